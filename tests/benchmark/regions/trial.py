"""A trial: one learner in each of several regions, real commands in network namespaces.

The regions are founded on lines without a limit, so that a trial does not begin with downloads of
the first state over slow lines. All lines are limited at the same moment, from which the trial
counts.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from examples.paper.bandwidth.run import Setting
from peer.processes import (
    Output,
    ProcessFailed,
    bootstrap_command,
    family,
    kill_tree,
    learner_command,
    spawn,
)
from peer.run_file.sections import RunFile
from peer.run_file.writing import to_toml
from peer.trainer.needs import needs_of
from tests.benchmark.regions.figures import Course, Failure, Merged, Progress, Row, row
from tests.swarms.topology import Internet, Site, internet

BOOTSTRAP = "bootstrap"
PORT = 7700
MTU = 9000
"""Bytes of a packet: fewer of them pass the program that delays them."""

START_WITHIN_S = 240.0
SETTLED_SHARE = 0.25
"""Share of the trial before bytes and steps are counted: first rounds, speeds are being learned."""

RETURN_WITHIN_S = 180.0
LEAVE_WITHIN_S = 60.0

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


def conduct(trial: Trial, *, tell: Tell) -> Row:
    """Train in all regions, and count. Raises ``ProcessFailed`` and ``NetworkFailed``."""
    sites = [Site(BOOTSTRAP, one_way_ms=trial.one_way_ms / 2)]
    sites += [Site(name, one_way_ms=trial.one_way_ms) for name in trial.names]
    trial.directory.mkdir(parents=True, exist_ok=True)
    with internet(sites, mtu=MTU) as net, _swarm(trial, net) as swarm:
        tell("starting")
        swarm.start()
        for name in trial.names:
            net.slow_down(name, trial.mbit)
        began_s = swarm.now()
        tell(f"training for {trial.seconds:g} s on lines of {trial.mbit:g} Mbit/s")
        swarm.wait(SETTLED_SHARE * trial.seconds)
        counted_s, before = swarm.now(), swarm.sent_bytes()
        swarm.wait(began_s + trial.seconds - swarm.now())
        course = Course(
            began_s=counted_s,
            ended_s=swarm.now(),
            progress={each.name: each.progress for each in swarm.learners},
            merged={each.name: each.merged for each in swarm.learners},
            sent_bytes=swarm.sent_bytes() - before,
            loss=swarm.loss,
        )
        failure = None if trial.fail_s is None else swarm.fail(trial.fail_s, tell=tell)
        swarm.leave()
    return row(course, _setting(trial), mbit=trial.mbit, failure=failure)


def _setting(trial: Trial) -> Setting:
    """The description of a trial for ``shoal simulate bandwidth``."""
    up, down = trial.run.outer.codecs
    return Setting(
        parameters=needs_of(trial.run).parameters,
        step_s=trial.step_s,
        learners=trial.regions,
        codec=f"{up}/{down}",
        steps_per_cycle=trial.run.outer.steps_per_cycle,
        fragments=trial.run.outer.fragments,
    )


@dataclass(slots=True)
class Learner:
    """The learner of a region over all its lives, as far as its output shows."""

    name: str
    folder: Path
    output: Output
    process: subprocess.Popen[bytes] | None = None
    link: str | None = None
    is_ready: bool = False
    progress: list[Progress] = field(default_factory=list)
    merged: list[Merged] = field(default_factory=list)


class Swarm:
    """The processes of a trial. ``_swarm`` ends them."""

    def __init__(self, trial: Trial, net: Internet) -> None:
        self.trial = trial
        self.learners = [
            Learner(name, trial.directory / name, Output(trial.directory / f"{name}.out"))
            for name in trial.names
        ]
        self.loss: float | None = None
        """Held-out loss of the newest version that was measured."""
        self._net = net
        self._began = time.monotonic()
        self._bootstrap: subprocess.Popen[bytes] | None = None

    def now(self) -> float:
        return time.monotonic() - self._began

    def sent_bytes(self) -> int:
        """Bytes that all regions have sent into their lines."""
        return sum(self._net.sent_bytes(name) for name in self.trial.names)

    def start(self) -> None:
        """Start everything, and return when each learner trains."""
        log = self.trial.directory / "bootstrap.out"
        listen = f"/ip4/{self._net.address(BOOTSTRAP)}/tcp/{PORT}"
        command = bootstrap_command(self.trial.directory / BOOTSTRAP, listen=listen)
        self._bootstrap = self._spawn(BOOTSTRAP, command, log)
        seed = Output(log).first(
            "address", self._bootstrap, name="the bootstrap peer", within_s=START_WITHIN_S
        )
        run = msgspec.structs.replace(self.trial.run, seeds=[seed])
        path = self.trial.directory / "run.toml"
        path.write_text(to_toml(run), encoding="utf-8")
        founder, *others = self.learners
        self._launch(founder, ["start", str(path)])
        self._until(lambda: founder.link is not None, "the founder has a link")
        for learner in others:
            self._launch(learner, ["join", str(founder.link)])
        self._until(lambda: all(each.is_ready for each in self.learners), "all learners train")

    def wait(self, seconds: float) -> None:
        """Read all output for a time. Raises ``ProcessFailed`` if a learner has ended."""
        deadline = self.now() + seconds
        while self.now() < deadline:
            self._read()
            for learner in self.learners:
                if learner.process is not None and learner.process.poll() is not None:
                    raise ProcessFailed(f"{learner.name} has ended", str(learner.output.log))
            time.sleep(0.1)
        self._read()

    def fail(self, seconds: float, *, tell: Tell) -> Failure:
        """Kill the last region for a time, and watch its return."""
        victim = self.learners[-1]
        others = [each for each in self.learners if each is not victim]
        assert victim.process is not None
        tell(f"{victim.name} is killed for {seconds:g} s")
        kill_tree(victim.process)
        victim.process = None
        killed_s = self.now()
        self.wait(seconds)
        started_s = self.now()
        rounds = {
            (each.fragment, each.version)
            for learner in others
            for each in learner.merged
            if killed_s <= each.at_s < started_s
        }
        self._launch(victim, ["join", str(self.learners[0].link)])
        while not any(each.at_s >= started_s for each in victim.merged):
            if self.now() - started_s > RETURN_WITHIN_S:
                break
            self.wait(0.2)
        returned = [each.at_s for each in victim.merged if each.at_s >= started_s]
        return Failure(
            away_s=seconds,
            rounds_per_minute=60 * len(rounds) / seconds,
            returned_s=returned[0] - started_s if returned else None,
        )

    def leave(self) -> None:
        """Ask all learners to leave, and wait until they have."""
        for learner in self.learners:
            if learner.process is not None:
                learner.process.terminate()
        deadline = self.now() + LEAVE_WITHIN_S
        while any(each.process and each.process.poll() is None for each in self.learners):
            if self.now() > deadline:
                break
            time.sleep(0.1)

    def end(self) -> None:
        """Kill every process that still runs."""
        for process in (*(each.process for each in self.learners), self._bootstrap):
            if process is not None and (process.poll() is None or family(process)[1:]):
                kill_tree(process)

    def _launch(self, learner: Learner, command: Sequence[str]) -> None:
        learner.is_ready = False
        arguments = learner_command(
            command,
            learner.folder,
            pace_s=self.trial.step_s,
            listen=(f"/ip4/0.0.0.0/tcp/{PORT}", "--page", "off", "--site", learner.name),
        )
        learner.process = self._spawn(learner.name, arguments, learner.output.log)

    def _spawn(self, site: str, arguments: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        environment = {
            "XDG_DATA_HOME": str(self.trial.directory / "data"),
            "OMP_NUM_THREADS": "1",
        }
        return spawn(arguments, log, prefix=self._net.at(site), environment=environment)

    def _until(self, happened: Callable[[], bool], what: str) -> None:
        deadline = self.now() + START_WITHIN_S
        while not happened():
            if self.now() > deadline:
                raise ProcessFailed(
                    f"not within {START_WITHIN_S:g} s: {what}", str(self.trial.directory)
                )
            self.wait(0.2)

    def _read(self) -> None:
        for learner in self.learners:
            for each in learner.output.news():
                self._note(learner, each)

    def _note(self, learner: Learner, record: dict[str, Any]) -> None:
        match record.get("event"):
            case "progress":
                learner.progress.append(Progress(self.now(), record["steps"]))
            case "round" if record["contributed"]:
                learner.merged.append(Merged(self.now(), record["fragment"], record["version"]))
            case "link":
                learner.link = record["link"]
            case "phase" if record["name"] == "ready":
                learner.is_ready = True
            case "measured":
                self.loss = record["loss"]


@contextmanager
def _swarm(trial: Trial, net: Internet) -> Iterator[Swarm]:
    swarm = Swarm(trial, net)
    try:
        yield swarm
    finally:
        swarm.end()
