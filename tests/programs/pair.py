"""Two peers of one program, as processes on this machine, and the same program alone."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log
from pathlib import Path
from typing import Any

from tests.processes import RANKS_ALONE, Processes

LOOP_WARNING = re.compile(r"LoopWarning: .*")

CYCLE = 16
"""Steps after which each fragment is merged again."""

RUN_TEXT = """
name = "{name}"
[model]
recipe = "custom"
[data]
recipe = "custom"
[inner]
optimizer = "custom"
learning_rate = {rate}
[schedule]
warmup_tokens = {warmup}
[outer]
fragments = 4
steps_per_cycle = {cycle}
{outer}
[end]
tokens = {tokens}
"""

ALONE = "learning_rate = 1.0\nmomentum = 0.0\ncodec = 'f32'"
"""Outer settings with which the merges of a lone learner change nothing."""

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
LAUNCH = (
    *("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_machines", "1"),
    *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
)


@dataclass(frozen=True)
class Shape:
    """A program, and the run in which two of it meet."""

    program: str
    tokens: int
    untrained: float = log(32)
    """Loss of a model that knows nothing."""
    rate: float = 3e-3
    outer: str = ""
    second: tuple[str, ...] = ()
    """What starts the second peer, between the interpreter and the program."""
    same_seed: bool = False
    """Both draw the same batches."""

    def text(self, *, alone: bool = False) -> str:
        return RUN_TEXT.format(
            name=self.program.replace("_", "-"),
            rate=self.rate,
            cycle=CYCLE,
            warmup=self.tokens // 40,
            outer=self.outer + (ALONE if alone else ""),
            tokens=self.tokens // 2 if alone else self.tokens,
        )


class Peer:
    """One peer of a program: a process, or those that a launcher starts."""

    def __init__(
        self,
        processes: Processes,
        directory: Path,
        shape: Shape,
        where: Path,
        *launcher: str,
        gate: Path | None = None,
    ) -> None:
        """``gate``: a file that is there when it may make its first step."""
        directory.mkdir()
        self.directory = directory
        self._processes = processes
        self.process: subprocess.Popen[bytes] = processes.python(
            *launcher,
            *("-m", f"tests.programs.{shape.program}", str(where)),
            environment={
                "PROGRAM_DIRECTORY": str(directory),
                "XDG_DATA_HOME": str(directory / "home"),
                "HF_HUB_OFFLINE": "1",
                **({} if gate is None else {"PROGRAM_GATE": str(gate)}),
                **({"PROGRAM_SAME_SEED": "1"} if shape.same_seed else {}),
                **RANKS_ALONE,
            },
        )

    @property
    def output(self) -> str:
        return self._processes.output_of(self.process)

    def link(self) -> str:
        line = self._processes.wait_for_line(self.process, "others join with", timeout_s=240)
        found = re.search(r"shoal://[^']+", line)
        assert found is not None, line
        return found[0]

    def warning(self, *, timeout_s: float) -> str:
        """The first warning about the program's loop."""
        deadline = time.monotonic() + timeout_s
        while not (found := LOOP_WARNING.findall(self.output)):
            assert self.process.poll() is None and time.monotonic() < deadline, self.output[-5000:]
            time.sleep(0.05)
        return str(found[0])

    def end(self, *, timeout_s: float = 300) -> list[dict[str, Any]]:
        """What its processes said at the end, rank 0 first."""
        assert self.process.wait(timeout=timeout_s) == 0, self.output[-5000:]
        lines = [line[4:] for line in self.output.splitlines() if line.startswith("end ")]
        return sorted(map(json.loads, lines), key=lambda said: int(said["rank"]))

    def rounds(self) -> Iterator[Mapping[str, Any]]:
        """Rounds in which something was merged, as its agent logged them."""
        for line in (self.directory / "peer" / "events.jsonl").read_text().splitlines():
            event = json.loads(line)
            if event["event"] == "round" and event["outcome"] == "finished":
                yield event


@dataclass(frozen=True)
class Met:
    """What two peers said and logged."""

    digests: Sequence[str]
    """Of all trained parameters, in every process of both."""
    losses: Sequence[float]
    together: int
    """Number of rounds with the work of both."""
    longest_gap_s: float
    """Longest time without a merge of some fragment, from the first round of both on."""
    slowest_cycle_s: float
    """Longest time of so many steps as each fragment is merged after."""
    pending: float
    """Share of all processed tokens that is in no version."""
    warnings: Sequence[str]

    def __str__(self) -> str:
        return (
            f"rounds of both {self.together}, longest gap {self.longest_gap_s:.2f} s (slowest "
            f"cycle {self.slowest_cycle_s:.2f} s), pending {self.pending:.1%}, digests "
            f"{', '.join(sorted(set(self.digests)))}, loss {self.losses[0]:.4f}"
        )


def meet(processes: Processes, directory: Path, shape: Shape) -> Met:
    """Two peers of the program, until their run is over."""
    run_file, link_file, gate = (directory / n for n in ("my.run.toml", "the.link", "gate"))
    run_file.write_text(shape.text(), encoding="utf-8")
    first = Peer(processes, directory / "first", shape, run_file, gate=gate)
    # It starts at once and waits for the link: frameworks take seconds to import.
    second = Peer(processes, directory / "second", shape, link_file, *shape.second)
    written = directory / "link"
    written.write_text(first.link(), encoding="utf-8")
    written.rename(link_file)
    second.link()
    gate.touch()
    said = [*first.end(), *second.end()]
    rounds = list(first.rounds())
    both = [each for each in rounds if len(each["contributors"]) == 2]
    assert both, "they never met"
    begun, over = both[0]["at"], rounds[-1]["at"]
    gaps = []
    for fragment in {each["fragment"] for each in rounds}:
        merged_at = [each["at"] for each in rounds if each["fragment"] == fragment]
        gaps += [b - a for a, b in pairwise([begun, *(t for t in merged_at if t > begun), over])]
    fates = [each["fates"] for each in said if "fates" in each]
    processed = sum(each["processed"] for each in fates)
    return Met(
        digests=[each["digest"] for each in said],
        losses=[each["loss"] for each in said],
        together=len(both),
        longest_gap_s=max(gaps),
        slowest_cycle_s=max(each["slowest_cycle_s"] for each in said),
        pending=sum(each.get("pending", 0.0) for each in fates) / processed,
        warnings=[w for p in (first, second) for w in LOOP_WARNING.findall(p.output)],
    )


def train_alone(processes: Processes, directory: Path, shape: Shape) -> float:
    """The loss of the program alone, after half of the tokens, as each of two trains on."""
    run_file = directory / "alone.run.toml"
    run_file.write_text(shape.text(alone=True), encoding="utf-8")
    alone = Peer(processes, directory / "alone", shape, run_file)
    return float(alone.end()[0]["loss"])
