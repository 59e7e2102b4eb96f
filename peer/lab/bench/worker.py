"""One peer of ``shoal bench averaging``, as a process of its own.

It reads commands as JSON lines on its standard input, answers on its standard
output, and measures itself: seconds, CPU seconds (its children, the daemon among
them, included), bytes written to the network, peak memory. What is
measured lives in one class per system; ``peer.lab.bench.comparison`` decides when.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import psutil

from averaging.numbers.arrays import Float32s

Reply = dict[str, Any]


_BLOCK_VALUES = 1 << 20


def contribution(index: int, values: int) -> Float32s:
    """Peer ``index``: noise, repeated, so that any peer knows them all."""
    block = np.random.default_rng(index).standard_normal(_BLOCK_VALUES, dtype=np.float32)
    return np.resize(block, values)


def worst_error(result: Float32s, peers: int) -> float:
    """The largest distance of ``result`` from the exact mean of all contributions."""
    exact = np.zeros(_BLOCK_VALUES)
    for index in range(peers):
        exact += contribution(index, _BLOCK_VALUES)
    exact /= peers
    worst = 0.0
    for start in range(0, result.size, _BLOCK_VALUES):
        part = result[start : start + _BLOCK_VALUES]
        worst = max(worst, float(np.abs(part - exact[: part.size]).max()))
    return worst


@dataclass(frozen=True, slots=True)
class Spent:
    """What a stretch of work cost this process and its children."""

    cpu_seconds: float
    bytes_sent: int | None
    """By the daemon; ``None`` where there is none."""
    peak_memory_bytes: int
    """Above what was held at the beginning."""


class Meter:
    """Measures this process and its children from ``start`` to ``stop``."""

    def __init__(self) -> None:
        self._watched: list[psutil.Process] = []
        """Listed once: looking through all processes would be charged to what is measured."""
        self._cpu = 0.0
        self._written: int | None = None
        self._resident: dict[int, int] = {}

    def _cpu_seconds(self) -> float:
        total = 0.0
        for process in self._watched:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def _daemon_written(self) -> int | None:
        """Bytes that libp2p daemons wrote, to the network and to us: each payload byte once at
        the sender (network) and once at the receiver (unix socket)."""
        written: int | None = None
        for process in self._watched:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, AttributeError):
                if "p2pd" in process.name():
                    # Linux counts read() and write() on sockets here too.
                    written = (written or 0) + process.io_counters().write_chars
        return written

    def start(self) -> None:
        me = psutil.Process()
        self._watched = [me, *me.children(recursive=True)]
        self._resident = {}
        for process in self._watched:
            with contextlib.suppress(psutil.NoSuchProcess, OSError):
                Path(f"/proc/{process.pid}/clear_refs").write_text("5")  # forget the old peak
                self._resident[process.pid] = process.memory_info().rss
        self._written = self._daemon_written()
        self._cpu = self._cpu_seconds()

    def stop(self) -> Spent:
        cpu = self._cpu_seconds() - self._cpu
        written = self._daemon_written()
        peak = 0
        for pid, before in self._resident.items():
            with contextlib.suppress(OSError, StopIteration):
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                highest = next(line for line in lines if line.startswith("VmHWM:"))
                peak += max(0, int(highest.split()[1]) * 1024 - before)
        sent = None if written is None or self._written is None else (written - self._written) // 2
        return Spent(cpu, sent, peak)


class Worker(ABC):
    """One system under measurement, as one peer of it. Commands arrive in the order below."""

    system: ClassVar[str]

    def __init__(self, *, index: int, peers: int, values: int, codec: str) -> None:
        self.index = index
        self.peers = peers
        self.values = values
        self.codec = codec

    @property
    def sent_apart(self) -> int:
        """Bytes sent so far past any daemon."""
        return 0

    @abstractmethod
    def open(self, meeting_point: str | None) -> str | None:
        """Start; the first peer gets ``None`` and returns where the others meet it."""

    @abstractmethod
    def ready(self) -> None:
        """Prepare one round, outside of what is measured."""

    @abstractmethod
    def form(self) -> None:
        """Form the group as far as possible without moving numbers."""

    @abstractmethod
    def exchange(self) -> None:
        """Average."""

    @abstractmethod
    def result(self) -> Float32s: ...

    @abstractmethod
    def close(self) -> None: ...


class GlooWorker(Worker):
    """torch.distributed's all-reduce over TCP: no encryption, no tolerance of anything."""

    system = "gloo"

    def open(self, meeting_point: str | None) -> str | None:
        import torch
        import torch.distributed as distributed

        torch.set_num_threads(1)
        point = meeting_point or f"127.0.0.1:{_free_port()}"
        self._original = torch.from_numpy(contribution(self.index, self.values))
        self._tensor = self._original.clone()
        self._distributed = distributed
        self._point = point
        if self.index != 0:
            self._join()
        return point

    def _join(self) -> None:
        self._distributed.init_process_group(
            "gloo", init_method=f"tcp://{self._point}", rank=self.index, world_size=self.peers
        )

    def ready(self) -> None:
        if not self._distributed.is_initialized():
            self._join()  # the first peer: the others are already waiting
        self._tensor.copy_(self._original)
        self._distributed.barrier()

    def form(self) -> None:
        return

    def exchange(self) -> None:
        self._distributed.all_reduce(self._tensor)
        self._tensor.div_(self.peers)

    def result(self) -> Float32s:
        array: Float32s = self._tensor.numpy()
        return array

    def close(self) -> None:
        self._distributed.destroy_process_group()


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def make_worker(system: str, *, index: int, peers: int, values: int, codec: str) -> Worker:
    kind: type[Worker]
    if system == "gloo":
        kind = GlooWorker
    elif system == "hivemind":
        from peer.lab.bench.hivemind_averager import HivemindWorker

        kind = HivemindWorker
    elif system == "shoal":
        from peer.lab.bench.shoal_averager import ShoalWorker

        kind = ShoalWorker
    elif system == "daemon":
        from peer.lab.bench.shoal_averager import DaemonWorker

        kind = DaemonWorker
    else:
        raise ValueError(f"system is {system!r}; known: daemon, gloo, hivemind, shoal")
    return kind(index=index, peers=peers, values=values, codec=codec)


def serve(worker: Worker) -> None:
    """Obey commands until ``close`` or the end of the input."""
    # Libraries print; the protocol gets a descriptor of its own, they get standard error.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    meter = Meter()
    clock = time.perf_counter
    sent_before = 0
    for line in sys.stdin:
        command = json.loads(line)
        do = command.pop("do")
        reply: Reply = {}
        if do == "open":
            reply["meeting_point"] = worker.open(command.get("meeting_point"))
        elif do == "ready":
            worker.ready()
            meter.start()
            sent_before = worker.sent_apart
        elif do == "form":
            began = clock()
            worker.form()
            reply["seconds"] = clock() - began
        elif do == "exchange":
            began = clock()
            worker.exchange()
            reply["seconds"] = clock() - began
        elif do == "spent":
            spent = meter.stop()
            reply["cpu_seconds"] = spent.cpu_seconds
            if spent.bytes_sent is not None:
                reply["bytes_sent"] = spent.bytes_sent + worker.sent_apart - sent_before
            reply["peak_memory_bytes"] = spent.peak_memory_bytes
        elif do == "error":
            reply["max_error"] = worst_error(worker.result(), worker.peers)
        elif do == "close":
            worker.close()
        else:  # what only one system can do
            reply = getattr(worker, f"do_{do}")(**command)
        answers.write(json.dumps(reply) + "\n")
        if do == "close":
            return


def main() -> None:
    settings = json.loads(sys.argv[1])
    serve(make_worker(settings.pop("system"), **settings))


if __name__ == "__main__":
    main()
