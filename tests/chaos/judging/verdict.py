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
    """No token is merged twice or without having been processed; nothing else is ever merged."""
    LEDGER = "ledger"
    """processed = merged + pending + discarded, according to three independent counts."""
    GOES_ON = "goes_on"
    """Merges do not pause, rounds and departures end in time, no peer ends or is banned for
    nothing."""
    RETURNS = "returns"
    """A peer that returns contributes within two cycles."""
    CLEAN = "clean"
    """No process, file or shared memory is left behind."""
    FLAT = "flat"
    """Memory and descriptors do not grow with time, and memory not without end in a flood."""


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
"""Share of the machine's processors. When other programs use more, paced trainers may make more
steps while a round waits for a processor."""


def verdict_of(
    promise: Promise, faults: Sequence[str], kept: str, *, on: Evidence | None = None
) -> Verdict:
    """Kept, for the reason ``kept``, unless there are faults; the first three are named.

    ``on``: evidence of a machine whose other programs, if they used much of it, explain the faults.
    """
    if not faults:
        return Verdict(promise, True, kept)
    if on is not None and on.others_share > OTHERS_SHARE_MAX:
        busy = f"other programs used {on.others_share:.0%} of this machine's processors"
        return Verdict(promise, None, f"{'; '.join(faults)}; {busy}")
    more = f" (and {len(faults) - 3} more)" if len(faults) > 3 else ""
    return Verdict(promise, False, "; ".join(faults[:3]) + more)
