"""Hellos: how peers exchange records directly, without the directory.

A hello carries the own record and a few fresh records of other peers, and so does the reply. It
also measures the difference between the two wall clocks. A goodbye is a hello whose record says
that its peer leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dht.bounded_mapping import BoundedMapping, by_age
from dht.errors import BUSY, NOT_SERVED, CallRefused, DhtError, HostClosed, PeerUnreachable
from dht.identity import PeerId
from dht.limits import Rate
from dht.membership import hello as wire
from dht.membership.contacts import contacts_to_make, peers_to_greet
from dht.presence.dialler import Dialler, DialLimited
from dht.presence.intake import Intake, Misfit
from dht.presence.this_peer import CALL_TIMEOUT_S, ThisPeer

CALLERS_MAX = 4096
"""Peers whose last hello is remembered; another one is said hello to once more."""
GOODBYES_MAX = 64
CLOCK_WARNING_S = 2.0
"""Difference to the swarm's clocks from which on it is reported."""

SPARED_BEATS = 0.75
"""A peer that said hello so many heartbeats ago is not greeted: it has this peer's record."""

UNASKED_BEATS_MAX = 4.0
"""It is greeted after so many all the same: only a peer that asks learns the difference of the
clocks."""

REFUSED_PAUSE_S = 600.0
"""Pause before a peer that refused a hello, or is of another run, is greeted again."""


@dataclass(slots=True, eq=False, repr=False)
class Greeting:
    """Both sides of hello on one host."""

    this: ThisPeer
    dialler: Dialler
    intake: Intake
    budget: Rate[PeerId]
    has_worked: Callable[[PeerId], bool] = lambda peer: True
    """True if the clock of a member counts before those of members that only just came."""

    bootstrap_peers: set[PeerId] = field(default_factory=set)
    """Seeds that answered a hello as bootstrap peers, which take part in no run."""
    _clock: wire.ClockOffsets = field(default_factory=wire.ClockOffsets)
    _clock_is_off: bool = False
    _not_to_greet: dict[PeerId, float] = field(default_factory=dict)
    """Connected peers of no run of ours, and until when to leave them alone."""
    _heard_from: BoundedMapping[PeerId, float] = field(
        default_factory=lambda: BoundedMapping("callers", CALLERS_MAX, worth=by_age)
    )
    """Time at which each peer last said hello."""
    _asked: dict[PeerId, float] = field(default_factory=dict)
    """Time at which each peer last answered a hello."""

    @property
    def clock(self) -> wire.ClockEstimate | None:
        """Estimated difference to the clocks of the swarm; ``None`` before any peer was asked.

        A run may end at a date by it, so strangers do not count. Members that have worked do, as
        anybody may be a member of an open run; while none of them was asked all members, and then
        the seeds that the owner of this peer has named.
        """
        now, table = self.this.now(), self.this.table
        if self.this.profile.run is None:
            return self._clock.estimate(now)
        for counts in (
            lambda peer: peer in table and self.has_worked(peer),
            table.__contains__,
            self.this.seed_peers.__contains__,
        ):
            if (estimate := self._clock.estimate(now, counts)) is not None:
                return estimate
        return None

    async def serve(self) -> None:
        """Answer other peers from now on."""
        await self.this.host.serve_calls(
            wire.HELLO_PROTOCOL, self._answer_hello, request_max_bytes=wire.HELLO_MAX_BYTES
        )

    def peers_to_greet(self) -> list[PeerId]:
        """The peers to say hello to at this heartbeat."""
        this, now = self.this, self.this.now()
        self._not_to_greet = {p: until for p, until in self._not_to_greet.items() if until > now}
        connected = self.dialler.connected
        strangers = [
            peer
            for peer in sorted(connected)
            if peer not in self._not_to_greet and peer not in this.table
        ]
        return peers_to_greet(
            this.table,
            connected,
            strangers,
            spared=self._spared(now),
            now=now,
            rng=this.rng,
        )

    def _spared(self, now: float) -> set[PeerId]:
        """The peers that have just said hello, and got this peer's record with the answer."""
        beat_s = self.this.settings.membership.heartbeat_s
        asked_after = now - UNASKED_BEATS_MAX * beat_s
        self._asked = {peer: at for peer, at in self._asked.items() if at > asked_after}
        heard_after = max(now - SPARED_BEATS * beat_s, self.this.hurried_at)
        return {p for p in self._asked if self._heard_from.get(p, -math.inf) > heard_after}

    def contacts_to_make(self) -> list[PeerId]:
        """The members to connect to, so that enough connections stay open."""
        this = self.this
        return contacts_to_make(this.table, self.dialler.connected, now=this.now(), rng=this.rng)

    async def greet(self, peers: Sequence[PeerId]) -> None:
        """Say hello to all of these at once."""
        async with asyncio.TaskGroup() as group:
            for peer in peers:
                group.create_task(self.say_hello(peer))

    async def say_hello(self, peer: PeerId) -> None:
        """Exchange one hello, as far as the other peer answers."""
        this, now = self.this, self.this.now
        run = this.profile.run
        hello = wire.write(
            wire.Hello(
                run=run or "",
                record=this.record(),
                passed=this.table.pass_on(run, to=peer, now=now(), rng=this.rng),
            )
        )
        this.stats.hellos_sent += 1
        try:
            await self.dialler.connect(peer, timeout_s=CALL_TIMEOUT_S)
            try:
                data, sent_at, returned_at = await self._exchange(peer, hello)
            except PeerUnreachable:  # most likely the connection broke, not the peer: once more
                await self.dialler.connect(peer, timeout_s=CALL_TIMEOUT_S)
                data, sent_at, returned_at = await self._exchange(peer, hello)
            reply = wire.read(wire.HelloReply, data)
        except DialLimited:
            return
        except PeerUnreachable:
            this.table.failed(peer, now())
            return
        except (CallRefused, ValueError) as error:
            if BUSY in str(error):
                return  # it is said hello to again, like others
            self._not_to_greet[peer] = now() + REFUSED_PAUSE_S
            # A visitor of the run, such as `shoal doctor`, has no hello.
            if peer in this.table or NOT_SERVED not in str(error):
                this.events.tell("hello_refused", f"{peer} refused the hello: {error}", peer=peer)
            return
        except HostClosed:
            return
        if run is not None and reply.run and reply.run != run:
            self._not_to_greet[peer] = now() + REFUSED_PAUSE_S
            text = f"{peer} takes part in run {reply.run}, not in run {run}"
            self.intake.note_misfit(peer, Misfit("run", run, reply.run), text)
            return
        if not reply.run and peer in self.this.seed_peers:
            self.bootstrap_peers.add(peer)
        measured = wire.sample(
            sent_at=sent_at,
            received_at=reply.received_at,
            replied_at=reply.sent_at,
            returned_at=returned_at,
            now=now(),
        )
        self._clock.add(peer, measured)
        self._asked[peer] = now()
        self._judge_clock()
        if reply.yours:
            self.intake.take(reply.yours, peer=this.id)
        self._take_hello(peer, reply.record, reply.passed)
        self.dialler.connected.setdefault(peer)
        if run is not None and peer not in this.table:
            # Others pass this peer's record on to a bootstrap peer. A peer that is alone is
            # forgotten there unless it is back before that ends.
            beats = 3.0 if this.table.live(now()) else 1.5
            self._not_to_greet[peer] = now() + beats * this.settings.membership.heartbeat_s

    async def say_goodbye(self, sealed: bytes) -> None:
        """Send a record that says so to the connected peers; the others notice the silence."""
        hello = wire.write(wire.Hello(run=self.this.profile.run or "", record=sealed))
        async with asyncio.TaskGroup() as group:
            for peer in sorted(self.dialler.connected)[:GOODBYES_MAX]:
                group.create_task(self._say_goodbye_to(peer, hello))

    async def _say_goodbye_to(self, peer: PeerId, hello: bytes) -> None:
        with contextlib.suppress(DhtError):
            await self._exchange(peer, hello)

    async def _exchange(self, peer: PeerId, hello: bytes) -> tuple[bytes, float, float]:
        """The reply to a hello, and the wall time before and after the call."""
        host = self.this.host
        sent_at = host.wall_time()
        data = await host.call(peer, wire.HELLO_PROTOCOL, hello, timeout_s=CALL_TIMEOUT_S)
        return data, sent_at, host.wall_time()

    async def _answer_hello(self, peer: PeerId, request: bytes) -> bytes:
        this = self.this
        run = this.profile.run
        received_at = this.host.wall_time()
        try:
            if not self.budget.spend(peer, this.now()):
                raise ValueError(f"{BUSY} in this minute")
            hello = wire.read(wire.Hello, request)
        except ValueError:
            this.stats.refused += 1
            raise
        if hello.run and run is not None and hello.run != run:
            # Told apart from other refusals, so that a newcomer can say what is wrong.
            this.stats.refused += 1
            sent_at = this.host.wall_time()
            return wire.write(wire.HelloReply(run=run, received_at=received_at, sent_at=sent_at))
        this.stats.hellos_received += 1
        if hello.record and hello.run == run:
            self._heard_from.renew(peer, this.now())
        self._take_hello(peer, hello.record, hello.passed)
        # A bootstrap peer that calls is told a little of every run, a member about its own.
        about = run or hello.run or None
        return wire.write(
            wire.HelloReply(
                run=run or "",
                record=this.record(),
                passed=this.table.pass_on(
                    about, to=peer, now=this.now(), rng=this.rng, but=hello.passed
                ),
                yours=this.table.newer_than(hello.record, peer) if hello.record else b"",
                received_at=received_at,
                sent_at=this.host.wall_time(),
            )
        )

    def _take_hello(self, peer: PeerId, record: bytes, passed: Sequence[wire.Passed]) -> None:
        """Believe of a hello what is signed."""
        if record:
            self.intake.take(record, peer=peer)
        for other in passed:
            self.intake.take(other.sealed, age_s=other.age_s)
        self.this.table.heard(peer, self.this.now())
        self.intake.report_news()

    def _judge_clock(self) -> None:
        estimate = self.clock
        if estimate is None:
            return
        limit_s = CLOCK_WARNING_S + estimate.error_s
        is_off = abs(estimate.offset_s) > limit_s
        if is_off and not self._clock_is_off:
            side = "behind" if estimate.offset_s > 0 else "ahead of"
            self.this.events.tell(
                "clock_off",
                f"this machine's clock is {abs(estimate.offset_s):.1f} s {side} the others' "
                f"({estimate.peers} asked); training does not mind, but times in logs will differ",
                offset_s=round(estimate.offset_s, 3),
                peers=estimate.peers,
            )
        self._clock_is_off = is_off
