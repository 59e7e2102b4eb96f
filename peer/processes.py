"""Limits of a process that reads what strangers wrote; what children have, and do not share.

A process that counts a stranger's model, or reads its text or tokenizer, has a limit on memory and
on processor time, and every attempt of Python's to open a connection fails in it. So what would
fill the memory, never end, or fetch something ends this process and nothing else. Two functions say
of an error whether memory was missing.

A forked child, such as a worker of torch's ``DataLoader``, has a copy of every descriptor, and may
outlive its parent. With a copy of the line to the agent the agent would not hear that the trainer
was killed; with a copy of the lock on a folder the folder would stay in use.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import psutil

_ALLOCATION_FAILED = (
    *("out of memory", "can't allocate memory", "not enough memory"),
    "ALLOC_FAILED",
)
"""Words in errors of torch: of ``OutOfMemoryError``, of MPS, of a CUDA kernel that is loaded late
("CUDA error: out of memory"), of the CPU, and of cuBLAS and cuDNN."""

_LOOK_UPS = ("socket.getaddrinfo", "socket.gethostbyname")
_NETWORK_EVENTS = ("socket.connect", "socket.bind", *_LOOK_UPS)


def limit_memory(more_bytes: int) -> None:
    """Let this process have so much more memory than it has now."""
    memory = psutil.Process().memory_info()
    _limit(resource.RLIMIT_DATA, getattr(memory, "data", memory.vms) + more_bytes)


def limit_processor(more_s: int) -> None:
    """Let this process have so much more time of a processor than it has had until now."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + more_s + 1)


def refuse_network(allowed: Callable[[str], bool] | None = None) -> None:
    """Let every attempt to open a connection fail, but for one to an ``allowed`` IP address."""

    def refuse(event: str, arguments: tuple[object, ...]) -> None:
        if event not in _NETWORK_EVENTS:
            return
        if allowed is not None:
            if event in _LOOK_UPS:
                return
            address = arguments[1] if event == "socket.connect" else None
            if isinstance(address, tuple) and allowed(str(address[0])):
                return
        raise PermissionError(f"{event}: nothing is fetched to read what a stranger wrote")

    sys.addaudithook(refuse)


def ran_out_of_memory(error: BaseException) -> bool:
    """Return whether an error was raised because memory could not be allocated."""
    if isinstance(error, OSError):  # of a system call, such as reading a folder to import from
        return error.errno == errno.ENOMEM
    # An extension whose allocation failed may return without having set an exception.
    return isinstance(error, MemoryError | SystemError)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that a device, or torch on the processor, has no memory left."""
    return isinstance(error, RuntimeError) and any(
        words in str(error) for words in _ALLOCATION_FAILED
    )


def ended_by_limit(code: int | None) -> bool:
    """Return whether a process with this exit code took too much time or memory."""
    return code in (-signal.SIGXCPU, -signal.SIGABRT)


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    with contextlib.suppress(ValueError, OSError):  # a system that does not know this limit
        resource.setrlimit(kind, (value, hard))


# --- children ---------------------------------------------------------------------------------


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment of a child process: no accelerator and one thread per library.

    A child must not take resources from its trainer.
    """
    package = str(Path(__file__).resolve().parents[1])
    path = [package, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        **environment,
        "PYTHONPATH": os.pathsep.join(path),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


# --- what forked children do not share ----------------------------------------------------------

_own: set[int] = set()


def keep_from_children(descriptor: int) -> None:
    """Let no child that is forked from now on share an open descriptor, until ``release``."""
    _watch_forks()
    _own.add(descriptor)


def release(descriptor: int) -> None:
    """Undo ``keep_from_children``: once it is closed another file may get its number."""
    _own.discard(descriptor)


@cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_let_go)


def _let_go() -> None:
    """Replace each descriptor by one of /dev/null, in a child.

    None is closed, since objects that were copied with it close it when they are freed.
    """
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor in _own:
        os.dup2(nothing, descriptor, inheritable=False)
    _own.clear()
    os.close(nothing)
