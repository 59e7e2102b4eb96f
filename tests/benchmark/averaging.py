"""A round of shoal compared with other systems on this machine: ``python -m`` this module.

Every peer is a process (``tests.benchmark.worker``). Every system uses the transport that it would
use between machines: shoal and hivemind one libp2p daemon per peer, gloo plain TCP. Absolute times
differ from machine to machine, so rounds of all systems alternate within one run, and the figures
to quote are ratios of medians.
"""

from __future__ import annotations

import json
import selectors
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from typing import IO, Annotated, Any

from typer import Option

from examples.paper.typed import count
from peer.cli.application import Json, json_text
from peer.errors import PeerError
from tests.benchmark.participant import Setup
from tests.command_line import run_program, tell
from tests.processes import Child

ANSWER_TIMEOUT_S = 180.0

WARM_UPS = 2
"""Unmeasured rounds of each system, after which all of its memory has been touched."""

SHOAL = ("shoal", "daemon", "numpy")
"""``daemon`` is shoal without direct connections: all traffic goes through the libp2p daemon.
``numpy`` is shoal without compiled codecs."""

HIVEMIND_CODECS = ("f32", "f16")
"""hivemind's 8-bit codecs raise with numpy 2.4 although the step returns, so they are left out."""


class BenchFailed(PeerError):
    """A system under measurement did not finish."""

    system: str
    codec: str
    peers: int
    reason: str
    message = "{system} {codec} with {peers} peers: {reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragingBench:
    """Settings of the comparison."""

    values: int = 30_000_000
    peers: tuple[int, ...] = (2,)
    codecs: tuple[str, ...] = ("f32", "f16", "int8", "int4")
    against: tuple[str, ...] = ("hivemind", "gloo")
    rounds: int = 7


@dataclass(slots=True, eq=False)
class _Process:
    """A worker process, and the pipes to it."""

    name: str
    child: Child
    log: IO[bytes]

    @classmethod
    def start(cls, system: str, setup: Setup) -> _Process:
        settings = {"system": system, **asdict(setup)}
        log = tempfile.TemporaryFile()  # noqa: SIM115 -- closed by stop()
        child = Child(
            *("-m", "tests.benchmark.worker", json.dumps(settings)),
            # hivemind logs a lot: only the end of its log is shown, when it fails.
            stderr=log if system == "hivemind" else None,
        )
        return cls(f"{system} {setup.codec} peer {setup.index}", child, log)

    def tell(self, do: str, **arguments: Any) -> None:
        self.child.tell(json.dumps({"do": do, **arguments}))

    def answer(self, *, deadline: float) -> dict[str, Any]:
        with selectors.DefaultSelector() as selector:
            selector.register(self.child.output, selectors.EVENT_READ)
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"{self.name} did not answer in time")
        line = self.child.line()
        if not line:
            self.log.seek(0)
            said = self.log.read()[-2000:].decode("utf-8", "replace").strip()
            raise ConnectionError(
                f"{self.name} ended with status {self.child.wait(10)}; it said: {said}"
            )
        reply: dict[str, Any] = json.loads(line)
        return reply

    def stop(self) -> None:
        with self.child, suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self.tell("close")
            self.child.wait(10)
        self.log.close()


@dataclass(slots=True, eq=False)
class _Contestant:
    """One system with one codec: its worker processes and their measurements."""

    system: str
    codec: str
    peers: int
    processes: list[_Process]
    seconds: list[float] = field(default_factory=list)
    seconds_with_forming: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    bytes_per_peer: list[float] = field(default_factory=list)
    peak_memory_bytes: int = 0
    floor_seconds: dict[str, list[float]] = field(default_factory=dict)
    """Seconds to move a round's bytes, through the ``daemon`` or the ``lane`` (direct)."""
    codec_seconds: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)

    def together(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        """Send a command to all peers at once, and collect their answers."""
        for process in self.processes:
            process.tell(do, **arguments)
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        return [process.answer(deadline=deadline) for process in self.processes]

    def open(self) -> None:
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        first, *others = self.processes
        first.tell("open", meeting_point=None)
        point = first.answer(deadline=deadline)["meeting_point"]
        for process in others:
            process.tell("open", meeting_point=point)
        for process in others:
            process.answer(deadline=deadline)

    def round(self, *, keep: bool) -> None:
        self.together("ready")
        forming = max(reply["seconds"] for reply in self.together("form"))
        seconds = max(reply["seconds"] for reply in self.together("exchange"))
        spent = self.together("spent")
        if self.system in SHOAL:
            # Shoal forms the group and exchanges in one call; the worker timed both parts.
            timed = self.together("times")
            forming = max(reply["forming"] for reply in timed)
            seconds = max(reply["exchange"] for reply in timed)
        if not keep:
            return
        self.seconds.append(seconds)
        self.seconds_with_forming.append(seconds + forming)
        self.cpu_seconds.append(sum(reply["cpu_seconds"] for reply in spent))
        sent = [reply["bytes_sent"] for reply in spent if "bytes_sent" in reply]
        if sent:
            self.bytes_per_peer.append(statistics.mean(sent))
        self.peak_memory_bytes = max(
            self.peak_memory_bytes, *(reply["peak_memory_bytes"] for reply in spent)
        )

    def floor(self) -> None:
        """Time the transfer of a round's bytes and its codec work, each without a round."""
        if self.system in SHOAL:
            for way, seconds in self.floor_seconds.items():
                replies = self.together("floor", bulk=way == "lane")
                seconds.append(max(reply["seconds"] for reply in replies))
            spent = self.together("codec_time")
            self.codec_seconds.append(max(reply["seconds"] for reply in spent))
            self.step_seconds.append(max(reply["step_seconds"] for reply in spent))

    def row(self, values: int) -> dict[str, Any]:
        error = max(reply["max_error"] for reply in self.together("error"))
        row: dict[str, Any] = {
            "system": self.system,
            "codec": self.codec,
            "peers": self.peers,
            "values": values,
            "seconds": statistics.median(self.seconds),
            "seconds_min": min(self.seconds),
            "seconds_max": max(self.seconds),
            "seconds_with_forming": statistics.median(self.seconds_with_forming),
            "cpu_seconds": statistics.median(self.cpu_seconds),
            # gloo has no daemon to ask; a ring moves 2 (n - 1) / n of the tensor per peer.
            "bytes_per_peer": statistics.median(self.bytes_per_peer)
            if self.bytes_per_peer
            else 2 * (self.peers - 1) / self.peers * 4 * values,
            "peak_memory_bytes": self.peak_memory_bytes,
            "max_error": error,
            "rounds": len(self.seconds),
        }
        if self.system in SHOAL:
            for way, seconds in self.floor_seconds.items():
                row[f"{way}_seconds"] = statistics.median(seconds)
            row["codec_seconds"] = statistics.median(self.codec_seconds)
            # Included in codec_seconds: the outer step, which the other systems do not take.
            row["step_seconds"] = statistics.median(self.step_seconds)
            row["encoded_bytes"] = self.together("encoded_bytes")[0]["bytes"]
        return row


def contestants(bench: AveragingBench) -> list[tuple[str, str]]:
    """System and codec of every contestant, in the order of their turns."""
    found = [("shoal", codec) for codec in bench.codecs]
    for system in ("daemon", "numpy"):
        if system in bench.against:
            found += [(system, codec) for codec in bench.codecs]
    if "hivemind" in bench.against:
        wanted = [codec for codec in HIVEMIND_CODECS if codec in bench.codecs]
        # Quantised rounds are compared with hivemind's fastest working codec.
        found += [("hivemind", codec) for codec in wanted or ["f16"]]
    if "gloo" in bench.against:
        found.append(("gloo", "f32"))
    return found


def run_averaging_bench(
    bench: AveragingBench, *, tell: Callable[[str], None] = lambda line: None
) -> dict[str, list[dict[str, Any]]]:
    """Measure all contestants; ``tell`` receives progress lines. Raises ``BenchFailed``."""
    rows: list[dict[str, Any]] = []
    for peers in bench.peers:
        with ExitStack() as stack:
            opened: list[_Contestant] = []
            for system, codec in contestants(bench):
                tell(f"starting {peers} peers of {system} {codec}")
                processes = []
                for index in range(peers):
                    setup = Setup(index=index, peers=peers, values=bench.values, codec=codec)
                    process = _Process.start(system, setup)
                    stack.callback(process.stop)
                    processes.append(process)
                contestant = _Contestant(system, codec, peers, processes)
                if system in SHOAL:
                    ways = ("daemon",) if system == "daemon" else ("daemon", "lane")
                    contestant.floor_seconds = {way: [] for way in ways}
                _guarded(contestant, contestant.open)
                for _ in range(WARM_UPS):
                    _guarded(contestant, lambda c=contestant: c.round(keep=False))  # type: ignore[misc]
                opened.append(contestant)
            for number in range(bench.rounds):
                tell(f"{peers} peers: round {number + 1} of {bench.rounds}")
                for contestant in opened:
                    _guarded(contestant, lambda c=contestant: c.round(keep=True))  # type: ignore[misc]
                    _guarded(contestant, contestant.floor)
            rows += [contestant.row(bench.values) for contestant in opened]
    return {"rows": rows}


def _guarded(contestant: _Contestant, work: Callable[[], None]) -> None:
    try:
        work()
    except (TimeoutError, ConnectionError) as error:
        raise BenchFailed(
            contestant.system, contestant.codec, contestant.peers, str(error)
        ) from error


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as text, with the ratio to hivemind's fp16 where that was measured."""
    lines = [
        f"{'peers':>5} {'system':<9}{'codec':<10}{'seconds':>9}{'min':>8}{'max':>8}{'forming':>9}"
        f"{'cpu s':>7}{'MB/peer':>9}{'peak MB':>9}{'error':>10}  compared"
    ]
    for row in rows:
        rival = next(
            (
                other["seconds"]
                for other in rows
                if other["system"] == "hivemind"
                and other["codec"] == "f16"
                and other["peers"] == row["peers"]
            ),
            None,
        )
        notes = []
        if rival is not None and row["system"] != "hivemind":
            notes.append(f"{rival / row['seconds']:.1f}x hivemind f16")
        if "daemon_seconds" in row:
            floor = row["daemon_seconds"] + row["codec_seconds"]
            step = f"of that step {row['step_seconds']:.3f}"
            lane = f"; lane {row['lane_seconds']:.3f}" if "lane_seconds" in row else ""
            notes.append(
                f"{row['seconds'] / floor:.2f}x (daemon {row['daemon_seconds']:.3f}"
                f" + codec {row['codec_seconds']:.3f}, {step}{lane})"
            )
        lines.append(
            f"{row['peers']:>5} {row['system']:<9}{row['codec']:<10}{row['seconds']:>9.3f}"
            f"{row['seconds_min']:>8.3f}{row['seconds_max']:>8.3f}"
            f"{row['seconds_with_forming']:>9.3f}{row['cpu_seconds']:>7.2f}"
            f"{row['bytes_per_peer'] / 1e6:>9.2f}{row['peak_memory_bytes'] / 1e6:>9.1f}"
            f"{row['max_error']:>10.2e}  {', '.join(notes)}"
        )
    return "\n".join(lines)


def main(
    values: Annotated[str, Option(help="Number of values to average, such as 30e6.")] = "30e6",
    peers: Annotated[str, Option(help="Group sizes to measure, separated by commas.")] = "2",
    codec: Annotated[
        str,
        Option(
            help="Codecs of shoal to measure; int2/int4: one up to reducers, one for the way down."
        ),
    ] = "f32,f16,int8,int4,int2/int4",
    vs: Annotated[
        str,
        Option(
            help="Systems to compare with: hivemind, gloo, daemon (shoal without direct "
            "connections) and numpy (shoal without compiled codecs); may be empty."
        ),
    ] = "hivemind,gloo",
    rounds: Annotated[int, Option(help="Measured rounds of each system.", min=1)] = 7,
    as_json: Json = False,
) -> None:
    """Compare the time of an averaging round with that of other systems.

    Every peer is a process on this machine, with a libp2p daemon of its own where the system uses
    one. Rounds of all systems alternate. "seconds" is the time from the closed group to the new
    state; "forming" adds the time to form the group.

    Example: python -m tests.benchmark.averaging --values 30e6 --peers 2,4 --codec int4
    """
    bench = AveragingBench(
        values=count(values),
        peers=tuple(int(count) for count in peers.split(",")),
        codecs=tuple(codec.split(",")),
        against=tuple(name for name in vs.split(",") if name),
        rounds=rounds,
    )
    found = run_averaging_bench(bench, tell=tell)
    print(json_text(found) if as_json else table(found["rows"]))


if __name__ == "__main__":
    run_program(main)
