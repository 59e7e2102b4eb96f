"""The members of a swarm of processes: a learner and a bootstrap peer, each over all its lives."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from dht.identity import Identity, PeerId
from peer.demo.processes import (
    CLI,
    LOOPBACK,
    Output,
    bootstrap_command,
    family,
    kill_tree,
    learner_command,
    spawn,
)
from tests.chaos.judging.evidence import Life, Report, Sample
from tests.chaos.workspace import Workspace, set_clock
from tests.processes import signal_family

START_WITHIN_S = 180.0
"""A start takes ten seconds on an idle machine; 92 were measured at a load of 24."""


@dataclass(slots=True)
class CurrentLife:
    """A life of a learner, from its launch until its process has ended."""

    process: subprocess.Popen[bytes]
    output: Output
    began_s: float
    ready_s: float | None = None
    ended_s: float | None = None
    killed: bool = False
    asked_s: float | None = None
    reports: list[Report] = field(default_factory=list)
    merged_after_steps: int | None = None
    peer_id: str | None = None
    link: str | None = None

    @property
    def steps(self) -> int:
        return self.reports[-1].steps if self.reports else 0

    def done(self) -> Life:
        assert self.ended_s is not None
        return Life(
            began_s=self.began_s,
            ready_s=self.ready_s,
            ended_s=self.ended_s,
            killed=self.killed,
            exit_code=self.process.poll(),
            reports=tuple(self.reports),
            merged_after_steps=self.merged_after_steps,
            asked_s=self.asked_s,
        )


class Learner:
    """One learner over all its lives."""

    def __init__(
        self, workspace: Workspace, index: int, *, hostile: bool = False, lies: bool = False
    ) -> None:
        """``hostile``: it spoils its uploads. ``lies``: it lies when its orders say so."""
        self.index = index
        self.hostile = hostile or lies
        self._lies = lies
        self.name = f"liar-{index}" if lies else "mallory" if hostile else f"peer-{index}"
        self.directory = workspace.directory / self.name
        """The folder of the peer, which holds nothing else."""
        self._clock_file = workspace.directory / f"{self.name}.clock"
        self.lives: list[CurrentLife] = []
        self.samples: list[Sample] = []
        self.clock: list[tuple[float, float]] = [(0.0, 0.0)]
        """Errors of its clock: since when, and by how many seconds."""
        self.stopped = False
        """True while SIGSTOP has stopped it."""
        self.measured: list[tuple[int, float]] = []
        """Version and held-out loss of measurements that were reported since the last look."""
        self._workspace = workspace

    @property
    def life(self) -> CurrentLife:
        return self.lives[-1]

    @property
    def up(self) -> bool:
        return bool(self.lives) and self.life.ended_s is None

    @property
    def whole(self) -> bool:
        """True if it is in the run, and nothing keeps it from training."""
        return self.up and not self.stopped and self.life.ready_s is not None

    @property
    def peer_id(self) -> str:
        return next((life.peer_id for life in reversed(self.lives) if life.peer_id), "")

    @property
    def events_path(self) -> Path:
        return self.directory / "events.jsonl"

    @property
    def orders_path(self) -> Path:
        """The file that says how a liar lies now."""
        return self._workspace.directory / f"{self.name}.orders"

    @property
    def lies_path(self) -> Path:
        """The log of what a hostile learner did."""
        return self.directory / "hostile.jsonl"

    def launch(self, command: Sequence[str]) -> None:
        """Begin a life. All lives use the same folder."""
        workspace = self._workspace
        pace_s, listen = workspace.settings.pace_s, self._listening()
        arguments = learner_command(command, self.directory, pace_s=pace_s, listen=listen)
        if self._lies:
            arguments += ["--orders", str(self.orders_path)]
        log = workspace.directory / f"{self.name}-life-{len(self.lives)}.out"
        process = spawn(
            arguments,
            log,
            module=("-m", "tests.chaos.attackers.hostile") if self.hostile else CLI,
            environment=workspace.environment(clock=self._clock_file),
        )
        self.lives.append(CurrentLife(process, Output(log), workspace.now()))

    def _listening(self) -> Sequence[str]:
        proxies = self._workspace.proxies
        if proxies is None:
            return (LOOPBACK,)
        inner, outer = proxies.ports(self.name)
        lane_inner, lane_outer = proxies.ports(self.name, "lane")
        return (
            f"/ip4/127.0.0.1/tcp/{inner}",
            *("--announce", f"/ip4/127.0.0.1/tcp/{outer}"),
            *("--lane", f"{lane_inner}:{lane_outer}"),
        )

    def come_back(self) -> None:
        """Begin the next life with the same folder."""
        self.launch(["join", str(self._workspace.run_path)])

    def leave(self) -> None:
        """Ask it to leave, as Ctrl-C does."""
        self._workspace.note(family(self.life.process))
        self.life.asked_s = self._workspace.now()
        self.life.process.terminate()

    def kill(self) -> None:
        """Kill trainer, agent and daemon with SIGKILL."""
        life = self.life
        self._workspace.note(family(life.process))
        life.killed = True
        kill_tree(life.process)
        life.ended_s = self._workspace.now()
        self.stopped = False

    def members(self, word: str) -> list[psutil.Process]:
        """The processes of this learner whose command line contains ``word``."""
        found = []
        for process in family(self.life.process):
            with contextlib.suppress(psutil.Error):
                if any(word in argument for argument in process.cmdline()):
                    found.append(process)
        return found

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes of this learner."""
        signal_family(self.life.process, number)
        self.stopped = number is signal.SIGSTOP

    def set_clock(self, offset_s: float) -> None:
        """Make the clock of this learner wrong by ``offset_s`` from now on."""
        self.clock.append((self._workspace.now(), offset_s))
        set_clock(self._clock_file, offset_s)

    def read(self) -> None:
        """Read its output since the last call."""
        if not self.lives:
            return
        life = self.life
        ended = life.process.poll() is not None
        for record in life.output.news():
            self._note(life, record)
        if ended and life.ended_s is None:
            life.ended_s = self._workspace.now()

    def _note(self, life: CurrentLife, record: Mapping[str, Any]) -> None:
        now = self._workspace.now()
        match record.get("event"):
            case "progress":
                life.peer_id = record["peer"]
                life.reports.append(
                    Report(
                        at_s=now,
                        steps=record["steps"],
                        trained_s=record["trained_s"],
                        merged_tokens=record["fates"].get("merged", 0.0),
                        global_tokens=record["global_tokens"],
                        peers=record["peers"],
                        loss=record["loss"],
                        blocked_p99_ms=record["blocked_p99_ms"],
                    )
                )
            case "round" if record["contributed"] and life.merged_after_steps is None:
                life.merged_after_steps = life.steps
            case "phase" if record["name"] == "ready" and life.ready_s is None:
                life.ready_s = now
            case "link":
                life.link = record["link"]
            case "measured" if not self.hostile:
                self.measured.append((record["version"], record["loss"]))

    def sample(self) -> None:
        """Record memory and descriptors of its processes."""
        self.samples += _sampled(self.life.process, self._workspace, role="trainer")

    def make_identity(self) -> PeerId:
        """Its peer id, before its first life."""
        self.directory.mkdir()
        return Identity.load_or_create(self.directory / "identity.key").peer_id


def _sampled(
    process: subprocess.Popen[bytes], workspace: Workspace, *, role: str
) -> Iterator[Sample]:
    """Memory and descriptors of a process with this role, and of its children."""
    now = workspace.now()
    members = family(process)
    workspace.note(members)
    for member in members:
        with contextlib.suppress(psutil.Error):
            words = " ".join(member.cmdline())
            yield Sample(
                at_s=now,
                pid=member.pid,
                role="agent" if "peer.agent" in words else "daemon" if "p2pd" in words else role,
                descriptors=member.num_fds(),
                memory_bytes=member.memory_info().rss,
            )


class Bootstrap:
    """A bootstrap peer over all its lives, which share its key and its port."""

    def __init__(self, workspace: Workspace, index: int) -> None:
        self.name = f"bootstrap-{index}"
        self.address = ""
        """Known after ``wait_for_address``."""
        self.process: subprocess.Popen[bytes] | None = None
        self.samples: list[Sample] = []
        self._workspace = workspace
        self._directory = workspace.directory / self.name
        self._directory.mkdir()
        self._listen = LOOPBACK
        self._announce: str | None = None
        if workspace.proxies is not None:
            inner, outer = workspace.proxies.ports(self.name)
            self._listen = f"/ip4/127.0.0.1/tcp/{inner}"
            self._announce = f"/ip4/127.0.0.1/tcp/{outer}"
        self._lives = 0

    def launch(self) -> None:
        log = self._directory / f"life-{self._lives}.out"
        self._lives += 1
        arguments = bootstrap_command(self._directory, listen=self._listen)
        if self._announce is not None:
            arguments += ["--announce", self._announce]
        self.process = spawn(arguments, log, environment=self._workspace.environment())

    def wait_for_address(self) -> None:
        """Wait until its first life has printed its address; later lives listen there again.

        Raises ``ProcessFailed``.
        """
        assert self.process is not None
        output = Output(self._directory / "life-0.out")
        self.address = output.first(
            "address", self.process, name=self.name, within_s=START_WITHIN_S
        )
        if self._announce is None:
            self._listen = self.address.partition("/p2p/")[0]

    def sample(self) -> None:
        """Record memory and descriptors of its processes."""
        if self.process is not None:
            self.samples += _sampled(self.process, self._workspace, role="bootstrap")

    def kill(self) -> None:
        if self.process is not None:
            self._workspace.note(family(self.process))
            kill_tree(self.process)
            self.process = None
