"""Judges a swarm that grows and shrinks by schedule: pauses of merges, and steps in the loss."""

from __future__ import annotations

from peer.lab.chaos.judging.evidence import Evidence
from peer.lab.chaos.judging.learning import SPIKE_MAX, largest_rise
from peer.lab.chaos.judging.progress import longest_gap
from peer.lab.chaos.judging.verdict import (
    OTHERS_SHARE_MAX,
    Promise,
    Verdict,
    others_text,
    verdict_of,
)

MEASUREMENTS_MIN = 4


def judge_resizes(evidence: Evidence) -> Verdict:
    """Judge the longest time between two merges, and the largest rise of the held-out loss.

    A cycle without a merge is allowed, and where many peers end at once the quorum's deadline on
    top: a roster that counts on dead peers closes by then.
    """
    if not evidence.sizes:
        return Verdict(Promise.RESIZES, None, "the number of learners did not change by schedule")
    sizes = [size for _, size in evidence.sizes]
    cycle_s = evidence.cycle_steps * evidence.pace_s
    gap_s, since_s = longest_gap(evidence)
    at_once = [
        at_s
        for (_, before), (at_s, after) in zip(evidence.sizes, evidence.sizes[1:], strict=False)
        if after < before - 1
    ]
    lost = any(since_s <= at_s <= since_s + gap_s for at_s in at_once)
    wrong = []
    if gap_s > cycle_s + (evidence.quorum_deadline_s if lost else 0.0):
        wrong.append(
            f"no merge for {gap_s:.1f} s from {since_s:.0f} s on; a cycle is {cycle_s:g} s"
        )
    rise = largest_rise(evidence.held_out)
    if rise > SPIKE_MAX:
        wrong.append(f"the held-out loss rose by {rise:.3f} nats")
    text = (
        f"{min(sizes)} to {max(sizes)} learners, {len(evidence.peers)} in all: never more than "
        f"{gap_s:.1f} s without a merge, {gap_s / cycle_s:.2f} cycles"
    )
    if len(evidence.held_out) >= MEASUREMENTS_MIN:
        text = f"{text}; largest rise of the held-out loss {rise:.3f} nats"
    if wrong and evidence.others_share > OTHERS_SHARE_MAX:
        return Verdict(Promise.RESIZES, None, f"{'; '.join(wrong)}; {others_text(evidence)}")
    return verdict_of(Promise.RESIZES, wrong, text)
