"""Times from the command to the first training step: ``python -m tests.benchmark.first_step``.

One learner founds a run and pauses, another joins it over loopback, all with the commands of users:
each has the machine to itself. Printed are the seconds from the start of each command until it
entered each phase, and until the first optimizer step was over. A batch is one short sequence, so
that the step itself hardly counts.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from peer import signals
from peer.run_file.presets import preset
from peer.run_file.sections import AdamwInner, End, PythonStdlibData
from peer.run_file.writing import to_toml
from peer.trainer.needs import needs_of
from tests.processes import Processes
from tests.swarms.commands import ANY_LOOPBACK_PORT, Command, Record, shoal

WITHIN_S = 300.0


class Newcomer(Command):
    """A learner from its command to its first step."""

    def __init__(self, processes: Processes, folder: Path, name: str, *arguments: str) -> None:
        self.name, self._folder = name, folder
        self.times_s: dict[str, float] = {}
        self._began = time.monotonic()
        options = [
            *("--directory", str(folder / name), "--name", name, "--json", "--yes"),
            *("--listen", ANY_LOOPBACK_PORT, "--page", "off"),
        ]
        environment = {"XDG_DATA_HOME": str(folder / "data")}
        super().__init__(processes, [*arguments, *options], environment=environment)
        self.wait_for(self._note, f"{name}'s first step", timeout_s=WITHIN_S)

    def link(self) -> str:
        return str(self.records("link")[-1]["link"])

    def pause(self) -> None:
        """Let it make no more steps; it goes on serving its state."""
        done = shoal("pause", "--directory", str(self._folder / self.name), home=self._folder)
        assert done.returncode == 0, done.stderr

    def _note(self, record: Record) -> bool:
        """Note when a record was seen. Returns whether it tells of a step."""
        now_s = time.monotonic() - self._began
        is_step = record.get("event") == "progress" and bool(record["steps"])
        if record.get("event") == "phase":
            self.times_s.setdefault(f"{record['name']}: {record['text']}", now_s)
        if is_step:
            self.times_s.setdefault("first step", now_s)
        return is_step


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmark.first_step")
    parser.add_argument("--size", default="124m", help="named size of the model, such as 350m")
    parser.add_argument("--sequence", type=int, default=64, help="tokens of the only sequence")
    options = parser.parse_args()
    run = msgspec.structs.replace(
        preset(options.size),
        name="first-step",
        data=PythonStdlibData(sequence_length=options.sequence),
        inner=AdamwInner(learning_rate=3e-4, batch_size=1),
        end=End(tokens=1_000_000_000),
    )
    sys.stdout.write(f"{needs_of(run).parameters / 1e6:.0f} M parameters\n")
    with (
        signals.as_interrupts(),
        tempfile.TemporaryDirectory() as temporary,
        Processes(Path(temporary)) as processes,
    ):
        folder = Path(temporary)
        path = folder / "run.toml"
        path.write_text(to_toml(run), encoding="utf-8")
        founder = Newcomer(processes, folder, "founder", "start", str(path))
        founder.pause()
        newcomer = Newcomer(processes, folder, "newcomer", "join", founder.link())
        for command in (founder, newcomer):
            sys.stdout.write(f"\n{command.name}\n")
            for what, seconds in command.times_s.items():
                sys.stdout.write(f"{seconds:7.1f} s  {what}\n")
            command.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main())
