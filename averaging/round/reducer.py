"""What a reducer knows of the slices it reduces in one round: who is complete, what is merged."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

NORM_MIN = 1e-20
"""Anything is a multiple of nothing: a length below this says nothing about what is usual."""


@dataclass(frozen=True, slots=True)
class Length:
    """How long an upload is, and what its reducer knew of that slice before."""

    norm: float
    usual: float | None = None
    """How far the last merges moved the slice; ``None``: not known yet.

    See ``averaging.rules.usual_norms``.
    """
    harmless: float = 0.0
    """Up to this nobody is judged by the others alone: the length of theta, until it is known
    what is usual. At the start of a run, under a warm-up from zero say, honest peers differ by any
    factor, and none moves theta by more than its own length."""


def outlying(lengths: Mapping[int, Length], *, norm_ratio_max: float) -> dict[int, str]:
    """Uploads of one slice that are absurdly longer than usual, and by how much.

    Usual is the median of the others, or what merges of this slice moved lately, whichever is
    more: among newcomers who have done little, a peer at work is not absurd. Whoever judges has one
    upload among others. Of two that nothing is known of, the longer one: a round without an
    honest contribution costs a round, one with an absurd one the model.
    """
    found = {}
    for sender, length in sorted(lengths.items()):
        others = [other.norm for who, other in lengths.items() if who != sender]
        usual = max(median(others) if others else 0.0, length.usual or 0.0)
        allowed = max(norm_ratio_max * usual, length.harmless)
        if usual > NORM_MIN and length.norm > allowed:
            found[sender] = (
                f"its norm is {length.norm / usual:.3g} times what is usual; "
                f"at most {norm_ratio_max:g}"
            )
    return found


class SliceState:
    """One slice at its reducer."""

    __slots__ = ("bundles", "complete", "lengths", "merged", "merging", "refused")

    def __init__(self) -> None:
        self.complete: set[int] = set()
        """Roster indices whose upload is here in full, finite and within the norm bound."""
        self.bundles: dict[int, tuple[int, ...]] = {}
        """By delegate, the riders whose contributions came in its upload: all or none count."""
        self.refused: dict[int, str] = {}
        """Roster indices whose upload will not be taken, and why."""
        self.lengths: dict[int, Length] = {}
        """Of complete uploads that move a displacement; mine is one of them."""
        self.merging = False
        self.merged: bytes | None = None
        """Digest of the merged slice, once it is here."""

    def can_be_parted_by(self, contributors: set[int]) -> bool:
        """Whether a seal takes all of each bundle, or nothing of it. No honest one does else."""
        together = ({delegate, *riders} for delegate, riders in self.bundles.items())
        return all(each <= contributors or each.isdisjoint(contributors) for each in together)


class Reducer:
    """The slices that one peer reduces in one round. Knows nothing of seals and ballots."""

    __slots__ = ("_norm_ratio_max", "slices")

    def __init__(self, slices: Iterable[int], *, norm_ratio_max: float = math.inf) -> None:
        """``norm_ratio_max``: how many times longer than usual an upload may be."""
        self._norm_ratio_max = norm_ratio_max
        self.slices: dict[int, SliceState] = {index: SliceState() for index in slices}

    def take(self, index: int) -> bool:
        """Reduce this slice too. ``False`` when I do so already."""
        if index in self.slices:
            return False
        self.slices[index] = SliceState()
        return True

    def arrived(
        self,
        index: int,
        sender: int,
        problem: str | None,
        length: Length | None = None,
        *,
        riders: tuple[int, ...] = (),
    ) -> bool:
        """An upload has ended, well or not. ``False`` when it changes nothing."""
        state = self.slices.get(index)
        if state is None or sender in state.complete:
            return False
        if problem is None:
            state.complete.update((sender, *riders))
            if riders:
                state.bundles[sender] = riders
            for member in (sender, *riders):
                state.refused.pop(member, None)
            if length is not None:
                state.lengths[sender] = length
            return True
        changed = sender not in state.refused
        state.refused.update(dict.fromkeys((sender, *riders), problem[:300]))
        return changed

    def missed(self, index: int, members: Iterable[int]) -> None:
        """Their delegate's bundle is here, without them."""
        state = self.slices.get(index)
        if state is not None:
            for member in members:
                state.refused.setdefault(member, "it was too late for its site's bundle")

    def outlying(self, index: int) -> dict[int, str]:
        """Complete uploads that are absurdly longer than usual, and by how much."""
        found = outlying(self.slices[index].lengths, norm_ratio_max=self._norm_ratio_max)
        for delegate, riders in self.slices[index].bundles.items():
            if delegate in found:
                found.update(dict.fromkeys(riders, f"it came with another's: {found[delegate]}"))
        return found

    def can_merge(self, index: int, contributors: Iterable[int]) -> bool:
        state = self.slices.get(index)
        return (
            state is not None
            and not state.merging
            and state.merged is None
            and state.complete.issuperset(contributors)
            and state.can_be_parted_by(set(contributors))
        )
