"""States that were fetched from other peers: which are taken, and what becomes of the own work.

The round machine asks for a state (``CatchUp``, ``Rebase``); the owner that carries that out
obtains it from other peers and then asks here.

1. ``prefers_replay``: whether replaying the missed rounds is cheaper than a whole state.
2. ``is_newer``: whether the state that arrived is worth taking at all; ``unfit``: whether its
   numbers may be taken; ``is_outvoted``: whether a source showed other bits than it should have.
3. ``fork_of``: where the two sides of a fork parted, if the work since then can be offered again.
4. ``Life``: what becomes of the own work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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

    def newly_contained(
        self, after: MergedMap, before: MergedMap | None, *, presumed: int | None = None
    ) -> int | None:
        """The own step up to which ``after`` contains work that ``before`` did not.

        Usually the mark of the outstanding snapshot. It can be the mark of one that was taken
        back: a majority may forswear a round that somebody has finished after all, and then
        follow it. ``presumed``: own work up to this step counts as merged elsewhere
        (``averaging.round.sealing.doubt.Doubting.presumed``).
        """
        step, known = self.mark_in(after), 0 if before is None else self.mark_in(before)
        return max(step if step > known else 0, presumed or 0) or None

    def lost_tokens(self, before: MergedMap, after: MergedMap, *, earlier: int) -> int:
        """Tokens of this incarnation in ``before`` that ``after`` lacks; negative: it has more.

        ``earlier``: tokens of earlier incarnations in ``before`` (``earlier_tokens``). The new side
        may have more work of these, which does not make up for lost work of this one.
        """
        there = self._tokens(after, self.earlier_tokens(after, earlier))
        return self._tokens(before, earlier) - there

    def _tokens(self, merged: MergedMap, earlier: int) -> int:
        mark = merged.get(self.peer)
        return 0 if mark is None else max(0, mark.tokens - earlier)

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
    return needs_way or missed * payload_bytes <= before.pieces.size_bytes


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
