"""Runs chaos scenarios one after the other, and a control swarm without faults to compare with."""

from __future__ import annotations

import os
import statistics
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from peer import signals
from tests.chaos.collect import collect
from tests.chaos.composition import SwarmSettings
from tests.chaos.director import Director
from tests.chaos.injection import FaultInjector
from tests.chaos.judging.evidence import Evidence
from tests.chaos.judging.figures import figures
from tests.chaos.judging.hostile import found, kept_out
from tests.chaos.judging.lies import acts
from tests.chaos.judging.oracle import judge
from tests.chaos.judging.scenarios import Scenario
from tests.chaos.judging.schedule import Fault, Timing, plan
from tests.chaos.judging.tokens import goodput, tokens
from tests.chaos.judging.verdict import Promise, Verdict
from tests.chaos.process_swarm import ProcessSwarm
from tests.chaos.resizing import Resizer
from tests.swarms.sizes import parse

LOOK_EVERY_S = 0.05
TURN_EVERY_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosSettings:
    """Which scenarios to run, on how large a swarm, and for how long."""

    scenarios: tuple[Scenario, ...]
    directory: Path
    peers: int | None = None
    """Number of honest learners. ``None``: the scenario's own."""
    minutes: float | None = None
    """Length of each scenario, from the moment when every learner is in the run. ``None``: the
    scenario's own."""
    seed: int = 0
    control: bool = True
    """Run a swarm without faults first, and compare with it."""
    pace_s: float = 0.2

    def __post_init__(self) -> None:
        for scenario in self.scenarios:
            self.timing(scenario)  # raises ValueError for a run that is too short

    def timing(self, scenario: Scenario) -> Timing:
        return Timing.of(60 * (scenario.minutes if self.minutes is None else self.minutes))

    def learners(self, scenario: Scenario) -> int:
        return scenario.peers if self.peers is None else self.peers

    def whole_min(self, scenario: Scenario) -> int:
        """Number of learners that are never affected at the same time."""
        return min(2, self.learners(scenario) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One scenario with its evidence and verdicts."""

    scenario: str
    seed: int
    evidence: Evidence
    verdicts: tuple[Verdict, ...]
    seconds: float
    control: Evidence | None = None
    """The same swarm without faults."""

    @property
    def kept(self) -> bool:
        return all(verdict.kept is not False for verdict in self.verdicts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """All judged scenarios."""

    settings: ChaosSettings
    judged: tuple[Judged, ...]

    @property
    def kept(self) -> bool:
        return all(each.kept for each in self.judged)


def run_chaos(settings: ChaosSettings, say: Callable[[str], None]) -> Outcome:
    """Run every scenario, each after its control, which several of them may share.

    ``say`` receives progress lines. Raises ``ProcessFailed`` if a swarm does not start.
    """
    controls: dict[str, Evidence] = {}
    judged = []
    for scenario in settings.scenarios:
        control = None
        if settings.control and not scenario.resizes:  # a swarm of one size compares with none
            quiet = scenario.control
            if quiet.name not in controls:
                controls[quiet.name] = run_scenario(settings, quiet, (), say)
            control = controls[quiet.name]
        began = time.monotonic()
        evidence = run_scenario(settings, scenario, schedule(settings, scenario), say)
        verdicts = judge(evidence, control)
        judged.append(
            Judged(
                scenario=scenario.name,
                seed=settings.seed,
                evidence=evidence,
                verdicts=verdicts,
                seconds=time.monotonic() - began,
                control=control,
            )
        )
        for verdict in verdicts:
            say(f"{scenario.name}: {verdict.promise} {verdict.word}: {verdict.reason}")
    return Outcome(settings=settings, judged=tuple(judged))


def schedule(settings: ChaosSettings, scenario: Scenario) -> tuple[Fault, ...]:
    """The faults of a scenario. They depend on the seed, not on which other scenarios are run."""
    return plan(
        scenario.kinds,
        settings.timing(scenario),
        learners=settings.learners(scenario),
        whole_min=settings.whole_min(scenario),
        rng=_rng(settings, scenario),
    )


def _rng(settings: ChaosSettings, scenario: Scenario) -> np.random.Generator:
    return np.random.default_rng([settings.seed, zlib.crc32(scenario.name.encode())])


def run_scenario(
    settings: ChaosSettings,
    scenario: Scenario,
    faults: Sequence[Fault],
    say: Callable[[str], None],
) -> Evidence:
    """Run one swarm from its start to its end."""
    timing = settings.timing(scenario)
    sizes_text = scenario.sizes_text(settings.learners(scenario))
    sizes = None if sizes_text is None else parse(sizes_text, over_s=timing.quiet_s)
    swarm_settings = SwarmSettings(
        directory=settings.directory / scenario.name.replace(" ", "-"),
        peers=settings.learners(scenario) if sizes is None else sizes.founders,
        pace_s=settings.pace_s,
        scenario=scenario,
    )
    say(f"{scenario.name}: {scenario.text}")
    with signals.as_interrupts(), ProcessSwarm(swarm_settings) as swarm:
        swarm.start()
        ready_s = swarm.now()
        used_before_s = swarm.used_s()
        say(f"{scenario.name}: all learners are in the run after {ready_s:.0f} s")

        def tell(text: str) -> None:
            say(f"{swarm.now() - ready_s:6.1f} s  {text}")

        injector = FaultInjector(
            swarm,
            faults,
            began_s=ready_s,
            quiet_s=ready_s + timing.quiet_s,
            whole_min=settings.whole_min(scenario),
            tell=tell,
            rng=_rng(settings, scenario),
        )
        planned = acts(timing.lead_in_s, timing.quiet_s) if scenario.late else ()
        director = Director(swarm, planned, began_s=ready_s, tell=tell)
        resizer = None if sizes is None else Resizer(swarm, sizes, began_s=ready_s, tell=tell)
        turn_s = 0.0
        quiet_s, end_s = ready_s + timing.quiet_s, ready_s + timing.total_s
        while (now := swarm.now()) < max(quiet_s, end_s):
            injector.turn()
            director.turn()
            if resizer is not None:
                resizer.turn()
            is_resized = resizer is None or resizer.over
            if now >= quiet_s and not (director.over and is_resized):
                quiet_s, end_s = now + LOOK_EVERY_S, now + timing.settle_s
            if now >= quiet_s and not injector.over:
                injector.heal()
                quiet_s = max(quiet_s, swarm.now())
            if now - turn_s >= TURN_EVERY_S:
                turn_s = now
                swarm.turn()
            time.sleep(LOOK_EVERY_S)
        injector.heal()
        ended_s = swarm.now()
        others_share = _others_share(used_before_s, swarm.used_s(), ended_s - ready_s)
        swarm.leave()
        swarm.end()
        evidence = collect(
            swarm,
            scenario=scenario.name,
            faults=injector.done,
            ready_s=ready_s,
            quiet_s=quiet_s,
            ended_s=ended_s,
        )
        return replace(
            evidence,
            others_share=others_share,
            acts=tuple(director.until(ended_s)) if scenario.lies else (),
            sizes=() if resizer is None else tuple(resizer.done),
        )


def _others_share(
    before_s: tuple[float, float], after_s: tuple[float, float], seconds: float
) -> float:
    """The share of the machine's processors that other programs used between two ``used_s``."""
    ours_s, machine_s = (after - before for before, after in zip(before_s, after_s, strict=True))
    return max(0.0, machine_s - ours_s) / (seconds * (os.cpu_count() or 1))


def summary(outcome: Outcome) -> dict[str, Any]:
    """The last line of ``python -m tests.chaos --json``."""
    verdicts: dict[str, bool | None] = {str(promise): None for promise in Promise}
    faults: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for each in outcome.judged:
        for verdict in each.verdicts:
            if verdict.kept is not None:
                before = verdicts[str(verdict.promise)]
                verdicts[str(verdict.promise)] = verdict.kept and before is not False
        faults.update(str(fault.kind) for fault in each.evidence.faults)
        faults.update(f"upload.{upload.kind}" for upload in each.evidence.hostile_uploads)
        total.update(tokens(each.evidence))
    shares = (share for each in outcome.judged if (share := goodput(each.evidence)) is not None)
    plain = {each.scenario: _plain(each) for each in outcome.judged}
    compared = [row for row in plain.values() if "control_loss" in row]
    return {
        "ok": outcome.kept,
        "verdicts": verdicts,
        "faults": dict(sorted(faults.items())),
        "tokens": {name: round(count) for name, count in total.items()},
        "goodput": _mean(shares),
        "loss": _mean(row["loss"] for row in compared) or _last_loss(outcome.judged),
        "control_loss": _mean(row["control_loss"] for row in compared),
        "scenarios": plain,
        "seed": outcome.settings.seed,
        "directory": str(outcome.settings.directory),
    }


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.fmean(found) if found else None


def _last_loss(judged: Sequence[Judged]) -> float | None:
    return _mean(each.evidence.held_out[-1].loss for each in judged if each.evidence.held_out)


def _plain(judged: Judged) -> Mapping[str, Any]:
    evidence, control = judged.evidence, judged.control
    lies = {"lies": [asdict(row) for row in found(evidence, control)]} if evidence.acts else {}
    return {
        "ok": judged.kept,
        "verdicts": {
            str(verdict.promise): {"kept": verdict.kept, "reason": verdict.reason}
            for verdict in judged.verdicts
        },
        "faults": dict(sorted(Counter(str(fault.kind) for fault in evidence.faults).items())),
        "kept_out": kept_out(evidence),
        "tokens": {name: round(count) for name, count in tokens(evidence).items()},
        "goodput": goodput(evidence),
        "control_goodput": goodput(control) if control is not None else None,
        **figures(evidence, control),
        "seconds": round(judged.seconds, 1),
        **lies,
    }
