"""The state of a reducer in one round: which uploads are complete, which slices are merged."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

NORM_MIN = 1e-20
"""A usual norm below this is taken for zero: any upload would be a large multiple of it."""


@dataclass(frozen=True, slots=True)
class UploadNorm:
    """The norm of an upload, and what its reducer knew of that slice before."""

    value: float
    usual: float | None = None
    """The norm of the slice in the last merges; ``None``: not known yet.

    See ``averaging.rules.usual_norms``.
    """
    harmless: float = 0.0
    """An upload up to this norm is never refused: the norm of theta, until ``usual`` is known.

    At the start of a run, with a warm-up from zero for example, honest peers differ by any factor,
    and none moves theta by more than its own norm."""


def outlying(norms: Mapping[int, UploadNorm], *, norm_ratio_max: float) -> dict[int, str]:
    """Uploads of one slice whose norm is far above the usual one, each with the reason.

    The usual norm is the median of the other uploads or the norm in recent merges, whichever is
    larger: among newcomers that have done little, the upload of a peer at work is not outlying. Of
    two uploads without a history the larger one is outlying: a round without an honest contribution
    costs a round, one with an absurd contribution costs the model.
    """
    found = {}
    for sender, norm in sorted(norms.items()):
        others = [other.value for index, other in norms.items() if index != sender]
        usual = max(median(others) if others else 0.0, norm.usual or 0.0)
        allowed = max(norm_ratio_max * usual, norm.harmless)
        if usual > NORM_MIN and norm.value > allowed:
            found[sender] = (
                f"its norm is {norm.value / usual:.3g} times what is usual; "
                f"at most {norm_ratio_max:g}"
            )
    return found


MERGED_SLACK = 2.0
"""Largest norm of a merged slice over that of an upload: its reducer knows other norms."""


def norm_objection(
    merged: float, *, usual: float | None, own: float, theta: float, norm_ratio_max: float
) -> str | None:
    """The reason not to take a slice that another peer merged; ``None``: there is none.

    No mean of contributions has a larger norm than all of them, and a reducer leaves out what is
    far above the usual one. ``usual``, ``own``: norms of the slice in the last merges and in the
    own contribution; 0: there is none. ``theta``: norm of the slice, which a merge may move so far
    in any case. Until something is usual it is that of the whole fragment, and a multiple of it is
    allowed: honest peers differ by any factor then, and a slice of theta may be zero.
    """
    known = max(usual or 0.0, own)
    harmless = theta if usual is not None else norm_ratio_max * theta
    allowed = max(MERGED_SLACK * norm_ratio_max * known, harmless)
    if allowed <= NORM_MIN or merged <= allowed:
        return None
    return f"the merged slice has a norm of {merged:.3g}; at most {allowed:.3g} is plausible"


class SliceState:
    """One slice at its reducer."""

    __slots__ = ("bundles", "complete", "merged", "merging", "norms", "refused")

    def __init__(self) -> None:
        self.complete: set[int] = set()
        """Roster indices of uploads that are here in full, finite and within the norm bound."""
        self.bundles: dict[int, tuple[int, ...]] = {}
        """Riders in each delegate's upload: all of a bundle count or none."""
        self.refused: dict[int, str] = {}
        """Roster indices of uploads that will not be taken, with the reasons."""
        self.norms: dict[int, UploadNorm] = {}
        """Norms of complete uploads that move a displacement, the own one included."""
        self.merging = False
        self.merged: bytes | None = None
        """Digest of the merged slice, once it is here."""

    def has_whole_bundles(self, contributors: set[int]) -> bool:
        """True if these contributors take all of each bundle or nothing of it, as an honest seal
        does."""
        together = ({delegate, *riders} for delegate, riders in self.bundles.items())
        return all(each <= contributors or each.isdisjoint(contributors) for each in together)


class Reducer:
    """The slices that one peer reduces in one round. Knows nothing of seals and ballots."""

    __slots__ = ("_norm_ratio_max", "slices")

    def __init__(self, slices: Iterable[int], *, norm_ratio_max: float = math.inf) -> None:
        """``norm_ratio_max``: the largest norm of an upload, as a multiple of the usual one."""
        self._norm_ratio_max = norm_ratio_max
        self.slices: dict[int, SliceState] = {index: SliceState() for index in slices}

    def take(self, index: int) -> bool:
        """Reduce this slice too. ``False``: it is reduced here already."""
        if index in self.slices:
            return False
        self.slices[index] = SliceState()
        return True

    def arrived(
        self,
        index: int,
        sender: int,
        problem: str | None,
        norm: UploadNorm | None = None,
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
            if norm is not None:
                state.norms[sender] = norm
            return True
        changed = sender not in state.refused
        state.refused.update(dict.fromkeys((sender, *riders), problem[:300]))
        return changed

    def missed(self, index: int, members: Iterable[int]) -> None:
        """The bundle of these members' delegate is here without their uploads."""
        state = self.slices.get(index)
        if state is not None:
            for member in members:
                state.refused.setdefault(member, "it was too late for its site's bundle")

    def outlying(self, index: int) -> dict[int, str]:
        """Complete uploads whose norm is far above the usual one, each with the reason."""
        found = outlying(self.slices[index].norms, norm_ratio_max=self._norm_ratio_max)
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
            and state.has_whole_bundles(set(contributors))
        )
