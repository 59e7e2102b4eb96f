"""The built-in loop with and without shoal, and one written by hand: ``python -m`` this module.

The loops take turns, each in a process of its own (``training_loops``), so that each has the whole
device and a busy machine hurts them alike. Speeds differ from machine to machine; the
figures to quote are ratios of turns that followed each other. On a CPU that other programs use as
well, ratios by the processor time of the trainer's process are steadier.

All loops train the same model with the same optimizer and the same batches' shape. The text is the
standard library's, which needs no download, and no held-out loss is measured. In the loop with
shoal a second peer on this machine, which computes nothing, takes part in every round.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import psutil
from typer import Argument, Option

from examples.paper.typed import seconds
from peer.cli.application import Json, json_text, usage_errors
from peer.demo.processes import Output, kill_tree, spawn
from peer.errors import PeerError, Unusable
from peer.joining.link import run_at
from peer.run_file.presets import preset
from peer.run_file.reading import from_canonical
from peer.run_file.sections import (
    AdamwInner,
    CustomInner,
    CustomModel,
    End,
    Evaluation,
    PythonStdlibData,
    RunFile,
    Schedule,
)
from peer.signals import as_interrupts
from peer.trainer.computing.device_facts import choose_device
from tests.benchmark.training_loops import Setup
from tests.command_line import Check, run_program, tell

LOOPS = ("alone", "by_hand", "shoal")
BARS = {"by_hand": 0.95, "alone": 0.99}
"""Least speed of the loop with shoal, as a share of the other loop's."""

DEVICE_BARS = {
    ("H100 80GB HBM3", "124m"): ("tokens_per_s", 420_000.0),
    ("H100 80GB HBM3", "1b"): ("share_of_peak", 0.45),
}
"""Least speed with shoal of a device, by a part of its name, and a named size with its usual batch.
"""

USUAL_BATCH = 32

START_TIMEOUT_S = 900.0
"""Time for building, compiling and measuring a model, and for joining."""


class LoopFailed(PeerError):
    """A loop of the benchmark did not finish."""

    loop: str
    reason: str
    message = "the loop {loop} did not finish: {reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBench:
    """Settings of the comparison."""

    run: RunFile
    size: str | None = None
    """The named size that the run has, with the usual batch; ``None``: another run."""
    device: str = "auto"
    threads: int | None = None
    seconds: float = 20.0
    """Measured time of each turn."""
    turns: int = 5
    loops: tuple[str, ...] = LOOPS
    """Loops to measure. Without ``shoal`` there is nobody to merge with, and no bar."""

    def __post_init__(self) -> None:
        if not self.loops or (unknown := sorted(set(self.loops) - set(LOOPS))):
            named = f"loop is {unknown[0]!r}" if self.loops else "no loop is given"
            raise ValueError(f"{named}; there are {', '.join(LOOPS)}")
        if self.turns < 1:
            raise ValueError(f"turns is {self.turns}; it must be at least 1")
        if not self.seconds > 0:
            raise ValueError(f"seconds is {self.seconds}; it must be above 0")


def run_of_size(size: str) -> RunFile:
    """A run of a named size with a batch for one GPU. Raises ``ValueError``."""
    return msgspec.structs.replace(preset(size), inner=AdamwInner(batch_size=USUAL_BATCH))


def small_run() -> RunFile:
    """A run for a few CPU cores."""
    return RunFile(inner=AdamwInner(batch_size=16))


def measured_run(run: RunFile) -> RunFile:
    """The run with a text that is everywhere, without an end and without held-out losses.

    Raises ``Unusable`` if a program brings its model or optimizer.
    """
    for what, section in (("model", run.model), ("optimizer", run.inner)):
        if isinstance(section, CustomModel | CustomInner):
            raise Unusable(
                f"the {what} of run {run.name!r} is 'custom': it cannot be measured",
                section="own-program-needed",
            )
    changed = msgspec.structs.replace(
        run,
        name="bench-training",
        seeds=[],
        data=PythonStdlibData(sequence_length=run.data.sequence_length),
        schedule=Schedule(shape="constant", warmup_tokens=0),
        evaluation=Evaluation(sequences=1, every_versions=1 << 20),
        end=End(tokens="unlimited"),
    )
    return from_canonical(changed.canonical(), changed.run_id)  # checks the combination


def run_training_bench(
    bench: TrainingBench, *, tell: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Let the loops take turns; ``tell`` receives progress lines. Raises ``LoopFailed``."""
    run = measured_run(bench.run)
    turns: list[dict[str, dict[str, Any]]] = []
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        setup = Setup(
            run=run.canonical().decode(),
            device=bench.device,
            threads=bench.threads,
            seconds=bench.seconds,
            folder=folder,
        )
        with ExitStack() as opened:
            seeds: tuple[str, ...] = ()
            if "shoal" in bench.loops:
                tell("alone: warming up")
                pace_s = _measured("alone", setup)["step_s"]
                seeds = (opened.enter_context(_partner(setup, pace_s=pace_s)),)
            for number in range(bench.turns):
                done: dict[str, dict[str, Any]] = {}
                for loop in _order(bench.loops, number):
                    of_loop = replace(setup, seeds=seeds if loop == "shoal" else ())
                    done[loop] = _measured(loop, of_loop)
                    tell(f"turn {number + 1} of {bench.turns}: {_speed_text(done[loop])}")
                turns.append(done)
    rows = {loop: _row(loop, [turn[loop] for turn in turns]) for loop in bench.loops}
    any_turn = turns[0][bench.loops[0]]
    device, shoal = any_turn["device"], rows.get("shoal")
    return {
        "device": device,
        "parameters": any_turn["parameters"],
        "rows": [*rows.values()],
        "bars": [_bar(other, turns) for other in BARS if shoal and other in rows],
        "device_bars": _device_bars(device, bench.size, shoal) if shoal else [],
    }


def _speed_text(turn: Mapping[str, Any]) -> str:
    """The result of a turn in words, for those who end the comparison early."""
    speed, work = turn["tokens_per_s"], turn["tokens_per_cpu_s"]
    return f"{turn['loop']} {speed:.0f} tokens/s, {work:.0f} per second of its processor time"


def _order(loops: Sequence[str], turn: int) -> Sequence[str]:
    """Each loop is first, second and last equally often."""
    shift = turn % len(loops)
    return (*loops[shift:], *loops[:shift])


def _row(loop: str, turns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    speeds = [turn["tokens_per_s"] for turn in turns]
    shares = [turn["share_of_peak"] for turn in turns]
    row = {
        "loop": loop,
        "tokens_per_s": statistics.median(speeds),
        "tokens_per_s_min": min(speeds),
        "tokens_per_s_max": max(speeds),
        "tokens_per_cpu_s": statistics.median(turn["tokens_per_cpu_s"] for turn in turns),
        "share_of_peak": None if None in shares else statistics.median(shares),
        "peak_memory_bytes": max(turn["peak_memory_bytes"] for turn in turns),
        "way": turns[-1]["way"],
        "turns": len(turns),
    }
    if loop == "shoal":
        row["rounds"] = sum(turn["rounds"] for turn in turns)
        row["blocked_share"] = statistics.median(turn["blocked_share"] for turn in turns)
    return row


def _bar(other: str, turns: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """The speed with shoal as a share of another loop's, compared within turns."""

    def shares_of(field: str) -> list[float]:
        return [turn["shoal"][field] / turn[other][field] for turn in turns]

    shares = shares_of("tokens_per_s")
    share = statistics.median(shares)
    return {
        "against": other,
        "share": share,
        "share_min": min(shares),
        "share_max": max(shares),
        "share_by_cpu_time": statistics.median(shares_of("tokens_per_cpu_s")),
        "bar": BARS[other],
        "met": share >= BARS[other],
    }


def _device_bars(device: str, size: str | None, shoal: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The bars for this device and size, with the figures of the loop with shoal."""
    return [
        {"figure": figure, "found": shoal[figure], "bar": bar, "met": shoal[figure] >= bar}
        for (name, of_size), (figure, bar) in DEVICE_BARS.items()
        if of_size == size and name in device and shoal[figure] is not None
    ]


def _measured(loop: str, setup: Setup) -> dict[str, Any]:
    """The result of one turn of a loop. Raises ``LoopFailed``."""
    with _process(loop, setup) as (process, log):
        try:
            code = process.wait(START_TIMEOUT_S + 10 * setup.seconds)
        except subprocess.TimeoutExpired as error:
            raise LoopFailed(loop, f"no result in time; it said: {_end_of(log)}") from error
        records = Output(log).news()
        if code or not records:
            raise LoopFailed(loop, f"it ended with status {code}; it said: {_end_of(log)}")
    return records[-1]


@contextmanager
def _partner(setup: Setup, *, pace_s: float) -> Iterator[str]:
    """A peer that founds the run and takes part in its rounds. Yields its address."""
    with _process("partner", replace(setup, pace_s=pace_s)) as (process, log):
        deadline = time.monotonic() + START_TIMEOUT_S
        while not (records := Output(log).news()):
            if process.poll() is not None or time.monotonic() > deadline:
                raise LoopFailed("partner", f"it gave no address; it said: {_end_of(log)}")
            time.sleep(0.1)
        yield records[0]["seed"]


@contextmanager
def _process(loop: str, setup: Setup) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    with tempfile.TemporaryDirectory(prefix=f"{loop}-", dir=setup.folder) as own:
        log = Path(own) / "log"
        arguments = (json.dumps({**asdict(setup), "loop": loop, "own": own}),)
        process = spawn(arguments, log, module=("-m", "tests.benchmark.training_loops"))
        try:
            yield process, log
        finally:
            kill_tree(process)


def _end_of(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-2000:].strip()


def table(found: Mapping[str, Any]) -> str:
    """The result as text."""
    lines = [
        f"{found['device']}, {found['parameters'] / 1e6:.1f} M parameters",
        f"{'loop':<9}{'tokens/s':>11}{'min':>11}{'max':>11}{'per cpu s':>11}{'of peak':>9}"
        f"{'peak MB':>10}  way",
    ]
    for row in found["rows"]:
        share = "" if row["share_of_peak"] is None else f"{row['share_of_peak']:.1%}"
        lines.append(
            f"{row['loop']:<9}{row['tokens_per_s']:>11.0f}{row['tokens_per_s_min']:>11.0f}"
            f"{row['tokens_per_s_max']:>11.0f}{row['tokens_per_cpu_s']:>11.0f}{share:>9}"
            f"{row['peak_memory_bytes'] / 1e6:>10.0f}  {row['way']}"
        )
    for bar in found["bars"]:
        verdict = "kept" if bar["met"] else "missed"
        lines.append(
            f"shoal has {bar['share']:.1%} of the speed of {bar['against']} "
            f"({bar['share_min']:.1%} to {bar['share_max']:.1%}; {bar['share_by_cpu_time']:.1%} by "
            f"its processor time); at least {bar['bar']:.0%}: {verdict}"
        )
    for bar in found["device_bars"]:
        verdict = "kept" if bar["met"] else "missed"
        lines.append(f"{bar['figure']} {bar['found']:.5g}; at least {bar['bar']:g}: {verdict}")
    for row in found["rows"]:
        if row["loop"] == "shoal":
            lines.append(
                f"{row['rounds']} rounds meanwhile; safe points took {row['blocked_share']:.2%} "
                "of the time"
            )
    return "\n".join(lines)


def main(
    file: Annotated[
        Path | None,
        Argument(
            metavar="RUN.toml",
            help="Run whose model, batch and optimizer are measured; unset: 124 M parameters on a "
            "GPU, a small model on a CPU.",
        ),
    ] = None,
    size: Annotated[
        str | None,
        Option(
            help="A named size instead of a run, with batches of 32 sequences: 124m, 350m or 1b."
        ),
    ] = None,
    device: Annotated[str, Option(help="cpu, cuda, cuda:1, mps, ... or auto.")] = "auto",
    threads: Annotated[
        int | None,
        Option(help="Torch threads on a CPU. [default: all cores but one]", min=1),
    ] = None,
    time: Annotated[str, Option(help="Measured time of each turn of a loop.")] = "20s",
    turns: Annotated[int, Option(help="Turns of each loop.", min=1)] = 5,
    loops: Annotated[
        str,
        Option(
            help="Loops to measure, separated by commas: alone, by_hand, and shoal, which needs "
            "memory for a second model."
        ),
    ] = "alone,by_hand,shoal",
    check: Check = False,
    as_json: Json = False,
) -> int:
    """Compare the training loop of `shoal join` with the same loop alone and one written by hand.

    The loops take turns, each in a process of its own. With shoal, a second peer on this machine
    merges with it and computes nothing. Ratios are medians over turns that followed each other.

    Example: python -m tests.benchmark.training --time 20s --turns 5
    """

    with usage_errors():
        is_cpu = choose_device(device).type == "cpu"
        spare = max(1, (psutil.cpu_count(logical=False) or 2) - 1)
        if file is None and size is None and not is_cpu:
            size = "124m"
        if file is not None:
            if size is not None:
                raise ValueError("pass a run or --size, not both")
            run = run_at(str(file)).run
        else:
            run = small_run() if size is None else run_of_size(size)
        bench = TrainingBench(
            run=run,
            size=size,
            device=device,
            threads=threads or (spare if is_cpu else None),
            seconds=seconds(time, option="--time"),
            turns=turns,
            loops=tuple(name for name in loops.split(",") if name),
        )
    with as_interrupts():
        found = run_training_bench(bench, tell=tell)
    print(json_text(found) if as_json else table(found))
    bars = [*found["bars"], *found["device_bars"]]
    return 1 if check and not all(bar["met"] for bar in bars) else 0


if __name__ == "__main__":
    run_program(main)
