"""Judges a swarm that grows and shrinks by schedule: pauses of merges, and steps in the loss."""

from __future__ import annotations

from itertools import pairwise

from peer.lab.chaos.judging.evidence import Evidence
from peer.lab.chaos.judging.learning import SPIKE_MAX, largest_rise
from peer.lab.chaos.judging.progress import longest_gap
from peer.lab.chaos.judging.verdict import (
    Promise,
    Verdict,
    verdict_of,
)

MEASUREMENTS_MIN = 4


def judge_resizes(evidence: Evidence) -> Verdict:
    """Judge the longest pause of a fragment's merges, and the largest rise of the held-out loss.

    Merges of a fragment come once in a cycle; a pause is what is longer than that, and a cycle of
    it is allowed. Where learners are killed, the round that they were in may also last until its
    deadline before the others are out of it.
    """
    if not evidence.sizes:
        return Verdict(Promise.RESIZES, None, "the number of learners did not change by schedule")
    sizes = [size for _, size in evidence.sizes]
    cycle_s = evidence.cycle_steps * evidence.pace_s
    fragments = sorted({report.fragment for _, report in evidence.finished_rounds()})
    gaps = [(*longest_gap(evidence, fragment), fragment) for fragment in fragments]
    wrong = [
        f"fragment {fragment} was not merged for {gap_s:.1f} s from {since_s:.0f} s on"
        for gap_s, since_s, fragment in gaps
        if gap_s > 2 * cycle_s + _until_out_of_round_s(evidence, since_s, since_s + gap_s)
    ]
    rise = largest_rise(evidence.held_out)
    if rise > SPIKE_MAX:
        wrong.append(f"the held-out loss rose by {rise:.3f} nats")
    longest_s, any_s = max((gap[0] for gap in gaps), default=0.0), longest_gap(evidence)[0]
    text = (
        f"{min(sizes)} to {max(sizes)} learners, {len(evidence.peers)} in all: never more than "
        f"{longest_s / cycle_s:.2f} cycles between two merges of a fragment, {any_s / cycle_s:.2f} "
        "of any"
    )
    if len(evidence.held_out) >= MEASUREMENTS_MIN:
        text = f"{text}; largest rise of the held-out loss {rise:.3f} nats"
    return verdict_of(Promise.RESIZES, wrong, text, on=evidence)


def _until_out_of_round_s(evidence: Evidence, begin_s: float, end_s: float) -> float:
    """Time that a kill between two moments may cost more."""
    killed = any(
        life.killed and begin_s <= life.ended_s <= end_s
        for peer in evidence.honest
        for life in peer.lives
    )
    fewer = any(
        begin_s <= at_s <= end_s and after < before
        for (_, before), (at_s, after) in pairwise(evidence.sizes)
    )
    return evidence.round_deadline_s if killed and fewer else 0.0
