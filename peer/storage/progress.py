"""The number of tokens that this peer has ever processed, in a file that survives ``kill -9``.

The trainer writes after each step into memory mapped from the file, so that the kernel has the
count even if the process ends in the next instant. A new incarnation begins with a new file; after
that each number is written by itself, in one aligned store, so that no reader sees half of it. The
agent reads at any time. Only a crash of the machine can lose steps: those that the kernel has not
written yet.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dht.whole_files import write_whole

_KIND = b"progress"
_RECORD = np.dtype(
    [
        ("kind", "S8"),
        ("incarnation", "<u8"),
        ("step", "<u8"),
        ("tokens", "<u8"),
        ("earlier_tokens", "<u8"),
        ("clean", "<u8"),
    ]
)


@dataclass(frozen=True, slots=True)
class Processed:
    """Steps and tokens of a peer's trainer at some moment."""

    incarnation: int
    """Number of this start of the trainer; it grows with every start."""
    step: int
    tokens: int
    """Tokens of this incarnation, as ``step`` is its steps."""
    earlier_tokens: int
    """Tokens of all earlier incarnations."""
    clean: bool = False
    """The incarnation ended normally; otherwise it crashed or is still running."""

    @property
    def total_tokens(self) -> int:
        return self.earlier_tokens + self.tokens


class ProgressFile:
    """The trainer's side of the file, which begins a new incarnation; one process may write."""

    def __init__(self, path: Path, *, wall_time_s: float) -> None:
        """Replace or create the file. Raises ``OSError``.

        Incarnations start at the clock's seconds, so that they grow even for a peer that has its
        identity but lost its files, while other peers remember its earlier incarnations.
        """
        self.previous = previous = read_progress(path)
        """Last record of the incarnation before this one; ``None`` for the first."""
        self.now = now = Processed(
            incarnation=max(int(wall_time_s), previous.incarnation + 1 if previous else 1),
            step=0,
            tokens=0,
            earlier_tokens=previous.total_tokens if previous else 0,
        )
        numbers = _KIND, now.incarnation, 0, 0, now.earlier_tokens, 0
        write_whole(path, np.array([numbers], _RECORD).tobytes())
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _RECORD.itemsize)
        self._record: NDArray[Any] | None = np.frombuffer(self._memory, _RECORD)

    def __repr__(self) -> str:
        return f"ProgressFile({self.now})"

    def record(self, *, step: int, tokens: int) -> None:
        """Record the progress of this incarnation. Takes a microsecond; no system call."""
        if tokens < self.now.tokens or step < self.now.step:
            raise ValueError(
                f"step {step}, tokens {tokens}: less than {self.now.step}, {self.now.tokens} before"
            )
        self._set("tokens", tokens)
        self._set("step", step)
        self.now = replace(self.now, step=step, tokens=tokens)

    def end(self) -> None:
        """Record a normal end of the incarnation: pending work was given up, not lost."""
        self.leaves()
        self.close()

    def leaves(self) -> None:
        """Record that the incarnation ends normally from here on, whatever ends it."""
        if self._record is not None:
            self._set("clean", 1)
            self.now = replace(self.now, clean=True)

    def close(self) -> None:
        """Close the file. Without ``end`` the incarnation counts as crashed."""
        if self._record is not None:
            self._record = None
            self._memory.flush()
            self._memory.close()

    def __enter__(self) -> ProgressFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _set(self, name: str, number: int) -> None:
        assert self._record is not None, "the file is open"
        self._record[name] = number


def begin_without_trainer(path: Path, *, wall_time_s: float) -> int:
    """Start the next incarnation of a peer that does not train, and return its number.

    The number is above those of all trainers that used the folder before. The record of how the
    last trainer ended is kept.
    """
    with ProgressFile(path, wall_time_s=wall_time_s) as progress:
        if progress.previous is None or progress.previous.clean:
            progress.end()
        return progress.now.incarnation


def read_progress(path: Path) -> Processed | None:
    """The latest record, or ``None``. Any process may call this at any time."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(content) != _RECORD.itemsize:
        return None
    kind, incarnation, step, tokens, earlier, clean = np.frombuffer(content, _RECORD)[0].item()
    if kind != _KIND:
        return None
    return Processed(incarnation, step, tokens, earlier, bool(clean))
