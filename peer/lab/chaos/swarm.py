"""A swarm of the real commands on loopback: started, watched and ended, whatever happens to it.

``Swarm`` owns every process, the folder with their files, and the clock that all times are on. It
hurts nobody (``peer.lab.chaos.hurting``) and judges nothing (``peer.lab.chaos.judging.oracle``).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from peer.errors import PeerError
from peer.lab.chaos.clocks import set_clock, write_hook
from peer.lab.chaos.judging.evidence import HeldOutPoint, Leaks, Life, Report, Sample
from peer.lab.chaos.proxy import Proxies
from peer.lab.commands import CLI, family, kill_tree, new_records, spawn
from peer.run_file.sections import (
    AdamwInner,
    End,
    Evaluation,
    GptModel,
    Membership,
    Outer,
    PythonStdlibData,
    Rounds,
    RunFile,
    Schedule,
)
from peer.run_file.writing import to_toml

START_WITHIN_S = 180.0
"""Ten seconds on a machine of its own, 92 were seen at a load of 24."""

LEAVE_WITHIN_S = 60.0
SAMPLE_EVERY_S = 4.0

CLOCKS_OFF_S = (0.0, -3600.0, 45.0, 7200.0, -5.0)
"""Of learners whose clocks are wrong, in turns."""

SYNCHRONOUS_S = 150.0
"""So long a synchronous swarm waits for whoever is away: longer than any recovery, not for ever."""

LOOPBACK = "/ip4/127.0.0.1/tcp/0"

SEQUENCE_LENGTH = 32
BATCH_SIZE = 4
STEP_TOKENS = SEQUENCE_LENGTH * BATCH_SIZE


class SwarmFailed(PeerError):
    """A process of the swarm did not do what it should, before anything was done to it."""

    def __init__(self, what: str, log: str) -> None:
        super().__init__(what, log)
        self.what = what
        self.log = log

    def __str__(self) -> str:
        return f"the swarm stopped: {self.what}; its output is in {self.log}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmSettings:
    """How large a swarm, and where."""

    directory: Path
    peers: int = 4
    bootstraps: int = 2
    pace_s: float = 0.2
    """Least time per step: so that a learner has time to spare, as if it had a machine."""
    cycle_steps: int = 16
    synchronous: bool = False
    """The control of the goodput experiment: every round waits for all, every trainer for it."""
    expiry_s: float = 6.0
    hostile: bool = False
    proxied: bool = False
    skewed: bool = False

    def __post_init__(self) -> None:
        if not 2 <= self.peers <= 32:
            raise ValueError(f"peers is {self.peers}; a swarm on one machine has 2 to 32")
        if not self.pace_s > 0:
            raise ValueError(f"pace_s is {self.pace_s}; learners that share cores must be paced")


def run_file(settings: SwarmSettings, seeds: Sequence[str]) -> RunFile:
    """A tiny byte-level transformer, and rounds that are fast enough to be hurt often."""
    return RunFile(
        name="chaos",
        description="A swarm that is hurt on purpose.",
        seeds=list(seeds),
        model=GptModel(layers=1, width=32, heads=4, context=64),
        data=PythonStdlibData(sequence_length=SEQUENCE_LENGTH),
        inner=AdamwInner(learning_rate=3e-3, batch_size=BATCH_SIZE),
        # Constant: then losses can be compared after as many tokens, however long a run was.
        schedule=Schedule(shape="constant", warmup_tokens=0),
        outer=Outer(
            fragments=4,
            steps_per_cycle=settings.cycle_steps,
            overlap_steps=0 if settings.synchronous else 2,
            codec="int8",
        ),
        rounds=Rounds(
            # A number: "all" would mean the live ones, and go on without who is away.
            quorum=settings.peers if settings.synchronous else "majority",
            quorum_deadline_s=SYNCHRONOUS_S if settings.synchronous else 8.0,
            round_deadline_s=2 * SYNCHRONOUS_S if settings.synchronous else 16.0,
            # Nobody stays alone for so long here: whoever is cut off keeps its work.
            alone_s=600.0,
        ),
        membership=Membership(
            heartbeat_s=min(2.0, settings.expiry_s / 3), expiry_s=settings.expiry_s
        ),
        evaluation=Evaluation(sequences=64),
        end=End(tokens="unlimited"),
    )


@dataclass(slots=True)
class _Living:
    """A life as it is being lived."""

    process: subprocess.Popen[bytes]
    log: Path
    began_s: float
    read_bytes: int = 0
    ready_s: float | None = None
    ended_s: float | None = None
    killed: bool = False
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
        )


class Learner:
    """One learner over all its lives."""

    def __init__(self, swarm: Swarm, index: int, *, hostile: bool = False) -> None:
        self.swarm = swarm
        self.index = index
        self.hostile = hostile
        self.name = "mallory" if hostile else f"peer-{index}"
        self.directory = swarm.directory / self.name
        self.directory.mkdir()
        self.lives: list[_Living] = []
        self.samples: list[Sample] = []
        self.clock: list[tuple[float, float]] = [(0.0, 0.0)]
        """Since when its clock was wrong by how much."""
        self.stopped = False
        """By SIGSTOP."""

    @property
    def life(self) -> _Living:
        return self.lives[-1]

    @property
    def up(self) -> bool:
        return bool(self.lives) and self.life.ended_s is None

    @property
    def whole(self) -> bool:
        """In the run, and nothing keeps it from training."""
        return self.up and not self.stopped and self.life.ready_s is not None

    @property
    def peer_id(self) -> str:
        return next((life.peer_id for life in reversed(self.lives) if life.peer_id), "")

    @property
    def events_path(self) -> Path:
        return self.directory / "events.jsonl"

    def launch(self, where: Sequence[str]) -> None:
        """Begin a life. The folder is the same in all of them."""
        swarm = self.swarm
        log = self.directory / f"life-{len(self.lives)}.out"
        arguments = [
            *where,
            *("--directory", str(self.directory), "--name", self.name),
            *self._listening(),
            *("--pace", str(swarm.settings.pace_s), "--threads", "1", "--json", "--yes"),
        ]
        module = ("-P", "-m", "peer.lab.chaos.hostile") if self.hostile else CLI
        process = spawn(arguments, log, module=module, environment=swarm.environment(self))
        self.lives.append(_Living(process, log, swarm.now()))

    def _listening(self) -> Sequence[str]:
        proxies = self.swarm.proxies
        if proxies is None:
            return ("--listen", LOOPBACK)
        inner, outer = proxies.ports(self.name)
        lane_inner, lane_outer = proxies.ports(self.name, "lane")
        return (
            *("--listen", f"/ip4/127.0.0.1/tcp/{inner}"),
            *("--announce", f"/ip4/127.0.0.1/tcp/{outer}"),
            *("--lane", f"{lane_inner}:{lane_outer}"),
        )

    def come_back(self) -> None:
        """Begin the next life, with the same folder."""
        self.launch(["join", str(self.swarm.run_path)])

    def kill(self) -> None:
        """kill -9: trainer, agent and daemon."""
        life = self.life
        self.swarm.note(family(life.process))
        life.killed = True
        kill_tree(life.process)
        life.ended_s = self.swarm.now()
        self.stopped = False

    def members(self, word: str) -> list[psutil.Process]:
        """Its processes whose command line has this word."""
        found = []
        for process in family(self.life.process):
            with contextlib.suppress(psutil.Error):
                if any(word in argument for argument in process.cmdline()):
                    found.append(process)
        return found

    def signal(self, number: signal.Signals) -> None:
        """To the whole family."""
        for process in family(self.life.process):
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)
        self.stopped = number is signal.SIGSTOP

    def set_clock(self, offset_s: float) -> None:
        """Its clock is wrong by so much from now on."""
        self.clock.append((self.swarm.now(), offset_s))
        set_clock(self.directory / "clock", offset_s)

    def read(self) -> None:
        """Take in what it has said since the last time."""
        if not self.lives:
            return
        life = self.life
        ended = life.process.poll() is not None
        records, life.read_bytes = new_records(life.log, life.read_bytes)
        for record in records:
            self._note(life, record)
        if ended and life.ended_s is None:
            life.ended_s = self.swarm.now()

    def _note(self, life: _Living, record: Mapping[str, Any]) -> None:
        now = self.swarm.now()
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
                self.swarm.heard_loss(record["version"], record["loss"])

    def sample(self) -> None:
        """What its processes hold right now."""
        now = self.swarm.now()
        members = family(self.life.process)
        self.swarm.note(members)
        for process in members:
            with contextlib.suppress(psutil.Error):
                words = " ".join(process.cmdline())
                role = (
                    "agent" if "peer.agent" in words else "daemon" if "p2pd" in words else "trainer"
                )
                self.samples.append(
                    Sample(
                        at_s=now,
                        pid=process.pid,
                        role=role,
                        descriptors=process.num_fds(),
                        memory_bytes=process.memory_info().rss,
                    )
                )

    def last_words(self) -> str:
        return str(self.life.log)


class Bootstrap:
    """A bootstrap peer over all its lives: its key and its port stay."""

    def __init__(self, swarm: Swarm, index: int) -> None:
        self.name = f"bootstrap-{index}"
        self._swarm = swarm
        self._directory = swarm.directory / self.name
        self._directory.mkdir()
        self._listen = LOOPBACK
        self._announce: str | None = None
        if swarm.proxies is not None:
            inner, outer = swarm.proxies.ports(self.name)
            self._listen = f"/ip4/127.0.0.1/tcp/{inner}"
            self._announce = f"/ip4/127.0.0.1/tcp/{outer}"
        self.address = ""
        self.process: subprocess.Popen[bytes] | None = None
        self._lives = 0

    def launch(self) -> None:
        log = self._directory / f"life-{self._lives}.out"
        self._lives += 1
        arguments = [
            *("bootstrap", "--listen", self._listen, "--json"),
            *("--data-dir", str(self._directory), "--page", "off"),
        ]
        if self._announce is not None:
            arguments += ["--announce", self._announce]
        self.process = spawn(arguments, log, environment=self._swarm.environment(None))

    def until_known(self) -> None:
        """Wait for its address, after its first launch; from now on it listens at the same."""
        assert self.process is not None
        log = self._directory / "life-0.out"
        deadline = time.monotonic() + START_WITHIN_S
        while not self.address:
            for record in new_records(log, 0)[0]:
                self.address = str(record.get("address", ""))
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SwarmFailed(f"{self.name} told no address", str(log))
            time.sleep(0.05)
        if self._announce is None:
            self._listen = self.address.partition("/p2p/")[0]

    def kill(self) -> None:
        if self.process is not None:
            self._swarm.note_processes()
            kill_tree(self.process)
            self.process = None


class Swarm:
    """Processes, their folder and their clock. Use as a context manager."""

    def __init__(self, settings: SwarmSettings) -> None:
        self.settings = settings
        self.directory = settings.directory
        self.directory.mkdir(parents=True, exist_ok=True)
        self._began = time.monotonic()
        self.began_at = time.time()
        """Unix time at 0 s."""
        # Short: daemons put sockets into it, whose paths may not be long.
        self._temporary = Path(tempfile.mkdtemp(prefix="shoal-chaos-"))
        self._shared_before = _shared_memory()
        self.proxies: Proxies | None = None
        self.bootstraps: list[Bootstrap] = []
        self.learners: list[Learner] = []
        self.mallory: Learner | None = None
        self.held_out: list[HeldOutPoint] = []
        self._versions_measured: set[int] = set()
        self._others: list[subprocess.Popen[bytes]] = []
        self._seen: set[psutil.Process] = set()
        self._used_s: dict[psutil.Process, float] = {}
        """Processor time of each, when it was seen last."""
        self._sampled_s = 0.0
        self.run_path = self.directory / "run.toml"
        self.run: RunFile | None = None
        self.leaks: Leaks | None = None

    def __enter__(self) -> Swarm:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def now(self) -> float:
        return time.monotonic() - self._began

    @property
    def everybody(self) -> list[Learner]:
        return [*self.learners, *([self.mallory] if self.mallory else [])]

    def environment(self, learner: Learner | None) -> dict[str, str]:
        """Of a process of ours."""
        environment = {
            "XDG_DATA_HOME": str(self.directory / "data"),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self._temporary),
            # torch keeps a cache of its own in the temporary folder, whoever uses it.
            "TORCHINDUCTOR_CACHE_DIR": str(self.directory / "torch"),
        }
        if learner is not None and self.settings.skewed:
            folders = [str(self.directory / "clock"), os.environ.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
            environment["SHOAL_CHAOS_CLOCK"] = str(learner.directory / "clock")
        return environment

    def compose(self, seeds: Sequence[str]) -> RunFile:
        """The run that everybody joins, from the addresses of the bootstrap peers."""
        return run_file(self.settings, seeds)

    # --- life -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Until everybody is in the run. Raises ``SwarmFailed``."""
        if self.settings.proxied:
            self.proxies = Proxies()
            self.proxies.find_diallers(self._dialler)
        if self.settings.skewed:
            write_hook(self.directory / "clock")
        for index in range(self.settings.bootstraps):
            self.bootstraps.append(Bootstrap(self, index))
            self.bootstraps[-1].launch()
        for bootstrap in self.bootstraps:
            bootstrap.until_known()
        self.run = self.compose([b.address for b in self.bootstraps])
        self.run_path.write_text(to_toml(self.run), encoding="utf-8")
        self.learners = [Learner(self, index) for index in range(self.settings.peers)]
        if self.settings.hostile:
            self.mallory = Learner(self, 0, hostile=True)
        if self.settings.skewed:
            for learner, offset_s in zip(self.learners, itertools.cycle(CLOCKS_OFF_S)):
                learner.set_clock(offset_s)
        # All at once: whoever joins waits for the founder's state.
        self.learners[0].launch(["start", str(self.run_path)])
        for learner in self.everybody[1:]:
            learner.come_back()
        for learner in self.everybody:
            self._until(partial(_trains, learner), "trains", learner)

    def until_steady(self, steps: int, *, within_s: float) -> None:
        """Wait until everybody has made so many steps. Raises ``SwarmFailed``."""
        deadline = time.monotonic() + within_s
        while any(learner.life.steps < steps for learner in self.learners):
            self.turn()
            if time.monotonic() > deadline:
                slow = min(self.learners, key=lambda learner: learner.life.steps)
                what = f"{slow.name} made {slow.life.steps} steps in {within_s:g} s"
                raise SwarmFailed(what, slow.last_words())
            time.sleep(0.1)

    def _until(self, happened: Callable[[], bool], what: str, learner: Learner) -> None:
        deadline = time.monotonic() + START_WITHIN_S
        while not happened():
            self.turn()
            if learner.life.ended_s is not None:
                code = learner.life.process.poll()
                raise SwarmFailed(f"{learner.name} ended with {code}", learner.last_words())
            if time.monotonic() > deadline:
                raise SwarmFailed(
                    f"it took over {START_WITHIN_S:g} s until {learner.name} {what}",
                    learner.last_words(),
                )
            time.sleep(0.1)

    def _dialler(self, port: int) -> str | None:
        """Who has this local port. Called from the proxies' thread."""
        assert self.proxies is not None
        found = self.proxies.listener_at(port)  # libp2p dials from where it listens, if it can
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

    def turn(self) -> None:
        """Read what everybody says, and now and then what they hold."""
        for learner in self.everybody:
            learner.read()
        if self.now() - self._sampled_s >= SAMPLE_EVERY_S:
            self._sampled_s = self.now()
            for learner in self.everybody:
                if learner.up:
                    learner.sample()

    def heard_loss(self, version: int, loss: float) -> None:
        """A measurement gets around: only its first telling counts."""
        if version in self._versions_measured:
            return
        self._versions_measured.add(version)
        known = [x.life.reports[-1].global_tokens for x in self.learners if x.life.reports]
        if known:
            self.held_out.append(HeldOutPoint(at_s=self.now(), global_tokens=max(known), loss=loss))

    def helper(
        self, module: str, arguments: Sequence[str], log: str
    ) -> tuple[subprocess.Popen[bytes], Path]:
        """Another process of the scenario, ended with the swarm; and where its output goes."""
        path = self.directory / log
        process = spawn(
            arguments, path, module=("-P", "-m", module), environment=self.environment(None)
        )
        self._others.append(process)
        return process, path

    def note(self, processes: Iterable[psutil.Process]) -> None:
        """Remember them: whoever is orphaned later still counts as ours."""
        for process in processes:
            self._seen.add(process)
            with contextlib.suppress(psutil.Error):
                self._used_s[process] = _used_s(process)

    def used_s(self) -> tuple[float, float]:
        """Processor time so far: ours, and that of the whole machine."""
        self.note_processes()
        times = psutil.cpu_times()
        machine_s = times.user + times.nice + times.system + getattr(times, "steal", 0.0)
        return sum(self._used_s.values()) + _used_s(psutil.Process()), machine_s

    def note_processes(self) -> None:
        """Remember all that run now."""
        for process in self._processes():
            self.note(family(process))

    def _processes(self) -> list[subprocess.Popen[bytes]]:
        found = [x.life.process for x in self.everybody if x.lives]
        found += [b.process for b in self.bootstraps if b.process is not None]
        found += self._others
        return [process for process in found if process.poll() is None]

    def leave(self) -> None:
        """Everybody is asked to leave; whoever does not is killed in the end."""
        self.note_processes()
        for learner in self.everybody:
            if learner.up:
                learner.life.process.terminate()
        deadline = time.monotonic() + LEAVE_WITHIN_S
        while any(x.up for x in self.everybody) and time.monotonic() < deadline:
            self.turn()
            time.sleep(0.1)

    def end(self) -> Leaks:
        """End every process, and say what is left of them. The folder with the logs stays."""
        if self.leaks is not None:
            return self.leaks
        self.note_processes()
        for learner in self.everybody:
            if learner.up:
                learner.kill()
        for bootstrap in self.bootstraps:
            if bootstrap.process is not None:
                end_softly(bootstrap.process, within_s=15.0)
        for other in self._others:
            end_softly(other, within_s=10.0)
        if self.proxies is not None:
            self.proxies.close()
        left = _still_running(self._seen, timeout_s=8.0)
        texts = tuple(_described(process) for process in left)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        files = tuple(sorted(str(path) for path in self._temporary.iterdir()))
        shared = tuple(sorted(_shared_memory() - self._shared_before))
        shutil.rmtree(self._temporary, ignore_errors=True)
        self.leaks = Leaks(processes=texts, files=files, shared_memory=shared)
        return self.leaks


def end_softly(process: subprocess.Popen[bytes], *, within_s: float) -> None:
    """Ask it to end, and kill it with its family if it does not."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(within_s)
    kill_tree(process)


def _trains(learner: Learner) -> bool:
    return bool(learner.life.reports)


def _shared_memory() -> set[str]:
    """Segments with a name, of this user and ours by it."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return set()
    return {str(path) for path in folder.iterdir() if "shoal" in path.name}


def _still_running(processes: set[psutil.Process], *, timeout_s: float) -> list[psutil.Process]:
    deadline = time.monotonic() + timeout_s
    while True:
        left = [process for process in processes if _runs(process)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _used_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _described(process: psutil.Process) -> str:
    try:
        return f"{process.pid}: {' '.join(process.cmdline())[:160]}"
    except psutil.Error:
        return str(process.pid)
