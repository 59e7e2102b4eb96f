"""Being present in a run: heartbeats, look-ups, hellos, seeds, goodbye.

The thin doing layer over ``membership``, ``known_runs``, ``contacts``, ``seeds``,
``reachability`` and ``clock_offset``, which decide. It runs over any ``Host``. Nothing that goes
wrong in the world ends it: it tells through ``on_event``, and tries again.

A bootstrap peer is present without a run: it sends no heartbeats, and keeps a
table of each run whose members say hello, so that it can introduce them. An
observer is present in a run without being of it: it publishes nothing, and is in
nobody's table, but reads the directory and says hello like a member.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from msgspec import UNSET, UnsetType
from multiaddr import Multiaddr

from dht.addresses import (
    Scope,
    deduplicate,
    is_announced,
    is_dialable,
    is_relayed,
    pack,
    peer_of,
    rank,
    scope_guessed,
    scope_seen,
    with_peer,
    without_peer,
)
from dht.errors import CallRefused, DhtError, HostClosed, PeerUnreachable
from dht.host import Connection, Host
from dht.identity import Identity, PeerId, RunId
from dht.membership import hello as wire
from dht.membership.call_budget import CallBudget
from dht.membership.clock_offset import ClockEstimate, ClockOffsets, sample
from dht.membership.contacts import ContactSettings, contacts_to_make, is_lonely, whom_to_greet
from dht.membership.known_runs import KnownRuns
from dht.membership.own_record import OwnRecord
from dht.membership.reachability import (
    NO_ADDRESS,
    Reachability,
    ReachabilitySettings,
    scope_that_counts,
)
from dht.membership.seeds import Attempt, Outcome, SeedPlanner, SeedSettings
from dht.membership.table import Member, MembershipSettings, PeerTable, bucket_key
from dht.presence.dial_back import DialBacks, NotReached, Reached
from dht.presence.kept_peers import KeptPeers
from dht.presence.run_files import RunFiles
from dht.records import (
    ADDRESS_MAX_BYTES,
    ADDRESSES_MAX,
    ContributionCounters,
    PeerRecord,
    Reason,
    Role,
    Sealed,
    check,
)

_logger = logging.getLogger("dht.presence.presence")

Fact = str | int | float | bool | None
GOODBYES_MAX = 64
OVERRULED_MAX = 3
MISFITS_MAX = 256
SEEN_FROM_MAX = 4096
DIALLED_MAX = 4096
SEEN_FROM_S = 3600.0
"""For this long a peer that was connected is believed to live where it was seen."""

ARRIVAL_S = 60.0
"""For this long the record of a peer that connected by itself is waited for."""

TELL_AGAIN_S = 1.0
"""Pause before a verdict is told to the owner again, whose daemon was being restarted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PresenceSettings:
    """How a peer stays in touch. The defaults are for the open internet."""

    membership: MembershipSettings = field(default_factory=MembershipSettings)
    seeds: SeedSettings = field(default_factory=SeedSettings)
    reachability: ReachabilitySettings = field(default_factory=ReachabilitySettings)
    contacts: ContactSettings = field(default_factory=ContactSettings)
    protocol_versions: tuple[int, int] = (1, 1)
    call_timeout_s: float = 5.0
    directory_timeout_s: float = 8.0
    look_ups_at_once: int = 8
    goodbye_timeout_s: float = 3.0
    cache_every_s: float = 60.0
    clock_warning_s: float = 2.0
    calls_per_minute: int = 120
    """Hellos and the like that one peer may send us; ten times fewer dial-backs."""

    def __post_init__(self) -> None:
        for name in ("look_ups_at_once", "calls_per_minute"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it is at least 1")
        for name in ("call_timeout_s", "directory_timeout_s", "goodbye_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it is positive")


@dataclass(frozen=True, slots=True)
class PresenceEvent:
    """Something that a human may want to know. ``text`` is one line."""

    name: str
    """``connected``, ``nobody_answered``, ``peer_joined``, ``peer_left``, ``peer_lost``,
    ``reachability``, ``hello_refused``, ``clock_off``, ``identity_in_use``,
    ``cache_unreadable`` or ``cache_unwritable``."""

    text: str
    fields: Mapping[str, Fact] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Misfit:
    """Why somebody cannot be in one run with this peer, with both values."""

    what: Literal["run", "protocol versions"]
    ours: str
    theirs: str


@dataclass(slots=True)
class PresenceStats:
    """What was done so far."""

    heartbeats: int = 0
    look_ups: int = 0
    stored_on: int = 0
    """On how many other peers the record lies since the last heartbeat."""

    hellos_sent: int = 0
    hellos_received: int = 0
    refused: int = 0
    """Hellos and goodbyes of others that were refused: malformed, of another run, too many."""


class Presence:
    """One peer's presence in a run (or, with ``run=None``, as a bootstrap peer of every run).

    ``start``, then ``leave`` (which tells the others) and ``close``. The host is the
    caller's: it is neither opened nor closed here.
    """

    def __init__(
        self,
        host: Host,
        identity: Identity,
        run: RunId | None,
        settings: PresenceSettings | None = None,
        *,
        role: Role = "learner",
        name: str = "",
        site: str = "",
        seeds: Sequence[Multiaddr] = (),
        run_file: bytes | None = None,
        cache_path: Path | None = None,
        rng: np.random.Generator | None = None,
        on_event: Callable[[PresenceEvent], None] | None = None,
        on_reachable: Callable[[bool], Awaitable[None]] | None = None,
        observes: bool = False,
    ) -> None:
        """``on_reachable`` is awaited when it turns out whether others can dial this peer, and
        with ``False`` when what was known does not count any more.

        ``observes``: learn who is in the run, and be no member of it. An observer has no
        others dial it either, unless it is told to (``check_reachability``): that can cost
        it the connection that it looks through.
        """
        if observes and run is None:
            raise ValueError("observes is true without a run; it needs one to look at")
        if host.peer_id != identity.peer_id:
            raise ValueError(f"identity is {identity.peer_id}; the host is {host.peer_id}")
        self.settings = settings = settings or PresenceSettings()
        self.run = run
        self.observes = observes
        self.stats = PresenceStats()
        self._host = host
        self._me = identity.peer_id
        self._rng = rng = rng if rng is not None else np.random.default_rng()
        self._on_event = on_event
        self._on_reachable = on_reachable
        self._own = OwnRecord(
            identity,
            incarnation=int(rng.integers(1, 2**62)),
            protocol_versions=settings.protocol_versions,
            ttl_s=settings.membership.expiry_s,
            role=role,
            name=name,
            site=site,
        )
        self._sealed_key = ""
        self._sealed: bytes | None = None
        """The own record as last published; ``None`` once a fact in it has changed."""

        self._seeds = tuple(seeds)
        self._kept = KeptPeers(
            cache_path,
            run,
            every_s=settings.cache_every_s,
            tell=lambda event, text: self._tell(event, text, path=str(cache_path)),
        )
        self._planner = SeedPlanner(self._me, settings.seeds, rng)
        self._runs = KnownRuns(self._me, run, settings.membership)
        self._reachability = Reachability(settings.reachability, scope=None)
        self._reachability_told: bool | None = None
        self._verdict_noted: bool | None = None
        self._seen_from: dict[PeerId, tuple[Scope, float]] = {}
        """How far away peers are that are or were connected, and when that was seen."""

        self._scope_at: dict[Multiaddr, Scope] = {}
        """How far away addresses are: the same few are asked about at each look."""

        self._guessed: dict[PeerId, tuple[tuple[Multiaddr, ...], Scope | None]] = {}
        """How far away members seem to be that were not connected, by their addresses."""

        self._present: dict[PeerId, Multiaddr] = {}
        """From where peers are connected directly, as of the last look."""

        self._arrivals: dict[PeerId, tuple[Connection, float]] = {}
        """New connections of which it is not known yet who opened them, and until when to ask."""

        self._dialled: dict[PeerId, None] = {}
        """Peers that answered when this peer dialled them."""
        self._clock = ClockOffsets()
        self._clock_is_off = False
        self._connected: dict[PeerId, bool] = {}
        """Who is connected, and whether through a relay."""

        self._not_to_greet: dict[PeerId, float] = {}
        """Connected peers of no run of ours, and until when to leave them alone."""

        self.misfits: dict[PeerId, Misfit] = {}
        """Who turned out to be of another run, or to speak no protocol that this peer speaks."""

        self._unsettled_until = math.inf
        """Till then all is read: somebody was met lately, who may have brought others within
        reach, or a part of the directory."""

        self._told_connected = False
        self._overruled = 0
        self._budget = CallBudget(settings.calls_per_minute)
        self._dial_backs = DialBacks(
            host,
            own_addresses=lambda: self._own.addresses,
            is_known=lambda peer: peer in self._dialled or self._runs.is_member(peer),
            can_dial=self._can_dial,
            rng=rng,
            budget=CallBudget(max(1, settings.calls_per_minute // 10)),
            call_timeout_s=settings.call_timeout_s,
        )
        self._run_files = RunFiles(
            host,
            run,
            self._own,
            content=run_file,
            budget=self._budget,
            connect=lambda peer: self.connect(peer, timeout_s=settings.call_timeout_s),
            call_timeout_s=settings.call_timeout_s,
            directory_timeout_s=settings.directory_timeout_s,
        )
        self._wake_beat = asyncio.Event()
        self._wake_seek = asyncio.Event()
        self._wake_check = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return (
            f"Presence(peer={self._me}, run={self.run and self.run[:8]}, "
            f"connected={len(self._connected)}, reachable={self.reachable})"
        )

    # --- what is known ---------------------------------------------------------------------

    @property
    def table(self) -> PeerTable:
        """The other members of this peer's run."""
        return self._runs.own_table()

    @property
    def tables(self) -> Mapping[RunId, PeerTable]:
        """The runs this peer knows members of."""
        return self._runs.tables

    @property
    def rejected(self) -> Mapping[Reason, int]:
        """Records that were not believed, by reason. Replays are normal weather."""
        return Counter(self._runs.rejected)

    @property
    def reachable(self) -> bool | None:
        """Whether others can dial this peer; ``None`` until somebody tried."""
        return self._reachability.reachable

    @property
    def reachability_reason(self) -> str:
        return self._reachability.reason

    @property
    def addresses(self) -> tuple[Multiaddr, ...]:
        """The addresses announced, best first, without the peer id."""
        return self._own.addresses

    @property
    def clock(self) -> ClockEstimate | None:
        """How far the own clock is from the swarm's; ``None`` before anybody was asked."""
        return self._clock.estimate(self._now())

    @property
    def seed_outcomes(self) -> tuple[Outcome, ...]:
        """How it went with each bootstrap address and cached peer."""
        return self._planner.outcomes()

    @property
    def connected(self) -> frozenset[PeerId]:
        """Who is connected, as of the last look."""
        return frozenset(self._connected)

    # --- life ------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin. Returns at once, whether or not anybody can be found."""
        assert self._task is None, "a presence is started once"
        now = self._now()
        self._unsettled_until = now + self.settings.membership.expiry_s
        self._planner.add_seeds(self._seeds, now=now)
        kept = await self._kept.load()
        if kept is not None:
            self._own.sequence = max(self._own.sequence, kept.sequence)
            self._planner.add_cached(kept.addresses(), now=now)
        await self._host.serve_calls(
            wire.HELLO_PROTOCOL, self._answer_hello, request_max_bytes=wire.HELLO_MAX_BYTES
        )
        await self._host.serve_calls(
            wire.GOODBYE_PROTOCOL, self._answer_goodbye, request_max_bytes=wire.HELLO_MAX_BYTES
        )
        await self._dial_backs.serve()
        await self._run_files.serve()
        self._task = asyncio.create_task(self._live(), name=f"presence of {self._me}")

    async def watch(self) -> None:
        """Returns once this presence was stopped; raises what a bug in it raised."""
        assert self._task is not None, "started before watched"
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.result()

    async def leave(self) -> None:
        """Stop, and tell the others in ``goodbye_timeout_s`` at most: they forget us at once."""
        await self._stop()
        if self._own.leaving or not self._is_member:
            return
        self._own.leaving = True
        sealed = self._renew()
        # Whoever does not hear it in time finds out by the silence.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.settings.goodbye_timeout_s):
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._publish(sealed))
                    for peer in sorted(self._connected)[:GOODBYES_MAX]:
                        group.create_task(self._say_goodbye(peer, sealed))

    async def close(self) -> None:
        """Stop without a word, and keep the peers met for the next time."""
        await self._stop()
        await self._kept.save(self.tables.values(), self._own.sequence)

    async def _stop(self) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await self.watch()

    async def _live(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._beat_for_ever())
            group.create_task(self._seek_for_ever(group))
            group.create_task(self._dial_backs.run())
            if not self.observes:
                group.create_task(self._check_for_ever())

    @property
    def _is_member(self) -> bool:
        """Whether others are to know this peer as one of its run."""
        return self.run is not None and not self.observes

    # --- what the owner says and asks ------------------------------------------------------

    def update(
        self,
        *,
        name: str | UnsetType = UNSET,
        site: str | UnsetType = UNSET,
        role: Role | UnsetType = UNSET,
        trains: bool | UnsetType = UNSET,
        step_time_s: float | UnsetType | None = UNSET,
        link_bytes_s: float | UnsetType | None = UNSET,
        versions: Sequence[int] | UnsetType = UNSET,
        counters: ContributionCounters | UnsetType = UNSET,
    ) -> None:
        """Change what the own record says. The others know with the next heartbeat.

        That is at once when it trains no longer, or again.
        """
        own = self._own
        if versions is not UNSET:
            own.set_versions(versions)
        own.name = own.name if name is UNSET else name
        own.site = own.site if site is UNSET else site
        own.role = own.role if role is UNSET else role
        if trains is not UNSET and trains != own.trains:
            own.trains = trains
            self._wake_beat.set()  # nobody should wait for one who has stopped
        own.step_time_s = own.step_time_s if step_time_s is UNSET else step_time_s
        own.link_bytes_s = own.link_bytes_s if link_bytes_s is UNSET else link_bytes_s
        own.counters = own.counters if counters is UNSET else counters
        self._sealed = None

    def heard(self, peer: PeerId) -> None:
        """The owner talked with a peer: it is alive."""
        self._runs.heard(peer, self._now())

    def failed(self, peer: PeerId) -> None:
        """A call of the owner's to a peer failed."""
        self._runs.failed(peer, self._now())

    async def connect(self, peer: PeerId, *, timeout_s: float) -> None:
        """Make sure that a peer is connected, by the addresses in its record.

        Raises ``PeerUnreachable`` or ``HostClosed``.
        """
        if any(connection.peer == peer for connection in await self._host.connections()):
            return
        if self._dial_backs.is_awaited(peer):
            raise PeerUnreachable(peer, "it is about to dial this peer")
        self._dial_backs.dials(peer)
        addresses = [with_peer(address, peer) for address in self._runs.addresses_of(peer)]
        await self._host.connect(peer, addresses, timeout_s=timeout_s)
        self._note_dialled(peer)

    async def fetch_run_file(self, matches: Callable[[bytes], bool], *, timeout_s: float) -> bytes:
        """The run file, from whoever has it. ``matches`` says whether its hash fits the run id.

        Raises ``RunFileUnavailable``, which says what each peer asked answered.
        """

        def peers() -> list[PeerId]:
            members = [member.peer for member in self.table.live(self._now())]
            # Those connected first: to the others there may be no way.
            return [*sorted(self._connected), *(p for p in members if p not in self._connected)]

        return await self._run_files.fetch(peers, matches, timeout_s=timeout_s)

    # --- heartbeats ------------------------------------------------------------------------

    async def _beat_for_ever(self) -> None:
        heartbeat_s = self.settings.membership.heartbeat_s
        while True:
            await self._beat()
            # Jitter, or peers that were started together would call each other all at once.
            await _wait_for(self._wake_beat, heartbeat_s * (0.9 + 0.2 * self._rng.random()))

    async def _beat(self) -> None:
        self.stats.heartbeats += 1
        await self._refresh()
        async with asyncio.TaskGroup() as group:
            if self.run is not None:
                group.create_task(self._read_buckets(self.run))
            if self._is_member:
                group.create_task(self._publish(self._renew()))
                group.create_task(self._run_files.offer())
            group.create_task(self._say_hello_to(self._whom_to_greet()))
        await self._say_hello_to(self._contacts_to_make())
        self._tell_changes()
        now = self._now()
        for table in self.tables.values():
            table.forget(now)
        await self._kept.save_if_due(self.tables.values(), self._own.sequence)

    async def _refresh(self) -> None:
        """Look at the own addresses and connections."""
        try:
            own = await self._host.addresses()
            await self._look_at_connections()
        except HostClosed:
            return  # its daemon is being restarted: nothing is known better than before
        now = self._now()
        usable = [without_peer(address) for address in own if is_dialable(address)]
        fitting = [a for a in rank(deduplicate(usable)) if len(pack(a)) <= ADDRESS_MAX_BYTES]
        announced = tuple(fitting[:ADDRESSES_MAX])
        if announced != self._own.addresses:
            self._own.addresses = announced
            self._scope_at.clear()
            self._guessed.clear()
            self._sealed = None
        direct = frozenset(str(address) for address in announced if not is_relayed(address))
        if self._reachability.announce(direct, now=now):
            self._wake_check.set()
            self._judge_arrivals()
        self._not_to_greet = {p: until for p, until in self._not_to_greet.items() if until > now}

    async def _look_at_connections(self) -> None:
        had_none = not self._connected
        connections = await self._host.connections()
        self._connected = {c.peer: c.relayed for c in connections}
        if had_none and self._connected:
            self._wake_check.set()
        self._locate(connections)
        self._judge_arrivals()

    def _renew(self) -> bytes:
        """A new record of our own: each heartbeat is a new sequence number."""
        assert self.run is not None
        self._own.reachable = self.reachable
        key = bucket_key(self.run, self.table.own_bucket(self._now()))
        self._sealed = self._own.renew(key, wall_time=self._host.wall_time())
        self._sealed_key = key
        return self._sealed

    async def _publish(self, sealed: bytes) -> None:
        try:
            self.stats.stored_on = await self._host.directory.publish(
                self._sealed_key,
                sealed,
                ttl_s=self.settings.membership.expiry_s,
                timeout_s=self.settings.directory_timeout_s,
            )
        except DhtError:
            self.stats.stored_on = 0  # the next heartbeat tries again

    async def _read_buckets(self, run: RunId) -> None:
        at_once = asyncio.Semaphore(self.settings.look_ups_at_once)
        table, now = self.table, self._now()
        settled = now >= self._unsettled_until and bool(table.live(now))

        async def read(bucket: str) -> None:
            quick = settled and table.is_quiet(bucket)
            async with at_once:
                try:
                    newcomers = await self._look_up(bucket_key(run, bucket), quick=quick)
                    if quick and table.misses_somebody(bucket, self._now()):
                        newcomers += await self._look_up(bucket_key(run, bucket), quick=False)
                except DhtError:
                    return
            read_at = self._now()
            quiet = not newcomers and not table.misses_somebody(bucket, read_at)
            table.was_read(bucket, read_at, quiet=quiet)

        async with asyncio.TaskGroup() as group:
            for bucket in table.buckets_due(now) if settled else table.buckets_to_read(now):
                group.create_task(read(bucket))

    async def _look_up(self, key: str, *, quick: bool) -> int:
        """Take the records under a key. Returns how many are of peers not known before."""
        self.stats.look_ups += 1
        found = await self._host.directory.look_up(
            key, timeout_s=self.settings.directory_timeout_s, quick=quick
        )
        newcomers = sum(peer != self._me and self.table.get(peer) is None for peer in found)
        news = [self._take(found[peer], peer=peer, key=key) for peer in sorted(found)]
        if any(news):
            self._run_files.wake()
        return newcomers

    def _take(
        self, data: bytes, *, peer: PeerId | None = None, key: str | None = None, age_s: float = 0.0
    ) -> bool:
        """A record from the network. Says whether it told anything new."""
        sealed = check(data)
        if isinstance(sealed, Sealed):
            if self._own.learn(sealed):
                self._was_overruled()
                return False
            if not self._speaks_with_us(sealed):
                return False
        return self._runs.take(data, now=self._now(), peer=peer, key=key, age_s=age_s)

    def _speaks_with_us(self, sealed: Sealed) -> bool:
        """Whether we could talk to the one whose record this is. One who speaks another protocol
        is no member for us: counted as one, it would be waited for in every round."""
        if sealed.run != self.run or not isinstance(sealed.record, PeerRecord):
            return True  # of another kind, or for the keeper to reject
        ours, theirs = self.settings.protocol_versions, sealed.record.protocol
        if ours[0] <= theirs[1] and theirs[0] <= ours[1]:
            return True
        self._does_not_fit(
            sealed.peer,
            Misfit("protocol versions", "{} to {}".format(*ours), "{} to {}".format(*theirs)),
            f"{sealed.peer} speaks protocol versions {theirs[0]} to {theirs[1]}, "
            f"this peer {ours[0]} to {ours[1]}; one of them needs another version of shoal",
        )
        return False

    def _does_not_fit(self, peer: PeerId, misfit: Misfit, text: str) -> None:
        if self.misfits.get(peer) == misfit or len(self.misfits) >= MISFITS_MAX:
            return
        self.misfits[peer] = misfit
        self._tell("hello_refused", text, peer=peer, ours=misfit.ours, theirs=misfit.theirs)

    def _was_overruled(self) -> None:
        """Our own key signed a higher number than we use: this machine's clock was set back."""
        self._sealed = None
        self._overruled += 1
        if self._overruled <= OVERRULED_MAX:
            self._wake_beat.set()
        elif self._overruled == OVERRULED_MAX + 1:  # a record of the past would not keep growing
            self._tell(
                "identity_in_use",
                f"another peer uses the same key file as this one ({self._me}); "
                "give each of them an identity of its own",
            )

    def _tell_changes(self) -> None:
        came_or_went = False
        for run, table in self.tables.items():
            for change in table.changes(self._now()):
                came_or_went = True
                who = change.name or change.peer
                if change.kind == "joined":
                    self._tell("peer_joined", f"{who} joined", peer=change.peer, run=run)
                elif change.kind == "left":
                    self._tell("peer_left", f"{who} left", peer=change.peer, run=run)
                else:
                    text = f"{who} has not been heard of for a while"
                    self._tell("peer_lost", text, peer=change.peer, run=run)
        if came_or_went and self.reachable:
            self._judge_arrivals()  # it may live farther away than those who proved that

    # --- hello and goodbye -----------------------------------------------------------------

    def _whom_to_greet(self) -> list[PeerId]:
        strangers = [
            peer
            for peer in sorted(self._connected)
            if peer not in self._not_to_greet and not self._runs.is_member(peer)
        ]
        return whom_to_greet(
            None if self.run is None else self.table,
            self._connected,
            strangers,
            self.settings.contacts,
            now=self._now(),
            rng=self._rng,
        )

    def _contacts_to_make(self) -> list[PeerId]:
        if self.run is None:
            return []
        return contacts_to_make(
            self.table, self._connected, self.settings.contacts, now=self._now(), rng=self._rng
        )

    async def _say_hello_to(self, peers: Sequence[PeerId]) -> None:
        async with asyncio.TaskGroup() as group:
            for peer in peers:
                group.create_task(self._say_hello(peer))

    async def _say_hello(self, peer: PeerId) -> bool:
        """One hello. Says whether it was answered in kind."""
        timeout_s = self.settings.call_timeout_s
        hello = wire.Hello(
            run=self.run or "",
            record=self._hello_record(),
            passed=self._runs.pass_on(self.run, to=peer, now=self._now(), rng=self._rng),
        )
        self.stats.hellos_sent += 1
        try:
            await self.connect(peer, timeout_s=timeout_s)
            try:
                data, sent_at, returned_at = await self._exchange(peer, wire.write(hello))
            except PeerUnreachable:  # most likely the connection broke, not the peer: once more
                await self.connect(peer, timeout_s=timeout_s)
                data, sent_at, returned_at = await self._exchange(peer, wire.write(hello))
            reply = wire.read(wire.HelloReply, data)
        except PeerUnreachable:
            self._runs.failed(peer, self._now())
            return False
        except (CallRefused, ValueError) as error:
            self._not_to_greet[peer] = self._now() + 600.0
            self._tell("hello_refused", f"{peer} refused to meet: {error}", peer=peer)
            return False
        except HostClosed:
            return False
        now = self._now()
        if self.run is not None and reply.run and reply.run != self.run:
            self._not_to_greet[peer] = now + 600.0
            text = f"{peer} takes part in run {reply.run}, not in run {self.run}"
            self._does_not_fit(peer, Misfit("run", self.run, reply.run), text)
            return False
        self._clock.add(
            peer,
            sample(
                sent_at=sent_at,
                received_at=reply.received_at,
                replied_at=reply.sent_at,
                returned_at=returned_at,
                now=now,
            ),
        )
        self._judge_clock()
        if reply.yours:
            self._take(reply.yours, peer=self._me)
        self._take_hello(peer, reply.record, reply.passed)
        self._connected.setdefault(peer, False)
        if self.run is not None and not self._runs.is_member(peer):
            self._not_to_greet[peer] = now + 3 * self.settings.membership.heartbeat_s
        return True

    async def _exchange(self, peer: PeerId, hello: bytes) -> tuple[bytes, float, float]:
        """The reply to a hello, and what the clock showed before and after."""
        sent_at = self._host.wall_time()
        data = await self._host.call(
            peer, wire.HELLO_PROTOCOL, hello, timeout_s=self.settings.call_timeout_s
        )
        return data, sent_at, self._host.wall_time()

    async def _answer_hello(self, peer: PeerId, request: bytes) -> bytes:
        received_at = self._host.wall_time()
        try:
            hello = self._read_hello(peer, request)
        except ValueError:
            self.stats.refused += 1
            raise
        if hello.run and self.run is not None and hello.run != self.run:
            # Told apart from other refusals, so that a newcomer can say what is wrong.
            self.stats.refused += 1
            return wire.write(
                wire.HelloReply(
                    run=self.run, received_at=received_at, sent_at=self._host.wall_time()
                )
            )
        self.stats.hellos_received += 1
        self._take_hello(peer, hello.record, hello.passed)
        # A bootstrap peer that calls is told a little of every run, a member about its own.
        about = self.run or hello.run or None
        return wire.write(
            wire.HelloReply(
                run=self.run or "",
                record=self._hello_record(),
                passed=self._runs.pass_on(about, to=peer, now=self._now(), rng=self._rng),
                yours=self._runs.newer_than(hello.record, peer) if hello.record else b"",
                received_at=received_at,
                sent_at=self._host.wall_time(),
            )
        )

    def _read_hello(self, peer: PeerId, request: bytes) -> wire.Hello:
        if not self._budget.spend(peer, self._now()):
            raise ValueError("too many calls in this minute")
        return wire.read(wire.Hello, request)

    def _hello_record(self) -> bytes:
        """The own record as last published, or a new one if something has changed since."""
        if not self._is_member:
            return b""
        return self._sealed if self._sealed is not None else self._renew()

    def _take_hello(self, peer: PeerId, record: bytes, passed: Sequence[wire.Passed]) -> None:
        """Believe of a hello what is signed."""
        if record:
            self._take(record, peer=peer)
        for other in passed:
            self._take(other.sealed, age_s=other.age_s)
        self._runs.heard(peer, self._now())
        self._run_files.wake()
        if any(table.has_news for table in self.tables.values()):
            self._tell_changes()

    def _judge_clock(self) -> None:
        estimate = self.clock
        if estimate is None:
            return
        limit_s = self.settings.clock_warning_s + estimate.error_s
        is_off = abs(estimate.offset_s) > limit_s
        if is_off and not self._clock_is_off:
            side = "behind" if estimate.offset_s > 0 else "ahead of"
            self._tell(
                "clock_off",
                f"this machine's clock is {abs(estimate.offset_s):.1f} s {side} the others' "
                f"({estimate.peers} asked); training does not mind, but times in logs will differ",
                offset_s=round(estimate.offset_s, 3),
                peers=estimate.peers,
            )
        self._clock_is_off = is_off

    async def _say_goodbye(self, peer: PeerId, sealed: bytes) -> None:
        with contextlib.suppress(DhtError):  # it will notice the silence
            await self._host.call(
                peer, wire.GOODBYE_PROTOCOL, sealed, timeout_s=self.settings.goodbye_timeout_s
            )

    async def _answer_goodbye(self, peer: PeerId, request: bytes) -> bytes:
        if not self._budget.spend(peer, self._now()) or not self._take(bytes(request), peer=peer):
            self.stats.refused += 1
            raise ValueError("this is no record of yours that is news here")
        self._tell_changes()
        return b""

    # --- seeds -----------------------------------------------------------------------------

    async def _seek_for_ever(self, group: asyncio.TaskGroup) -> None:
        look_every_s = self.settings.membership.heartbeat_s / 2
        while True:
            with contextlib.suppress(HostClosed):  # its daemon is being restarted
                await self._look_at_connections()
            now = self._now()
            table = None if self.run is None else self.table
            self._planner.met(
                self._connected.keys(),
                swarm_peers=0 if table is None else int(table.size_estimate(now)),
                lonely=is_lonely(table, self._connected, self.settings.contacts, now=now),
                now=now,
            )
            for attempt in self._planner.due(now):
                group.create_task(self._attempt(attempt))
            pause_s = min(look_every_s, max(0.05, self._planner.next_at() - self._now()))
            await _wait_for(self._wake_seek, pause_s)

    async def _attempt(self, attempt: Attempt) -> None:
        timeout_s = self.settings.seeds.connect_timeout_s
        try:
            if self._dial_backs.is_awaited(attempt.peer):
                raise PeerUnreachable(attempt.peer, "it is about to dial this peer")
            self._dial_backs.dials(attempt.peer)
            await self._host.connect(attempt.peer, [attempt.address], timeout_s=timeout_s)
            self._note_dialled(attempt.peer)
        except (PeerUnreachable, HostClosed) as error:
            self._planner.failed(attempt, error.reason, now=self._now())
            report = self._planner.report()
            if report is not None:
                self._told_connected = False
                self._tell("nobody_answered", str(report), addresses=len(report.outcomes))
            return
        self._planner.succeeded(attempt, now=self._now())
        self._connected.setdefault(attempt.peer, False)
        if not self._told_connected:
            self._told_connected = True
            self._tell("connected", f"connected to {attempt.address}", peer=attempt.peer)
        await self._say_hello(attempt.peer)
        self._unsettled_until = self._now() + self.settings.membership.expiry_s
        # The directory has somebody to ask now, and somebody could dial back.
        for event in (self._wake_beat, self._wake_seek, self._wake_check):
            event.set()

    # --- reachability ----------------------------------------------------------------------

    async def _check_for_ever(self) -> None:
        state = self._reachability
        while True:
            await self._tell_reachability()
            if self._connected and self._now() >= state.due_at:
                await self.check_reachability()
            pause_s = min(60.0, max(0.5, state.due_at - self._now()))
            if self._reachability_told is None and self.reachable is not None:
                pause_s = min(pause_s, TELL_AGAIN_S)
            await _wait_for(self._wake_check, pause_s)

    async def check_reachability(self) -> None:
        """Ask a few peers for a dial-back, one after the other, until the matter is settled.

        Done now and then by itself; only the owner of an observer calls this.
        """
        state = self._reachability
        self._judge_arrivals()
        state.asked(now=self._now())
        scope = state.scope
        helpers = [peer for peer in sorted(self._present) if self._scope_of(peer) is scope]
        if scope is not None and helpers and not state.usable:
            # Nobody has to dial for that. Twice, as the daemon finds out about addresses slowly.
            state.denied(helpers[0], NO_ADDRESS, others=0, now=self._now(), scope=scope)
        elif scope is not None and self._own.addresses:
            able = [peer for peer in helpers if self._can_dial(peer)]
            order = [able[int(i)] for i in self._rng.permutation(len(able))]
            for helper in order[: state.settings.helpers_per_check]:
                if await self._have_tried(helper, scope, others=len(order) - 1):
                    break
        await self._tell_reachability()

    async def _have_tried(self, helper: PeerId, scope: Scope, *, others: int) -> bool:
        """Have one helper see to a dial-back. Says whether no other has to be asked."""
        state = self._reachability
        usable = [a for a in self._own.addresses if str(a) in state.verdicts[scope].addresses]
        answer = await self._dial_backs.ask(helper, usable, may_cut=not state.settled)
        now = self._now()
        if isinstance(answer, Reached):
            seen = self._scope_seen(answer.remote)
            state.confirmed(answer.by, now=now, scope=seen)
            return seen >= scope
        if isinstance(answer, NotReached):
            return state.denied(helper, answer.reason, others=others, now=now, scope=scope)
        state.not_tried(answer.reason, scope=scope)
        return False

    def _can_dial(self, peer: PeerId) -> bool:
        """Whether a peer may be asked to dial others: not one that can only dial out itself."""
        if peer == self._me:
            return self.reachable is not False
        member = self._runs.member(peer)
        if member is not None:
            return member.reachable is not False
        return peer in self._dialled or any(peer_of(seed) == peer for seed in self._seeds)

    def _note_dialled(self, peer: PeerId) -> None:
        self._dialled.pop(peer, None)
        self._dialled[peer] = None
        while len(self._dialled) > DIALLED_MAX:
            del self._dialled[next(iter(self._dialled))]

    def _locate(self, connections: Sequence[Connection]) -> None:
        """Note how far away the connected peers are, and which connections are new."""
        now = self._now()
        before = self._present
        self._present = {c.peer: c.address for c in connections if not c.relayed}
        for connection in connections:
            peer = connection.peer
            self._seen_from.pop(peer, None)
            self._seen_from[peer] = (self._scope_seen(connection.address), now)
            if peer in self._present and peer not in before and connection.inbound is not False:
                self._arrivals[peer] = (connection, now + ARRIVAL_S)
        while len(self._seen_from) > SEEN_FROM_MAX:
            del self._seen_from[next(iter(self._seen_from))]

    def _judge_arrivals(self) -> None:
        """Take connections that others opened by themselves for the dial-backs that they are."""
        state, now = self._reachability, self._now()
        self._count_scopes()
        for peer, (connection, until) in list(self._arrivals.items()):
            announced = self._runs.addresses_of(peer)
            # At the addresses that it announces we may have dialled it: the daemon does so too.
            inbound = connection.inbound or (
                bool(announced) and not is_announced(connection.address, announced)
            )
            if inbound and self._own.addresses:
                seen = self._scope_seen(connection.address)
                state.confirmed(peer, now=now, scope=seen, how="connected to it")
            if inbound or announced or now >= until or peer not in self._present:
                del self._arrivals[peer]
        if self.reachable != self._verdict_noted:
            self._verdict_noted = self.reachable
            self._wake_check.set()

    def _count_scopes(self) -> None:
        """Find out in which scope the known peers live."""
        now = self._now()
        members: list[Scope | None] = []
        if self.run is not None:
            members = [
                self._scope_of(member.peer)
                if member.peer in self._seen_from and self._is_located(member.peer, now)
                else self._scope_guessed(member)
                for member in self.table.live(now)
            ]
        connected = [self._seen_from[peer][0] for peer in self._present]
        if self.observes:
            members = [*members, *connected]
        scope = scope_that_counts(members, connected)
        if scope is not None and self._reachability.count_in(scope, now=now):
            self._wake_check.set()

    def _scope_seen(self, remote: Multiaddr) -> Scope:
        scope = self._scope_at.get(remote)
        if scope is None:
            if len(self._scope_at) >= SEEN_FROM_MAX:
                self._scope_at.clear()
            scope = self._scope_at[remote] = scope_seen(remote, self._own.addresses)
        return scope

    def _scope_guessed(self, member: Member) -> Scope | None:
        known = self._guessed.get(member.peer)
        if known is None or known[0] != member.addresses:
            if len(self._guessed) >= SEEN_FROM_MAX:
                self._guessed.clear()
            known = member.addresses, scope_guessed(member.addresses, self._own.addresses)
            self._guessed[member.peer] = known
        return known[1]

    def _is_located(self, peer: PeerId, now: float) -> bool:
        return now - self._seen_from[peer][1] < SEEN_FROM_S

    def _scope_of(self, peer: PeerId) -> Scope:
        return self._seen_from[peer][0]

    async def _tell_reachability(self) -> None:
        reachable = self.reachable
        if reachable == self._reachability_told or (
            reachable is None and not self._reachability_told
        ):
            return
        self._reachability_told = reachable
        self._sealed = None
        self._wake_beat.set()
        announced = ", ".join(str(address) for address in self._own.addresses) or "no address"
        state = {True: "reachable", False: "dial-out only", None: "not known any more"}[reachable]
        self._tell(
            "reachability",
            f"{state}: {self._reachability.reason}; announced {announced}",
            reachable=reachable,
        )
        if self._on_reachable is not None:
            try:
                await self._on_reachable(reachable is True)
            except HostClosed:
                self._reachability_told = None  # it is told again as soon as the daemon is up

    # --- small change ----------------------------------------------------------------------

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _tell(self, event: str, text: str, **fields: Fact) -> None:
        _logger.info("%s %s", event, " ".join(f"{name}={fields[name]}" for name in fields))
        if self._on_event is not None:
            self._on_event(PresenceEvent(event, text, fields))


async def _wait_for(event: asyncio.Event, pause_s: float) -> None:
    """Until the event is set or the pause is over."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(pause_s):
            await event.wait()
    event.clear()
