"""Promises that a swarm under test must keep, and the verdict on each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from tests.chaos.judging.evidence import Evidence


class Promise(StrEnum):
    """A promise of the project to its users."""

    IDENTICAL = "identical"
    """Equal lineages have equal bits, a round has one outcome, no peer ends on a side branch."""
    ONCE = "once"
    """No token is merged twice, and no token that was never processed."""
    BOUNDED = "bounded"
    """Rounds and departures end within their deadlines."""
    GOES_ON = "goes_on"
    """Unaffected peers keep merging, and no peer ends by itself."""
    SPEED = "speed"
    """Unaffected trainers keep their steps per second."""
    LEDGER = "ledger"
    """processed = merged + pending + discarded, according to three independent counts."""
    RETURNS = "returns"
    """A peer that returns contributes within two cycles."""
    RESIZES = "resizes"
    """Merges do not pause and the loss has no step while the swarm grows and shrinks."""
    LOSS = "loss"
    """The loss has no spike when a peer joins, and ends as low as without faults."""
    HYGIENE = "hygiene"
    """Uploads that are not finite or outlying are never merged; no other upload is refused."""
    LIARS = "liars"
    """Members that can be proved to lie are soon banned by all, and no honest peer ever is."""
    CLEAN = "clean"
    """No process, file or shared memory is left behind."""
    FLAT = "flat"
    """Memory and descriptors do not grow with time."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judgement on one promise. ``kept`` is ``None`` where the evidence cannot tell."""

    promise: Promise
    kept: bool | None
    reason: str

    @property
    def word(self) -> str:
        return {True: "kept", False: "BROKEN", None: "cannot tell"}[self.kept]


OTHERS_SHARE_MAX = 0.2
"""Share of the machine's processors. When other programs use more, they can explain slow steps,
and paced trainers may make more steps while a round waits for a processor."""


def verdict_of(
    promise: Promise, faults: Sequence[str], kept: str, *, on: Evidence | None = None
) -> Verdict:
    """Kept, for the reason ``kept``, unless there are faults; the first three are named.

    ``on``: evidence of a machine whose other programs, if they used much of it, explain the faults.
    """
    if not faults:
        return Verdict(promise, True, kept)
    if on is not None and on.others_share > OTHERS_SHARE_MAX:
        return Verdict(promise, None, f"{'; '.join(faults)}; {others_text(on)}")
    more = f" (and {len(faults) - 3} more)" if len(faults) > 3 else ""
    return Verdict(promise, False, "; ".join(faults[:3]) + more)


def others_text(evidence: Evidence) -> str:
    """The reason of a verdict that other programs on the machine make impossible."""
    return f"other programs used {evidence.others_share:.0%} of this machine's processors"
