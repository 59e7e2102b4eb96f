"""One process per device of this machine, together one island: what ``shoal join`` starts.

``run_island`` starts the ranks, hands signals to rank 0, and waits. When a rank is lost, the others
cannot make another step: they are killed and all start again. Rank 0 has the same folder, hence
the same identity, and gets the parameters from the run. A device on which ranks are lost again and
again is left out. The ranks find each other through a file, so nothing listens for it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from peer import signals
from peer.trainer.channel import IslandBroken

LOST = 75
"""Exit code of a rank that cannot go on for lack of the others."""

TROUBLED_MAX = 2
"""Losses in a row after which a device is left out."""

RESTARTS_MAX = 6
"""Losses in a row after which the island ends."""

STEADY_S = 300.0
"""Time after which a loss counts as the first in a row again."""

SETTLE_S = 3.0
"""Time after the first loss for the other ranks to notice it and end with ``LOST``."""

END_S = 60.0
"""Time for the other ranks to end after rank 0 has."""

JOIN_S = 120.0
"""Time for all ranks to start."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The place of one process in an island."""

    rank: int
    devices: tuple[str, ...]
    meeting: Path
    """File through which the ranks find each other."""

    log: Path
    """File for what the rank has to say that is not for the screen."""

    @property
    def device(self) -> str:
        return self.devices[self.rank]


Work: TypeAlias = Callable[[RankPlace], int]
"""The work of a rank: a picklable function that returns an exit code."""


def run_island(
    devices: Sequence[str], work: Work, *, logs: Path, tell: Callable[[str], None]
) -> int:
    """Run ``work`` in one process per device until rank 0 has ended. Returns its exit code.

    ``tell`` is called with a sentence for people whenever a rank was lost.
    """
    left = list(devices)
    losses: list[str] = []
    while True:
        began = time.monotonic()
        code, lost = _run_once(tuple(left), work, logs)
        if not lost:
            return code
        if time.monotonic() - began >= STEADY_S:
            losses.clear()
        losses += lost
        for device in set(lost):
            if len(left) > 1 and losses.count(device) >= TROUBLED_MAX:
                left.remove(device)
                tell(f"going on without {device}, which was lost {TROUBLED_MAX} times in a row")
        if len(losses) >= RESTARTS_MAX:
            raise IslandBroken(f"its processes end again and again; see {logs}/rank-*.log")
        tell(f"the process on {' and '.join(lost)} was lost; starting again on {', '.join(left)}")


def _run_once(devices: tuple[str, ...], work: Work, logs: Path) -> tuple[int, list[str]]:
    """The exit code of rank 0 and nothing, or the devices whose processes were lost."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="shoal-island-") as folder:
        ranks = []
        for rank in range(len(devices)):
            place = RankPlace(rank, devices, Path(folder) / "meeting", logs / f"rank-{rank}.log")
            ranks.append(context.Process(target=_rank, args=(place, work), name=f"rank {rank}"))
        try:
            for process in ranks:
                process.start()
            with _signals_to(ranks[0]) as asked:
                return _outcome(ranks, devices, asked)
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                if process.pid is not None:
                    process.join()


def _outcome(
    ranks: Sequence[Any], devices: tuple[str, ...], asked: threading.Event
) -> tuple[int, list[str]]:
    """Wait until rank 0 has ended by itself, or a rank is lost."""
    running = {process.sentinel: at for at, process in zip(devices, ranks, strict=True)}
    first: list[str] = []
    while ranks[0].is_alive() and not any(_is_lost(process) for process in ranks):
        ended = wait(list(running))
        first = [running.pop(sentinel) for sentinel in ended]
        for process in ranks:
            if process.sentinel in ended:
                process.join()
    if ranks[0].exitcode is not None and not _is_lost(ranks[0]):
        _join(ranks[1:], END_S)
        return ranks[0].exitcode, []
    if asked.is_set():  # somebody has insisted on the end
        return 128 + signal.SIGINT, []
    _join(ranks, SETTLE_S)
    killed = [
        device
        for device, process in zip(devices, ranks, strict=True)
        if _is_lost(process) and process.exitcode != LOST
    ]
    return LOST, killed or first


def _is_lost(process: Any) -> bool:
    """Say whether a process was killed, failed, or could not go on for lack of another one."""
    code = process.exitcode
    return code is not None and (code < 0 or code in (1, LOST))


def _join(processes: Sequence[Any], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))


@contextmanager
def _signals_to(lead: Any) -> Iterator[threading.Event]:
    """Hand the signals that ask for the end to rank 0, which ends the others."""
    asked = threading.Event()

    def hand_on(number: int, frame: FrameType | None) -> None:
        asked.set()
        if lead.is_alive():
            os.kill(lead.pid, number)

    with signals.handled(hand_on):
        yield asked


def _rank(place: RankPlace, work: Work) -> None:
    """The main function of a rank's process."""
    os.setpgid(0, 0)  # Ctrl-C is for the process that started this one
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    if place.rank:
        for number in signals.asking():
            signal.signal(number, signal.SIG_IGN)
        log = os.open(place.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
    try:
        with _together(place):
            code = work(place)
    except RuntimeError as error:  # of gloo, NCCL or CUDA, which have no classes of their own
        with place.log.open("a") as file:
            traceback.print_exception(error, file=file)
        code = 1 if place.rank == 0 and len(place.devices) == 1 else LOST
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a collective operation that waits for a lost rank would keep the process


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(LOST)


@contextmanager
def _together(place: RankPlace) -> Iterator[None]:
    """Join the process group of the ranks, on the loopback interface."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    # As torchrun does; processes that tokenize share the cores by it.
    os.environ["LOCAL_WORLD_SIZE"] = str(len(place.devices))
    device = torch.device(place.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        init_method=place.meeting.as_uri(),
        rank=place.rank,
        world_size=len(place.devices),
        timeout=timedelta(seconds=JOIN_S),
    )
    yield
    dist.destroy_process_group()
