"""A swarm of real ``shoal`` commands on loopback.

Starts ``shoal bootstrap | start | join ... --json`` as a user would, reads their output, and kills
them with their child processes. Processes that are left behind fail the test
(``tests.processes``), and all are ended with it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from peer.demo.processes import kill_tree
from tests.processes import Processes

Record = dict[str, Any]

ANY_LOOPBACK_PORT = "/ip4/127.0.0.1/tcp/0"

RUN_TEXT = """\
schema = 1
name = "{name}"
seeds = [{seeds}]

[model]
recipe = "gpt"
layers = {layers}
width = {width}
heads = 4
context = 64
{model}

[data]
recipe = "python_stdlib"
sequence_length = {sequence_length}

[inner]
optimizer = "adamw"
learning_rate = {learning_rate}
batch_size = {batch_size}

[schedule]
warmup_tokens = 20000

[outer]
fragments = {fragments}
steps_per_cycle = {cycle}
codec = "{codec}"
line_share = {line_share}
{outer}

[rounds]
quorum_deadline_s = {quorum_deadline_s}
round_deadline_s = {round_deadline_s}

[membership]
heartbeat_s = {heartbeat_s}
expiry_s = {expiry_s}

[end]
tokens = {tokens}
"""

DEFAULTS: Mapping[str, Any] = {
    "name": "integration",
    "layers": 1,
    "width": 32,
    "model": "",
    "sequence_length": 32,
    "learning_rate": 3e-3,
    "batch_size": 4,
    "fragments": 4,
    "cycle": 24,
    "codec": "int4",
    "line_share": 0.7,
    "outer": "",
    "quorum_deadline_s": 10.0,
    "round_deadline_s": 20.0,
    "heartbeat_s": 2.0,
    "expiry_s": 8.0,
    "tokens": 100_000_000,
}


def run_text(*seeds: str, **changes: Any) -> str:
    """A run file of a tiny byte-level transformer, with changed settings."""
    unknown = changes.keys() - DEFAULTS.keys()
    assert not unknown, f"the text of these runs has no {sorted(unknown)}"
    quoted = ", ".join(f'"{seed}"' for seed in seeds)
    return RUN_TEXT.format(seeds=quoted, **{**DEFAULTS, **changes})


def until(
    happened: Callable[[], bool], what: str, *, timeout_s: float = 90.0, look_every_s: float = 0.1
) -> float:
    """Poll until a condition holds; returns the seconds that it took."""
    began = time.monotonic()
    while not happened():
        assert time.monotonic() - began < timeout_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(look_every_s)
    return time.monotonic() - began


def sums_up(fates: Mapping[str, float]) -> bool:
    """Check that every token is accounted for: processed = merged + pending + discarded."""
    rest = sum(count for name, count in fates.items() if name != "processed")
    return fates["processed"] == pytest.approx(rest, abs=1e-6)


class Command:
    """A command or a helper as a process, which may be started several times, and its output."""

    def __init__(
        self,
        processes: Processes,
        arguments: Sequence[str],
        *,
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        module: str = "peer.cli",
        program: Sequence[str] = (),
    ) -> None:
        """``program``: what Python runs in place of a module."""
        self._processes = processes
        self._environment = dict(environment or {})
        # -P keeps the checkout out of the path of commands; helpers are in the checkout.
        run = program or [*(["-P"] if module == "peer.cli" else []), "-m", module]
        self._python = [sys.executable, *run]
        self.arguments = list(arguments)
        self.prefix = list(prefix)
        self.lives = 0
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        self.lives += 1
        command = [*self.prefix, *self._python, *self.arguments]
        return self._processes.start(command, environment=self._environment)

    def again(self, *arguments: str) -> None:
        """Start it again after it ended or was killed."""
        assert self.process.poll() is not None, "it still runs"
        if arguments:
            self.arguments = list(arguments)
        self.process = self._start()

    @property
    def output(self) -> str:
        """Output of the last start."""
        return self._processes.output_of(self.process)

    def records(self, event: str | None = None) -> list[Record]:
        """The complete JSON lines of the last start, oldest first."""
        return self._processes.records_of(self.process, event)

    def wait_for(
        self, wanted: Callable[[Record], bool], what: str, *, timeout_s: float = 90.0
    ) -> Record:
        """The first matching record. Fails if the process ends or is too slow."""
        deadline = time.monotonic() + timeout_s
        while True:
            code = self.process.poll()
            for record in self.records():
                if wanted(record):
                    return record
            assert code is None, f"{what}: it ended with {code} and said:\n{self.output[-3000:]}"
            assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
            time.sleep(0.1)

    def wait(self, *, timeout_s: float = 60.0) -> int:
        return self.process.wait(timeout=timeout_s)

    def kill(self) -> None:
        """Kill trainer, agent and daemon with SIGKILL."""
        self._processes.note()
        kill_tree(self.process)

    def stop(self) -> None:
        """Ask it to leave, as the first Ctrl-C does."""
        self.process.terminate()


class Learner(Command):
    """A learner of the swarm."""

    def __init__(
        self,
        processes: Processes,
        directory: Path,
        command: Sequence[str],
        *,
        pace_s: float = 0.05,
        options: Sequence[str] = (),
        prefix: Sequence[str] = (),
        listen: str = ANY_LOOPBACK_PORT,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.directory = directory
        self.name = directory.name
        self.pace_s = pace_s
        self.options = [
            *("--directory", str(directory), "--name", self.name),
            *("--listen", listen, "--pace", str(pace_s)),
            *("--threads", "1", "--json", "--yes", *options),
        ]
        environment = {
            "XDG_DATA_HOME": str(directory.parent / "data"),
            "OMP_NUM_THREADS": "1",
            **(environment or {}),
        }
        super().__init__(
            processes, [*command, *self.options], prefix=prefix, environment=environment
        )

    def come_back(self, link: str) -> None:
        """Join again with the same folder after it was killed."""
        self.again("join", link, *self.options)

    def link(self) -> str:
        return str(self.wait_for(lambda r: r.get("event") == "link", "its link")["link"])

    def ready(self, *, timeout_s: float = 90.0) -> None:
        def is_ready(record: Record) -> bool:
            return record.get("event") == "phase" and record.get("name") == "ready"

        self.wait_for(is_ready, f"{self.name} is ready", timeout_s=timeout_s)

    def progress(self) -> Record:
        """The last progress report; empty before the first one."""
        reports = [r for r in self.records() if r.get("event") in ("progress", "done")]
        return reports[-1] if reports else {}

    def own_rounds(self) -> list[Record]:
        """Rounds since the last start that merged its work."""
        return [record for record in self.records("round") if record["contributed"]]

    def end(self, *, timeout_s: float = 90.0) -> Record:
        """Wait until it has ended, by itself or after ``stop``; returns its last record."""
        code = self.wait(timeout_s=timeout_s)
        assert code in (0, 130), f"{self.name} ended with {code}:\n{self.output[-3000:]}"
        return self.records("done")[-1]


def is_ready(record: Record) -> bool:
    return record.get("event") == "phase" and record.get("name") == "ready"


class Swarm:
    """The processes of one test."""

    def __init__(self, processes: Processes, directory: Path) -> None:
        self.processes = processes
        self.directory = directory
        self.learners: list[Learner] = []

    def bootstrap(
        self,
        name: str = "bootstrap",
        *,
        listen: str = ANY_LOOPBACK_PORT,
        prefix: Sequence[str] = (),
        options: Sequence[str] = (),
    ) -> Command:
        """A bootstrap peer that is ready."""
        where = self.directory / name
        arguments = [
            *("bootstrap", "--listen", listen, "--json"),
            *("--data-dir", str(where), "--page", "off", *options),
        ]
        command = Command(self.processes, arguments, prefix=prefix)
        address_of(command)
        return command

    def start(self, name: str, text: str, **settings: Any) -> Learner:
        """The founder of a run."""
        path = self.directory / f"{name}.toml"
        path.write_text(text, encoding="utf-8")
        return self._add(name, ["start", str(path)], **settings)

    def join(self, name: str, where: str, **settings: Any) -> Learner:
        return self._add(name, ["join", where], **settings)

    def keep(
        self,
        directory: Path,
        link: str,
        *,
        listen: str = ANY_LOOPBACK_PORT,
        prefix: Sequence[str] = (),
        options: Sequence[str] = (),
    ) -> Command:
        """A keeper that has the state of the run."""
        arguments = [
            *("keep", link, "--directory", str(directory), "--name", "keeper", "--json", "--yes"),
            *("--listen", listen, *options),
        ]
        command = Command(self.processes, arguments, prefix=prefix)
        command.wait_for(is_ready, "the keeper has the state")
        return command

    def _add(self, name: str, command: Sequence[str], **settings: Any) -> Learner:
        learner = Learner(self.processes, self.directory / name, command, **settings)
        self.learners.append(learner)
        return learner

    def end(self) -> list[Record]:
        """Stop all learners and return their last records."""
        for learner in self.learners:
            learner.stop()
        return [learner.end() for learner in self.learners]


def address_of(bootstrap: Command) -> str:
    record = bootstrap.wait_for(lambda r: "address" in r, "the bootstrap peer's address")
    return str(record["address"])


def shoal(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with its data in ``home``."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "peer.cli", *arguments],
        env={**os.environ, "XDG_DATA_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def answer(*arguments: str, home: Path) -> Record:
    """The JSON that a command prints with ``--json``."""
    done = shoal(*arguments, "--json", home=home)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def load() -> str:
    """The load of the machine, to be printed with every measured figure."""
    return "load " + " ".join(f"{value:.1f}" for value in os.getloadavg())


def tell(text: str) -> None:
    """Print a measured figure; visible with ``pytest -s``."""
    sys.stdout.write(f"\n{text}\n")
