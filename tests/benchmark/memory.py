"""Memory of an agent, with the run's state in memory and in files: ``python -m`` this module.

For each of the two ways a pair of real agents is started, with real shared memory and a stand-in
for the trainer that has no model: it offers noise, adopts nothing, and says that it makes a step
now and then. So a model of a billion parameters needs no memory but its agents'. The pairs take
turns: one makes rounds while the other one's stand-ins stop stepping, so that other programs of the
machine hurt both alike.

Memory is sampled all the time at the second agent of each pair, which fetched the state, serves
none and saves checkpoints like any peer. Time is that of a round from its commit to the new state.
Downloaded is what it received until it had its first states: no round is made before.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from typer import Option

from averaging.history.state import value_bytes
from averaging.numbers.arrays import Float32s
from averaging.numbers.layout import Layout, TensorSpec
from dht.identity import Identity
from examples.paper.typed import count, seconds
from peer.bridge.agent_process import AgentProcess, LineSettings
from peer.bridge.messages import Begin, FromAgent, Happened, Over, Report
from peer.bridge.settings import PeerSettings
from peer.bridge.shared_memory import SharedTensors, SlotState
from peer.description import tensors_of
from peer.errors import PeerError
from peer.run_file.reading import parse
from peer.run_file.sections import RunFile
from peer.signals import as_interrupts
from tests.command_line import run_program, tell

WAYS = {"memory": "off", "files": "on"}
"""Places of the state, and the values of ``--state-on-disk``."""

FILES_BAR_BYTES = 2e9
"""Largest resident memory with files of an agent of a model of a billion parameters."""

MEMORY_BAR = (1.5 * 4, 450e6)
"""Bytes for each parameter beside the state, and for everything else, without files."""

TIME_BAR = 1.2
"""Largest time of a round with files, relative to one in memory."""

START_TIMEOUT_S = 900.0
TURN_TIMEOUT_S = 600.0
LOOK_EVERY_S = 0.02
SAMPLE_EVERY_S = 0.2
WARM_UPS = 1
"""Cycles of each pair that are not measured: afterwards all of its memory has been touched."""

STEP_TOKENS = 1024
NOISE_VALUES = 1 << 20

RUN = """
name = "bench-memory"
[model]
recipe = "custom"
[data]
recipe = "custom"
[inner]
optimizer = "custom"
learning_rate = 0.1
[schedule]
warmup_tokens = 0
[outer]
codec = "int4"
momentum = {momentum}
fragments = {fragments}
steps_per_cycle = {cycle}
[rounds]
quorum_deadline_s = 60
round_deadline_s = 300
"""


class AgentsFailed(PeerError):
    """A pair of agents of the benchmark did not do its rounds."""

    way: str
    reason: str
    message = "the agents with the state in {way}: {reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBench:
    """Settings of the comparison."""

    values: int = 100_000_000
    fragments: int = 24
    ways: tuple[str, ...] = tuple(WAYS)
    founder: str | None = None
    """Place of the state of the agent that is not measured, if not that of the other one."""
    turns: int = 3
    """Turns of each pair; in each it makes as many rounds as there are fragments."""
    step_s: float = 0.5
    """Time of a step of a stand-in; a cycle has two steps for each fragment."""
    momentum: float = 0.5
    """The run's outer momentum; with 0 states are half as large."""

    @property
    def run(self) -> RunFile:
        cycle = 2 * self.fragments
        return parse(RUN.format(fragments=self.fragments, cycle=cycle, momentum=self.momentum))

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """Four matrices for each fragment."""
        rows = -(-self.values // (4 * self.fragments * 1000))
        names = (f"block.{number}.weight" for number in range(4 * self.fragments))
        return tuple(TensorSpec(name, (rows, 1000), "float32") for name in names)


@dataclass(slots=True)
class Residence:
    """Memory of a process in bytes."""

    resident: int = 0
    anonymous: int = 0
    """What is in no file, and not shared."""

    def take_most(self, other: Residence) -> None:
        for name in self.__slots__:
            setattr(self, name, max(getattr(self, name), getattr(other, name)))

    @classmethod
    def of(cls, pid: int) -> Residence:
        """Raises ``OSError`` if the process is gone."""
        lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        found = {words[0]: 1024 * int(words[1]) for words in lines if words[2:] == ["kB"]}
        return cls(found["VmRSS:"], found["RssAnon:"])


class StandIn(threading.Thread):
    """A trainer without a model, and its agent."""

    def __init__(
        self, bench: MemoryBench, folder: Path, *, number: int, way: str, seeds: tuple[str, ...]
    ) -> None:
        super().__init__(name=f"stand-in {way} {number}", daemon=True)
        folder.mkdir(parents=True)
        run, specs = bench.run, bench.tensors
        layout = Layout.build(specs, bench.fragments)
        Identity.load_or_create(folder / "identity.key")
        begin = Begin(
            run=run.canonical(),
            directory=str(folder),
            settings=PeerSettings(
                name=f"{way}-{number}",
                seeds=seeds,
                listen=("/ip4/127.0.0.1/tcp/0",),
                page=None,
                state_on_disk=WAYS[way],
            ),
            tensors=tensors_of(layout),
            found_after_s=None if seeds else 0.0,
            started_at=time.time(),
            earlier_tokens=0,
            ended_cleanly=True,
        )
        self.memory = SharedTensors.create(
            [fragment.size for fragment in layout.fragments],
            layout=layout.hash,
            incarnation=time.time_ns() // 1000,
            coarse=False,
        )
        self.agent = AgentProcess(
            begin,
            self.memory,
            log_path=folder / "agent.log",
            hear=self._hear,
            died=lambda code, pause_s: self.trouble.append(f"an agent ended with code {code}"),
            settings=LineSettings(end_patience_s=30.0),
        )
        self.report: Report | None = None
        self.round_s: list[float] = []
        self.trouble: list[str] = []
        self.steps = threading.Event()
        """Set while the trainer makes steps."""
        self.most = Residence()
        self._step_s = bench.step_s
        self._ended = threading.Event()
        self._noise = np.random.default_rng(number).standard_normal(NOISE_VALUES, dtype=np.float32)

    @property
    def has_begun(self) -> bool:
        """True once it stands on a version of every fragment."""
        return all(self.memory.base(index) is not None for index in range(self.memory.fragments))

    def end(self) -> None:
        self._ended.set()
        if self.is_alive():
            self.join(10.0)
        self.agent.stop()
        self.agent.join(60.0)
        self.memory.close()

    def run(self) -> None:
        self.agent.start()
        step, stepped_at, sampled_at = 0, 0.0, 0.0
        while not self._ended.wait(LOOK_EVERY_S):
            now = time.monotonic()
            if self.steps.is_set() and now - stepped_at >= self._step_s:
                step, stepped_at = step + 1, now
            self.memory.report(
                step=step,
                tokens=STEP_TOKENS * step,
                step_time_s=self._step_s,
                batch_tokens_max=STEP_TOKENS,
            )
            if sum(self._look(index, step) for index in range(self.memory.fragments)):
                self.agent.ring()
            if now - sampled_at >= SAMPLE_EVERY_S and self.agent.pid is not None:
                sampled_at = now
                with contextlib.suppress(OSError, KeyError):  # it has ended
                    self.most.take_most(Residence.of(self.agent.pid))

    def _look(self, fragment: int, step: int) -> bool:
        """Do what a trainer does at a safe point. Returns whether there was anything to do."""
        state = self.memory.state(fragment)
        if state is SlotState.WANTED:
            _fill(self.memory.slot(fragment), self._noise)
            self.memory.offer(fragment, mark=step, tokens=STEP_TOKENS * step)
        elif state is SlotState.ADOPT:
            order = self.memory.order(fragment)
            self.memory.note_adoption(fragment, order, step=step, tokens=STEP_TOKENS * step)
        return state in (SlotState.WANTED, SlotState.ADOPT)

    def _hear(self, message: FromAgent) -> None:
        if isinstance(message, Report):
            self.report = message
        elif isinstance(message, Over):
            self.trouble.append(message.reason)
        elif isinstance(message, Happened) and message.name == "round":
            self.round_s.append(float(message.fields["seconds"]))  # type: ignore[arg-type]


def _fill(slot: Float32s, noise: Float32s) -> None:
    for start in range(0, slot.size, noise.size):
        part = slot[start : start + noise.size]
        np.copyto(part, noise[: part.size])


@dataclass(slots=True, eq=False)
class Pair:
    """Two agents of one run; the second one is measured."""

    way: str
    first: StandIn
    second: StandIn
    fetched_bytes: int
    """What the second one received until it had its first states."""
    round_s: list[list[float]] = field(default_factory=list)
    """Times of the rounds of each measured turn."""

    @classmethod
    def start(cls, bench: MemoryBench, folder: Path, way: str, stack: ExitStack) -> Pair:
        """Start the founder, then the peer that fetches its state. Raises ``AgentsFailed``."""
        founder = bench.founder or way
        first = StandIn(bench, folder / f"{way}-1", number=1, way=founder, seeds=())
        stack.callback(first.end)
        first.start()
        _until(way, [first], lambda: first.has_begun and "seed=" in _link(first), START_TIMEOUT_S)
        seed = _link(first).partition("seed=")[2].partition("&")[0]
        second = StandIn(bench, folder / f"{way}-2", number=2, way=way, seeds=(seed,))
        stack.callback(second.end)
        second.start()
        _until(way, [first, second], lambda: second.has_begun, START_TIMEOUT_S)
        report = second.report
        _until(way, [first, second], lambda: second.report is not report, START_TIMEOUT_S)
        assert second.report is not None
        return cls(way, first, second, second.report.status.bytes_received)

    def turn(self, *, keep: bool) -> None:
        """Make as many rounds as there are fragments. Raises ``AgentsFailed``."""
        agents = [self.first, self.second]
        begin = len(self.second.round_s)
        end = begin + self.second.memory.fragments
        for agent in agents:
            agent.steps.set()
        try:
            _until(self.way, agents, lambda: len(self.second.round_s) >= end, TURN_TIMEOUT_S)
        finally:
            for agent in agents:
                agent.steps.clear()
        if keep:
            self.round_s.append(self.second.round_s[begin:])

    def row(self, bench: MemoryBench) -> dict[str, Any]:
        times = [each for turn in self.round_s for each in turn]
        most = self.second.most
        return {
            "way": self.way,
            "values": sum(spec.size for spec in bench.tensors),
            "momentum": bench.momentum,
            "fetched_bytes": self.fetched_bytes,
            "resident_bytes": most.resident,
            "anonymous_bytes": most.anonymous,
            "round_s": statistics.median(times),
            "round_s_of_turns": [statistics.median(turn) for turn in self.round_s],
            "rounds": len(times),
        }


def _link(agent: StandIn) -> str:
    return "" if agent.report is None else agent.report.status.link


def _until(way: str, agents: Sequence[StandIn], done: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        for agent in agents:
            if agent.trouble:
                raise AgentsFailed(way, agent.trouble[0])
        if time.monotonic() > deadline:
            raise AgentsFailed(way, f"not done within {timeout_s:g} s")
        time.sleep(LOOK_EVERY_S)


def run_memory_bench(
    bench: MemoryBench, *, folder: Path, tell: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Measure in ``folder``; ``tell`` receives progress lines. Raises ``AgentsFailed``."""
    with ExitStack() as stack:
        where = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
        pairs = []
        for way in bench.ways:
            tell(f"state in {way}: founding, fetching, and {WARM_UPS} cycle to warm up")
            pair = Pair.start(bench, where, way, stack)
            for _ in range(WARM_UPS):
                pair.turn(keep=False)
            pairs.append(pair)
        for number in range(bench.turns):
            for pair in pairs:
                pair.turn(keep=True)
                times, most = pair.round_s[-1], pair.second.most
                tell(
                    f"turn {number + 1} of {bench.turns}, state in {pair.way}: {len(times)} "
                    f"rounds of {statistics.median(times):.2f} s, at most "
                    f"{most.resident / 1e6:.0f} MB resident"
                )
        rows = [pair.row(bench) for pair in pairs]
    return {"rows": rows, "bars": list(_bars(rows))}


def _bars(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    found = {row["way"]: row for row in rows}
    files, memory = found.get("files"), found.get("memory")
    if memory is not None:
        each = MEMORY_BAR[0] + value_bytes(memory["momentum"])
        yield _resident_bar(memory, each * memory["values"] + MEMORY_BAR[1])
    if files is not None:
        yield _resident_bar(files, FILES_BAR_BYTES)
    if files is not None and memory is not None:
        ratio = files["round_s"] / memory["round_s"]
        yield {
            "bar": f"round time within {TIME_BAR:g}x",
            "measured": ratio,
            "met": ratio <= TIME_BAR,
        }


def _resident_bar(row: Mapping[str, Any], most: float) -> dict[str, Any]:
    resident = row["resident_bytes"]
    return {
        "bar": f"state in {row['way']}: resident below {most / 1e9:.3g} GB",
        "measured": resident,
        "met": resident < most,
    }


def table(found: Mapping[str, Any]) -> str:
    """The rows and bars as text. Memory is in MB, the most of each kind at any time."""
    lines = [
        f"{'state in':<9}{'values':>9}{'downloaded':>12}{'resident':>10}{'anonymous':>11}"
        f"{'round s':>9}  of turns"
    ]
    for row in found["rows"]:
        turns = ", ".join(f"{each:.2f}" for each in row["round_s_of_turns"])
        lines.append(
            f"{row['way']:<9}{row['values'] / 1e6:>7.0f} M{row['fetched_bytes'] / 1e6:>12.0f}"
            f"{row['resident_bytes'] / 1e6:>10.0f}{row['anonymous_bytes'] / 1e6:>11.0f}"
            f"{row['round_s']:>9.2f}  {turns}"
        )
    for bar in found["bars"]:
        lines.append(f"{bar['bar']}: {bar['measured']:.4g}, {'met' if bar['met'] else 'MISSED'}")
    return "\n".join(lines)


def main(
    values: Annotated[str, Option(help="Number of parameters, such as 100e6.")] = "100e6",
    ways: Annotated[
        str, Option(help="Places of the state to measure, separated by commas.")
    ] = "memory,files",
    founder: Annotated[
        str | None,
        Option(
            help="Place of the state of each pair's founder, which is not measured: files halves "
            "what a pair takes. [default: that of the other]"
        ),
    ] = None,
    turns: Annotated[int, Option(help="Cycles of each pair of agents.", min=1)] = 3,
    step: Annotated[
        str, Option(help="Time of a step; a cycle has two for each fragment.")
    ] = "0.5s",
    momentum: Annotated[float, Option(help="Outer momentum of the run.", min=0.0)] = 0.5,
    directory: Annotated[
        Path, Option(help="Folder on the disk to measure; it is left as it was.")
    ] = Path(),
) -> None:
    """Compare an agent's memory and rounds with the run's state in memory and in files.

    Real agents on this machine, two for each place, with stand-ins for their trainers. In memory
    the two need 24 bytes for each parameter (without momentum 16), in files as much of the disk and
    of checkpoints: a machine that has less kills them.

    Example: python -m tests.benchmark.memory --values 100e6 --turns 3
    """
    bench = MemoryBench(
        values=count(values),
        ways=tuple(ways.split(",")),
        founder=founder,
        turns=turns,
        step_s=seconds(step, option="--step"),
        momentum=momentum,
    )
    with as_interrupts():
        print(table(run_memory_bench(bench, folder=directory.resolve(), tell=tell)))


if __name__ == "__main__":
    run_program(main)
