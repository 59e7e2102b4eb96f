"""The driver of averaging: carries out what the round machines of all fragments decide.

One ``Averager`` per peer and run. It owns the links, the streams, the threads for codec work, the
states and the replay logs; it asks the learner for snapshots and hands it states; every decision
about a round is ``averaging.round.machine``'s. Without a learner's port it is a keeper: it holds
states and follows, and lends itself as leader and reducer.

Everything that waits has a deadline, every queue a maximum. A message that a peer should not send
is refused with a reason naming it, counted, and never ends a round for the others.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence

from averaging import messages as said
from averaging.history.lineage import Lineage
from averaging.history.replay import ReplayEntry
from averaging.history.standing import Standing
from averaging.history.state import FragmentState, value_bytes
from averaging.live.fragment import FragmentWork
from averaging.live.learner_port import LearnerPort
from averaging.live.services import Services, rings_at
from averaging.live.settings import AveragerSettings, Participant, RunTerms, Surroundings, topic_of
from averaging.live.slices.evidence import Uploads
from averaging.live.states.fetch_server import FetchServer
from averaging.live.states.state_files import TEND_EVERY_S, StateFiles
from averaging.live.streams.bulk import Bulk
from averaging.messages import BadMessage, Head, Signatures
from averaging.round.interface import inputs
from averaging.round.interface.effects import refusal
from averaging.round.interface.inputs import Input
from averaging.round.interface.phase import Phase
from averaging.round.turns import NO_PLACE, Turns, holder_that_gives_way
from averaging.rules.due import HURRIED_SHARE
from averaging.rules.line_levels import Level, Need, merges_at_once
from averaging.rules.orders import RoundOrders
from dht.host import Messaging
from dht.identity import PeerId

KEPT_LINKS = 8
"""Number of peers to which a peer that can only dial out keeps links open."""


class Averager(Services):
    """All fragments of one run at one peer. ``run`` does the work until it is cancelled.

    The facts that it needs, and the owner that it tells, are grouped in
    ``averaging.live.settings``.
    """

    def __init__(
        self,
        host: Messaging,
        port: LearnerPort | None,
        *,
        me: Participant,
        terms: RunTerms,
        around: Surroundings,
        states: Sequence[FragmentState | None] = (),
        settings: AveragerSettings | None = None,
    ) -> None:
        super().__init__(host, port, me=me, terms=terms, around=around, settings=settings)
        self._server = FetchServer(
            host,
            run=terms.run,
            library=self,
            threads=self.threads,
            prefers=self.is_established,
            state_bytes=value_bytes(terms.policy.mu) * terms.layout.size,
            line=self.transport.up,
            uplink=self.uplink,
        )
        self._works = self._fragments(states)
        self._turns = Turns()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at: float | None = None
        self._draining = False
        self.goes_back = False
        """True while some fragments have begun again after a rollback, and others have yet to."""
        self._step_seen: int | None = None
        self._hurried: set[int] = set()
        """Fragments that were made due since another one is final."""

    # What others see

    @property
    def states(self) -> tuple[FragmentState | None, ...]:
        return tuple(work.state for work in self._works)

    def standing(self, fragment: int) -> Standing | None:
        state = self._works[fragment].state
        return None if state is None else Standing.of(state)

    @property
    def final_fragments(self) -> frozenset[int]:
        """The fragments that have reached the run's tokens in a version that nothing follows."""
        now = self.now()
        machines = (work.machine for work in self._works)
        return frozenset(each.fragment for each in machines if each.ending.is_final(now))

    @property
    def closed_ranks(self) -> bool:
        """True once a swarm of several groups meets in one, because the run ends."""
        return any(work.machine.ending.closed_ranks for work in self._works)

    @property
    def alone_until(self) -> float | None:
        """When this peer, beside no other that trains, begins to merge its work by itself.

        ``None`` where it does so already, and while others train.
        """
        # All fragments see the same peers, of which there may be thousands.
        return None if self.port is None else self._works[0].machine.alone_until(self.now())

    @property
    def in_flight(self) -> int:
        return sum(work.is_busy for work in self._works)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phase of each fragment's round machine."""
        return tuple(work.machine.phase for work in self._works)

    def level(self) -> tuple[Level, Need] | None:
        """The level with the longest cycle of any fragment, and what the own line needs.

        ``None`` where the run fixes both.
        """
        paces = [work.machine.pace for work in self._works]
        if all(len(pace.levels) == 1 for pace in paces):
            return None
        longest = max((pace.level for pace in paces), key=lambda level: level.cycle_steps)
        return longest, max((pace.need for pace in paces), key=lambda need: need.level)

    @property
    def rounds_kept(self) -> int:
        """Rounds of which uploads and merged slices are kept, in case somebody needs them."""
        return sum(len(work.exchanges) for work in self._works)

    def counters(self) -> Counter[str]:
        """Sum of the counters of the machines, the transport and the fetchers."""
        total: Counter[str] = Counter(self.stats.refused)
        for work in self._works:
            total.update(work.machine.counters)
        total.update(self.transport.counters)
        total.update(self.fetcher.counters)
        total.update(self._server.counters)
        total.update(self.guard.counters)
        return total

    def set_reachable(self, reachable: bool) -> None:
        """Tell the machines whether others can dial this peer: otherwise it leads nothing."""
        self.reachable = reachable
        self._tell(inputs.ReachabilityChanged(reachable))

    def _tell(self, given: Input) -> None:
        for work in self._works:
            work.take(given)

    def _fragments(self, states: Sequence[FragmentState | None]) -> list[FragmentWork]:
        """The work of each fragment. ``states``: those that are known, of a checkpoint."""
        known = {state.fragment: state for state in states if state is not None}
        for state in known.values():
            expected = self.terms.pieces(state.fragment)
            if state.pieces != expected:
                raise ValueError(
                    f"fragment {state.fragment} has {state.pieces}; the run's is {expected}"
                )
        count = len(self.terms.layout.fragments)
        return [FragmentWork(self, index, known.get(index)) for index in range(count)]

    def shown(self, state: FragmentState) -> Head:
        """The head of a state as other peers are shown it: with the signatures under it."""
        return self._works[state.fragment].shown(state)

    # ``fetch.Library``

    def state(self, fragment: int) -> FragmentState | None:
        state = self._works[fragment].state if fragment < len(self._works) else None
        return None if state is None else self.around.watch.serves(state)

    def signatures(self, state: FragmentState) -> Signatures:
        return self.shown(state).signatures

    def replay(self, fragment: int, version: int, lineage: Lineage) -> Sequence[ReplayEntry] | None:
        if fragment >= len(self._works):
            return None
        log = self._works[fragment].replay
        entries = None if log is None else log.since(version, lineage)
        return None if entries is None else self.around.watch.serves_rounds(entries)

    # Life

    async def run(self) -> None:
        """Take part until cancelled. A bug in any task ends all of it, loudly."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                await self.transport.start(tasks)
                await self._server.start()
                await self.guard.start()
                for work in self._works:
                    work.start()
                tasks.create_task(self._watch_learner(), name="watch learner")
                tasks.create_task(self._look_after_links(), name="look after links")
                if (files := self.around.state_files) is not None:
                    tasks.create_task(self._tend(files), name="tend state files")
                    tasks.create_task(self._put_away(files), name="put states away")
                self.set_timer()
                try:
                    await asyncio.Event().wait()
                finally:
                    self._ended = True
        finally:
            self._draining = True
            if self._timer is not None:
                self._timer.cancel()
            await self.transport.close()
            self.threads.close()

    async def _tend(self, files: StateFiles) -> None:
        """Keep files of states out of memory, and report when states have to be in it."""
        refused: str | None = None
        while True:
            await files.tend()
            if files.refusal is not None and refused is None:
                self.event("state_in_memory", reason=files.refusal)
            refused = files.refusal

    async def _put_away(self, files: StateFiles) -> None:
        """Move states to their files. A slow disk may take its time; pages are let go meanwhile."""
        while True:
            await asyncio.sleep(TEND_EVERY_S)
            for work in self._works:
                if not await work.put_away(files):
                    break  # nor is there room for the next one

    def offer_before_leaving(self) -> int:
        """Offer the learner's work now, as this peer leaves: to be called until nothing is left.

        Returns the encoded size of the fragments with work that is not merged. The others come with
        little work of their own. This peer counts as any other member: its tokens are merged under
        its own name, so once per lineage holds as in every round, for a peer that comes back in the
        middle of one as well. A peer that offered the work in its place would need a right to do so
        that outlives the leaver, and a merge that is decided after the leaver has counted its
        tokens: two fates for one token. So a peer waits instead of handing over. Where no other
        trains, a keeper makes the rounds with it, and where there is none either, it folds.
        """
        if self.port is None:
            return 0
        self._tell(inputs.MergeBeforeLeaving())
        step = self.port.progress().step
        lacking = [
            work
            for work in self._works
            if work.state is not None and self.life.mark_in(work.state.merged) < step
        ]
        # A fragment in doubt, or catching up, leaves the line to the others.
        begun = [work for work in lacking if work.is_busy and work.machine.doubt is None]
        places = self._merges_at_once() - len(begun)
        for work in lacking:
            if places > 0 and not work.is_busy:
                self.make_due([work.index])
                places -= work.is_busy
        return sum(work.upload_bytes for work in lacking)

    def hurry_to_the_end(self) -> None:
        """Make fragments due once another one is final: to be called until all of them are.

        The work that made that one final is pending in the others, and one round of each has it. A
        fragment that waited for its turn in the cycle would end with three quarters of a cycle of
        steps that nothing merges. Each is hurried once: a round that comes to nothing is followed
        by the usual ones.
        """
        final = self.final_fragments
        if not final or self.port is None:
            return
        places = self._merges_at_once() - sum(work.is_busy for work in self._works)
        for work in self._works:
            if places > 0 and work.index not in final | self._hurried and not work.is_busy:
                self.make_due([work.index])
                self._hurried.add(work.index)
                places -= work.is_busy

    def stay(self) -> None:
        """Go on as before: this peer does not leave, or rest, any more."""
        self._tell(inputs.MergeBeforeLeaving(leaves=False))

    def company_s(self) -> float:
        """Longest time until another learner has enough steps to join one that leaves."""
        now = self.now()
        trains = any(
            seen.trains and seen.is_live(now)
            for peer, seen in self.around.view.items()
            if peer != self.life.peer
        )
        paces = [work.machine.pace for work in self._works if trains]
        steps = max((pace.level.cycle_steps for pace in paces), default=0)
        step_s = max((pace.median_step_s(now) for pace in paces), default=0.0)
        return HURRIED_SHARE * steps * step_s

    def round_bytes(self) -> int:
        """Encoded size of one contribution to every fragment."""
        return sum(work.upload_bytes for work in self._works)

    def _merges_at_once(self) -> int:
        speed = self.bytes_per_s or self.terms.policy.slow_link_bytes_s
        largest = max(work.upload_bytes for work in self._works)
        return merges_at_once(largest / speed, upload_s=self.terms.policy.upload_s)

    async def drain(self, *, timeout_s: float) -> bool:
        """Begin no round any more and let those under way end. ``False``: not all did."""
        self._draining = True
        self._tell(inputs.Leave())
        try:
            async with asyncio.timeout(timeout_s):
                await self.until(lambda: not self.in_flight)
        except TimeoutError:
            return False
        return True

    def changed(self) -> None:
        super().changed()
        if self._turns:
            # The caller may be in the middle of a machine's effects.
            asyncio.get_running_loop().call_soon(self._let_in)

    def has_place(self) -> bool:
        """True if one more round may begin."""
        return self.in_flight < self.settings.in_flight_max and not self._is_exchanging()

    def _is_exchanging(self) -> bool:
        """True if as many rounds exchange as may at once; another one would slow them down."""
        return sum(work.is_exchanging for work in self._works) >= self.settings.exchanges_max

    def has_its_turn_later(self, fragment: int) -> bool:
        return fragment in self._turns and not self.has_place()

    def _let_in(self) -> None:
        """Begin the rounds that found no place, as soon as there is one."""
        now = self.now()
        while not self._draining and self.has_place():
            machine = self._turns.next(now, is_free=lambda index: not self._works[index].is_busy)
            if machine is None:
                return
            self._works[machine.fragment].take(inputs.Due())

    def turn_away(self, fragment: int) -> None:
        """Refuse a round that found no place, unless another fragment's gives way."""
        work = self._works[fragment]
        if self._turns.turn_away(work.machine):
            self.event("skipped", fragment=work.index, in_flight=self.in_flight)
        work.take(inputs.GiveWay(NO_PLACE))
        if self.has_place() or self._is_exchanging():
            return
        holders = [other.machine for other in self._works if other.is_busy]
        other = holder_that_gives_way(work.machine, holders, self.now())
        if other is not None:
            self._works[other.fragment].take(inputs.GiveWay(f"fragment {work.index} goes first"))

    # Audits

    def uploads_of(self, round_id: bytes) -> Uploads | None:
        found = (work.exchanges.get(round_id) for work in self._works)
        return next((each.parts.uploads for each in found if each is not None), None)

    # Time

    def set_timer(self) -> None:
        """Have the machines ticked when the first of them wants it.

        Most inputs move a deadline to a later time. A timer that is set is left alone then: it
        comes early, and is set again.
        """
        wanted = min((at for work in self._works if (at := work.tick_at) is not None), default=None)
        if wanted is None or (self._timer_at is not None and self._timer_at <= wanted):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = wanted
        when = rings_at(wanted, clock_s=self.around.clock_s)
        self._timer = asyncio.get_running_loop().call_at(when, self.tick)

    def tick(self) -> None:
        """Tick the machines that want it now. The timer does it."""
        self._timer = self._timer_at = None
        if self._ended:
            return
        now = self.now()
        for work in self._works:
            at = work.tick_at
            if at is not None and at <= now:
                work.take(inputs.Tick())
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
            for work in sorted(self._works, key=FragmentWork.rank):
                work.progressed(progress)

    def gather_everybody(self) -> None:
        """Put all peers into one group from now on, and join every leader that calls.

        A swarm of several groups ends in agreement that way: its lineages are melded in one round.
        """
        self._tell(inputs.EndIsNear())

    def end_merges(self) -> None:
        """Merge no more from now on; of two states that are apart the lighter gives way.

        So a run ends that has a date, after its last rounds.
        """
        self._tell(inputs.LastRoundOver())

    def follow(self, orders: RoundOrders) -> None:
        """Follow the newest directive of the run's owner from now on."""
        self.terms.book.orders = orders
        self._tell(inputs.OrdersChanged())

    async def states_of(self, source: PeerId) -> tuple[FragmentState, ...]:
        """Every fragment's state at one peer, for ``replace_states``. Raises ``FetchFailed``."""
        return tuple([await work.following.state_of(source) for work in self._works])

    async def before_jumps(self, states: Sequence[FragmentState]) -> None:
        """Let the loss be measured before all fragments go over to these states."""
        for state in states:
            before = self._works[state.fragment].state
            if before is not None:
                await self.guard.gate.before_jump(before, Standing.of(state))

    async def replace_states(self, states: Sequence[FragmentState], *, reason: str) -> None:
        """Go over to another history of the run, founded apart from the own one.

        All fragments go over: a model is of one founding. Work that is not merged is given up,
        because it grew from other first weights.
        """
        for state in states:
            await self._works[state.fragment].following.replace(state, reason=reason)

    async def begin_again(
        self, states: Sequence[FragmentState | None], *, rollback: int, reason: str
    ) -> None:
        """Go on from these states, as a rollback orders; ``None``: fetch it from others.

        Nothing of the rounds before counts any more. Work that is not merged is given up.
        """
        self.topic, self.goes_back = topic_of(self.terms.run, self.terms.layout, rollback), True
        try:
            for work in self._works:
                await work.begin_again(states[work.index], reason=reason)
        finally:
            self.goes_back = False

    def is_after(self, rollback: int) -> bool:
        """True if no rollback later than this one separates this averager from its peers."""
        return self.topic == topic_of(self.terms.run, self.terms.layout, rollback)

    def give(self, fragment: int, given: Input) -> None:
        """Give an input to a fragment's machine."""
        self._works[fragment].take(given)

    def make_due(self, fragments: Iterable[int]) -> None:
        """Make these fragments due now. Rounds that are under way go on."""
        for fragment in fragments:
            if not self._works[fragment].is_busy:
                self._works[fragment].take(inputs.Due())

    async def _watch_learner(self) -> None:
        """Tell the machines of every step; they know when a fragment is due."""
        while self.port is not None:
            self.look()
            await asyncio.sleep(self.settings.progress_s)

    async def _look_after_links(self) -> None:
        """Keep links open to some possible leaders while this peer can only dial out."""
        while True:
            self.transport.keep([] if self.reachable else self._able_to_lead()[:KEPT_LINKS])
            await asyncio.sleep(5.0)

    def _able_to_lead(self) -> list[PeerId]:
        """The live peers that can be dialled, the established ones first."""
        now = self.now()
        able = [
            peer
            for peer, seen in self.around.view.items()
            if seen.reachable and seen.is_live(now) and peer != self.host.peer_id
        ]
        return sorted(able, key=lambda p: (not self.around.view[p].is_established(now), p))

    # What comes in

    def _heard(self, peer: PeerId, data: bytes) -> None:
        if self.guard.lie_of(peer) is not None:
            return
        try:
            message = said.decode(data, self.me.speaks)
        except BadMessage as error:
            self.blame(peer, "bad_message", str(error))
            return
        heard = self.around.watch.heard(peer, message)
        if heard is None:
            return
        message = heard
        if self.guard.saw(peer, message):
            return
        work = self._work(message.fragment)
        if work is None:
            self.blame(peer, "unknown_fragment", f"fragment {message.fragment}")
            return
        if isinstance(message, said.Join) and not self.around.may_train(peer):
            self.blame(peer, "join_of_a_keeper", "the run admits it as a keeper only")
        elif isinstance(message, said.Directed):
            answers = not self.around.take_directive(message.directive)
            if answers and self.terms.book.may_answer(peer, self.now()):
                answer = said.Directed(message.fragment, self.terms.book.orders.encoded)
                self.transport.send(peer, said.encode(answer))
        elif isinstance(message, said.Bits):
            work.following.heard_bits(peer, message)
        else:
            work.take(inputs.Received(peer, message))

    def _work(self, fragment: int) -> FragmentWork | None:
        return self._works[fragment] if fragment < len(self._works) else None

    async def _serve(self, bulk: Bulk, header: bytes) -> None:
        """Route a bulk stream that has opened to its fragment and round."""
        peer = bulk.remote
        try:
            opening = said.decode_opening(header)
        except BadMessage as error:
            self.blame(peer, "bad_opening", str(error))
            await bulk.refuse(str(error))
            return
        if (lie := self.guard.lie_of(peer)) is not None:
            await bulk.refuse("you are banned: you " + lie)
            return
        self.guard.saw_commit(opening.commit, opening.signature)
        work = self._work(opening.fragment)
        if work is None:
            self.blame(peer, "unknown_fragment", f"fragment {opening.fragment}")
            await bulk.refuse(f"there is no fragment {opening.fragment} here")
            return
        wanted = work.machine.handle(inputs.StreamOpened(peer, opening), self.now())
        problem = refusal(wanted)
        work.do(wanted)
        exchange = work.exchanges.get(opening.round)
        if problem is not None or exchange is None:
            problem = problem or "the round is over here"
            self.blame(peer, "opening_refused", problem, fragment=opening.fragment)
            await bulk.refuse(problem)
            return
        await exchange.reducing.serve(bulk, opening)
