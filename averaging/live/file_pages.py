"""Pages of mapped files: are they in the page cache, bring them there, let them go.

These calls of the kernel may wait for a disk. They are made by ``ctypes``, as the methods of
``mmap`` keep the interpreter's lock meanwhile, and the event loop would wait as well. Where a
system has no such call nothing is done: pages then come one by one, as they are touched.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import cache

import numpy as np

from averaging.numbers.arrays import Bytes

MADV_POPULATE_WRITE = 23
"""Linux 5.14 or newer; Python does not name it."""

_RESIDENT = 1
"""The bit of a page in an answer of ``mincore``."""


def cached_share(data: Bytes) -> float:
    """The part of these pages that is in the page cache; 1.0 where the system does not tell."""
    pages = -(-data.size // mmap.PAGESIZE)
    found = np.zeros(pages, np.uint8)
    if _call("mincore", _address(data), data.size, _address(found)):
        return float(np.count_nonzero(found & _RESIDENT)) / pages
    return 1.0


def fetch(data: Bytes) -> None:
    """Begin to read what is not in the page cache. Nothing becomes resident."""
    if hasattr(mmap, "MADV_WILLNEED"):
        _call("madvise", _address(data), data.size, mmap.MADV_WILLNEED)


def allot(data: Bytes) -> None:
    """Give pages to a file that has none, so that nobody waits for them when they are written."""
    if sys.platform == "linux":
        _call("madvise", _address(data), data.size, MADV_POPULATE_WRITE)


def let_go(data: Bytes) -> None:
    """Take the pages out of this process's memory; what was written stays in the page cache."""
    if hasattr(mmap, "MADV_DONTNEED"):
        _call("madvise", _address(data), data.size, mmap.MADV_DONTNEED)


def _call(name: str, *arguments: int) -> bool:
    """Call a function of the system with pointers and sizes; true if it succeeds."""
    function = getattr(_system(), name, None)
    return function is not None and function(*map(ctypes.c_size_t, arguments)) == 0


@cache
def _system() -> ctypes.CDLL | None:
    return None if sys.platform == "win32" else ctypes.CDLL(None)


def _address(data: Bytes) -> int:
    address: int = data.__array_interface__["data"][0]
    return address
