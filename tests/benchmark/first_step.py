"""Times from the command to the first training step: ``python -m tests.benchmark.first_step``.

One learner founds a run and pauses, another joins it over loopback, all with the commands of users:
each has the machine to itself. Printed are the seconds from the start of each command until it
entered each phase, and until the first optimizer step was over. A batch is one short sequence, so
that the step itself hardly counts.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from peer import signals
from peer.demo.processes import CLI, Output, ProcessFailed, kill_tree, spawn
from peer.run_file.reading import parse
from peer.run_file.writing import to_toml
from peer.trainer.needs import needs_of

WITHIN_S = 300.0
LOOK_EVERY_S = 0.02

RUN = """
name = "first-step"
[model]
recipe = "gpt"
size = "{size}"
[data]
recipe = "python_stdlib"
sequence_length = {sequence}
[inner]
optimizer = "adamw"
learning_rate = 3e-4
batch_size = 1
[end]
tokens = 1_000_000_000
"""


class Command:
    """A learner from its command to its first step."""

    def __init__(self, name: str, folder: Path, arguments: list[str]) -> None:
        self.name = name
        self._folder = folder
        self.times_s: dict[str, float] = {}
        self.link: str | None = None
        self._output = Output(folder / f"{name}.out")
        self._began = time.monotonic()
        self.process: subprocess.Popen[bytes] = spawn(
            [
                *arguments,
                *("--directory", str(folder / name), "--name", name, "--json", "--yes"),
                *("--listen", "/ip4/127.0.0.1/tcp/0", "--page", "off"),
            ],
            self._output.log,
            environment={"XDG_DATA_HOME": str(folder / "data")},
        )

    def wait(self) -> None:
        """Wait for the first step. Raises ``ProcessFailed`` if there is none."""
        while "first step" not in self.times_s:
            now_s = time.monotonic() - self._began
            if now_s > WITHIN_S or self.process.poll() is not None:
                raise ProcessFailed(f"{self.name} has not trained", str(self._output.log))
            for each in self._output.news():
                self._note(each, now_s)
            time.sleep(LOOK_EVERY_S)

    def pause(self) -> None:
        """Let it make no more steps; it goes on serving its state."""
        directory = str(self._folder / self.name)
        command = [sys.executable, *CLI, "pause", "--directory", directory]
        subprocess.run(command, check=True, capture_output=True, timeout=WITHIN_S)

    def _note(self, record: dict[str, Any], now_s: float) -> None:
        match record.get("event"):
            case "link":
                self.link = record["link"]
            case "phase":
                self.times_s.setdefault(f"{record['name']}: {record['text']}", now_s)
            case "progress" if record["steps"]:
                self.times_s.setdefault("first step", now_s)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmark.first_step")
    parser.add_argument("--size", default="124m", help="size of the model, as in a run file")
    parser.add_argument("--sequence", type=int, default=64, help="tokens of the only sequence")
    options = parser.parse_args()
    run = parse(RUN.format(size=options.size, sequence=options.sequence))
    sys.stdout.write(f"{needs_of(run).parameters / 1e6:.0f} M parameters\n")
    commands: list[Command] = []
    with signals.as_interrupts(), tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        path = folder / "run.toml"
        path.write_text(to_toml(run), encoding="utf-8")
        try:
            for name, verb in (("founder", "start"), ("newcomer", "join")):
                where = str(path) if not commands else str(commands[0].link)
                commands.append(Command(name, folder, [verb, where]))
                commands[-1].wait()
                if name == "founder":
                    commands[-1].pause()
                sys.stdout.write(f"\n{name}\n")
                for what, seconds in commands[-1].times_s.items():
                    sys.stdout.write(f"{seconds:7.1f} s  {what}\n")
                sys.stdout.flush()
        finally:
            for command in commands:
                kill_tree(command.process)
    return 0


if __name__ == "__main__":
    sys.exit(main())
