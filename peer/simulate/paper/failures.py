"""Simulates one training job on chips that fail and come back, and measures its computing time.

The simulation is event-driven and exact in time: every failure and every return of a slice of chips
is an event. It has no models and no networks; a pause is a time in which the job's chips wait.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

YEAR_S = 365.25 * 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnDelay:
    """Exponentiated Weibull distribution of the time that a failed slice is away."""

    scale_s: float
    shape: float
    power: float
    """1: ordinary Weibull distribution; above 1 very short absences become rare."""

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.float64]:
        uniform = rng.random(count)
        return self.scale_s * (-np.log1p(-(uniform ** (1.0 / self.power)))) ** (1.0 / self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Chips that train in step, and the pauses that changes among them cause."""

    slices: int
    failures_per_slice_s: float
    away: ReturnDelay
    stop_s: float
    """Pause of all chips after a failure. A failure during a pause does not extend it: the restart
    in progress leaves the newly failed slice out as well."""

    return_s: float
    """Pause of all chips to readmit slices. Those that return during a pause join at its end."""

    return_every_s: float
    """Shortest time between two readmissions."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Outcome of one job."""

    horizon_s: float
    goodput: float
    """Share of the chip time spent computing; the time of absent chips counts as lost."""

    idle: NDArray[np.float64]
    """Intervals (from, to) in which the job did not train, in order, not overlapping."""

    failures: int


def run_job(job: Job, *, horizon_s: float, rng: np.random.Generator) -> Timeline:
    """Simulate one job on a cluster in its steady state."""
    returning = _already_away(job, rng)
    alive = job.slices - len(returning)
    waiting = 0  # slices that are back and wait to be readmitted
    pause_until = 0.0
    next_entry_at = 0.0
    pauses: list[tuple[float, float]] = []
    now = capacity = 0.0
    failures = 0
    draws = _Draws(job, rng)

    next_failure = draws.until_failure(alive)
    while now < horizon_s:
        entry_at = max(now, pause_until, next_entry_at) if waiting else np.inf
        back_at = returning[0] if returning else np.inf
        at = min(now + next_failure, entry_at, back_at, horizon_s)
        stepping_from = min(max(now, pause_until), at)
        capacity += alive * (at - stepping_from)
        elapsed, now = at - now, at
        if now >= horizon_s:
            break
        if at == back_at:
            heapq.heappop(returning)
            waiting += 1
            next_failure -= elapsed
        elif at == entry_at:
            # Slices that came back during a pause start with the others at its end, without cost.
            joined_in_a_pause = at == pause_until
            alive += waiting
            waiting = 0
            if not joined_in_a_pause:
                pauses.append((at, at + job.return_s))
                pause_until = at + job.return_s
                next_entry_at = at + job.return_every_s
            next_failure = draws.until_failure(alive)
        else:
            failures += 1
            alive -= 1
            heapq.heappush(returning, at + draws.away())
            if at >= pause_until:
                pauses.append((at, at + job.stop_s))
                pause_until = at + job.stop_s
            next_failure = draws.until_failure(alive)

    idle = np.minimum(np.array(pauses, dtype=np.float64).reshape(-1, 2), horizon_s)
    return Timeline(horizon_s, capacity / (job.slices * horizon_s), idle, failures)


def share_with_nobody_stepping(timelines: list[Timeline]) -> float:
    """Share of the time in which all of these jobs paused at once."""
    starts = np.concatenate([t.idle[:, 0] for t in timelines])
    ends = np.concatenate([t.idle[:, 1] for t in timelines])
    times = np.concatenate([starts, ends])
    steps = np.concatenate([np.ones(len(starts)), -np.ones(len(ends))])
    order = np.argsort(times, kind="stable")
    idle_jobs = np.cumsum(steps[order])[:-1]
    lengths = np.diff(times[order])
    return float(lengths[idle_jobs >= len(timelines)].sum()) / timelines[0].horizon_s


def _already_away(job: Job, rng: np.random.Generator) -> list[float]:
    """Return times of the slices that are away at the start, distributed as in the steady state."""
    sample = job.away.draw(rng, 4096)
    expected = min(float(job.slices), job.slices * job.failures_per_slice_s * float(sample.mean()))
    count = min(int(rng.poisson(expected)), job.slices)
    # At a random moment, absences occur with a probability proportional to their length, and part
    # of them is over.
    lengths = rng.choice(sample, size=count, p=sample / sample.sum())
    remaining = [float(r) for r in lengths * rng.random(count)]
    heapq.heapify(remaining)
    return remaining


class _Draws:
    """Draws random numbers in blocks: one by one would take longer than the simulation."""

    def __init__(self, job: Job, rng: np.random.Generator) -> None:
        self._job, self._rng = job, rng
        self._unit: list[float] = []
        self._away: list[float] = []

    def until_failure(self, alive: int) -> float:
        if alive == 0:
            return float("inf")
        if not self._unit:
            self._unit = self._rng.exponential(1.0, 1024).tolist()
        return self._unit.pop() / (self._job.failures_per_slice_s * alive)

    def away(self) -> float:
        if not self._away:
            self._away = self._job.away.draw(self._rng, 1024).tolist()
        return self._away.pop()
