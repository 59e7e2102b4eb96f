"""States that were fetched from other peers: which are taken, and what becomes of the own work.

The round machine asks for a state (``CatchUp``, ``Rebase``); the owner that carries that out
obtains it from other peers and then asks here. Live and simulated peers differ only in how the
bytes reach them.

1. ``prefers_replay``: whether replaying the missed rounds is cheaper than a whole state.
2. ``is_newer``: whether the state that arrived is worth taking at all; ``unfit``: whether its
   numbers may be taken; ``is_outvoted``: whether a source showed other bits than it should have.
3. ``fork_of``: where the two sides of a fork parted, if the work since then can be offered again.
4. ``hand_over``: gives the state to the learner and says what became of the own work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from averaging.history.adoption import Parting
from averaging.history.merged_map import MergedMap
from averaging.history.replay import ReplayEntry, ReplayLog, rewound, shared_version
from averaging.history.standing import Standing
from averaging.history.state import FragmentState
from averaging.messages import Link
from averaging.numbers.arrays import Float32s, norm
from averaging.numbers.codec import Scratch
from averaging.round.interface.effects import Apply, CatchUp, Rebase
from averaging.rules.mixing import RunsEnd
from averaging.rules.plausible import leap
from dht.identity import PeerId


class Learner(Protocol):
    """One fragment of a learner, as far as a new state concerns it."""

    def adopt(self, state: FragmentState, *, contained: int | None) -> None:
        """Take in ``state``; own work up to step ``contained`` is newly in it."""
        ...

    def rebase(self, state: FragmentState, parting: Parting) -> int | None:
        """Take in another side of a fork and offer the work since ``parting`` again.

        Returns the tokens that were merged and are pending again, or ``None`` without having done
        anything: ``adopt`` follows then.
        """
        ...


@dataclass(frozen=True, slots=True)
class Life:
    """One incarnation of one peer. Marks of its other incarnations say nothing about its work."""

    peer: PeerId
    incarnation: int

    def mark_in(self, merged: MergedMap) -> int:
        """The own step up to which ``merged`` contains this incarnation's work; 0: none of it."""
        mark = merged.get(self.peer)
        return mark.step if mark is not None and mark.incarnation == self.incarnation else 0

    def earlier_tokens(self, merged: MergedMap, known: int = 0) -> int:
        """Tokens of this peer's earlier incarnations in ``merged``.

        A map has one number for all incarnations of a peer. ``known``: those of the state that
        this one follows on, which it still has if it contains work of this incarnation.
        """
        mark = merged.get(self.peer)
        if mark is None:
            return 0
        return known if mark.incarnation == self.incarnation else mark.tokens

    def newly_contained(self, after: MergedMap, before: MergedMap | None) -> int | None:
        """The own step up to which ``after`` contains work that ``before`` did not.

        Usually the mark of the outstanding snapshot. It can be the mark of one that was taken
        back: a majority may forswear a round that somebody has finished after all, and then
        follow it.
        """
        mark = after.get(self.peer)
        if mark is None or mark.incarnation != self.incarnation:
            return None
        known = before.get(self.peer) if before is not None else None
        if known is not None and (known.incarnation, known.step) >= (mark.incarnation, mark.step):
            return None
        return mark.step

    def contained_by(self, apply: Apply, after: MergedMap, before: MergedMap) -> int | None:
        """The own step up to which the state after a round newly contains work.

        Where states travel, another side of the fork may have merged more of this peer's work.
        """
        if apply.contained is not None or not apply.commit.melds:
            return apply.contained
        return self.newly_contained(after, before)


def prefers_replay(
    effect: CatchUp, before: FragmentState | None, *, payload_bytes: int, needs_way: bool
) -> bool:
    """True if the missed rounds are to be replayed one by one instead of fetching the state.

    ``payload_bytes``: size of one merged round. ``needs_way``: the learner can find the base of its
    parameters only among the versions on the way.
    """
    if before is None or isinstance(effect, Rebase):
        return False
    missed = effect.version - before.version
    state_bytes = before.theta.nbytes + before.momentum.nbytes
    return needs_way or missed * payload_bytes <= state_bytes


def is_newer(
    mine: Standing | None,
    theirs: Standing,
    *,
    end: RunsEnd | None,
    effect: CatchUp | None = None,
) -> bool:
    """True if a fetched state replaces the own one: it continues its chain or has more tokens.

    ``end``: of the run, once this peer settles with others which state it ends on.
    ``effect``: what it was fetched for. A peer that gives way takes any other state.
    """
    if leap(None if mine is None else mine.head(), theirs.head()) is not None:
        return False
    if mine is None:
        return True
    if theirs.lineage == mine.lineage:
        return False
    if isinstance(effect, Rebase) and effect.gives_way:
        return True
    if theirs.chain.find(mine.version, mine.lineage) is not None:
        return True
    if end is not None:
        if end.gives_way(mine.head(), theirs.head()):
            return True
        if end.gives_way(theirs.head(), mine.head()):
            return False
    # Of two that are not final the round machine lets the lighter side rebase until the end.
    return theirs.merged.tokens > mine.merged.tokens


def is_outvoted(votes: int, *, by: int) -> bool:
    """True if bits of a lineage that so many peers hold are wrong, as others hold different ones.

    Only peers that count vote. Of two that contradict each other the honest one may be either.
    """
    return by > max(1, votes)


def unfit(
    state: FragmentState,
    before: FragmentState | None,
    *,
    usual: float | None,
    norm_ratio_max: float,
) -> str | None:
    """The reason not to take another peer's numbers; ``None``: there is none.

    ``usual``: how far a merge usually moves the fragment (``averaging.rules.usual_norms``). Each
    round that was missed may have moved it as far as an upload may be long.
    """
    if not (np.isfinite(state.theta).all() and np.isfinite(state.momentum).all()):
        return f"version {state.version} has values that are not finite (NaN or infinity)"
    if before is None or usual is None:
        return None
    with np.errstate(over="ignore"):
        moved = norm(state.theta - before.theta)
    missed = max(1, state.version - before.version)
    most = norm_ratio_max * max(usual * missed, norm(before.theta))
    if moved > most:
        return f"version {state.version} is {moved:.3g} from mine; at most {most:.3g} is plausible"
    return None


@dataclass(frozen=True, slots=True, eq=False)
class Fork:
    """A fork whose other side was fetched."""

    shared: Link
    """The last version that both sides share."""
    before: FragmentState
    after: FragmentState
    rounds: Sequence[ReplayEntry]
    """Those that led from the shared version to ``before``."""
    life: Life
    theta: Float32s | None = None
    """Theta of the shared version, if it was folded and is kept."""

    def parting(self, sizes: Sequence[int], scratch: Scratch) -> Parting | None:
        """The facts that a learner needs to change sides; ``None`` if rounding has spoilt theta.

        ``sizes``: the unit sizes. It reads all the rounds, which takes a while.
        """
        theta = self.theta
        if theta is None:
            theta = rewound(self.before, self.rounds, sizes, scratch)
        if theta is None:
            return None
        return Parting(
            version=self.shared.version,
            theta=theta,
            merged_mark=self.life.mark_in(self.after.merged),
            given_up_mark=self.life.mark_in(self.before.merged),
        )


def fork_of(
    effect: CatchUp,
    before: FragmentState | None,
    after: FragmentState,
    life: Life,
    replay: ReplayLog | None,
    *,
    stale_max: int,
) -> Fork | None:
    """The fork, if the own work since then can be offered again.

    It cannot when others go on with the side that is given up, when the new side contains some of
    it already, when the shared version is too old, or when a round since then is not kept here.
    """
    if before is None or replay is None:
        return None
    if not isinstance(effect, Rebase) or effect.others_follow:
        return None
    if life.newly_contained(after.merged, before.merged) is not None:
        return None
    shared = shared_version(before.chain, after.chain, versions_max=stale_max)
    if shared is None:
        return None
    if (theta := replay.theta_at(shared.version, shared.lineage)) is not None:
        return Fork(shared, before, after, (), life, theta)
    rounds = replay.since(shared.version, shared.lineage)
    return None if rounds is None else Fork(shared, before, after, rounds, life)


@dataclass(frozen=True, slots=True)
class FateOfWork:
    """The fate of this peer's work when it took a state over."""

    parting: Parting | None
    """The work since then is pending again; ``None``: it is not."""
    regained_tokens: int
    written_off_tokens: int
    """Merged tokens that are lost: they are not in the state that was taken."""

    @property
    def since(self) -> int | None:
        """The version at which the pending work began, if not at the new one."""
        return None if self.parting is None else self.parting.version


def hand_over(
    learner: Learner,
    state: FragmentState,
    before: FragmentState | None,
    life: Life,
    *,
    parting: Parting | None = None,
    presumed: int | None = None,
    earlier: int = 0,
) -> FateOfWork:
    """Give the learner a state that others made.

    ``presumed``: own work up to this step counts as merged elsewhere
    (``averaging.round.sealing.doubt.Doubting.presumed``). ``earlier``: tokens of earlier
    incarnations in the state before (``Life.earlier_tokens``). Lost work is counted for this
    incarnation only: the new side may have more work of its former ones, which does not make up for
    it.
    """
    regained = None if parting is None else learner.rebase(state, parting)
    if regained is None:
        parting = None
        contained = life.newly_contained(state.merged, None if before is None else before.merged)
        if presumed is not None and presumed > (contained or 0):
            contained = presumed
        learner.adopt(state, contained=contained)
    lost = 0
    if before is not None:
        # On the lighter side of a fork, this peer's work was merged into what is given up now.
        there = _tokens(state, life, life.earlier_tokens(state.merged, earlier))
        lost = _tokens(before, life, earlier) - there - (regained or 0)
    return FateOfWork(parting, regained or 0, max(0, lost))


def _tokens(state: FragmentState, life: Life, earlier: int) -> int:
    """Tokens of this incarnation in a state with so many of its earlier ones."""
    mark = state.merged.get(life.peer)
    return 0 if mark is None else max(0, mark.tokens - earlier)
