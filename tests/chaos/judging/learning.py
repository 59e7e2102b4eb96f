"""Judges the held-out loss against that of a swarm without faults."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from tests.chaos.judging.evidence import Evidence, HeldOutPoint
from tests.chaos.judging.verdict import Promise, Verdict

LOSS_RATIO_MAX = 1.06

LOSS_RATIO_BESIDE_LIARS_MAX = 1.02

COMPARED_SHARE = 0.125
"""Last part of the tokens over which losses beside liars are compared."""

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
    if evidence.acts:
        return _losses_beside_liars(evidence, control)
    last = list(evidence.held_out)[-3:]
    at = statistics.fmean(map(_global_tokens, last))
    loss = statistics.fmean(point.loss for point in last)
    return loss, _loss_at(control.held_out, at)


def _losses_beside_liars(evidence: Evidence, control: Evidence) -> tuple[float, float]:
    """Means over the last part of the tokens that both have.

    One measurement of a tiny model varies by 1.1%, so with three on each side the difference varies
    by 0.9%, half of what it is judged by (a run of ten minutes, 24 November 2026).
    """
    there, here = ([(p.honest_tokens, p.loss) for p in e.held_out] for e in (control, evidence))
    end = min(max(there)[0], max(here)[0])
    begin = (1.0 - COMPARED_SHARE) * end

    def mean(points: Sequence[tuple[float, float]]) -> float:
        inside = [loss for tokens, loss in points if begin <= tokens <= end]
        nearest = sorted(points, key=lambda point: abs(point[0] - end))
        return statistics.fmean(inside if len(inside) >= 3 else [loss for _, loss in nearest[:3]])

    return mean(here), mean(there)


def _global_tokens(point: HeldOutPoint) -> float:
    return point.global_tokens


def _loss_at(points: Sequence[HeldOutPoint], tokens: float) -> float:
    """Loss near ``tokens``, smoothed over neighbours; the last one if the points end earlier."""
    ordered = sorted(points, key=_global_tokens)
    nearest = min(range(len(ordered)), key=lambda i: abs(ordered[i].global_tokens - tokens))
    near = ordered[max(0, nearest - 1) : nearest + 2]
    return statistics.fmean(point.loss for point in near)


def largest_rise(points: Iterable[HeldOutPoint]) -> float:
    """The largest rise above the lowest of the three losses before."""
    values = [point.loss for point in points]
    rises = [values[i] - min(values[i - 3 : i]) for i in range(3, len(values))]
    return max([0.0, *rises])
