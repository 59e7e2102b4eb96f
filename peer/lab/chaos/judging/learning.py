"""Judges the held-out loss against that of a swarm without faults."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

from peer.lab.chaos.judging.evidence import Evidence, HeldOutPoint
from peer.lab.chaos.judging.verdict import Promise, Verdict

LOSS_RATIO_MAX = 1.06

LOSS_RATIO_BESIDE_LIARS_MAX = 1.02

SPIKE_MAX = 0.25
"""Allowed rise in nats, beyond the largest one of the control."""


def judge_loss(evidence: Evidence, control: Evidence | None) -> Verdict:
    """Judge the final loss and its largest rise against the control's."""
    points = evidence.held_out
    if control is None or len(control.held_out) < 4 or len(points) < 4:
        return Verdict(Promise.LOSS, None, "no control to compare with, or too few measurements")
    loss, usual = losses(evidence, control)
    spike, usual_spike = largest_rise(points), largest_rise(control.held_out)
    disturbed = "liars" if evidence.acts else "faults"
    figures = (
        f"held-out loss {loss:.3f}, without {disturbed} {usual:.3f} after equally many "
        f"tokens{' of honest peers' if evidence.acts else ''}; "
        f"largest rise {spike:.3f}, without {disturbed} {usual_spike:.3f}"
    )
    ratio_max = LOSS_RATIO_BESIDE_LIARS_MAX if evidence.acts else LOSS_RATIO_MAX
    kept = loss <= ratio_max * usual and spike <= usual_spike + SPIKE_MAX
    return Verdict(Promise.LOSS, kept, figures)


def losses(evidence: Evidence, control: Evidence) -> tuple[float, float]:
    """The held-out loss at the end, and the control's after equally many tokens.

    Liars claim tokens: beside them those of the honest learners are compared. If the control has
    fewer at its end, both losses are those at as many tokens as it has.
    """
    work = _honest_tokens if evidence.acts else _global_tokens
    last = list(evidence.held_out)[-3:]
    at = statistics.fmean(map(work, last))
    loss = statistics.fmean(point.loss for point in last)
    at_most = max(map(work, control.held_out))
    if evidence.acts and at > at_most:
        at = at_most
        loss = _loss_at(evidence.held_out, at, work)
    return loss, _loss_at(control.held_out, at, work)


def _global_tokens(point: HeldOutPoint) -> float:
    return point.global_tokens


def _honest_tokens(point: HeldOutPoint) -> float:
    return point.honest_tokens


def _loss_at(
    points: Sequence[HeldOutPoint], tokens: float, work: Callable[[HeldOutPoint], float]
) -> float:
    """Loss near ``tokens``, smoothed over neighbours; the last one if the points end earlier."""
    ordered = sorted(points, key=work)
    nearest = min(range(len(ordered)), key=lambda i: abs(work(ordered[i]) - tokens))
    near = ordered[max(0, nearest - 1) : nearest + 2]
    return statistics.fmean(point.loss for point in near)


def largest_rise(points: Iterable[HeldOutPoint]) -> float:
    """The largest rise above the lowest of the three losses before."""
    values = [point.loss for point in points]
    rises = [values[i] - min(values[i - 3 : i]) for i in range(3, len(values))]
    return max([0.0, *rises])
