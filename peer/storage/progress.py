"""How many tokens this peer has ever processed: a small file that survives ``kill -9``.

The trainer writes after each step, into memory mapped from the file, so that the
kernel has the count even if the process is gone the next instant. Two slots are
written in turn, each with a checksum: a write that was cut short is
recognized, and the slot before it still holds. The agent reads at any time.

Only a crash of the machine itself can lose steps, those since the last ``flush``.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

_MAGIC = b"shoalP1\0"
# sequence, incarnation, step, tokens, earlier tokens, clean end; then their CRC-32
_RECORD = struct.Struct("<6Q")
_CHECKSUM = struct.Struct("<I")
_SLOT_BYTES = 64
_SLOTS_AT = (64, 128)
_FILE_BYTES = 192


@dataclass(frozen=True, slots=True)
class Processed:
    """What a peer's trainer has done up to some moment."""

    incarnation: int
    """Grows with every start of the trainer."""
    step: int
    tokens: int
    """Both of this incarnation."""
    earlier_tokens: int
    """Of all incarnations before."""
    clean: bool = False
    """The incarnation ended as it should; otherwise it crashed, or is still running."""

    @property
    def total_tokens(self) -> int:
        return self.earlier_tokens + self.tokens


class ProgressFile:
    """The trainer's end. ``begin`` starts a new incarnation; nobody else may write meanwhile."""

    def __init__(self, descriptor: int, memory: mmap.mmap, previous: Processed | None) -> None:
        self._descriptor = descriptor
        self._memory = memory
        self._sequence = 0
        self.previous = previous
        """Where the incarnation before this one ended; ``None`` for the first."""
        self.now: Processed

    @classmethod
    def begin(cls, path: Path, *, wall_time_s: float) -> ProgressFile:
        """Open or create the file and count up the incarnation.

        Incarnations begin at the clock's seconds: then they grow even for a peer that keeps
        its identity but lost its files, whose earlier incarnations others still remember.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            if size != _FILE_BYTES or os.pread(descriptor, len(_MAGIC), 0) != _MAGIC:
                # New, or it never got to its first record. Real blocks, not a hole: on a full
                # disk this fails here instead of killing the trainer when it first writes.
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, _MAGIC.ljust(_FILE_BYTES, b"\0"), 0)
                os.fsync(descriptor)
            memory = mmap.mmap(descriptor, _FILE_BYTES)
        except BaseException:
            os.close(descriptor)
            raise
        previous = _newest(memory)
        self = cls(descriptor, memory, previous[1] if previous else None)
        self._sequence = previous[0] if previous else 0
        before = self.previous
        self.now = Processed(
            incarnation=max(int(wall_time_s), before.incarnation + 1 if before else 1),
            step=0,
            tokens=0,
            earlier_tokens=before.total_tokens if before else 0,
        )
        self._write(self.now)
        self.flush()
        return self

    def __repr__(self) -> str:
        return f"ProgressFile({self.now})"

    def record(self, *, step: int, tokens: int) -> None:
        """Say how far this incarnation is. A microsecond; no system call."""
        if tokens < self.now.tokens or step < self.now.step:
            raise ValueError(
                f"step {step} and tokens {tokens} are behind {self.now.step} and {self.now.tokens}"
            )
        before = self.now
        self.now = Processed(before.incarnation, step, tokens, before.earlier_tokens)
        self._write(self.now)

    def flush(self) -> None:
        """Put it on the disk, for the day the whole machine fails. Waits for the disk."""
        self._memory.flush()

    def end(self) -> None:
        """The incarnation ends as it should: what is pending was given up, not lost."""
        now = self.now
        self.now = Processed(now.incarnation, now.step, now.tokens, now.earlier_tokens, clean=True)
        self._write(self.now)
        self.close()

    def close(self) -> None:
        """Let go of the file. Without ``end`` this counts as a crash."""
        if self._descriptor < 0:
            return
        self._memory.flush()
        self._memory.close()
        os.close(self._descriptor)  # which also unlocks
        self._descriptor = -1

    def __enter__(self) -> ProgressFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
        at = _SLOTS_AT[self._sequence % 2]  # never the slot that holds the latest
        self._memory[at : at + _SLOT_BYTES] = (fields + _CHECKSUM.pack(zlib.crc32(fields))).ljust(
            _SLOT_BYTES, b"\0"
        )


def begin_without_trainer(path: Path, *, wall_time_s: float) -> int:
    """Count up the incarnation for a peer that does not train; returns it.

    It is of the same kind as a trainer's and above all of those before it, should a trainer have
    used the folder, or come to use it. How the last trainer ended stays as it is told there.
    """
    with ProgressFile.begin(path, wall_time_s=wall_time_s) as progress:
        if progress.previous is None or progress.previous.clean:
            progress.end()
        return progress.now.incarnation


def read_progress(path: Path) -> Processed | None:
    """The latest record, at any time, from any process; ``None`` if there is none."""
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
        # Both slots were being written while we read: the writer lapped us. Look again.
    return None


def _newest(content: bytes | mmap.mmap) -> tuple[int, Processed] | None:
    found: list[tuple[int, Processed]] = []
    if content[: len(_MAGIC)] != _MAGIC:
        return None
    for at in _SLOTS_AT:
        fields = content[at : at + _RECORD.size]
        (checksum,) = _CHECKSUM.unpack(content[at + _RECORD.size : at + _RECORD.size + 4])
        if zlib.crc32(fields) != checksum:
            continue
        sequence, incarnation, step, tokens, earlier, clean = _RECORD.unpack(fields)
        if sequence:
            found.append((sequence, Processed(incarnation, step, tokens, earlier, bool(clean))))
    return max(found, key=lambda entry: entry[0], default=None)
