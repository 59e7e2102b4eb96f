"""Taking over states of other peers: a first state, catching up, giving way to a majority.

It belongs to one fragment, replaces its state and tells its machine and learner. The decisions are
those of ``averaging.round.fetched_states``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from averaging import messages as said
from averaging.errors import LineageBroken
from averaging.history.adoption import Parting
from averaging.history.audit import Audit, Minority, Others, Verdict
from averaging.history.chain import Chain
from averaging.history.lineage import Lineage
from averaging.history.manifest import Manifest, digest_of_pieces
from averaging.history.replay import ReplayEntry, ReplayLog, advance
from averaging.history.standing import Standing
from averaging.history.state import FragmentState, Pieces
from averaging.live.services import Services
from averaging.live.states.fetcher import SOURCES_MAX, FetchFailed
from averaging.messages import Commit, Head, Signatures
from averaging.numbers.arithmetic import norm_at_most
from averaging.numbers.codecs import codec_named
from averaging.numbers.layout import Fragment
from averaging.round.fetched_states import (
    fork_of,
    is_newer,
    prefers_replay,
    unfit,
)
from averaging.round.gathering.catching_up import fetch_timeout_s, state_timeout_s
from averaging.round.interface.effects import CatchUp, Rebase
from averaging.round.interface.inputs import CaughtUp, GiveWay, Input
from averaging.round.interface.phase import Phase
from averaging.round.machine import FragmentRounds
from averaging.rules.succession import sources_in_turn, with_first
from averaging.rules.usual_norms import is_unusual
from dht.identity import PeerId

logger = logging.getLogger(__name__)


class Followed(Protocol):
    """One fragment, as this module sees it."""

    index: int
    fragment: Fragment
    machine: FragmentRounds
    state: FragmentState | None
    replay: ReplayLog | None
    earlier_tokens: int
    averager: Services

    @property
    def is_busy(self) -> bool: ...

    def follow(self, state: FragmentState) -> None: ...

    def adopt(self, state: FragmentState, *, contained: int | None) -> None:
        """Take in ``state``; own work up to step ``contained`` is newly in it."""
        ...

    def rebase(self, state: FragmentState, parting: Parting) -> int | None:
        """Take in another side of a fork and offer the work since ``parting`` again.

        Returns the tokens that were merged and are pending again, or ``None`` without having done
        anything: ``adopt`` follows then.
        """
        ...

    def set_state(self, state: FragmentState) -> None: ...

    def keep_for_replay(self, entry: ReplayEntry, lineage: Lineage) -> None: ...

    def keep_if_good(self, state: FragmentState) -> None: ...

    def shown(self, state: FragmentState) -> Head: ...

    def usual_norm(self) -> float | None: ...

    def reduced(self, parent: Lineage) -> ReplayEntry | None: ...

    def take(self, given: Input) -> None: ...

    def event(self, event: str, **fields: Any) -> None: ...

    async def stop_encoding(self) -> None: ...


FETCH_USUAL_S = 15.0
"""Time in which a first state is usually found. Until then a source that is busy, or that has just
gone on to another version, is no trouble."""

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 8.0
"""Pauses between two looks for a first state: one of 34 s kept a newcomer out for that long."""

REPLAY_SOURCES_MAX = 3
"""Peers that are asked for missed merges before a whole state is fetched."""


@dataclass(slots=True, eq=False)
class _Attempt:
    """One attempt to go over to a state of another peer."""

    effect: CatchUp
    before: FragmentState | None
    machine: FragmentRounds
    """The machine that asked for it; after a rollback it is another one."""
    began: float
    asked_at: float
    """Time since which the source is waited for, turns at other fragments not included."""
    replayed: list[tuple[ReplayEntry, Lineage]] = field(default_factory=list)
    """The rounds that led to the state, with their lineages; none if a whole state was fetched."""


class Following:
    """Brings one fragment to states that other peers have."""

    def __init__(self, work: Followed) -> None:
        self._work = work
        self._averager = work.averager
        self._audit = Audit(self._averager.worth)
        self._giving_way = False

    # Catching up

    def _sources(self, first: PeerId | None) -> list[PeerId]:
        """All live peers to ask for a state, and ``first``, which is said to have it."""
        averager = self._averager
        now = averager.now()
        live = {peer: seen for peer, seen in averager.around.view.items() if seen.is_live(now)}
        established = {peer for peer in {*live, first} if peer and averager.is_established(peer)}
        in_turn = sources_in_turn(
            averager.life.peer, self._work.index, live, established.__contains__
        )
        if first is None:
            return in_turn
        return with_first(in_turn, first, established.__contains__, asked_max=SOURCES_MAX)

    async def catch_up(self, effect: CatchUp) -> None:
        """Go over to the state that ``effect`` names, or tell the machine why not."""
        averager, work = self._averager, self._work
        attempt = _Attempt(effect, work.state, work.machine, averager.now(), averager.now())
        before = attempt.before
        try:
            state = await self._obtain(attempt)
        except FetchFailed as error:
            self._failed(attempt, error)
            return
        if work.machine is not attempt.machine:
            return  # the run was taken back meanwhile
        replayed = attempt.replayed
        if not replayed and not self._is_newer(Standing.of(state), effect=effect):
            held_s = averager.now() - attempt.asked_at
            work.take(CaughtUp(None, held_s=held_s, reason="nothing newer there"))
            return
        await work.stop_encoding()
        parted = None
        if not replayed:
            parted = await self._parted(effect, before, state)
            await self._before_jump(before, state)
        if work.machine is not attempt.machine:
            return
        refused = self._refused(state.chain)
        if self._has_moved_on(before):
            refused = "things have moved on"
        if refused is not None:
            work.take(CaughtUp(None, held_s=0.0, reason=refused))
            return
        for entry, lineage in replayed:
            work.keep_for_replay(entry, lineage)
        if replayed:
            work.state = state
        else:
            work.set_state(state)
        averager.tell_line_speed()
        self._report(attempt, state, parted)
        self._taken(state, before, parted)

    def _has_moved_on(self, before: FragmentState | None) -> bool:
        """True if the fragment has another state than ``before``, or is on its way to one.

        The machine waits for a state for a limited time, and may be in a round when it comes.
        """
        goes_on = self._work.machine.phase in (Phase.ENTERED, Phase.FOLDING)
        return goes_on or self._work.state is not before

    async def _obtain(self, attempt: _Attempt) -> FragmentState:
        """Replay up to the state, or fetch it. Raises ``FetchFailed``."""
        averager, effect, before = self._averager, attempt.effect, attempt.before
        async with averager.catching_up():
            attempt.asked_at = averager.now()
            if not averager.reputation.may_ask(effect.source, attempt.asked_at):
                reasons = {effect.source: "it did not deliver another one"}
                raise FetchFailed(self._work.index, reasons)
            if before is not None and not isinstance(effect, Rebase):
                replayed = await self._replay_to(effect, before)
                if replayed is not None:
                    state, attempt.replayed = replayed
                    return state
            sources = self._sources(effect.source)
            trust = _Trust(self._work, partial(self._is_newer, effect=effect))
            async with averager.fetching_state():
                attempt.asked_at = averager.now()
                return await self._fetch_state(sources, trust, effect.source)

    def _failed(self, attempt: _Attempt, error: FetchFailed) -> None:
        averager, source = self._averager, attempt.effect.source
        if self._work.machine is not attempt.machine:
            return
        held_s = averager.now() - attempt.asked_at
        if averager.reputation.is_long(held_s):
            reason = f"{error}, in {held_s:.0f} s"
            averager.blame(source, "did_not_deliver", reason, fragment=self._work.index)
        self._work.take(CaughtUp(None, held_s=held_s, reason=str(error)))

    def _report(self, attempt: _Attempt, state: FragmentState, parted: Parting | None) -> None:
        effect, before = attempt.effect, attempt.before
        self._work.event(
            "state_adopted",
            how="replay" if attempt.replayed else "state",
            version=state.version,
            from_version=None if before is None else before.version,
            missed=self._missed(effect, before, state),
            rebased=isinstance(effect, Rebase),
            parted_at=None if parted is None else parted.version,
            seconds=self._averager.now() - attempt.began,
        )

    def _refused(self, chain: Chain) -> str | None:
        """The reason why this peer takes no state with this history; ``None``: there is none."""
        return self._averager.guard.gate.refuses(self._work.index, chain)

    async def _before_jump(self, before: FragmentState | None, state: FragmentState) -> None:
        """Let the loss be measured before the fragment goes over to another peer's state."""
        if before is not None:
            await self._averager.guard.gate.before_jump(before, Standing.of(state))

    async def _before_unusual_steps(
        self, before: FragmentState, state: FragmentState, *, steps: int
    ) -> None:
        usual = self._work.usual_norm()
        if not self._averager.guard.gate.measures or usual is None:
            return
        sizes = self._work.fragment.unit_sizes
        moved = await self._averager.threads.run(
            lambda: norm_at_most(state.theta - before.theta, sizes)
        )
        if is_unusual(moved, usual=usual, steps=steps):
            await self._before_jump(before, state)

    def _missed(self, effect: CatchUp, before: FragmentState | None, state: FragmentState) -> int:
        """Rounds on the way from one state to the other that had nothing of this peer's learner."""
        if self._averager.port is None or before is None or isinstance(effect, Rebase):
            return 0
        contained = self._averager.life.newly_contained(state.merged, before.merged) is not None
        return max(0, state.version - before.version - contained)

    async def _parted(
        self, effect: CatchUp, before: FragmentState | None, state: FragmentState
    ) -> Parting | None:
        """The parting of this peer's side from the new one, if its work since can be offered."""
        averager, work = self._averager, self._work
        stale_max = averager.terms.policy.stale_max
        fork = fork_of(effect, before, state, averager.life, work.replay, stale_max=stale_max)
        if averager.port is None or fork is None:
            return None
        sizes, scratch = work.fragment.unit_sizes, averager.threads.scratch
        parting = await averager.threads.run(lambda: fork.parting(sizes, scratch()))
        return parting if work.state is before else None

    async def _fetch_state(
        self, sources: Sequence[PeerId], trust: _Trust, named: PeerId
    ) -> FragmentState:
        """Fetch a state; ``named``: the peer that is blamed for one that may not be taken."""
        averager = self._averager
        timeout_s = state_timeout_s(
            averager.terms.policy,
            self._pieces.size_bytes,
            line_bytes_s=averager.transport.down.bytes_per_s,
        )
        state = await averager.fetcher.state(
            self._work.index, self._pieces, sources, trust=trust, timeout_s=timeout_s
        )
        return await self._fit(state, named)

    async def _fit(self, state: FragmentState, source: PeerId) -> FragmentState:
        """The state, if its numbers may be taken. Raises ``FetchFailed``."""
        averager = self._averager
        usual, ratio = self._work.usual_norm(), averager.settings.norm_ratio_max
        before = self._work.state
        problem = await averager.threads.run(
            lambda: unfit(state, before, usual=usual, norm_ratio_max=ratio)
        )
        if problem is not None:
            averager.blame(source, "unfit_state", problem, fragment=self._work.index)
            raise FetchFailed(self._work.index, {source: problem})
        return state

    @property
    def _pieces(self) -> Pieces:
        return self._averager.terms.pieces(self._work.index)

    def _is_newer(self, theirs: Standing, *, effect: CatchUp | None = None) -> bool:
        mine, machine = self._work.state, self._work.machine
        return is_newer(
            None if mine is None else Standing.of(mine),
            theirs,
            end=machine.ending.end(self._averager.now()),
            effect=effect,
        )

    def _taken(
        self, state: FragmentState, before: FragmentState | None, parted: Parting | None = None
    ) -> None:
        """A state that others made is this peer's now: tell the learner and the machine."""
        work, averager = self._work, self._averager
        life, earlier = averager.life, work.earlier_tokens
        regained = None if parted is None else work.rebase(state, parted)
        if regained is None:
            known = None if before is None else before.merged
            presumed = work.machine.doubting.presumed(averager.now())
            contained = life.newly_contained(state.merged, known, presumed=presumed)
            work.adopt(state, contained=contained)
        work.follow(state)
        since = None
        if parted is not None and regained is not None:
            since = parted.version
            work.event("regained", tokens=regained)
        if before is not None and averager.port is not None:
            # On the lighter side of a fork, this peer's work was merged into what is given up now.
            lost = life.lost_tokens(before.merged, state.merged, earlier=earlier) - (regained or 0)
            if lost > 0:
                work.event("written_off", tokens=lost, reason="rebased")
        work.take(CaughtUp(Standing.of(state), since))
        self._work.keep_if_good(state)

    async def _replay_to(
        self, effect: CatchUp, before: FragmentState
    ) -> tuple[FragmentState, list[tuple[ReplayEntry, Lineage]]] | None:
        """Replay up to the lineage asked for; ``None`` when only a whole state will do.

        Returns the state and the rounds that led to it, with their lineages.
        """
        averager = self._averager
        if averager.guard.gate.refuses_any(self._work.index):
            return None  # a state shows its history before it is fetched
        sizes = self._work.fragment.unit_sizes
        down = self._work.machine.identity.policy_at(effect.version).codecs[1]
        payload_bytes = codec_named(down).encoded_size(sizes)
        needs_way = averager.port is not None and averager.port.misses_base(self._work.index)
        if not prefers_replay(effect, before, payload_bytes=payload_bytes, needs_way=needs_way):
            return None
        entries, reached = self._reduced(effect, Standing.of(before))
        missed_bytes = (effect.version - reached.version) * payload_bytes
        if reached.lineage != effect.lineage:
            fetched = await self._replayed(effect, reached, sizes, missed_bytes)
            if fetched is None:
                return None
            entries += fetched
        if not entries or self._has_moved_on(before):
            return None
        state, replayed = before, []
        for entry in entries:
            try:
                state = await averager.threads.run(self._advance, state, entry)
            except LineageBroken as error:  # a lineage may be of another run's outer momentum
                self._work.event("replay_failed", reason=str(error))
                return None
            replayed.append((entry, state.lineage))
            if averager.port is not None:
                averager.port.passed(self._work.index, state)
        await self._before_unusual_steps(before, state, steps=len(entries))
        return state, replayed

    async def _replayed(
        self, effect: CatchUp, reached: Standing, sizes: Sequence[int], missed_bytes: int
    ) -> tuple[ReplayEntry, ...] | None:
        """The rounds that lead to the lineage asked for; ``None`` if nobody who is asked has them.

        Whoever has merged them can send them: the peer that is ahead may be one that only a relay
        leads to, and relays carry no bulk. Merges are an eighth of the state in int4.
        """
        averager = self._averager
        others = [peer for peer in self._sources(effect.source) if peer != effect.source]
        timeout_s = fetch_timeout_s(
            averager.terms.policy, missed_bytes, line_bytes_s=averager.transport.down.bytes_per_s
        )
        for source in (effect.source, *others[: REPLAY_SOURCES_MAX - 1]):
            try:
                return await averager.fetcher.replay(
                    self._work.index,
                    sizes,
                    source,
                    reached,
                    target=effect.lineage,
                    timeout_s=timeout_s,
                )
            except FetchFailed as error:
                self._work.event("replay_failed", reason=str(error))
        return None

    def _reduced(self, effect: CatchUp, standing: Standing) -> tuple[list[ReplayEntry], Standing]:
        """The next rounds, as far as this peer reduced them for others, and where they lead."""
        entries: list[ReplayEntry] = []
        while standing.lineage != effect.lineage and standing.version < effect.version:
            entry = self._work.reduced(standing.lineage)
            if entry is None:
                break
            standing = entry.head.after(standing)
            entries.append(entry)
        return entries, standing

    def _advance(self, state: FragmentState, entry: ReplayEntry) -> FragmentState:
        scratch = self._averager.threads.scratch()
        sizes, floats = self._work.fragment.unit_sizes, self._averager.floats
        return advance(state, entry, sizes, scratch, floats=floats)

    async def begin_from_nothing(self, *, gives_up: str | None = None) -> None:
        """Ask live peers for a first state until one has it, with a pause that grows.

        ``gives_up``: reason why the learner's work so far is not to be merged.
        """
        averager, machine = self._averager, self._work.machine
        pause_s, began = FIRST_PAUSE_S, averager.now()
        while self._work.state is None and self._work.machine is machine:
            sources = [peer for peer in self._sources(None) if averager.around.begins_from(peer)]
            try:
                if not sources:
                    raise FetchFailed(self._work.index, {})
                trust = _Trust(self._work, self._is_newer)
                async with averager.catching_up(), averager.fetching_state():
                    state = await self._fetch_state(sources, trust, sources[0])
            except FetchFailed as error:
                # Where several join at once all ask the same few: that is nothing to report.
                is_late = averager.now() - began >= FETCH_USUAL_S
                self._work.event("fetch_failed" if is_late else "fetch_waits", reason=str(error))
                await asyncio.sleep(pause_s)
                pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
                continue
            if self._work.machine is not machine:
                return  # the run was taken back meanwhile
            self._work.set_state(state)
            self._work.event("state_fetched", version=state.version)
            if gives_up is None or averager.port is None:
                self._taken(state, None)
            else:
                averager.port.discard(self._work.index, state, reason=gives_up)
                self._work.take(CaughtUp(Standing.of(state)))

    async def look_round(self) -> None:
        """Compare standings with other peers now and then: a keeper is in no group."""
        averager = self._averager
        turn = 0
        while True:
            await asyncio.sleep(averager.settings.look_round_s)
            sources = self._sources(None)
            if self._work.state is not None and sources:
                turn += 1
                peer = sources[turn % len(sources)]
                compare = said.Compare(self._work.index, self._work.shown(self._work.state))
                averager.transport.send(peer, said.encode(compare))

    # Another founding

    async def state_of(self, source: PeerId) -> FragmentState:
        """The certified state that one peer has. Raises ``FetchFailed``."""
        trust = _Trust(self._work, lambda theirs: True)
        return await self._fetch_state([source], trust, source)

    async def replace(self, state: FragmentState, *, reason: str) -> None:
        """Take a state of another history instead of the own one; pending work is given up."""
        averager, work = self._averager, self._work
        machine = work.machine

        def stands_still() -> bool:
            # A machine that joins or leads would not hear that the state is another one.
            return not work.is_busy and machine.phase in (Phase.IDLE, Phase.CATCHING)

        while True:
            # Others of the old history may never come: the roster that waits for them is left.
            work.take(GiveWay("goes over to another founding of the run"))
            await averager.until(stands_still)
            await work.stop_encoding()
            if stands_still():  # it may have begun to join meanwhile
                break
        work.set_state(state)
        if averager.port is not None:
            averager.port.discard(work.index, state, reason=reason)
        work.follow(state)
        work.take(CaughtUp(Standing.of(state)))

    # Silent divergence

    async def take_digest(self, state: FragmentState, commit: Commit) -> None:
        """Tell the members of the round that made this state its digest, and hear the voters'."""
        averager = self._averager
        digest = await averager.threads.run(state.digest)
        bits = said.encode(said.Bits(self._work.index, state.lineage, digest))
        for entry in commit.members:
            if entry.peer != averager.life.peer:
                averager.transport.send(entry.peer, bits)
        voters = [commit.members[index].peer for index in commit.voters]
        self._judge(self._audit.took(state.lineage, digest, voters))

    def heard_bits(self, sender: PeerId, bits: said.Bits) -> None:
        self._judge(self._audit.heard(sender, bits.lineage, bits.digest))

    def _judge(self, verdict: Verdict) -> None:
        averager = self._averager
        match verdict:
            case Others(peers):
                self._work.event("bits_differ", peers=list(peers))
            case Minority(digest, holders, with_me):
                if self._giving_way:
                    return
                self._giving_way = True
                self._work.event("diverged", majority=list(holders), with_me=with_me)
                logger.warning(
                    "diverged fragment=%d majority=%d with_me=%d: this machine computed something "
                    "else than the others; check its memory, its disk and numpy",
                    self._work.index,
                    len(holders),
                    with_me,
                )
                averager.spawn(
                    self._give_way(digest, holders), f"give way in fragment {self._work.index}"
                )
            case _:
                return

    async def _give_way(self, digest: bytes, holders: Sequence[PeerId]) -> None:
        """Take the majority's state as soon as no own round is under way."""
        averager = self._averager
        try:
            async with asyncio.timeout(averager.terms.policy.catch_up_s):
                await averager.until(lambda: not self._work.is_busy)
                before = self._work.state
                trust = _Trust(self._work, lambda theirs: True)
                state = await self._fetch_state(holders, trust, holders[0])
                await self._before_jump(before, state)
                await averager.until(lambda: not self._work.is_busy)
        except (TimeoutError, FetchFailed) as error:
            self._work.event("give_way_failed", reason=str(error))
            return
        finally:
            self._giving_way = False
        ahead = before is not None and state.chain.find(before.version, before.lineage) is not None
        if self._work.state is not before or before is None or not ahead:
            self._work.event("give_way_failed", reason="things have moved on")
            return  # the next audit tells again
        if state.lineage == before.lineage and state.digest() != digest:
            self._work.event("give_way_failed", reason="not the majority's bits")
            return
        self._work.set_state(state)
        self._work.event("gave_way", version=state.version)
        self._taken(state, before)


class _Trust:
    """The states of one fragment that this peer takes: certified, and better than its own."""

    def __init__(self, work: Followed, is_wanted: Callable[[Standing], bool]) -> None:
        self._averager = work.averager
        self._fragment = work.index
        self._machine = work.machine
        self._is_wanted = is_wanted

    def holders_min(self, manifest: Manifest) -> int:
        if self._machine.certificates.known_digest(manifest.tip) is not None:
            return 0  # its bits are known
        return self._machine.catching_up.holders_min(self._averager.now())

    def counts(self, peer: PeerId) -> bool:
        return self._machine.certificates.counts(peer, self._averager.now())

    def hear(self, manifest: Manifest, signatures: Signatures) -> None:
        self._machine.certificates.hear(manifest.tip, signatures, self._averager.now())

    def problem(self, manifest: Manifest) -> str | None:
        digest = self._machine.certificates.known_digest(manifest.tip)
        if digest is not None and digest != digest_of_pieces(manifest.digests):
            return f"its version {manifest.version} has other bits than are known to be right"
        if not self._machine.catching_up.may_take(manifest.tip, self._averager.now()):
            return f"too few peers that count have signed its version {manifest.version}"
        theirs = manifest.standing()
        refused = self._averager.guard.gate.refuses(self._fragment, theirs.chain)
        if refused is not None:
            return refused
        return None if self._is_wanted(theirs) else f"its version {manifest.version} is not newer"

    def signers(self, manifest: Manifest) -> Sequence[PeerId]:
        return self._machine.certificates.signers(manifest.tip)
