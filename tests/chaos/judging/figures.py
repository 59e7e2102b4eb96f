"""Figures of a swarm beside the verdicts: loss, step times, pauses, and versions beside strangers.

None of them is judged: each depends on the machine, on other programs, or on a model of a minute.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from tests.chaos.judging.evidence import Evidence, HeldOutPoint
from tests.chaos.judging.schedule import ABSENT, FaultKind

COMPARED_SHARE = 0.125
"""Last part of the tokens over which losses are compared: one measurement of a tiny model varies by
1.1%, so means count."""

SETTLED_STEPS = 31
"""The first steps of a life are slow."""

STEPS_PER_SPAN_S = 2.0


def figures(evidence: Evidence, control: Evidence | None) -> dict[str, Any]:
    """All figures of a scenario; those of the control begin with ``control_``."""
    found: dict[str, Any] = {"step_s": _quantiles(step_times_s(evidence))}
    if control is not None:
        found["control_step_s"] = _quantiles(step_times_s(control))
    if control is not None and evidence.held_out and control.held_out:
        found["loss"], found["control_loss"] = losses(evidence, control)
    found["largest_rise"] = largest_rise(evidence.held_out)
    found["in_the_run"] = in_the_run(evidence)
    beside, without = versions_per_minute(evidence)
    return {**found, "versions_per_minute": without, "beside_strangers": beside}


def losses(evidence: Evidence, control: Evidence) -> tuple[float, float]:
    """Mean held-out losses of a swarm and its control over the last part of the tokens of both.

    Tokens are those of honest learners where liars claim others.
    """
    there, here = (_curve(each, of_honest=bool(evidence.acts)) for each in (control, evidence))
    end = min(max(there)[0], max(here)[0])

    def mean(points: Sequence[tuple[float, float]]) -> float:
        inside = [loss for tokens, loss in points if (1 - COMPARED_SHARE) * end <= tokens <= end]
        nearest = sorted(points, key=lambda point: abs(point[0] - end))
        return statistics.fmean(inside if len(inside) >= 3 else [loss for _, loss in nearest[:3]])

    return mean(here), mean(there)


def _curve(evidence: Evidence, *, of_honest: bool) -> list[tuple[float, float]]:
    return [
        (point.honest_tokens if of_honest else float(point.global_tokens), point.loss)
        for point in evidence.held_out
    ]


def largest_rise(points: Iterable[HeldOutPoint]) -> float:
    """The largest rise of the loss above the lowest of the three before."""
    values = [point.loss for point in points]
    rises = [values[i] - min(values[i - 3 : i]) for i in range(3, len(values))]
    return max([0.0, *rises])


def in_the_run(evidence: Evidence) -> float:
    """Share of the time in which learners were in the run: the goodput that failures leave if
    nobody waits for anybody."""
    there = sum(
        max(0.0, min(life.ended_s, evidence.ended_s) - max(life.ready_s, evidence.ready_s))
        for peer in evidence.honest
        for life in peer.lives
        if life.ready_s is not None
    )
    return there / max(1e-9, len(evidence.honest) * (evidence.ended_s - evidence.ready_s))


def versions_per_minute(evidence: Evidence) -> tuple[float | None, float]:
    """Versions per minute beside crowds of strangers (``None`` if there were none), and without."""
    crowds = [(f.at_s, f.until_s) for f in evidence.faults if f.kind is FaultKind.CROWD]
    edges = [evidence.ready_s, *(edge for crowd in crowds for edge in crowd), evidence.ended_s]
    beside, without = (_per_minute(evidence, spans) for spans in (crowds, [*pairwise(edges)][::2]))
    return beside, without or 0.0


def _per_minute(evidence: Evidence, spans: Sequence[tuple[float, float]]) -> float | None:
    seconds = sum(end - begin for begin, end in spans)
    made = sum(begin <= at_s < end for at_s in evidence.round_times_s() for begin, end in spans)
    return 60.0 * made / seconds if seconds else None


def step_times_s(evidence: Evidence) -> list[float]:
    """Mean step times over spans of about two seconds, of learners without a fault of their own."""
    times: list[float] = []
    for peer in evidence.honest:
        # Losing the agent or the disk must not slow a trainer down, so these faults do not count.
        own = [f for f in evidence.faults if f.victim == peer.name and f.kind in ABSENT]
        for life in peer.lives:
            begin = None
            for report in life.reports:
                if report.steps <= SETTLED_STEPS or report.at_s < evidence.ready_s:
                    continue
                if begin is None:
                    begin = report
                    continue
                if report.trained_s - begin.trained_s < STEPS_PER_SPAN_S:
                    continue
                affected = any(
                    fault.at_s - 1.0 < report.at_s and begin.at_s < fault.until_s + 2.0
                    for fault in own
                )
                steps = report.steps - begin.steps
                if steps and not affected and report.at_s <= evidence.ended_s:
                    times.append((report.trained_s - begin.trained_s) / steps)
                begin = report
    return times


def _quantiles(times: Sequence[float]) -> Mapping[str, float] | None:
    if not times:
        return None
    quantiles = {"median": 0.5, "p90": 0.9, "p99": 0.99}
    return {name: round(float(np.quantile(times, q)), 4) for name, q in quantiles.items()}
