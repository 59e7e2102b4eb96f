"""The upload and merged slices that a member encodes in a round, and what encoding has lost.

**Error feedback for what a peer encodes for others**: merged slices, and the bundle of its site
(``Rests``). Nobody else knows what these were before they were encoded, so the peer that merged
them passes the loss on: it becomes part of the displacement that this peer offers next, divided by
its weight in the merge. No message and no other peer's arithmetic depends on it.

Where a slice is given to another reducer although the first one is merging it, both pass the loss
on: 3 of 5231 slices in 150 storms. If only the reducer that is named last did, no loss would be
passed on twice. But that reducer often receives the slice merged, so the losses of 7 slices more
would be passed on by nobody, and each is an error of the same size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from averaging.history.parent_maps import ParentMap
from averaging.history.state import FragmentState
from averaging.messages import Commit
from averaging.numbers.arithmetic import Moved
from averaging.numbers.arrays import SUM_TILE, Float32s, arithmetic, uninitialised_floats
from averaging.numbers.chunks import Chunk, Cutting
from averaging.round.interface.effects import Apply, Enter
from averaging.rules.policy import RoundPolicy
from averaging.rules.weights import uploaded_share, weights_of


@dataclass(frozen=True, slots=True)
class Contribution(Moved):
    """Arrays to be encoded, and what travels with them."""

    own_map: ParentMap | None = None
    """The own merged map, where states travel."""
    keeps_rests: bool = False
    """The loss of encoding the slices that this member merges is part of what it offers next
    (``averaging.round.contributing``)."""


def contribution(
    enter: Enter,
    state: FragmentState | None,
    offered: tuple[Float32s, Float32s] | None,
    policy: RoundPolicy,
) -> Contribution | None:
    """Return what a member gives to a round; ``None``: nothing.

    ``offered``: base and values of the learner's snapshot.
    """
    commit = enter.commit
    if offered is None:
        return None
    base, values = offered
    assert enter.entry is not None
    up, down = (names.partition("/")[0] in policy.feedback for names in commit.codecs)
    given = Contribution(
        base,
        values,
        feedback=up,
        keeps_rests=policy.feeds_back_merged and (up or down),
        share=uploaded_share(policy.late_work, staleness=commit.members[enter.entry].staleness),
    )
    if not commit.melds:
        return given
    assert state is not None
    own_map = ParentMap(state.merged, state.history)
    return replace(given, own_map=own_map, carried=state.vectors)


@dataclass(frozen=True, slots=True)
class Rest:
    """The loss of encoding one slice."""

    place: slice
    """The slice's values in the fragment."""
    values: Float32s

    def of(self, chunk: Chunk) -> Float32s:
        """Return the part of a chunk of the slice."""
        start = self.place.start
        return self.values[chunk.values.start - start : chunk.values.stop - start]

    def leave(self, offered: Float32s, *, factor: float) -> None:
        """Make it part of what the learner offers next.

        ``offered``: the values of the fragment relative to which the learner adopts the version.
        """
        part, rounded = offered[self.place], np.float32(factor)
        with arithmetic():
            for start in range(0, part.size, SUM_TILE):  # of each, both passes in the cache
                tile = slice(start, start + SUM_TILE)
                np.add(part[tile], self.values[tile] * rounded, out=part[tile])


class Rests:
    """The losses of encoding the slices that a member merged in one round."""

    def __init__(
        self,
        commit: Commit,
        entry: int | None,
        cutting: Cutting,
        *,
        floats: Callable[[int], Float32s] = uninitialised_floats,
    ) -> None:
        """``entry``: the member's own in the roster. ``floats(count)``: memory for values."""
        self._floats = floats
        self._commit = commit
        self._entry = entry
        self._cutting = cutting
        self._kept: list[tuple[Rest, float]] = []

    def room(self, index: int) -> Rest:
        """Return uninitialised memory for the rest of a slice."""
        piece = self._cutting.slices[index]
        return Rest(piece.values, self._floats(piece.size))

    def keep(self, rest: Rest, inside: Sequence[int]) -> None:
        """The slice has been merged of the work of these members, and this is its rest.

        A member of less weight than the mean may have more the next time, and would then bring too
        much, so it counts as one of the mean weight.
        """
        if self._entry in inside:
            weight = weights_of(self._commit, inside)[inside.index(self._entry)]
            self._kept.append((rest, 1 / max(weight, 1 / len(inside))))

    def leave(self, apply: Apply, offered: Float32s) -> None:
        """Leave the rests in the learner's parameters when it adopts the version.

        Only if its own work is in it: otherwise it does not adopt relative to what it ``offered``.
        """
        if apply.contained is not None and self._entry in apply.seal:
            for rest, factor in self._kept:
                rest.leave(offered, factor=factor)
        self._kept.clear()
