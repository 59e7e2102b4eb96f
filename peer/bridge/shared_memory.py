"""Memory that a trainer and its agent share: one fp32 slot per fragment, and a few counters.

Both processes map one file that has no name: the trainer creates it and hands the descriptor to
each agent that it starts. So nothing is left behind when either of them is killed, and a new agent
finds everything as the old one left it.

**A slot is a baton.** Its state word says which side may touch the slot and the rest of its control
block; only that side writes the word. No lock is needed, and neither side waits for the other::

    FREE     agent    nothing under way
    WANTED   trainer  copy the parameters in, at the next safe point
    OFFERED  agent    the parameters as they were at ``mark``
    TURNING  agent    OFFERED or FREE, and being overwritten: no longer parameters, not yet a delta
    ADOPT    trainer  adopt this, at the next safe point
    BASE     agent    adopted; the slot says what the trainer's rounding made of it

    FREE -> WANTED -> OFFERED -> TURNING -> ADOPT -> FREE     (fp32 parameters)
                         |                        -> BASE -> FREE  (coarser ones)
                         +-> FREE  (not needed after all)
    FREE -> TURNING -> ADOPT                    (something new, nothing offered)

The trainer writes ``base`` (the version that its parameters are based on) at the moment it adopts
a version. It is therefore right even if the agent died meanwhile; an agent that starts on used
memory reconciles with it (``peer.agent.slots``). The memory of a dead trainer is never reused.
"""

from __future__ import annotations

import contextlib
import enum
import mmap
import os
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from peer.bridge.messages import LineBroken
from peer.errors import PeerError

Float32s: TypeAlias = NDArray[np.float32]

_MAGIC = 0x5348_4F41_4C01_0002
"""The last digits number the layout below."""
_PAGE_BYTES = 4096
_PROGRESS_OFFSET = 256
_MADV_POPULATE_WRITE = 23


class SlotState(enum.IntEnum):
    """State of a slot; the table is in the docstring of this module."""

    FREE = 0
    WANTED = 1
    OFFERED = 2
    TURNING = 3
    ADOPT = 4
    BASE = 5


class Adoption(enum.IntEnum):
    """Ways in which the trainer adopts the contents of a slot."""

    ADD = 0
    """now += slot. Steps made meanwhile stay."""
    SET = 1
    """now = slot. Steps made meanwhile are lost; also used to enter a run."""
    PUT = 2
    """now = slot, and nothing counts as lost."""


_HEADER = np.dtype(
    [
        ("magic", "<u8"),
        ("fragments", "<u8"),
        ("total_bytes", "<u8"),
        ("incarnation", "<u8"),
        ("coarse", "<u8"),
        ("layout", "u1", 32),
        ("may_empty", "<u8"),
    ]
)

# Every value is aligned to its size and written by one side only: no reader sees half of it.
_PROGRESS = np.dtype(
    [
        ("step", "<u8"),
        ("tokens", "<u8"),
        ("step_time_s", "<f8"),
        ("batch_tokens_max", "<u8"),
        ("spare", "<u8", 4),
    ]
)

_CONTROL = np.dtype(
    [
        ("state", "<u4"),
        ("size_values", "<u4"),
        ("offset_bytes", "<u8"),
        # Written by the trainer with OFFERED.
        ("mark", "<u8"),
        ("tokens", "<u8"),
        # Written by the trainer when it adopts a version.
        ("has_base", "<u8"),
        ("base_version", "<u8"),
        ("base_mark", "<u8"),
        ("base_tokens", "<u8"),
        ("adopted_step", "<u8"),
        ("adopted_tokens", "<u8"),
        ("base_lineage", "u1", 32),
        # Written by the agent before ADOPT.
        ("operation", "<u8"),
        ("has_mark", "<u8"),
        ("new_version", "<u8"),
        ("new_mark", "<u8"),
        ("new_tokens", "<u8"),
        ("new_lineage", "u1", 32),
        ("spare", "u1", 72),
    ]
)
assert _CONTROL.itemsize == 256, _CONTROL.itemsize
assert _PROGRESS.itemsize == 64, _PROGRESS.itemsize


class MemoryUnavailable(PeerError):
    """There is not enough shared memory to exchange fragments through."""

    needed_bytes: int
    reason: str

    def __str__(self) -> str:
        return (
            f"{self.needed_bytes / 1e6:.1f} MB of shared memory cannot be had: {self.reason}; "
            "free some memory, or raise this container's memory limit"
        )


@dataclass(frozen=True, slots=True)
class Base:
    """Version that a trainer's parameters of one fragment are based on."""

    version: int
    lineage: bytes
    mark: int
    """Own steps up to here are in that version, or were given up."""
    tokens: int
    """This incarnation's tokens up to ``mark``."""


@dataclass(frozen=True, slots=True)
class AdoptionOrder:
    """The agent's request to adopt a version."""

    operation: Adoption
    version: int
    lineage: bytes
    mark: int | None
    """Own steps up to here are in the version; ``None``: the base's mark stays."""
    tokens: int


class SharedTensors:
    """One mapping of the shared memory. Trainer and agent each hold their own."""

    def __init__(self, descriptor: int) -> None:
        """Map the file of ``descriptor``, which is closed by ``close`` as well."""
        self._descriptor = descriptor
        size = os.fstat(descriptor).st_size
        if size < _PAGE_BYTES:
            raise ValueError(f"shared memory of {size} bytes has no header")
        self._map = mmap.mmap(descriptor, size)
        self._header = np.frombuffer(self._map, _HEADER, 1)[0:1]
        if int(self._header["magic"][0]) != _MAGIC:
            raise LineBroken("their shared memory is of another kind")
        if int(self._header["total_bytes"][0]) != size:
            raise ValueError("shared memory was cut off")
        count = int(self._header["fragments"][0])
        self._progress = np.frombuffer(self._map, _PROGRESS, 1, offset=_PROGRESS_OFFSET)
        self.control: NDArray[Any] = np.frombuffer(self._map, _CONTROL, count, offset=_PAGE_BYTES)
        self._states: NDArray[np.uint32] = self.control["state"]
        self._slots: list[Float32s] = [
            np.frombuffer(
                self._map, np.float32, int(block["size_values"]), int(block["offset_bytes"])
            )
            for block in self.control
        ]

    @classmethod
    def create(
        cls, sizes: Sequence[int], *, layout: bytes, incarnation: int, coarse: bool
    ) -> SharedTensors:
        """Create memory with a slot of ``sizes[n]`` values for each fragment.

        ``coarse``: the parameters have fewer than 32 bits, so that the trainer returns after each
        adoption what its rounding made of it.
        """
        if len(layout) != 32:
            raise ValueError(f"a layout hash has 32 bytes, not {len(layout)}")
        if any(size < 1 or size >= 1 << 32 for size in sizes):
            raise ValueError("a fragment has between 1 and 2^32 - 1 values")
        offset = _round_up(_PAGE_BYTES + len(sizes) * _CONTROL.itemsize)
        offsets = []
        for size in sizes:
            offsets.append(offset)
            offset = _round_up(offset + 4 * size)
        descriptor = _nameless_file(offset)
        header = np.zeros(1, _HEADER)
        header["magic"] = _MAGIC
        header["fragments"] = len(sizes)
        header["total_bytes"] = offset
        header["incarnation"] = incarnation
        header["coarse"] = coarse
        header["layout"][0] = np.frombuffer(layout, np.uint8)
        header["may_empty"] = 1
        control = np.zeros(len(sizes), _CONTROL)
        control["size_values"] = sizes
        control["offset_bytes"] = offsets
        progress = np.zeros(1, _PROGRESS)
        os.pwrite(descriptor, header.tobytes(), 0)
        os.pwrite(descriptor, progress.tobytes(), _PROGRESS_OFFSET)
        os.pwrite(descriptor, control.tobytes(), _PAGE_BYTES)
        made = cls(descriptor)
        made._touch()
        return made

    def __repr__(self) -> str:
        states = ",".join(SlotState(int(word)).name for word in self._states)
        return f"SharedTensors(step={self.step}, states=[{states}])"

    # --- what never changes -----------------------------------------------------------------

    @property
    def descriptor(self) -> int:
        """File descriptor for a child process that maps the same memory."""
        return self._descriptor

    @property
    def fragments(self) -> int:
        return len(self._slots)

    @property
    def incarnation(self) -> int:
        return int(self._header["incarnation"][0])

    @property
    def coarse(self) -> bool:
        return bool(self._header["coarse"][0])

    @property
    def layout(self) -> bytes:
        return bytes(self._header["layout"][0])

    # --- slots ------------------------------------------------------------------------------

    def slot(self, fragment: int) -> Float32s:
        """The values. Only the side that the state word names may touch them."""
        return self._slots[fragment]

    def hold_pages(self) -> None:
        """Trainer, before its agent starts: no slot may be emptied any more.

        A device that reaches pinned pages by itself would go on using those that were given back,
        which no process sees any more.
        """
        self._header["may_empty"] = 0

    @property
    def may_empty(self) -> bool:
        """False where a device may use the pages."""
        return bool(self._header["may_empty"][0])

    def empty(self, fragment: int) -> None:
        """Agent, in state FREE: give the memory of a slot back. Its values become zeros.

        Nothing happens where it may not be emptied, or the system cannot do it.
        """
        if self.may_empty and hasattr(mmap, "MADV_REMOVE"):  # Linux
            self._map.madvise(mmap.MADV_REMOVE, *self._place(fragment))

    def fill(self, fragment: int) -> None:
        """Agent, in state FREE: reserve the memory of an empty slot. Work for a thread.

        The trainer would wait for it at its safe point, or be ended if there is none.
        Raises ``MemoryUnavailable``.
        """
        offset, size = self._place(fragment)
        if not hasattr(mmap, "MADV_REMOVE"):
            return
        try:
            os.posix_fallocate(self._descriptor, offset, size)
        except OSError as error:
            raise MemoryUnavailable(size, error.strerror or str(error)) from error

    def _place(self, fragment: int) -> tuple[int, int]:
        """Offset and size of a slot, in whole pages."""
        block = self.control[fragment]
        return int(block["offset_bytes"]), _round_up(4 * int(block["size_values"]))

    def state(self, fragment: int) -> SlotState:
        state = SlotState(int(self._states[fragment]))
        _fence()
        return state

    def states(self) -> list[int]:
        """All state words at once, at little cost."""
        words: list[int] = self._states.tolist()
        _fence()
        return words

    def pass_on(self, fragment: int, state: SlotState) -> None:
        """Write the state word. Everything written before is visible to a reader of the word."""
        _fence()
        self._states[fragment] = state

    def base(self, fragment: int) -> Base | None:
        """The base of the trainer's parameters; ``None`` before the first adoption."""
        block = self.control[fragment]
        if not block["has_base"]:
            return None
        mark = int(block["base_mark"])
        _fence()  # the tokens may be those of a later mark, and never of an earlier one
        return Base(
            version=int(block["base_version"]),
            lineage=bytes(block["base_lineage"]),
            mark=mark,
            tokens=int(block["base_tokens"]),
        )

    def order(self, fragment: int) -> AdoptionOrder:
        """Trainer, in state ADOPT: the agent's request."""
        block = self.control[fragment]
        return AdoptionOrder(
            operation=Adoption(int(block["operation"])),
            version=int(block["new_version"]),
            lineage=bytes(block["new_lineage"]),
            mark=int(block["new_mark"]) if block["has_mark"] else None,
            tokens=int(block["new_tokens"]),
        )

    def give(self, fragment: int, order: AdoptionOrder) -> None:
        """Agent, with the slot filled: let the trainer adopt it."""
        block = self.control[fragment]
        block["operation"] = order.operation
        block["new_version"] = order.version
        block["new_lineage"] = np.frombuffer(order.lineage, np.uint8)
        block["has_mark"] = order.mark is not None
        block["new_mark"] = order.mark or 0
        block["new_tokens"] = order.tokens
        self.pass_on(fragment, SlotState.ADOPT)

    def offer(self, fragment: int, *, mark: int, tokens: int) -> None:
        """Trainer, with its parameters as of own step ``mark`` in the slot: pass them on."""
        block = self.control[fragment]
        block["mark"] = mark
        block["tokens"] = tokens
        self.pass_on(fragment, SlotState.OFFERED)

    def offered(self, fragment: int) -> tuple[int, int]:
        """Agent, in state OFFERED: the mark, and this incarnation's tokens up to it."""
        block = self.control[fragment]
        return int(block["mark"]), int(block["tokens"])

    def note_adoption(self, fragment: int, order: AdoptionOrder, *, step: int, tokens: int) -> None:
        """Trainer: the request was carried out at own step ``step``."""
        block = self.control[fragment]
        block["base_version"] = order.version
        block["base_lineage"] = np.frombuffer(order.lineage, np.uint8)
        if order.operation is Adoption.SET:
            # Own work that was not in that version has just been overwritten.
            self._note_base(fragment, mark=step, tokens=tokens)
        elif order.mark is not None:
            self._note_base(fragment, mark=order.mark, tokens=order.tokens)
        block["has_base"] = 1
        block["adopted_step"], block["adopted_tokens"] = step, tokens
        self.pass_on(fragment, SlotState.BASE if self.coarse else SlotState.FREE)

    def _note_base(self, fragment: int, *, mark: int, tokens: int) -> None:
        """Tokens first: the agent may look in between."""
        block = self.control[fragment]
        block["base_tokens"] = tokens
        _fence()
        block["base_mark"] = mark

    def adopted_at(self, fragment: int) -> tuple[int, int]:
        """Own step and tokens at the last adoption."""
        block = self.control[fragment]
        return int(block["adopted_step"]), int(block["adopted_tokens"])

    # --- progress: written by the trainer at each safe point, read by the agent at any time -----

    @property
    def step(self) -> int:
        return int(self._progress["step"][0])

    @property
    def tokens(self) -> int:
        return int(self._progress["tokens"][0])

    @property
    def step_time_s(self) -> float:
        return float(self._progress["step_time_s"][0])

    @property
    def batch_tokens_max(self) -> int:
        return int(self._progress["batch_tokens_max"][0])

    def report(
        self,
        *,
        step: int,
        tokens: int,
        step_time_s: float,
        batch_tokens_max: int,
    ) -> None:
        """Trainer: how far it is."""
        self._progress[0] = (
            step,
            tokens,
            step_time_s,
            batch_tokens_max,
            0,
        )

    def _touch(self) -> None:
        """Map every page now, so that no safe point pays for it.

        The first copy of a slot of 30 MB takes 20 ms without this, and 6 ms with it.
        """
        with contextlib.suppress(OSError):  # not before Linux 5.14
            self._map.madvise(_MADV_POPULATE_WRITE)

    def close(self) -> None:
        """Unmap. Views keep their part of the mapping alive until they are freed."""
        if self._descriptor < 0:
            return
        os.close(self._descriptor)
        self._descriptor = -1
        self._slots = []
        # The map is freed with its last view: to close it under a view would be an error.


def _round_up(size: int) -> int:
    return -(-size // _PAGE_BYTES) * _PAGE_BYTES


_first = threading.Lock()
_second = threading.Lock()


def _fence() -> None:
    """Memory fence: no read or write is reordered across it.

    Python has no fence of its own. Releasing one lock and then taking another is one on every
    machine: a release is not reordered with a later acquire.
    """
    with _first:
        pass
    with _second:
        pass


def _nameless_file(size: int) -> int:
    """Create a file without a name, with its pages reserved; it is freed with its last descriptor.

    On Linux it is not in /dev/shm, which containers limit to 64 MB.
    """
    if sys.platform == "linux":
        descriptor = os.memfd_create("shoal-slots", os.MFD_CLOEXEC)
    else:
        descriptor, path = tempfile.mkstemp(prefix="shoal-slots-")
        Path(path).unlink()
    try:
        os.ftruncate(descriptor, size)
        if sys.platform == "linux":
            os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        os.close(descriptor)
        raise MemoryUnavailable(size, error.strerror or str(error)) from error
    return descriptor
