"""A swarm of real processes on loopback: started, observed and ended.

``ProcessSwarm`` owns every process. It injects no faults (``tests.chaos.injection``) and judges
nothing (``tests.chaos.judging``).
"""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from peer.demo.processes import ProcessFailed, family, spawn
from peer.run_file.sections import RunFile
from peer.run_file.writing import to_toml
from tests.chaos.composition import SwarmSettings, run_file
from tests.chaos.judging.evidence import HeldOutPoint, Leaks
from tests.chaos.judging.lies import liars_of
from tests.chaos.members import START_WITHIN_S, Bootstrap, Learner
from tests.chaos.workspace import Workspace
from tests.processes import end_softly

LEAVE_WITHIN_S = 60.0
BOOTSTRAPS = 2
SAMPLE_EVERY_S = 4.0
STRANGERS = ("-m", "tests.chaos.attackers.visit")

CLOCKS_OFF_S = (0.0, -3600.0, 45.0, 7200.0, -5.0)
"""Initial clock errors, dealt to the learners in turn."""


class ProcessSwarm:
    """Bootstrap peers, learners and helper processes. Use as a context manager."""

    def __init__(self, settings: SwarmSettings) -> None:
        self.settings = settings
        self._scenario = settings.scenario
        self.workspace = Workspace(settings)
        self.bootstraps: list[Bootstrap] = []
        self.learners: list[Learner] = []
        self.mallory: Learner | None = None
        self.liars: list[Learner] = []
        self.run: RunFile | None = None
        self.held_out: list[HeldOutPoint] = []
        self.leaks: Leaks | None = None
        self._versions_measured: set[int] = set()
        self._strangers: list[subprocess.Popen[bytes]] = []
        self._sampled_s = 0.0

    def __enter__(self) -> ProcessSwarm:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def now(self) -> float:
        return self.workspace.now()

    @property
    def everybody(self) -> list[Learner]:
        """All learners, with the hostile ones if there are any."""
        return [*self.learners, *([self.mallory] if self.mallory else []), *self.liars]

    def compose(self, seeds: Sequence[str]) -> RunFile:
        """The run to join, from the addresses of the bootstrap peers."""
        listed = [x.make_identity() for x in self.everybody] if self._scenario.listed else []
        return run_file(self.settings, seeds, listed)

    # --- start ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all processes and return when every learner trains. Raises ``ProcessFailed``.

        A learner that is held back is started by ``launch_late``.
        """
        if self.workspace.proxies is not None:
            self.workspace.proxies.find_diallers(self._dialler)
        for index in range(BOOTSTRAPS):
            self.bootstraps.append(Bootstrap(self.workspace, index))
            self.bootstraps[-1].launch()
        for bootstrap in self.bootstraps:
            bootstrap.wait_for_address()
        self.learners = [Learner(self.workspace, index) for index in range(self.settings.peers)]
        if self._scenario.hostile:
            self.mallory = Learner(self.workspace, 0, hostile=True)
        if self._scenario.lies:
            count = liars_of(self.settings.peers)
            self.liars = [Learner(self.workspace, index, lies=True) for index in range(count)]
        self.run = self.compose([b.address for b in self.bootstraps])
        self.workspace.run_path.write_text(to_toml(self.run), encoding="utf-8")
        if self._scenario.skewed:
            for learner, offset_s in zip(self.learners, itertools.cycle(CLOCKS_OFF_S)):
                learner.set_clock(offset_s)
        # All at once: joining learners wait for the founder's state themselves.
        self.learners[0].launch(["start", str(self.workspace.run_path)])
        held_back = self.learners[-1] if self._scenario.late else None
        first = [learner for learner in self.everybody if learner is not held_back]
        for learner in first[1:]:
            learner.come_back()
        for learner in first:
            self._wait_until_training(learner)

    def add(self) -> None:
        """Start one more learner."""
        self.learners.append(Learner(self.workspace, len(self.learners)))
        self.learners[-1].come_back()

    def launch_late(self) -> None:
        """Start the learner that was held back, if there is one."""
        if self._scenario.late and not self.learners[-1].lives:
            self.learners[-1].come_back()

    def _wait_until_training(self, learner: Learner) -> None:
        deadline = time.monotonic() + START_WITHIN_S
        while not learner.life.reports:
            self.turn()
            if learner.life.ended_s is not None:
                code = learner.life.process.poll()
                raise ProcessFailed(
                    f"{learner.name} ended with {code}", str(learner.life.output.log)
                )
            if time.monotonic() > deadline:
                what = f"{learner.name} did not train within {START_WITHIN_S:g} s"
                raise ProcessFailed(what, str(learner.life.output.log))
            time.sleep(0.1)

    def _dialler(self, port: int) -> str | None:
        """The member that uses this local port. Called from the thread of the proxies."""
        assert self.workspace.proxies is not None
        # libp2p dials from the port on which it listens, if it can.
        found = self.workspace.proxies.listener_at(port)
        if found is not None:
            return found
        holders = [(x.name, x.life.process) for x in self.everybody if x.up]
        holders += [(b.name, b.process) for b in self.bootstraps if b.process is not None]
        for name, process in holders:
            for member in family(process):
                with contextlib.suppress(psutil.Error):
                    if any(c.laddr and c.laddr.port == port for c in member.net_connections()):
                        return name
        return None

    # --- observation ----------------------------------------------------------------------------

    def turn(self) -> None:
        """Read all output, and from time to time sample the processes."""
        for learner in self.everybody:
            learner.read()
            for version, loss in learner.measured:
                self._note_loss(version, loss)
            learner.measured.clear()
        if self.now() - self._sampled_s >= SAMPLE_EVERY_S:
            self._sampled_s = self.now()
            for learner in self.everybody:
                if learner.up:
                    learner.sample()
            for bootstrap in self.bootstraps:
                bootstrap.sample()

    def _note_loss(self, version: int, loss: float) -> None:
        """Note a held-out loss. Peers pass measurements on, so only the first report counts."""
        if version in self._versions_measured:
            return
        self._versions_measured.add(version)
        last = [x.life.reports[-1] for x in self.learners if x.lives and x.life.reports]
        if last:
            self.held_out.append(
                HeldOutPoint(
                    at_s=self.now(),
                    global_tokens=max(report.global_tokens for report in last),
                    loss=loss,
                    honest_tokens=sum(report.merged_tokens for report in last),
                )
            )

    def visit(self, arguments: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        """Start strangers, which end with the swarm (``tests.chaos.attackers.visit``)."""
        process = spawn(arguments, log, module=STRANGERS, environment=self.workspace.environment())
        self._strangers.append(process)
        return process

    def note_processes(self) -> None:
        """Remember all processes that run now as the swarm's own."""
        found = [x.life.process for x in self.everybody if x.lives]
        found += [b.process for b in self.bootstraps if b.process is not None]
        for process in [*found, *self._strangers]:
            if process.poll() is None:
                self.workspace.note(family(process))

    def used_s(self) -> tuple[float, float]:
        """Processor time so far: of the swarm with this process, and of the whole machine."""
        self.note_processes()
        return self.workspace.used_s()

    # --- end ------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Ask all learners to leave, and wait until they have, up to a deadline."""
        self.note_processes()
        for learner in self.everybody:
            if learner.up:
                learner.life.process.terminate()
        deadline = time.monotonic() + LEAVE_WITHIN_S
        while any(x.up for x in self.everybody) and time.monotonic() < deadline:
            self.turn()
            time.sleep(0.1)

    def end(self) -> Leaks:
        """End every process and report what is left behind. The folder with the logs stays."""
        if self.leaks is None:
            self.note_processes()
            for learner in self.everybody:
                if learner.up:
                    learner.kill()
            for bootstrap in self.bootstraps:
                if bootstrap.process is not None:
                    end_softly(bootstrap.process, within_s=15.0)
            for stranger in self._strangers:
                end_softly(stranger, within_s=10.0)
            self.leaks = self.workspace.close()
        return self.leaks
