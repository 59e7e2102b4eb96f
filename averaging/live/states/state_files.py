"""States in files: theta, momentum and replay log of which little is in memory.

``StateFiles`` puts vectors into files without a name and maps them. Arithmetic works on them as on
any other memory, with the same bits; the kernel reads pages as they are touched and writes them
back when it likes. It may take their memory for other programs at any time, which it cannot do with
ordinary memory where there is no swap.

A vector that is to be filled is **ordinary memory** at first: the kernel finds, clears, maps and
books each page of a new file at its first touch, which takes several times as long as an outer
step, and a round waits for it. The owner of a finished state has it ``put_away`` afterwards. There
is ordinary memory for ``working_bytes_max``; beyond it, vectors are files from the beginning.

Pages that were touched count as this process's memory until it lets go of them. ``tend`` does that
as soon as they are more than ``resident_max_bytes``, whoever touched them: a round, a checkpoint, a
peer that fetches the state. Letting go is always safe, also of pages that are being used: nothing
is lost, and the next access finds them in the page cache. So nobody has to say when he is done.

The files are scratch. They have no name from the beginning, so that nothing is left behind however
the process ends; a peer's state is recovered from its checkpoint and from other peers. The space of
each is allocated before it is mapped, since to touch a page for which the disk has no room ends the
process (SIGBUS). Where there is no room, or the machine's owner allows no more, vectors are
ordinary memory and ``refusal`` says why.

A new file is made for each vector. To use an old one again would read its pages from the disk only
to overwrite them, and a page that was never written back costs no writing when its file goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import mmap
import os
import resource
import shutil
import sys
import tempfile
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from averaging.history.state import value_bytes
from averaging.live.streams.buffers import SMALL_BYTES, Arena
from averaging.numbers.arrays import Buffer, Bytes, Float32s, uninitialised_floats

SPARE_BYTES = 1 << 30
"""Free space that is left to others on the disk, and to file systems that copy what is written."""

RESIDENT_MAX_BYTES = 256 << 20
WORKING_BYTES_MAX = 448 << 20
"""Both vectors of one of 24 fragments of a billion values, and the rounding of their sizes."""
SHARE_OF_DESCRIPTORS = 0.5
"""Part of the open files that the system allows this process: each mapping holds one."""

TEND_EVERY_S = 0.25
"""Reading at 1 GB/s makes as much resident between two looks as may be."""


class _Mapped(NamedTuple):
    """One file. Its size is asked for in any thread, and a closed mapping does not tell it."""

    mapping: mmap.mmap
    size: int


def working_bytes(largest: int, mu: float) -> int:
    """Ordinary memory for one round's vectors of a fragment with so many values, at most."""
    return min(WORKING_BYTES_MAX, (2 + value_bytes(mu)) * largest)


class StateFiles:
    """Memory of states in files of one folder."""

    def __init__(
        self,
        folder: Path,
        *,
        allowed_bytes: Callable[[], float | None] = lambda: None,
        resident_max_bytes: int = RESIDENT_MAX_BYTES,
        working_bytes_max: int = WORKING_BYTES_MAX,
        spare_bytes: int = SPARE_BYTES,
        least_bytes: int = SMALL_BYTES,
        files_max: int | None = None,
    ) -> None:
        """``allowed_bytes()``: current limit for all files; ``None``: the free space.

        ``least_bytes``: smaller vectors are ordinary memory. ``files_max``: most files at a time;
        ``None``: ``SHARE_OF_DESCRIPTORS`` of what the system allows.
        """
        self._files_max = _descriptors() if files_max is None else files_max
        self._folder = folder
        self._allowed_bytes = allowed_bytes
        self._spare_bytes = spare_bytes
        self._least_bytes = least_bytes
        self._resident_max_bytes = resident_max_bytes + (_shared_resident_bytes() or 0)
        self._working = Arena(working_bytes_max)
        self._maps: dict[int, _Mapped] = {}
        """Files in use, by address."""
        # Vectors may go in any thread; a deque's ends are safe there.
        self._returned: deque[_Mapped] = deque()
        """Files that nobody uses any more."""
        self.refusal: str | None = None
        """Reason why the last vector is in memory; ``None``: it is in a file."""

    @property
    def used_bytes(self) -> int:
        """Space on the disk that the files take. No listing of a folder shows it."""
        return sum(each.size for each in (*self._maps.values(), *self._returned))

    def floats(self, count: int) -> Float32s:
        if self._has_working_memory(4 * count):
            return self._working.floats(count)
        raw = self._mapped(4 * count)
        return uninitialised_floats(count) if raw is None else raw.view(np.float32)

    def is_put_away(self, vector: Float32s) -> bool:
        """True if the vector is where it is to stay."""
        return vector.nbytes < self._least_bytes or _address(vector) in self._maps

    def put_away(self, vector: Float32s) -> Float32s:
        """The vector in a file, where there is room for it. Work for a thread."""
        if self.is_put_away(vector):
            return vector
        raw = self._mapped(vector.nbytes, vector.view(np.uint8).data)
        return vector if raw is None else raw.view(np.float32)

    def kept(self, payload: Buffer) -> Buffer:
        """The bytes in a file of their own. Work for a thread."""
        view = memoryview(payload).cast("B")
        raw = self._mapped(len(view), view)
        return payload if raw is None else raw.data

    async def tend(self) -> None:
        """Wait a moment, keep resident pages below their limit, and give back unused files."""
        await asyncio.sleep(TEND_EVERY_S)
        resident = _shared_resident_bytes()
        if resident is None or resident > self._resident_max_bytes:
            self.let_go()
        await asyncio.to_thread(self._close_returned)

    def let_go(self) -> None:
        """Take all pages out of this process's memory; their content stays."""
        for mapped in list(self._maps.values()):
            mapped.mapping.madvise(mmap.MADV_DONTNEED)

    def _has_working_memory(self, size: int) -> bool:
        return self._working.used_bytes + size <= self._working.kept_max_bytes

    def _mapped(self, size: int, content: memoryview | None = None) -> Bytes | None:
        """A new file, mapped; ``None``: there is no room for it. ``content``: what is written."""
        if size < self._least_bytes:
            return None
        allowed = self._allowed_bytes()
        if allowed is not None and self.used_bytes + size > allowed:
            self.refusal = (
                f"{self.used_bytes / 1e6:.0f} of {allowed / 1e6:.0f} MB of disk are used for it, "
                f"and {size / 1e6:.0f} MB more are needed; raise the limit with "
                "`shoal limits --disk`"
            )
            return None
        if len(self._maps) + len(self._returned) >= self._files_max:
            self.refusal = (
                f"it is in {self._files_max} files already, and no more may be open; raise the "
                "limit with `ulimit -n`, or have fewer fragments in the run"
            )
            return None
        try:
            mapping = self._new_file(size, content)
        except OSError as error:
            self.refusal = (
                f"{self._folder}: {size / 1e6:.0f} MB cannot be had beside a reserve of "
                f"{self._spare_bytes / 1e6:.0f} MB: {error.strerror or error}; free some space"
            )
            return None
        self.refusal = None
        # Every view's base is this array, as it does not own its memory: it goes when all are gone.
        owner: Bytes = np.frombuffer(mapping, np.uint8)
        address = _address(owner)
        self._maps[address] = _Mapped(mapping, size)
        weakref.finalize(owner, self._gone, address).atexit = False
        return owner

    def _new_file(self, size: int, content: memoryview | None) -> mmap.mmap:
        if shutil.disk_usage(self._folder).free < size + self._spare_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        descriptor, path = tempfile.mkstemp(prefix=".state-", dir=self._folder)
        try:
            Path(path).unlink()
            if content is None:
                _allocate(descriptor, size)
            else:
                _write(descriptor, content)
            return mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)

    def _gone(self, address: int) -> None:
        self._returned.append(self._maps.pop(address))

    def _close_returned(self) -> None:
        """Unmap files that nobody uses: it takes a while, as the kernel frees their pages."""
        while self._returned:
            mapped = self._returned.popleft()
            # The last view may be about to go in another thread: it unmaps the file then.
            with contextlib.suppress(BufferError):
                mapped.mapping.close()


def _address(vector: np.ndarray[tuple[int], np.dtype[np.float32 | np.uint8]]) -> int:
    address: int = vector.__array_interface__["data"][0]
    return address


def _descriptors() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else int(SHARE_OF_DESCRIPTORS * soft)


def _allocate(descriptor: int, size: int) -> None:
    """Reserve the space of a file. Raises ``OSError`` if there is none."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
        return
    zeros = bytes(SMALL_BYTES)  # macOS has no such call
    for start in range(0, size, len(zeros)):
        os.pwrite(descriptor, zeros[: size - start], start)


def _write(descriptor: int, content: memoryview) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


def _shared_resident_bytes() -> int | None:
    """Resident pages of files and shared memory; ``None`` where the system does not tell."""
    try:
        pages = Path("/proc/self/statm").read_text().split()
    except OSError:
        return None
    return int(pages[2]) * mmap.PAGESIZE
