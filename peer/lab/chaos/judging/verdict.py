"""Promises that a swarm under test must keep, and the verdict on each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from peer.lab.chaos.judging.evidence import Evidence


class Promise(StrEnum):
    """What is judged; the numbers are those of DESIGN 6."""

    IDENTICAL = "identical"
    """2: equal lineages have equal bits, a round has one outcome, nobody stays apart."""
    ONCE = "once"
    """2: no token is merged twice, and none that was never processed."""
    BOUNDED = "bounded"
    """3: rounds and goodbyes end within their deadlines."""
    GOES_ON = "goes_on"
    """4: the others merge on, and nobody ends by itself."""
    SPEED = "speed"
    """4: the steps per second of those who are not hurt do not drop."""
    LEDGER = "ledger"
    """5: processed = merged + pending + discarded, as three independent books have it."""
    RETURNS = "returns"
    """6: who returns contributes within two cycles."""
    LOSS = "loss"
    """6: no spike when somebody comes, and no worse a loss than without faults."""
    HYGIENE = "hygiene"
    """DESIGN 5: what is not finite or outlying is never merged, and nothing else is refused."""
    CLEAN = "clean"
    """No process, file or shared memory is left."""
    FLAT = "flat"
    """Memory and descriptors do not grow with time."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One promise: kept, broken, or not to be told; and the words for it."""

    promise: Promise
    kept: bool | None
    reason: str


OTHERS_SHARE_MAX = 0.2
"""Of the processors. Beyond it steps that take longer may be others' doing, and more of them may
pass, being paced, while a round waits for a processor."""


def verdict_of(promise: Promise, faults: Sequence[str], kept: str) -> Verdict:
    if not faults:
        return Verdict(promise, True, kept)
    more = f" (and {len(faults) - 3} more)" if len(faults) > 3 else ""
    return Verdict(promise, False, "; ".join(faults[:3]) + more)


def others_text(evidence: Evidence) -> str:
    return f"processes that are none of ours had {evidence.others_share:.0%} of this machine"
