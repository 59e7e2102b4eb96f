"""Goodput measured with real processes: the work that is merged although learners keep failing.

A failure is a kill -9; after ``recovery_s`` the learner trains again. A learner fails after some
time of its *own training*: while it waits for others, as in a synchronous run, it does not fail.
Let r be the rate of failures of all learners together, and R the duration of a recovery:

    share of time in training     at best          because
    a synchronous run             1 / (1 + r R)      all learners stop for each failure
    M learners without waiting    1 / (1 + r R / M)  each learner stops for its own failures only

With r R = 2.7 these are 27.0%, and 74.8% for 8 learners. The control is the same swarm with
``tau = 0`` and a quorum of all learners, under the same failures.

The formulas depend on the rate alone, so failures are spaced evenly and each swarm is measured over
whole turns of training and failing: minutes then show what random times would show after hours.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import typer
from numpy.typing import NDArray
from typer import Option

from peer import signals
from peer.cli.application import Json, json_text, start_logging
from peer.cli.showing import course, seconds, trial_folder, usage_errors
from tests.chaos.collect import collect
from tests.chaos.composition import SYNCHRONOUS_S, SwarmSettings
from tests.chaos.judging.evidence import Evidence, FaultDone, PeerEvidence
from tests.chaos.judging.schedule import FaultKind
from tests.chaos.judging.tokens import goodput, judge_ledger, tokens
from tests.chaos.members import Learner
from tests.chaos.process_swarm import ProcessSwarm
from tests.command_line import LogFolder, run_program

TURN_EVERY_S = 0.1

END_WITHIN_S = 300.0
"""Additional time that a synchronous run may take; then it is measured unfinished."""

STEADY_WITHIN_S = 3 * SYNCHRONOUS_S
"""The first rounds of a synchronous swarm wait for the last one to start."""

START_S = 9.0
"""Assumed duration of a learner's start, until the first one has been measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputSettings:
    """Size of the experiment."""

    directory: Path
    learners: int = 8
    minutes: float = 10.0
    """Approximate length, rounded to whole turns."""
    recovery_s: float = 60.0
    """Time from a kill to the first step after it."""
    load: float = 2.7
    """r R: number of failures of all learners during one recovery."""
    pace_s: float = 0.4
    cycle_steps: int = 8
    synchronous: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.recovery_s < 20:
            raise ValueError(f"recovery_s is {self.recovery_s:g}; a start alone takes about 10 s")

    @property
    def mean_until_failure_s(self) -> float:
        """Own training time of one learner between two of its failures."""
        return self.learners * self.recovery_s / self.load

    @property
    def best(self) -> float:
        """The best possible share, by the formula."""
        parts = 1 if self.synchronous else self.learners
        return 1.0 / (1.0 + self.load / parts)

    @property
    def turn_s(self) -> float:
        """Length of a turn: one learner trains, fails and recovers; or, in a synchronous run, all
        train from one failure to the next."""
        if self.synchronous:
            return self.mean_until_failure_s / self.learners
        return self.mean_until_failure_s + self.recovery_s

    @property
    def lead_in_s(self) -> float:
        """Time until as many learners are recovering as on average; at first all of them train."""
        return 0.0 if self.synchronous else self.recovery_s

    @property
    def length_s(self) -> float:
        """Measured time in whole turns; in a synchronous run training time alone."""
        wanted_s = 60 * self.minutes * (self.best if self.synchronous else 1.0)
        return max(1, round(wanted_s / self.turn_s)) * self.turn_s


def times_until_failure_s(
    settings: GoodputSettings, count: int, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Own training times of each learner: until its first failure, and between the next ones.

    First failures are spread over one turn (M turns in a synchronous run), so that any whole number
    of turns after the lead-in contains the same failures.
    """
    learners = settings.learners
    spread_s = settings.turn_s * (learners if settings.synchronous else 1)
    first = spread_s * (rng.permutation(learners) + rng.random(learners)) / learners
    return np.column_stack([first, np.full((learners, count - 1), settings.mean_until_failure_s)])


@dataclass(slots=True)
class _Failing:
    """One learner that keeps failing."""

    learner: Learner
    until_s: list[float]
    """Own training time until each of its failures."""
    pace_s: float
    first_steps: int = 0
    """Steps of this life before the experiment began."""
    earlier_steps: int = 0
    """Steps of earlier lives since the experiment began."""
    killed_s: float | None = None
    """Time of a failure after which it has not trained yet."""

    @property
    def steps(self) -> int:
        """Steps since the experiment began."""
        now = self.learner.life.steps - self.first_steps if self.learner.up else 0
        return self.earlier_steps + now

    @property
    def fails_now(self) -> bool:
        learner = self.learner
        trained = learner.life.steps - self.first_steps
        return learner.up and trained * self.pace_s >= self.until_s[0]


class _Experiment:
    """The failures of one swarm."""

    def __init__(
        self, swarm: ProcessSwarm, settings: GoodputSettings, tell: Callable[[str], None]
    ) -> None:
        self.faults: list[FaultDone] = []
        self.recoveries_s: list[float] = []
        self._swarm = swarm
        self._settings = settings
        self._tell = tell
        self._start_s = START_S
        """Estimated duration of a learner's start."""
        count = 8 + int(4 * 60 * settings.minutes / settings.mean_until_failure_s)
        rng = np.random.default_rng(settings.seed)
        times_s = times_until_failure_s(settings, count, rng)
        self._failing = [
            _Failing(
                learner,
                times_s[learner.index].tolist(),
                settings.pace_s,
                first_steps=learner.life.steps,
            )
            for learner in swarm.learners
        ]

    @property
    def trained_s(self) -> float:
        """Mean training time of a learner since the experiment began."""
        steps = sum(one.steps for one in self._failing)
        return steps * self._settings.pace_s / len(self._failing)

    def turn(self) -> None:
        """Kill learners that are due to fail, and restart those that are due to recover."""
        now = self._swarm.now()
        for one in self._failing:
            learner = one.learner
            if one.fails_now:
                learner.kill()
                one.killed_s = now
                one.until_s.pop(0)
                one.earlier_steps += learner.life.steps - one.first_steps
                one.first_steps = 0
                back_s = now + self._settings.recovery_s
                self.faults.append(
                    FaultDone(kind=FaultKind.KILL, at_s=now, until_s=back_s, victim=learner.name)
                )
                self._tell(f"{learner.name} fails")
            elif one.killed_s is not None:
                away_s = now - one.killed_s
                if not learner.up and away_s >= self._settings.recovery_s - self._start_s:
                    learner.come_back()
                elif learner.up and learner.life.steps:
                    self._note_recovery(one)

    def _note_recovery(self, one: _Failing) -> None:
        """Correct the estimated duration of a start by the time that this recovery took."""
        assert one.killed_s is not None
        report = one.learner.life.reports[0]
        took_s = report.at_s - report.trained_s - one.killed_s
        self.recoveries_s.append(took_s)
        one.killed_s = None
        late_s = took_s - self._settings.recovery_s
        share = 1.0 if len(self.recoveries_s) == 1 else 0.5
        longest_s = self._settings.recovery_s - 5.0
        self._start_s = min(longest_s, max(3.0, self._start_s + share * late_s))


def measure(settings: GoodputSettings, tell: Callable[[str], None]) -> dict[str, Any]:
    """Run one swarm; returns the figures of ``tests.chaos.goodput --json``."""
    kind = "synchronous" if settings.synchronous else "shoal"
    swarm_settings = SwarmSettings(
        directory=settings.directory / f"{kind}-{settings.learners}",
        peers=settings.learners,
        pace_s=settings.pace_s,
        cycle_steps=settings.cycle_steps,
        synchronous=settings.synchronous,
    )
    with signals.as_interrupts(), ProcessSwarm(swarm_settings) as swarm:
        swarm.start()
        swarm.until_steady(2 * settings.cycle_steps, within_s=STEADY_WITHIN_S)
        tell(f"{kind}: {settings.learners} learners train after {swarm.now():.0f} s")
        experiment = _Experiment(swarm, settings, tell)
        _turn_until(swarm, experiment, swarm.now() + settings.lead_in_s)
        ready_s = swarm.now()
        psutil.cpu_percent()
        if settings.synchronous:
            longest_s = settings.length_s / settings.best + END_WITHIN_S
            _turn_until(swarm, experiment, ready_s + longest_s, trained_s=settings.length_s)
        else:
            _turn_until(swarm, experiment, ready_s + settings.length_s)
        ended_s = swarm.now()
        busy = psutil.cpu_percent() / 100
        swarm.leave()
        swarm.end()
        evidence = collect(
            swarm,
            scenario=kind,
            faults=experiment.faults,
            ready_s=ready_s,
            quiet_s=ended_s,
            ended_s=ended_s,
        )
    return _figures(settings, evidence, experiment.recoveries_s, kind=kind, cpu_share=busy)


def _turn_until(
    swarm: ProcessSwarm, experiment: _Experiment, end_s: float, *, trained_s: float = math.inf
) -> None:
    """Run until ``end_s`` on the swarm's clock, or until the mean training time is reached."""
    while swarm.now() < end_s and experiment.trained_s < trained_s:
        swarm.turn()
        experiment.turn()
        time.sleep(TURN_EVERY_S)


def _figures(
    settings: GoodputSettings,
    evidence: Evidence,
    recoveries_s: Sequence[float],
    *,
    kind: str,
    cpu_share: float,
) -> dict[str, Any]:
    share = goodput(evidence) or 0.0
    steps = sum(_steps_in_time(peer, evidence) for peer in evidence.honest)
    each_trained_s = steps * settings.pace_s / settings.learners
    recovery_s = statistics.fmean(recoveries_s) if recoveries_s else settings.recovery_s
    # Failures follow own training time, so their rate is as planned; recoveries may take longer.
    load = settings.load * recovery_s / settings.recovery_s
    parts = 1 if settings.synchronous else settings.learners
    return {
        "kind": kind,
        "learners": settings.learners,
        "minutes": round((evidence.ended_s - evidence.ready_s) / 60, 1),
        "failures": sum(fault.at_s >= evidence.ready_s for fault in evidence.faults),
        "recovery_s": round(recovery_s, 1),
        "load": settings.load,
        "load_measured": round(load, 3),
        "best": round(settings.best, 4),
        "best_at_measured_load": round(1.0 / (1.0 + load / parts), 4),
        "trained": round(each_trained_s / (evidence.ended_s - evidence.ready_s), 4),
        "goodput": round(share, 4),
        "of_best": round(share / settings.best, 4),
        "of_best_at_measured_load": round(share * (1.0 + load / parts), 4),
        "cpu_share": round(cpu_share, 3),
        "tokens": {name: round(number) for name, number in tokens(evidence).items()},
        "ledger_kept": judge_ledger(evidence).kept,
    }


def figures_text(figures: Mapping[str, Any]) -> str:
    return (
        f"{figures['kind']}, {figures['learners']} learners, {figures['minutes']:g} min: goodput "
        f"{figures['goodput']:.1%} of {figures['best']:.1%} at best ({figures['of_best']:.1%} of "
        f"it); {figures['failures']} failures, {figures['recovery_s']:g} s each, so that "
        f"{figures['best_at_measured_load']:.1%} were possible; CPU {figures['cpu_share']:.0%}"
    )


def _steps_in_time(peer: PeerEvidence, evidence: Evidence) -> int:
    """Steps of a peer during the measured time, merged or not."""
    total = 0
    for life in peer.lives:
        seen = [r.steps for r in life.reports if r.at_s <= evidence.ended_s]
        before = [r.steps for r in life.reports if r.at_s <= evidence.ready_s]
        total += max(seen, default=0) - max(before, default=0)
    return total


def main(
    learners: Annotated[int, Option(help="Number of learners.", min=2, max=32)] = 8,
    minutes: Annotated[float, Option(help="Length for each swarm.", min=1.0)] = 10.0,
    recovery: Annotated[str, Option(help="Time from a failure to the next step.")] = "60s",
    load: Annotated[
        float, Option(help="Failures of all learners during one recovery.", min=0.1)
    ] = 2.7,
    pace: Annotated[float, Option(help="Least seconds per step.", min=0.01)] = 0.4,
    only: Annotated[str | None, Option(help="Only one swarm: shoal or synchronous.")] = None,
    seed: Annotated[int, Option(help="Seed of the failures.", min=0)] = 0,
    directory: LogFolder = None,
    as_json: Json = False,
) -> int:
    """Measure the share of work that constant failures leave, with real processes.

    Let r be the rate of failures of all learners per training time, and R the duration of a
    recovery. A synchronous run trains 1/(1 + r R) of the time, M learners that do not wait for each
    other at best 1/(1 + r R/M): 27.0% and, for 8 learners, 74.8% with r R = 2.7.

    Example: python -m tests.chaos.goodput
    """

    start_logging(logging.WARNING)
    swarms = {"shoal": False, "synchronous": True}
    if only is not None and only not in swarms:
        raise typer.BadParameter(f"--only is {only!r}; it is one of {', '.join(swarms)}")
    where = trial_folder(directory, "goodput")
    found = []
    for synchronous in swarms.values() if only is None else (swarms[only],):
        with usage_errors():
            settings = GoodputSettings(
                directory=where,
                learners=learners,
                minutes=minutes,
                recovery_s=seconds(recovery, option="--recovery"),
                load=load,
                pace_s=pace,
                synchronous=synchronous,
                seed=seed,
            )
        found.append(measure(settings, course(as_json=as_json)))
        if not as_json:
            print(figures_text(found[-1]), flush=True)
    if as_json:
        print(json_text({"swarms": found, "directory": str(where)}))
    return 0


if __name__ == "__main__":
    run_program(main)
