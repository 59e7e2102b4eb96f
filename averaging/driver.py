"""Averaging as it happens: carries out what the round machines of all fragments decide.

One ``Averager`` per peer and run. It owns the links, the streams, the threads for codec work, the
states and the replay logs; it asks the learner for snapshots and hands it states; every decision
about a round is ``averaging.round``'s. Without a learner's port it is a keeper (it holds states
and follows) or an auxiliary (it lends itself as leader and reducer).

Everything that waits has a deadline, every queue a maximum. What a peer sends that it
should not is refused with a reason naming it, counted, and never ends a round for the others.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import blake3
import numpy as np
from multiaddr import Multiaddr

from averaging import messages as said
from averaging.answering import Answering
from averaging.arena import Arena
from averaging.auditing import Audit, Minority, Others, Verdict
from averaging.catching import Doubts, patience_s
from averaging.codec import codec_named, codec_names
from averaging.effects import (
    Answer,
    Apply,
    CatchUp,
    Discard,
    Effect,
    Enter,
    Fold,
    Forget,
    GiveUp,
    Merge,
    Note,
    Presume,
    Rebase,
    Reduce,
    Send,
    Settle,
    Silent,
    TakeSnapshot,
    Upload,
)
from averaging.errors import AveragingError
from averaging.exchange import Exchange, Tally
from averaging.fetch import (
    Fetcher,
    FetchFailed,
    FetchProgress,
    FetchServer,
    FetchSettings,
)
from averaging.finale import gives_way
from averaging.grouping import PeerView
from averaging.joining import Offer
from averaging.layout import Layout
from averaging.lineage import Lineage
from averaging.messages import ROSTER_MAX, BadMessage, Commit
from averaging.numbers import encoded_size
from averaging.phase import Phase
from averaging.policy import RoundPolicy
from averaging.port import LearnerPort, Parting, Progress, Snapshot
from averaging.reducing import Length
from averaging.replay import ReplayEntry, ReplayHead, ReplayLog, advance
from averaging.rewind import parting, rewound
from averaging.round import FragmentRounds
from averaging.standing import Standing
from averaging.state import FragmentState
from averaging.threads import Threads
from averaging.transport import Bulk, Transport, TransportSettings
from averaging.turns import NO_PLACE, Turns, rank, who_gives_way
from averaging.usual import Usual
from dht.host import Host
from dht.identity import Identity, PeerId, RunId, verify

logger = logging.getLogger(__name__)

EventHandler = Callable[[str, Mapping[str, Any]], None]

PEERS_BLAMED_MAX = 1024

_BLAMED = {"upload_outlying": "upload_refused", "strange_join": "join_refused"}
"""What a machine notes of a peer that should not have sent it, and as what it is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragerSettings:
    """What one peer allows itself. None of it has to agree with other peers'."""

    in_flight_max: int = 64
    """Fragments of which a snapshot or a round may be under way at once, as memory allows. Most of
    them only wait for others: that costs nothing."""
    exchanges_max: int = 4
    """With so many rounds exchanging at once nothing new is begun."""
    threads: int = 2
    replay_bytes_max: int = 256 << 20
    """Merged payloads kept for those who are behind, of all fragments together."""
    spare_bytes_max: int = 1 << 30
    """Memory of past rounds that is kept for the next one, at most 10 bytes for each value of the
    largest fragment."""
    progress_s: float = 0.25
    """How often the learner's step counter is looked at."""
    norm_ratio_max: float = 50.0
    """A contribution so many times longer than usual is refused by me as a reducer."""
    kept_links: int = 8
    """Established peers to which somebody who can only dial out keeps a link open."""
    catching_max: int = 2
    """Fragments that are fetched at once."""
    audit_versions: int = 32
    """After every so many versions members compare the digests of what they hold."""
    look_round_s: float = 30.0
    """Without a learner: how often a fragment's standing is compared with somebody's."""
    transport: TransportSettings = field(default_factory=TransportSettings)
    fetch: FetchSettings = field(default_factory=FetchSettings)

    def __post_init__(self) -> None:
        for name in (
            "in_flight_max",
            "exchanges_max",
            "threads",
            "kept_links",
            "catching_max",
            "audit_versions",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it is at least 1")
        for name in ("progress_s", "look_round_s", "norm_ratio_max"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it is above 0")


@dataclass(slots=True)
class AveragerStats:
    """Counted since the start."""

    rounds: int = 0
    """Finished here."""
    contributed: int = 0
    """Of those, with my own work in them."""
    void: int = 0
    folds: int = 0
    caught_up: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    blamed: Counter[PeerId] = field(default_factory=Counter)
    """What peers sent that they should not have, by peer."""
    refused: Counter[str] = field(default_factory=Counter)
    """The same by kind."""


class Averager:
    """All fragments of one run at one peer. ``run`` does the work until it is cancelled.

    ``view`` is the owner's, who keeps it up to date. ``on_event(event, fields)`` hears every
    transition that a person or a log may want; it must not raise and must not wait.
    """

    def __init__(
        self,
        host: Host,
        port: LearnerPort | None,
        *,
        identity: Identity,
        run: RunId,
        layout: Layout,
        policy: RoundPolicy,
        view: Mapping[PeerId, PeerView],
        incarnation: int,
        states: Sequence[FragmentState | None] = (),
        founder: bool = False,
        keeps: bool = True,
        reachable: bool = True,
        site: str | None = None,
        line_max: Callable[[], float] = lambda: math.inf,
        settings: AveragerSettings | None = None,
        on_event: EventHandler = lambda event, fields: None,
        on_fetched: Callable[[FetchProgress], None] = lambda progress: None,
        addresses: Callable[[PeerId], Sequence[Multiaddr]] | None = None,
    ) -> None:
        """``keeps``: follow the states even without a learner (a keeper); else an auxiliary.
        ``site``: who says the same is near (``averaging.sites``). ``line_max``: how many bytes a
        second the owner of the line allows now.
        """
        if identity.peer_id != host.peer_id:
            raise ValueError(f"the identity is {identity.peer_id}, the host {host.peer_id}")
        self.host = host
        self.port = port
        self.layout = layout
        self.policy = policy
        self.settings = settings or AveragerSettings()
        self.incarnation = incarnation
        self.reachable = reachable
        self.site = site
        self.stats = AveragerStats()
        self._identity = identity
        self._view = view
        self._founder = founder
        self._keeps = keeps or port is not None
        self._line_max = line_max
        self._on_event = on_event
        self._topic = blake3.blake3(run.encode() + b"\0" + layout.hash).digest(length=16)
        self._threads = Threads(self.settings.threads)
        # Enough for what one round of the largest fragment lets go: an old theta, three payloads.
        largest = max(fragment.size for fragment in layout.fragments)
        self._arena = Arena(min(self.settings.spare_bytes_max, 10 * largest))
        self.transport = Transport(
            host,
            run=run,
            message=self._heard,
            lost=self._lost,
            bulk=self._serve,
            settings=self.settings.transport,
            addresses=addresses,
        )
        self._server = FetchServer(
            host, run=run, library=self, threads=self._threads, settings=self.settings.fetch
        )
        self._fetcher = Fetcher(host, run, self._threads, self.settings.fetch, on_fetched)
        if addresses is not None:
            self._fetcher.addresses = addresses
        self._works = [_Work(self, index) for index in range(len(layout.fragments))]
        self._answering = Answering()
        self._doubts = Doubts(policy)
        self._turns = Turns()
        self._catching = asyncio.Semaphore(self.settings.catching_max)
        self._tasks: asyncio.TaskGroup | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at: float | None = None
        self._draining = False
        self._pins = 0
        self._step_seen: int | None = None
        self._waiting: list[asyncio.Future[None]] = []
        self.load([state for state in states if state is not None])

    def __repr__(self) -> str:
        versions = [state.version if state else None for state in self.states]
        return f"Averager({self.host.peer_id}, versions={versions})"

    # What others see

    @property
    def states(self) -> tuple[FragmentState | None, ...]:
        return tuple(work.state for work in self._works)

    def standing(self, fragment: int) -> Standing | None:
        state = self._works[fragment].state
        return None if state is None else Standing.of(state)

    @property
    def final_fragments(self) -> frozenset[int]:
        """Of these the run has its tokens, in a version that nothing follows."""
        return frozenset(
            work.index for work in self._works if work.machine is not None and work.machine.is_final
        )

    @property
    def closed_ranks(self) -> bool:
        """Whether a swarm of several groups gathers in one, because the run has its tokens."""
        return any(work.machine is not None and work.machine.closed_ranks for work in self._works)

    @property
    def in_flight(self) -> int:
        return sum(work.is_busy for work in self._works)

    @property
    def phases(self) -> tuple[Phase | None, ...]:
        """What is done here about each fragment; ``None`` as long as nothing can be."""
        machines = (work.machine for work in self._works)
        return tuple(None if machine is None else machine.phase for machine in machines)

    @property
    def rounds_kept(self) -> int:
        """Rounds of which uploads and merged slices are kept, in case somebody needs them."""
        return sum(len(work.exchanges) for work in self._works)

    def counters(self) -> Counter[str]:
        """Of the machines and the transport, added up."""
        total: Counter[str] = Counter(self.stats.refused)
        for work in self._works:
            if work.machine is not None:
                total.update(work.machine.counters)
        total.update(self.transport.counters)
        total.update(self._fetcher.counters)
        total.update(self._server.counters)
        return total

    def set_reachable(self, reachable: bool) -> None:
        """It turned out whether others can dial this peer. Who only dials out leads nothing."""
        self.reachable = reachable
        for work in self._works:
            if work.machine is not None:
                work.machine.reachable = reachable

    @property
    def bytes_per_s(self) -> float:
        """What my line does in the slower direction, as far as I know; 0 when I do not.

        Who only dials out answers nobody, and never learns what its line sends.
        """
        up, down = self.transport.up.bytes_per_s, self.transport.down.bytes_per_s
        return 0.0 if up is None or down is None else min(up, down, self._line_max())

    def tell_line_speed(self) -> None:
        """To the machines, who say it when they join."""
        for work in self._works:
            if work.machine is not None:
                work.machine.bytes_per_s = self.bytes_per_s

    def load(self, states: Sequence[FragmentState]) -> None:
        """Take states from a checkpoint, before ``run``."""
        if self._tasks is not None:
            raise RuntimeError("load() comes before run(); later, states come from other peers")
        for state in states:
            expected = self.layout.fragments[state.fragment].size
            if state.theta.size != expected or state.momentum.size != expected:
                raise ValueError(
                    f"fragment {state.fragment} has {state.theta.size} values of theta and "
                    f"{state.momentum.size} of momentum; the layout says {expected}"
                )
            self._works[state.fragment].set_state(state)

    # ``fetch.Library``

    def state(self, fragment: int) -> FragmentState | None:
        if fragment >= len(self._works) or self._works[fragment].changing:
            return None
        return self._works[fragment].state

    def replay(self, fragment: int, version: int, lineage: Lineage) -> Sequence[ReplayEntry] | None:
        if fragment >= len(self._works):
            return None
        log = self._works[fragment].replay
        return None if log is None else log.since(version, lineage)

    # Life

    async def run(self) -> None:
        """Take part until cancelled. A bug in any task ends all of it, loudly."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                await self.transport.start(tasks)
                await self._server.start()
                for work in self._works:
                    work.start()
                tasks.create_task(self._watch_learner(), name="watch learner")
                tasks.create_task(self._look_after_links(), name="look after links")
                self.set_timer()
        finally:
            self._draining = True
            if self._timer is not None:
                self._timer.cancel()
            await self.transport.close()
            self._threads.close()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        assert self._tasks is not None
        return self._tasks.create_task(work, name=name)

    async def drain(self, *, timeout_s: float) -> bool:
        """Begin no round any more and let those under way end. ``False``: not all did."""
        self._draining = True
        now = self.now()
        for work in self._works:
            if work.machine is not None:
                work.do(work.machine.withdraw("leaving", now))
        try:
            async with asyncio.timeout(timeout_s):
                await self._until(lambda: not self.in_flight)
        except TimeoutError:
            return False
        return True

    async def quiet(self, *, timeout_s: float) -> None:
        """Return once nothing is kept of any round. Raises ``TimeoutError``."""
        async with asyncio.timeout(timeout_s):
            await self._until(lambda: not (self.in_flight or self.rounds_kept))

    @asynccontextmanager
    async def pinned(self) -> AsyncIterator[tuple[FragmentState | None, ...]]:
        """All states, with arrays that nobody writes to meanwhile: to read them in a thread.

        Rounds go on; while states are pinned each costs a copy of its momentum.
        """
        self._pins += 1
        try:
            await self._until(lambda: not any(work.changing for work in self._works))
            yield self.states
        finally:
            self._pins -= 1

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that can only change where ``changed`` is called."""
        while not condition():
            waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(waiting)
            await waiting

    def changed(self) -> None:
        """Something that ``drain`` or ``pinned`` may wait for has happened."""
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)
        if self._turns:
            # Whoever tells may be in the middle of a machine's effects.
            asyncio.get_running_loop().call_soon(self._let_in)

    def has_place(self) -> bool:
        """Whether one more round may begin."""
        return self.in_flight < self.settings.in_flight_max and not self._is_exchanging()

    def _is_exchanging(self) -> bool:
        """As much as it may at once. Who begins nothing then does not make it slower."""
        return sum(work.exchanges_now for work in self._works) >= self.settings.exchanges_max

    def has_its_turn_later(self, fragment: int) -> bool:
        return fragment in self._turns and not self.has_place()

    def _let_in(self) -> None:
        """Those that found no place have their turn as soon as there is one."""
        now = self.now()
        while not self._draining and self.has_place():
            machine = self._turns.next(now, is_free=lambda index: self._works[index].is_free)
            if machine is None:
                return
            self._works[machine.fragment].do(machine.due(now))

    def turn_away(self, work: _Work) -> None:
        """There is no place for one more round, unless one of another fragment gives way."""
        machine = work.machine
        assert machine is not None
        if self._turns.turn_away(machine):
            self.event("skipped", fragment=work.index, in_flight=self.in_flight)
        now = self.now()
        work.do(machine.give_way(NO_PLACE, now))
        if self.has_place() or self._is_exchanging():
            return
        holders = [other.machine for other in self._works if other.is_busy and other.machine]
        other = who_gives_way(machine, holders, now)
        if other is not None:
            reason = f"fragment {work.index} goes first"
            self._works[other.fragment].do(other.give_way(reason, now))

    def may_step_in_place(self, state: FragmentState) -> bool:
        """Whether nobody but its owner reads this state's momentum."""
        return not self._pins and not self._server.is_frozen(state)

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def event(self, event: str, **fields: Any) -> None:
        self._on_event(event, fields)

    def blame(self, peer: PeerId, kind: str, reason: str, **fields: Any) -> None:
        """A peer sent what it should not have: count it and say so."""
        self.stats.refused[kind] += 1
        if peer in self.stats.blamed or len(self.stats.blamed) < PEERS_BLAMED_MAX:
            self.stats.blamed[peer] += 1
        self.event("refused", peer=peer, kind=kind, reason=reason, **fields)

    # Time

    def set_timer(self) -> None:
        """Have the machines ticked when the first of them wants it."""
        wanted = min((at for work in self._works if (at := work.tick_at) is not None), default=None)
        if wanted == self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_at = wanted
        if wanted is not None:
            self._timer = asyncio.get_running_loop().call_at(wanted, self._tick)

    def _tick(self) -> None:
        self._timer = self._timer_at = None
        now = self.now()
        for work in self._works:
            at = work.tick_at
            if at is not None and at <= now:
                assert work.machine is not None
                work.do(work.machine.tick(now))
        self.set_timer()

    def look(self) -> None:
        """Look at the learner's step counter now; it may have moved. Cheap.

        It is looked at every ``progress_s`` anyway.
        """
        if self.port is None or self._draining or self._tasks is None:
            return
        progress = self.port.progress()
        if progress.step != self._step_seen:
            self._step_seen = progress.step
            for work in sorted(self._works, key=_Work.rank):
                work.progressed(progress)

    def answer_every_call(self) -> None:
        """From now on join whoever calls, however little there is to offer: the end is near."""
        for work in self._works:
            if work.machine is not None:
                work.machine.due_time.eager = True

    def gather_everybody(self) -> None:
        """From now on all meet in one group, as far as a roster can be long: the end is near.

        A swarm of several groups ends in agreement that way: its lineages are mixed in one round.
        """
        for work in self._works:
            if work.machine is not None:
                work.machine.around.group_size = ROSTER_MAX

    def make_due(self, fragments: Iterable[int]) -> None:
        """These are due now, however long their cycle still is. What is under way goes on."""
        for fragment in fragments:
            work = self._works[fragment]
            if work.machine is not None and not work.is_busy:
                work.do(work.machine.due(self.now()))

    async def _watch_learner(self) -> None:
        """Tell the machines of every step; they know when a fragment is due."""
        while self.port is not None:
            self.look()
            await asyncio.sleep(self.settings.progress_s)

    async def _look_after_links(self) -> None:
        """Who can only dial out holds on to some of those who lead."""
        while True:
            if not self.reachable:
                now = self.now()
                able = [
                    peer
                    for peer, seen in sorted(self._view.items())
                    if seen.reachable and seen.is_live(now) and peer != self.host.peer_id
                ]
                able.sort(key=lambda peer: (not self._view[peer].is_established(now), peer))
                self.transport.keep(able[: self.settings.kept_links])
            await asyncio.sleep(5.0)

    # What comes in

    def _heard(self, peer: PeerId, data: bytes) -> None:
        self._answering.heard(peer, self.now())
        try:
            message = said.decode(data)
        except BadMessage as error:
            self.blame(peer, "bad_message", str(error))
            return
        work = self._work(message.fragment)
        if work is None:
            self.blame(peer, "unknown_fragment", f"fragment {message.fragment}")
            return
        if isinstance(message, said.Bits):
            work.heard_bits(peer, message)
        elif work.machine is not None:
            work.do(work.machine.receive(peer, message, self.now()))

    def _work(self, fragment: int) -> _Work | None:
        return self._works[fragment] if fragment < len(self._works) else None

    def _lost(self, peer: PeerId, reason: str) -> None:
        # It may be told from within ``send``, in the middle of somebody's effects.
        asyncio.get_running_loop().call_soon(self._tell_lost, peer, reason)

    def _tell_lost(self, peer: PeerId, reason: str) -> None:
        now = self.now()
        self.event("link_lost", peer=peer, reason=reason)
        for work in self._works:
            if work.machine is not None:
                work.do(work.machine.lost(peer, now))

    def silent(self, peer: PeerId, since: float) -> None:
        """One fragment waited for an answer in vain. Told in the middle of its effects."""
        asyncio.get_running_loop().call_soon(self._tell_silent, peer, since)

    def _tell_silent(self, peer: PeerId, since: float) -> None:
        if not self._answering.is_silent(peer, since=since):
            return
        now = self.now()
        self.event("silent", peer=peer, seconds=now - since)
        for work in self._works:
            if work.machine is not None:
                work.do(work.machine.silent(peer, now))

    async def _serve(self, bulk: Bulk, header: bytes) -> None:
        """A bulk stream has opened: find out what it is for."""
        peer = bulk.remote
        self._answering.heard(peer, self.now())
        try:
            opening = said.decode_opening(header)
        except BadMessage as error:
            self.blame(peer, "bad_opening", str(error))
            await bulk.refuse(str(error))
            return
        work = self._work(opening.fragment)
        if work is None or work.machine is None:
            self.blame(peer, "unknown_fragment", f"fragment {opening.fragment}")
            await bulk.refuse(f"there is no fragment {opening.fragment} here")
            return
        problem, effects = work.machine.opening(peer, opening, self.now())
        work.do(effects)
        exchange = work.exchanges.get(opening.round)
        if problem is not None or exchange is None:
            problem = problem or "the round is over here"
            self.blame(peer, "opening_refused", problem, fragment=opening.fragment)
            await bulk.refuse(problem)
            return
        await exchange.serve(bulk, opening)


class _Work:
    """One fragment: its machine, its numbers, and what is under way for it."""

    def __init__(self, averager: Averager, index: int) -> None:
        self.averager = averager
        self.index = index
        self.fragment = averager.layout.fragments[index]
        self.machine: FragmentRounds | None = None
        self.state: FragmentState | None = None
        self.changing = False
        """The state's arrays are being written to: nobody else may read them now."""
        self.replay: ReplayLog | None = None
        self.exchanges: dict[bytes, Exchange] = {}
        self.snapshot: Snapshot | None = None
        """Taken of the learner, and not yet given back by ``adopt`` or ``release``."""
        self.tick_at: float | None = None
        """The machine's deadline, as of its last input."""
        self.audit = Audit()
        self.usual = Usual()
        self._giving_way = False
        self._asking = False
        self._applying = False
        self._mine: bytes | None = None
        """The round that I am a member of."""

    def __repr__(self) -> str:
        version = self.state.version if self.state else None
        return f"_Work(fragment={self.index}, version={version}, rounds={len(self.exchanges)})"

    @property
    def is_busy(self) -> bool:
        return self._asking or self.snapshot is not None or self._mine is not None

    @property
    def exchanges_now(self) -> bool:
        return self._mine is not None

    @property
    def is_free(self) -> bool:
        """Whether another round may begin."""
        return not (self.is_busy or self._applying)

    def rank(self) -> tuple[int, int]:
        """What goes first when not all can."""
        return (0, self.index) if self.machine is None else rank(self.machine)

    def set_state(self, state: FragmentState) -> None:
        self.state = state
        settings, layout = self.averager.settings, self.averager.layout
        share = settings.replay_bytes_max * self.fragment.size // layout.size
        if self.replay is None:
            self.replay = ReplayLog(bytes_max=share, version=state.version, lineage=state.lineage)
        else:
            self.replay.restart(state.version, state.lineage)

    def start(self) -> None:
        averager = self.averager
        port = averager.port
        self.machine = FragmentRounds(
            fragment=self.index,
            me=averager.host.peer_id,
            incarnation=averager.incarnation,
            topic=averager._topic,
            policy=averager.policy,
            view=averager._view,
            standing=None if self.state is None else Standing.of(self.state),
            sign=averager._identity.sign,
            verify=verify,
            encoded_bytes=self._encoded_bytes,
            codecs=codec_names(),
            trains=port is not None,
            reachable=averager.reachable,
            bytes_per_s=averager.bytes_per_s,
            founder=averager._founder,
            site=averager.site,
            norm_ratio_max=averager.settings.norm_ratio_max,
            doubts=averager._doubts,
            step=port.progress().step if port is not None else 0,
            now=averager.now(),
        )
        if averager._keeps and self.state is None:
            averager.spawn(self._begin_from_nothing(), f"first state of fragment {self.index}")
        if averager._keeps and port is None:
            averager.spawn(self._look_round(), f"look round for fragment {self.index}")

    def _encoded_bytes(self, codec: str) -> int:
        return encoded_size(codec, self.fragment.unit_sizes)

    # Inputs

    def progressed(self, progress: Progress) -> None:
        if self.machine is not None:
            now = self.averager.now()
            effects = self.machine.progressed(
                progress.step,
                progress.step_time_s,
                now,
                waits=self.averager.has_its_turn_later(self.index),
            )
            if effects:
                self.do(effects)

    def do(self, effects: list[Effect]) -> None:
        """Carry effects out, in their order."""
        for effect in effects:
            self._do(effect)
        assert self.machine is not None
        self.tick_at = self.machine.deadline
        self.averager.set_timer()
        self.averager.changed()

    def _do(self, effect: Effect) -> None:
        match effect:
            case Send():
                self.averager.transport.send(effect.to, said.encode(effect.message))
            case Silent():
                self.averager.silent(effect.peer, effect.since)
            case Note():
                self._note(effect)
            case TakeSnapshot():
                self._take_snapshot()
            case Enter():
                self._enter(effect)
            case Reduce():
                self._in(effect.round, lambda exchange: exchange.reduce(effect.slice))
            case Upload():
                self._in(
                    effect.round,
                    lambda exchange: exchange.upload(effect.slice, effect.to, effect.what),
                )
            case Merge():
                self._in(
                    effect.round,
                    lambda exchange: exchange.merge(
                        effect.slice, effect.contributors, effect.weights
                    ),
                )
            case Answer():
                self._in(effect.round, lambda exchange: exchange.answer(effect.slice))
            case Apply():
                self._applying = True
                self.averager.spawn(self._apply(effect), f"apply fragment {self.index}")
            case GiveUp():
                self._give_up(effect)
            case Discard():
                self._discard(effect)
            case Settle():
                self._release()
            case Presume():
                self.averager.spawn(self._presume(effect), f"presume fragment {self.index}")
            case Forget():
                self._forget(effect.round)
            case CatchUp() | Rebase():
                self.averager.spawn(self._catch_up(effect), f"catch up fragment {self.index}")
            case Fold():
                self.averager.spawn(self._fold(effect), f"fold fragment {self.index}")

    def _in(self, round_id: bytes, act: Callable[[Exchange], None]) -> None:
        exchange = self.exchanges.get(round_id)
        assert exchange is not None, "Enter comes first, Forget last"
        act(exchange)

    def _note(self, note: Note) -> None:
        if note.event == "void":
            self.averager.stats.void += 1
        if (kind := _BLAMED.get(note.event)) is not None:
            peer, reason = PeerId(str(note.fields["peer"])), str(note.fields["reason"])
            if peer != self.averager.host.peer_id:
                self.averager.blame(peer, kind, reason, fragment=self.index)
        if note.event == "upload_outlying":
            self._left_out(note.fields)
        self.averager.event(note.event, fragment=self.index, **note.fields)

    def _left_out(self, verdict: Mapping[str, Any]) -> None:
        exchange = self.exchanges[bytes.fromhex(verdict["round"])]
        entry = exchange.commit.index(verdict["peer"])
        assert entry is not None
        exchange.left_out(verdict["slice"], entry, verdict["reason"])

    # The learner

    def _take_snapshot(self) -> None:
        averager = self.averager
        assert averager.port is not None and self.machine is not None
        if not (averager.has_place() and self.is_free):
            # From inside of the machine's own effects it must not be called: next turn.
            asyncio.get_running_loop().call_soon(averager.turn_away, self)
            return
        self._asking = True
        averager.spawn(self._ask(averager.port), f"snapshot of fragment {self.index}")

    async def _ask(self, port: LearnerPort) -> None:
        timeout_s = self.averager.policy.snapshot_s
        try:
            self.snapshot = await port.snapshot(self.index, timeout_s=timeout_s)
        finally:
            self._asking = False
        await self._offer(self.snapshot)

    async def _offer(self, snapshot: Snapshot | None) -> None:
        assert self.machine is not None and self.averager.port is not None
        offer = None
        if snapshot is not None:
            offer = Offer(
                mark=snapshot.mark,
                steps=snapshot.steps,
                tokens=snapshot.tokens,
                base_version=snapshot.base_version,
                base_lineage=snapshot.base_lineage,
                batch_tokens_max=self.averager.port.progress().batch_tokens_max,
            )
        self.do(self.machine.offered(offer, self.averager.now()))

    def _release(self) -> None:
        """Give the learner its arrays back, once no thread reads them any more."""
        if self.snapshot is not None:
            self.averager.spawn(self._release_now(self.snapshot), f"release {self.index}")

    async def _release_now(self, snapshot: Snapshot) -> None:
        await self._stop_encoding()
        if self.snapshot is snapshot and self.averager.port is not None:
            self.snapshot = None
            self.averager.port.release(self.index)
            self.averager.changed()

    async def _stop_encoding(self) -> None:
        for exchange in list(self.exchanges.values()):
            await exchange.stop_encoding()

    def _adopt(self, state: FragmentState, *, contained: int | None) -> None:
        self.snapshot = None
        if self.averager.port is not None:
            self.averager.port.adopt(self.index, state, contained=contained)

    def _give_up(self, effect: GiveUp) -> None:
        if effect.round is not None and self._mine == effect.round:
            self._mine = None
        if effect.round is not None:
            self._report(effect.round, None, effect.reason)
        if not effect.in_doubt:
            self._release()

    async def _presume(self, effect: Presume) -> None:
        """What I offered is merged on another lineage: it is not mine to offer any more."""
        await self._stop_encoding()
        if self.state is not None:
            self._adopt(self.state, contained=effect.mark)

    def _discard(self, effect: Discard) -> None:
        port = self.averager.port
        assert port is not None and self.state is not None
        self.snapshot = None
        self.averager.event("discarded", fragment=self.index, reason=effect.reason)
        port.discard(self.index, self.state, reason=effect.reason)

    async def _fold(self, effect: Fold) -> None:
        """Alone: my parameters become the state."""
        assert self.machine is not None and self.snapshot is not None and self.state is not None
        values = self.snapshot.values.copy()
        if not np.isfinite(values).all():
            self.averager.event("not_finite", fragment=self.index, reason="fold")
            self._release()
            return
        standing = effect.standing
        state = FragmentState(
            self.index,
            standing.version,
            standing.lineage,
            standing.chain,
            values,
            self.state.momentum,
            standing.merged,
        )
        self.set_state(state)
        self._adopt(state, contained=effect.contained)
        self.averager.stats.folds += 1
        self.do(self.machine.folded(self.averager.now()))

    # Rounds

    def _enter(self, effect: Enter) -> None:
        averager = self.averager
        exchange = Exchange(
            effect,
            self.fragment,
            me=averager.host.peer_id,
            transport=averager.transport,
            threads=averager._threads,
            arena=averager._arena,
            outcomes=_Told(self, effect.round),
            spawn=averager.spawn,
            usual=self.usual,
            norm_ratio_max=averager.settings.norm_ratio_max,
            theta=lambda: None if self.state is None else self.state.theta,
            now=averager.now(),
        )
        self.exchanges[effect.round] = exchange
        if effect.entry is None:
            return
        self._mine = effect.round
        if exchange.is_mix:
            if effect.entry in effect.commit.carriers:
                assert self.state is not None
                exchange.contribute(self.state.momentum, self.state.theta, self.state.merged)
        elif self.snapshot is not None:
            carried, marks = None, None
            if exchange.moves_states:
                assert self.state is not None
                carried = self.state.theta, self.state.momentum
                marks = self.state.merged
            exchange.contribute(self.snapshot.base, self.snapshot.values, marks, carried=carried)

    def _forget(self, round_id: bytes) -> None:
        exchange = self.exchanges.pop(round_id, None)
        if self._mine == round_id:
            self._mine = None
        if exchange is not None:
            tally = exchange.tally
            self.averager.stats.sent_bytes += tally.sent_bytes
            self.averager.stats.received_bytes += tally.received_bytes
            self.averager.tell_line_speed()
            self.averager.spawn(exchange.close(), f"forget {round_id.hex()[:8]}")

    async def _apply(self, effect: Apply) -> None:
        """The outer step; from here the round cannot fail for me."""
        assert self.machine is not None and self.state is not None
        averager = self.averager
        exchange = self.exchanges[effect.round]
        await self._stop_encoding()
        before = state = self.state
        self.changing = True
        try:
            in_place = averager.may_step_in_place(state)
            state = await exchange.step(state, effect.standing, effect.seal, in_place=in_place)
        finally:
            self.changing = False
            averager.changed()
        self.state = state
        assert self.replay is not None
        if exchange.moves_states:
            self.replay.restart(state.version, state.lineage)
        else:
            head = ReplayHead(exchange.encoded_commit, effect.seal, effect.digests)
            self.replay.append(ReplayEntry(head, exchange.merged_payload), state.lineage)
        self._mine = None
        self._applying = False
        contained = effect.contained
        if exchange.moves_states and contained is None:
            # Another side of the fork may have merged more of my work than mine had.
            contained = self._newly_contained(state, before)
        self._adopt(state, contained=contained)
        averager.stats.rounds += 1
        averager.stats.contributed += effect.contained is not None
        self._report(effect.round, effect, effect.reason)
        merged = state.merged if exchange.moves_states else None
        dispersion = exchange.dispersion
        if dispersion is not None:
            averager.event("melded", fragment=self.index, dispersion=dispersion)
        self.do(
            self.machine.finished(
                effect.round, averager.now(), merged=merged, dispersion=dispersion
            )
        )
        if state.version % averager.settings.audit_versions == 0:
            # Who merges without mixing has a lineage of its own: there is nothing to compare.
            members = [entry.peer for entry in effect.commit.members]
            averager.spawn(self._take_digest(state, members), f"digest of fragment {self.index}")

    # Silent divergence

    async def _take_digest(self, state: FragmentState, members: Sequence[PeerId]) -> None:
        averager = self.averager
        async with averager.pinned():
            if self.state is not state:
                return  # too late: its momentum may have moved on
            digest = await averager._threads.run(state.digest)
        bits = said.encode(said.Bits(self.index, state.lineage, digest))
        for peer in members:
            if peer != averager.host.peer_id:
                averager.transport.send(peer, bits)
        self._judge(self.audit.took(state.lineage, digest, members))

    def heard_bits(self, sender: PeerId, bits: said.Bits) -> None:
        self._judge(self.audit.heard(sender, bits.lineage, bits.digest))

    def _judge(self, verdict: Verdict) -> None:
        averager = self.averager
        match verdict:
            case Others(peers):
                averager.event("bits_differ", fragment=self.index, peers=list(peers))
            case Minority(digest, holders, with_me):
                if self._giving_way:
                    return
                self._giving_way = True
                averager.event(
                    "diverged", fragment=self.index, majority=list(holders), with_me=with_me
                )
                logger.warning(
                    "diverged fragment=%d majority=%d with_me=%d: this machine computed something "
                    "else than the others; check its memory and numpy",
                    self.index,
                    len(holders),
                    with_me,
                )
                averager.spawn(
                    self._give_way(digest, holders), f"give way in fragment {self.index}"
                )
            case _:
                return

    async def _give_way(self, digest: bytes, holders: Sequence[PeerId]) -> None:
        """Take the majority's state as soon as nothing of mine is under way."""
        assert self.machine is not None
        averager = self.averager
        try:
            async with asyncio.timeout(averager.policy.catch_up_s):
                await averager._until(lambda: self.is_free)
                before = self.state
                state = await self._fetch_state(holders)
                await averager._until(lambda: self.is_free)
        except (TimeoutError, FetchFailed) as error:
            averager.event("give_way_failed", fragment=self.index, reason=str(error))
            return
        finally:
            self._giving_way = False
        ahead = before is not None and state.chain.find(before.version, before.lineage) is not None
        if self.state is not before or before is None or not ahead:
            averager.event("give_way_failed", fragment=self.index, reason="things have moved on")
            return  # the next audit tells again
        if state.lineage == before.lineage and state.digest() != digest:
            averager.event("give_way_failed", fragment=self.index, reason="not the majority's bits")
            return
        self.set_state(state)
        averager.event("gave_way", fragment=self.index, version=state.version)
        self._taken(state, before)

    def _report(self, round_id: bytes, apply: Apply | None, reason: str) -> None:
        """One event for a round as this peer lived it: who, what, when, how much, and why not."""
        exchange = self.exchanges.get(round_id)
        if exchange is None:
            return
        commit, tally = exchange.commit, exchange.tally
        seal = apply.seal if apply is not None else ()
        left_out = {
            entry.peer: tally.refused.get(entry.peer, "not in every slice by the deadline")
            for index, entry in enumerate(commit.members)
            if apply is not None and commit.kind != "mix" and index not in seal
        }
        began = exchange.entered_at
        self.averager.event(
            "round",
            fragment=self.index,
            round=round_id.hex(),
            kind=commit.kind,
            version=commit.version,
            outcome="finished" if apply is not None else "given up",
            reason=reason,
            leader=commit.leader,
            members=[entry.peer for entry in commit.members],
            contributors=[commit.members[index].peer for index in seal],
            # Which of each contributor's steps are in it: whoever audits a run adds them up.
            marks={
                entry.peer: [entry.incarnation, entry.mark, entry.steps, entry.tokens]
                for entry in (commit.members[index] for index in seal)
            },
            lineage=self.state.lineage.hex() if apply is not None and self.state else None,
            weights=list(apply.weights) if apply is not None else [],
            left_out=left_out,
            codec=commit.codec,
            seconds=self.averager.now() - began,
            encoded_s=None if tally.encoded_at is None else tally.encoded_at - began,
            merged_s=None if tally.merged_at is None else tally.merged_at - began,
            sent_bytes=tally.sent_bytes,
            received_bytes=tally.received_bytes,
            **self._by_site(commit, tally),
        )

    def _by_site(self, commit: Commit, tally: Tally) -> dict[str, Any]:
        """Who carried whose contribution over the slow line, and where my bytes came from."""
        carried = {
            entry.peer: commit.members[entry.delegate].peer
            for entry in commit.members
            if entry.delegate is not None
        }
        if not carried:
            return {}
        return {"delegates": carried, "received_from": tally.received_from()}

    # Catching up

    def _sources(self, first: PeerId | None) -> list[PeerId]:
        """Whom to ask for a state: the one who is said to have it, then whoever is there."""
        averager = self.averager
        now = averager.now()
        others = [
            peer
            for peer, seen in sorted(averager._view.items())
            if seen.is_live(now) and peer != averager.host.peer_id
        ]
        # Not everybody the same ones first.
        key = blake3.blake3(averager.host.peer_id.encode() + bytes([self.index % 256])).digest()

        def rank(peer: PeerId) -> tuple[bool, bytes]:
            # Who cannot be dialled, or not yet as far as is known, may be connected all the same.
            unreachable = not averager._view[peer].reachable
            return unreachable, blake3.blake3(key + peer.encode()).digest()

        others.sort(key=rank)
        return [*([first] if first is not None else []), *(p for p in others if p != first)]

    async def _catch_up(self, effect: CatchUp | Rebase) -> None:
        assert self.machine is not None
        averager = self.averager
        before = self.state
        began = asked_at = averager.now()
        how = "replay"
        try:
            async with averager._catching:
                asked_at = averager.now()
                if not averager._doubts.believes(effect.source, asked_at):
                    raise FetchFailed(self.index, {effect.source: "it did not deliver another one"})
                state = None
                if isinstance(effect, CatchUp) and before is not None:
                    state = await self._replay_to(effect, before)
                if state is None:
                    how = "state"
                    sources = self._sources(effect.source)
                    state = await self._fetch_state(sources)
                    if not self._is_newer(state):
                        # Most of them are where I am; who was said to be further is asked alone.
                        state = await self._fetch_state([effect.source])
        except FetchFailed as error:
            now = averager.now()
            held_s = now - asked_at
            if averager._doubts.is_long(held_s):
                reason = f"{error}, in {held_s:.0f} s"
                averager.blame(effect.source, "did_not_deliver", reason, fragment=self.index)
            averager.event("catch_up_failed", fragment=self.index, reason=str(error))
            self.do(self.machine.caught_up(None, now, held_s=held_s))
            return
        if how == "state" and not self._is_newer(state):
            averager.event("catch_up_failed", fragment=self.index, reason="nothing newer there")
            now = averager.now()
            self.do(self.machine.caught_up(None, now, held_s=now - asked_at))
            return
        await self._stop_encoding()
        parted = None
        if how == "state":
            if isinstance(effect, Rebase) and before is not None and not effect.others_follow:
                parted = await self._parted(before, state)
            self.set_state(state)
        averager.stats.caught_up += 1
        averager.event(
            "state_adopted",
            fragment=self.index,
            how=how,
            version=state.version,
            from_version=None if before is None else before.version,
            rebased=isinstance(effect, Rebase),
            parted_at=None if parted is None else parted.version,
            seconds=averager.now() - began,
        )
        self._taken(state, before, parted)

    async def _parted(self, before: FragmentState, state: FragmentState) -> Parting | None:
        """Where my side left the one that I take, if what I did since can still be offered."""
        averager, replay = self.averager, self.replay
        if averager.port is None or replay is None:
            return None
        shared = parting(before.chain, state.chain, versions_max=averager.policy.stale_max)
        if shared is None:
            return None
        entries = replay.since(shared.version, shared.lineage)
        if entries is None or self._newly_contained(state, before) is not None:
            return None
        scratch = averager._threads.scratch
        theta = await averager._threads.run(
            lambda: rewound(before, entries, self.fragment.unit_sizes, scratch())
        )
        if theta is None or self.state is not before:
            return None
        return Parting(
            version=shared.version,
            theta=theta,
            merged_mark=self._my_mark(state),
            given_up_mark=self._my_mark(before),
        )

    def _my_mark(self, state: FragmentState) -> int:
        """Up to which of my own steps a state has my work: 0 for none of this life."""
        mark = state.merged.get(self.averager.host.peer_id)
        known = mark is not None and mark.incarnation == self.averager.incarnation
        return mark.step if mark is not None and known else 0

    async def _fetch_state(self, sources: Sequence[PeerId]) -> FragmentState:
        averager = self.averager
        timeout_s = patience_s(averager.policy, 2 * 4 * self.fragment.size)
        return await averager._fetcher.state(
            self.index, self.fragment.size, sources, timeout_s=timeout_s
        )

    def _is_newer(self, state: FragmentState) -> bool:
        """Whether a fetched state is worth taking: more merged tokens, or later in my own chain."""
        mine = self.state
        if mine is None:
            return True
        if state.lineage == mine.lineage:
            return False
        if state.chain.find(mine.version, mine.lineage) is not None:
            return True
        tokens_end = self.averager.policy.tokens_end
        if tokens_end is not None and self.machine is not None and self.machine.closed_ranks:
            here, there = Standing.of(mine).head(), Standing.of(state).head()
            return gives_way(here, there, tokens_end)
        return state.merged.tokens > mine.merged.tokens

    def _taken(
        self, state: FragmentState, before: FragmentState | None, parted: Parting | None = None
    ) -> None:
        """A state that others made is mine now: tell the learner and the machine."""
        assert self.machine is not None
        averager = self.averager
        again = None
        if parted is not None and averager.port is not None:
            again = averager.port.rebase(self.index, state, parted)
        if again is not None:
            self.snapshot = None
            averager.event("regained", fragment=self.index, tokens=again)
        else:
            parted = None
            contained = self._newly_contained(state, before)
            presumed = self.machine.doubting.presumed(averager.now())
            if presumed is not None and presumed > (contained or 0):
                contained = presumed
            self._adopt(state, contained=contained)
        if before is not None and averager.port is not None:
            # On the lighter side of a fork, my work was merged into what is given up now.
            mine, theirs = (each.merged.get(averager.host.peer_id) for each in (before, state))
            lost = (mine.tokens if mine else 0) - (theirs.tokens if theirs else 0) - (again or 0)
            if lost > 0:
                averager.event("written_off", fragment=self.index, tokens=lost, reason="rebased")
                averager.port.write_off(self.index, lost, reason="rebased")
        since = None if parted is None else parted.version
        self.do(self.machine.caught_up(Standing.of(state), averager.now(), since=since))

    def _newly_contained(self, state: FragmentState, before: FragmentState | None) -> int | None:
        """Up to which of my steps the new state holds work that the one before did not.

        As a rule that is the mark of the outstanding snapshot. It can be that of one which was
        taken back: a majority may forswear a round that somebody has finished after all, and then
        follow it.
        """
        me = self.averager.host.peer_id
        mark = state.merged.get(me)
        if mark is None or mark.incarnation != self.averager.incarnation:
            return None
        known = before.merged.get(me) if before is not None else None
        if known is not None and (known.incarnation, known.step) >= (mark.incarnation, mark.step):
            return None
        return mark.step

    async def _replay_to(self, effect: CatchUp, before: FragmentState) -> FragmentState | None:
        """Replay up to the lineage asked for; ``None`` when only a whole state will do."""
        averager = self.averager
        sizes = self.fragment.unit_sizes
        missed = effect.version - before.version
        payload_bytes = codec_named(averager.policy.codec).encoded_size(sizes)
        state_bytes = before.theta.nbytes + before.momentum.nbytes
        wants_the_way = averager.port is not None and averager.port.misses_base(self.index)
        if missed * payload_bytes > state_bytes and not wants_the_way:
            return None  # the state is smaller
        try:
            entries = await averager._fetcher.replay(
                self.index,
                sizes,
                effect.source,
                Standing.of(before),
                target=effect.lineage,
                timeout_s=patience_s(averager.policy, missed * payload_bytes),
            )
        except FetchFailed as error:
            averager.event("replay_failed", fragment=self.index, reason=str(error))
            return None
        if not entries or self.state is not before:
            return None
        state = before
        for number, entry in enumerate(entries):
            # The first step copies; the copy is nobody else's and is stepped on in place.
            step = partial(self._advance, state, entry, in_place=number > 0)
            state = await averager._threads.run(step)
            if averager.port is not None:
                averager.port.passed(self.index, state)
        if self.state is not before:
            return None
        assert self.replay is not None
        for entry in entries:
            lineage = state.lineage if entry is entries[-1] else _lineage_after(entry, state)
            self.replay.append(entry, lineage)
        self.state = state
        return state

    def _advance(
        self, state: FragmentState, entry: ReplayEntry, *, in_place: bool
    ) -> FragmentState:
        scratch = self.averager._threads.scratch()
        return advance(state, entry, self.fragment.unit_sizes, scratch, in_place=in_place)

    async def _begin_from_nothing(self) -> None:
        """A newcomer: ask until somebody has a state. Endless, with a pause that grows."""
        averager = self.averager
        pause_s = 1.0
        while self.state is None:
            sources = self._sources(None)
            try:
                if not sources:
                    raise FetchFailed(self.index, {})
                async with averager._catching:
                    state = await averager._fetcher.state(
                        self.index,
                        self.fragment.size,
                        sources,
                        timeout_s=averager.policy.catch_up_s,
                    )
            except FetchFailed as error:
                averager.event("fetch_failed", fragment=self.index, reason=str(error))
                await asyncio.sleep(pause_s)
                pause_s = min(30.0, 2 * pause_s)
                continue
            self.set_state(state)
            averager.event("state_fetched", fragment=self.index, version=state.version)
            self._taken(state, None)

    async def _look_round(self) -> None:
        """A keeper is in no group, so nobody tells it: it asks how far others are."""
        averager = self.averager
        turn = 0
        while True:
            await asyncio.sleep(averager.settings.look_round_s)
            sources = self._sources(None)
            if self.state is not None and sources:
                turn += 1
                peer = sources[turn % len(sources)]
                compare = said.Compare(self.index, Standing.of(self.state).head())
                averager.transport.send(peer, said.encode(compare))


def _lineage_after(entry: ReplayEntry, state: FragmentState) -> Lineage:
    """The lineage that a replayed round led to, out of the chain of where it all led."""
    for link in state.chain.since(entry.version - 1):
        if link.version == entry.version:
            return link.lineage
    raise AveragingError(f"version {entry.version} is not in the chain that it led to")


class _Told:
    """Brings what became of an exchange's parts to its machine."""

    def __init__(self, work: _Work, round_id: bytes) -> None:
        self._work = work
        self._round = round_id

    @property
    def _machine(self) -> FragmentRounds:
        machine = self._work.machine
        assert machine is not None
        return machine

    def upload_arrived(
        self,
        slice_index: int,
        sender: PeerId,
        problem: str | None,
        length: Length | None = None,
        *,
        riders: tuple[int, ...] = (),
    ) -> None:
        work = self._work
        if problem is not None and sender != work.averager.host.peer_id:
            work.averager.blame(sender, "upload_refused", problem, fragment=work.index)
        now = work.averager.now()
        effects = self._machine.upload_arrived(
            self._round, slice_index, sender, problem, now, length=length, riders=riders
        )
        work.do(effects)

    def unfit(self, reason: str) -> None:
        work = self._work
        work.averager.event("not_finite", fragment=work.index, reason=reason)

    def upload_failed(self, slice_index: int, reason: str) -> None:
        now = self._work.averager.now()
        self._work.do(self._machine.upload_failed(self._round, slice_index, reason, now))

    def not_taken(self, slice_index: int, reducer: PeerId, reason: str) -> None:
        work = self._work
        work.averager.event(
            "not_taken", fragment=work.index, slice=slice_index, by=reducer, reason=reason
        )

    def slice_merged(self, slice_index: int, digest: bytes) -> None:
        now = self._work.averager.now()
        self._work.do(self._machine.slice_merged(self._round, slice_index, digest, now))

    def merged_arrived(self, slice_index: int, digest: bytes) -> None:
        now = self._work.averager.now()
        self._work.do(self._machine.merged_arrived(self._round, slice_index, digest, now))
