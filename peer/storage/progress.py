"""The number of tokens that this peer has ever processed, in a file that survives ``kill -9``.

The trainer writes after each step into memory mapped from the file, so that the kernel has the
count even if the process ends in the next instant. Two slots are written in turn, each with a
checksum: an incomplete write is recognized, and the other slot is still valid. The agent reads at
any time. Only a crash of the machine can lose steps: those since the last ``flush``.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

_MAGIC = b"shoalP1\0"
# sequence, incarnation, step, tokens, earlier tokens, clean end; then their CRC-32
_RECORD = struct.Struct("<6Q")
_CHECKSUM = struct.Struct("<I")
_SLOT_BYTES = 64
_SLOTS_AT = (64, 128)
_FILE_BYTES = 192


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
    """The trainer's side of the file. ``begin`` starts a new incarnation; one process may write."""

    def __init__(
        self,
        descriptor: int,
        memory: mmap.mmap,
        *,
        sequence: int,
        previous: Processed | None,
        now: Processed,
    ) -> None:
        self._descriptor = descriptor
        self._memory = memory
        self._sequence = sequence
        self.previous = previous
        """Last record of the incarnation before this one; ``None`` for the first."""
        self.now = now

    @classmethod
    def begin(cls, path: Path, *, wall_time_s: float) -> ProgressFile:
        """Open or create the file and start the next incarnation.

        Incarnations start at the clock's seconds, so that they grow even for a peer that has its
        identity but lost its files, while other peers remember its earlier incarnations.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            if size != _FILE_BYTES or os.pread(descriptor, len(_MAGIC), 0) != _MAGIC:
                # New, or without a first record. Write real blocks: with a hole, a full disk
                # would kill the trainer at its first write instead of failing here.
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, _MAGIC.ljust(_FILE_BYTES, b"\0"), 0)
                os.fsync(descriptor)
            memory = mmap.mmap(descriptor, _FILE_BYTES)
        except BaseException:
            os.close(descriptor)
            raise
        sequence, previous = _newest(memory) or (0, None)
        now = Processed(
            incarnation=max(int(wall_time_s), previous.incarnation + 1 if previous else 1),
            step=0,
            tokens=0,
            earlier_tokens=previous.total_tokens if previous else 0,
        )
        self = cls(descriptor, memory, sequence=sequence, previous=previous, now=now)
        self._write(self.now)
        self.flush()
        return self

    def __repr__(self) -> str:
        return f"ProgressFile({self.now})"

    def record(self, *, step: int, tokens: int) -> None:
        """Record the progress of this incarnation. Takes a microsecond; no system call."""
        if tokens < self.now.tokens or step < self.now.step:
            raise ValueError(
                f"step {step}, tokens {tokens}: less than {self.now.step}, {self.now.tokens} before"
            )
        before = self.now
        self.now = Processed(before.incarnation, step, tokens, before.earlier_tokens, before.clean)
        self._write(self.now)

    def flush(self) -> None:
        """Write the record to the disk, in case the machine crashes. Waits for the disk."""
        self._memory.flush()

    def end(self) -> None:
        """Record a normal end of the incarnation: pending work was given up, not lost."""
        self.leaves()
        self.close()

    def leaves(self) -> None:
        """Record that the incarnation ends normally from here on, whatever ends it."""
        if self._descriptor < 0:
            return
        now = self.now
        self.now = Processed(now.incarnation, now.step, now.tokens, now.earlier_tokens, clean=True)
        self._write(self.now)

    def close(self) -> None:
        """Close the file. Without ``end`` the incarnation counts as crashed."""
        if self._descriptor < 0:
            return
        self._memory.flush()
        self._memory.close()
        os.close(self._descriptor)  # which also unlocks
        self._descriptor = -1

    def __enter__(self) -> ProgressFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, now: Processed) -> None:
        self._sequence += 1
        fields = _RECORD.pack(
            self._sequence,
            now.incarnation,
            now.step,
            now.tokens,
            now.earlier_tokens,
            int(now.clean),
        )
        at = _SLOTS_AT[self._sequence % 2]  # never the slot of the latest record
        self._memory[at : at + _SLOT_BYTES] = (fields + _CHECKSUM.pack(zlib.crc32(fields))).ljust(
            _SLOT_BYTES, b"\0"
        )


def begin_without_trainer(path: Path, *, wall_time_s: float) -> int:
    """Start the next incarnation of a peer that does not train, and return its number.

    The number is above those of all trainers that used the folder before. The record of how the
    last trainer ended is kept.
    """
    with ProgressFile.begin(path, wall_time_s=wall_time_s) as progress:
        if progress.previous is None or progress.previous.clean:
            progress.end()
        return progress.now.incarnation


def read_progress(path: Path) -> Processed | None:
    """The latest record, or ``None``. Any process may call this at any time."""
    for _ in range(100):
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        if len(content) != _FILE_BYTES or not any(content[at] for at in range(64, _FILE_BYTES)):
            return None
        newest = _newest(content)
        if newest is not None:
            return newest[1]
        # The writer changed both slots during the read; read again.
    return None


def _newest(content: bytes | mmap.mmap) -> tuple[int, Processed] | None:
    slots: list[tuple[int, Processed]] = []
    if content[: len(_MAGIC)] != _MAGIC:
        return None
    for at in _SLOTS_AT:
        fields = content[at : at + _RECORD.size]
        (checksum,) = _CHECKSUM.unpack(content[at + _RECORD.size : at + _RECORD.size + 4])
        if zlib.crc32(fields) != checksum:
            continue
        sequence, incarnation, step, tokens, earlier, clean = _RECORD.unpack(fields)
        if sequence:
            slots.append((sequence, Processed(incarnation, step, tokens, earlier, bool(clean))))
    return max(slots, key=lambda entry: entry[0], default=None)
