"""A trial: one learner in each of several regions, real commands in network namespaces.

The regions are founded on lines without a limit, so that a trial does not begin with downloads of
the first state over slow lines. All lines are limited at the same moment, from which the trial
counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from examples.paper.bandwidth.run import Setting
from peer.run_file.sections import RunFile
from peer.run_file.writing import to_toml
from peer.trainer.needs import needs_of
from tests.benchmark.regions.figures import Course, Failure, Merged, Progress, Row, row
from tests.processes import Processes
from tests.swarms.hurt_internet import hurt_internet
from tests.swarms.topology import Site
from tests.swarms.wide_area import BOOTSTRAP, START_WITHIN_S
from tests.swarms.wide_area import Trial as Swarm

MTU = 9000
"""Bytes of a packet: fewer of them pass the program that delays them."""

SETTLED_SHARE = 0.25
"""Share of the trial before bytes and steps are counted: first rounds, speeds are being learned."""

RETURN_WITHIN_S = 180.0
LOOK_EVERY_S = 1.0

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The description of a trial."""

    run: RunFile
    """The run of the trial, which sets its seeds."""
    directory: Path
    regions: int = 4
    mbit: float = 200.0
    one_way_ms: float = 20.0
    """Distance of each region from the middle: half of it between two regions."""
    step_s: float = 0.5
    """Time of a step; computing it must take less."""
    seconds: float = 60.0
    fail_s: float | None = None
    """Kill one region afterwards, for this long."""

    def __post_init__(self) -> None:
        if not 2 <= self.regions <= 8:
            raise ValueError(f"regions is {self.regions}; one machine runs 2 to 8")
        for name in ("mbit", "step_s", "seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above zero")

    @property
    def names(self) -> list[str]:
        return [f"region-{number}" for number in range(1, self.regions + 1)]

    def text(self, seed: str) -> str:
        return to_toml(msgspec.structs.replace(self.run, seeds=[seed]))

    @property
    def setting(self) -> Setting:
        """The description of the trial for ``examples/paper/bandwidth``."""
        up, down = self.run.outer.codecs
        return Setting(
            parameters=needs_of(self.run).parameters,
            step_s=self.step_s,
            learners=self.regions,
            codec=f"{up}/{down}",
            steps_per_cycle=self.run.outer.steps_per_cycle,
            fragments=self.run.outer.fragments,
        )


def conduct(trial: Trial, *, tell: Tell) -> Row:
    """Train in all regions, and count."""
    sites = [Site(BOOTSTRAP, one_way_ms=trial.one_way_ms / 2)]
    sites += [Site(name, one_way_ms=trial.one_way_ms) for name in trial.names]
    trial.directory.mkdir(parents=True, exist_ok=True)
    with Processes(trial.directory) as processes, hurt_internet(sites, mtu=MTU) as net:
        tell("starting")
        swarm = Swarm(
            net, processes, trial.directory, trial.text, pace_s=trial.step_s, own_sites=True
        )
        for name in trial.names:
            net.slow_down(name, trial.mbit)
        tell(f"training for {trial.seconds:g} s on lines of {trial.mbit:g} Mbit/s")
        time.sleep(SETTLED_SHARE * trial.seconds)

        def sent_bytes() -> int:
            return sum(net.sent_bytes(name) for name in trial.names)

        began_s, before = time.time(), sent_bytes()
        progress: dict[str, list[Progress]] = {name: [] for name in trial.names}
        while time.time() < began_s + (1 - SETTLED_SHARE) * trial.seconds:
            time.sleep(LOOK_EVERY_S)
            for name, learner in swarm.learners.items():
                progress[name].append(Progress(time.time(), learner.progress()["steps"]))
        ended_s, sent = time.time(), sent_bytes() - before
        course = Course(
            began_s=began_s,
            ended_s=ended_s,
            progress=progress,
            merged=_merged(swarm),
            sent_bytes=sent,
            loss=_loss(swarm),
        )
        failure = None if trial.fail_s is None else _fail(swarm, trial.fail_s, tell=tell)
        swarm.end()
    return row(course, trial.setting, mbit=trial.mbit, failure=failure)


def _merged(swarm: Swarm) -> dict[str, list[Merged]]:
    """The rounds that merged each learner's work."""
    return {
        name: [
            Merged(event["at"], event["fragment"], event["version"])
            for event in log
            if event["event"] == "round" and event["contributed"]
        ]
        for name, log in swarm.logs().items()
    }


def _loss(swarm: Swarm) -> float | None:
    """The held-out loss of the newest version that was measured."""
    measured = [each for learner in swarm.learners.values() for each in learner.records("measured")]
    newest = max(measured, key=lambda each: float(each["version"]), default=None)
    return None if newest is None else float(newest["loss"])


def _fail(swarm: Swarm, seconds: float, *, tell: Tell) -> Failure:
    """Kill the last region for a time, and watch its return."""
    name, victim = list(swarm.learners.items())[-1]
    tell(f"{name} is killed for {seconds:g} s")
    victim.kill()
    killed_s = time.time()
    time.sleep(seconds)
    started_s = time.time()
    rounds = {
        (each.fragment, each.version)
        for other, merged in _merged(swarm).items()
        for each in merged
        if other != name and killed_s <= each.at_s < started_s
    }
    victim.come_back(swarm.link)
    victim.ready(timeout_s=START_WITHIN_S)
    while not victim.own_rounds() and time.time() < started_s + RETURN_WITHIN_S:
        time.sleep(0.2)
    returned_s = time.time() - started_s if victim.own_rounds() else None
    return Failure(
        away_s=seconds, rounds_per_minute=60 * len(rounds) / seconds, returned_s=returned_s
    )
