"""Memory that a trainer and its agent share: one fp32 slot per fragment, and a few counters.

Both processes map one file that has no name: the trainer makes it and hands the
descriptor to each agent it starts. So nothing can be left behind, whoever is
killed, and a new agent finds everything as the old one left it.

**A slot is a baton.** Its state word says who may touch the slot and the rest of
its control block; only that side writes the word. No lock is needed, and nobody
waits for the other::

    FREE     agent    nothing under way
    WANTED   trainer  copy the parameters in, at the next safe point
    OFFERED  agent    the parameters as they were at ``mark``
    TURNING  agent    OFFERED or FREE, and being overwritten: no longer parameters, not yet a delta
    ADOPT    trainer  take this in, at the next safe point
    BASE     agent    taken in; the slot says what the trainer's rounding made of it

    FREE -> WANTED -> OFFERED -> TURNING -> ADOPT -> FREE     (fp32 parameters)
                         |                        -> BASE -> FREE  (coarser ones)
                         +-> FREE  (not needed after all)
    FREE -> TURNING -> ADOPT                    (something new, nothing offered)

What ``base`` is (the version which the trainer's parameters grew from) is written
by the trainer at the moment it takes a version in. It is therefore right even if
the agent died meanwhile; an agent that starts on used memory reconciles with
it (``peer.agent.slots``). A dead trainer takes its parameters with it; its memory is never reused.
"""

from __future__ import annotations

import contextlib
import enum
import mmap
import os
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from peer.errors import PeerError

Float32s: TypeAlias = NDArray[np.float32]

_MAGIC = 0x5348_4F41_4C01_0002
_PAGE_BYTES = 4096
_PROGRESS_OFFSET = 256
_MADV_POPULATE_WRITE = 23


class SlotState(enum.IntEnum):
    """Whose turn it is with a slot; the table is in the module's docstring."""

    FREE = 0
    WANTED = 1
    OFFERED = 2
    TURNING = 3
    ADOPT = 4
    BASE = 5


class Adoption(enum.IntEnum):
    """What the trainer does with the contents of a slot in state ADOPT."""

    ADD = 0
    """now += slot. The steps made meanwhile stay."""
    SET = 1
    """now = slot. The steps made meanwhile are lost; also the way into a run."""
    BLEND = 2
    """now = alpha * now + (1 - alpha) * slot."""


_HEADER = np.dtype(
    [
        ("magic", "<u8"),
        ("fragments", "<u8"),
        ("total_bytes", "<u8"),
        ("incarnation", "<u8"),
        ("coarse", "<u8"),
        ("layout", "u1", 32),
    ]
)

# Every value is aligned to its size and written by one side only: no reader sees half of it.
_PROGRESS = np.dtype(
    [
        ("step", "<u8"),
        ("tokens", "<u8"),
        ("step_time_s", "<f8"),
        ("batch_tokens_max", "<u8"),
        ("safe_points", "<u8"),
        ("loss", "<f8"),
        ("blocked_s", "<f8"),
        ("spare", "<u8"),
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
        # Written by the trainer when it takes a version in.
        ("has_base", "<u8"),
        ("base_version", "<u8"),
        ("base_mark", "<u8"),
        ("base_tokens", "<u8"),
        ("adopted_step", "<u8"),
        ("adopted_tokens", "<u8"),
        ("base_lineage", "u1", 32),
        # Written by the agent before ADOPT.
        ("operation", "<u4"),
        ("alpha", "<f4"),
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
    """The memory that trainer and agent exchange fragments through cannot be had."""

    def __init__(self, needed_bytes: int, reason: str) -> None:
        super().__init__(needed_bytes, reason)
        self.needed_bytes = needed_bytes
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"{self.needed_bytes / 1e6:.1f} MB of shared memory cannot be had: {self.reason}; "
            "free some memory, or raise this container's memory limit"
        )


@dataclass(frozen=True, slots=True)
class Base:
    """What a trainer's parameters of one fragment grew from."""

    version: int
    lineage: bytes
    mark: int
    """Own steps up to here are in that version, or were given up."""
    tokens: int
    """This incarnation's tokens up to ``mark``."""


@dataclass(frozen=True, slots=True)
class Order:
    """What the agent asks the trainer to take in."""

    operation: Adoption
    alpha: float
    version: int
    lineage: bytes
    mark: int | None
    """Own steps up to here are in the version; ``None``: it changes nothing about the marks."""
    tokens: int


class SharedTensors:
    """One mapping of the shared memory. Trainer and agent each hold their own."""

    def __init__(self, descriptor: int) -> None:
        """Map what ``descriptor`` holds, and own it: ``close`` closes both."""
        self._descriptor = descriptor
        size = os.fstat(descriptor).st_size
        if size < _PAGE_BYTES:
            raise ValueError(f"shared memory of {size} bytes has no header")
        self._map = mmap.mmap(descriptor, size)
        self._header = np.frombuffer(self._map, _HEADER, 1)[0:1]
        if int(self._header["magic"][0]) != _MAGIC:
            raise ValueError("shared memory of another kind or version")
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
        """New memory with a slot of so many values for each fragment.

        ``coarse``: the parameters are kept in fewer than 32 bits, so that the
        trainer says after each adoption what its rounding made of it.
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
        control = np.zeros(len(sizes), _CONTROL)
        control["size_values"] = sizes
        control["offset_bytes"] = offsets
        progress = np.zeros(1, _PROGRESS)
        progress["loss"] = np.nan
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
        """To be handed to a child process; it maps the same memory."""
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
        """The values. Touch them only while the state word says that it is your turn."""
        return self._slots[fragment]

    def state(self, fragment: int) -> SlotState:
        state = SlotState(int(self._states[fragment]))
        _fence()
        return state

    def states(self) -> list[int]:
        """All state words at once, cheaply."""
        words: list[int] = self._states.tolist()
        _fence()
        return words

    def pass_on(self, fragment: int, state: SlotState) -> None:
        """Say whose turn it is now. Everything written before is visible to who reads the word."""
        _fence()
        self._states[fragment] = state

    def base(self, fragment: int) -> Base | None:
        """What the trainer's parameters grew from; ``None`` before the first adoption."""
        block = self.control[fragment]
        if not block["has_base"]:
            return None
        return Base(
            version=int(block["base_version"]),
            lineage=bytes(block["base_lineage"]),
            mark=int(block["base_mark"]),
            tokens=int(block["base_tokens"]),
        )

    def order(self, fragment: int) -> Order:
        """Trainer, in state ADOPT: what to do with the slot."""
        block = self.control[fragment]
        return Order(
            operation=Adoption(int(block["operation"])),
            alpha=float(block["alpha"]),
            version=int(block["new_version"]),
            lineage=bytes(block["new_lineage"]),
            mark=int(block["new_mark"]) if block["has_mark"] else None,
            tokens=int(block["new_tokens"]),
        )

    def give(self, fragment: int, order: Order) -> None:
        """Agent, with the slot filled: it is the trainer's turn to take it in."""
        block = self.control[fragment]
        block["operation"] = order.operation
        block["alpha"] = order.alpha
        block["new_version"] = order.version
        block["new_lineage"] = np.frombuffer(order.lineage, np.uint8)
        block["has_mark"] = order.mark is not None
        block["new_mark"] = order.mark or 0
        block["new_tokens"] = order.tokens
        self.pass_on(fragment, SlotState.ADOPT)

    def offer(self, fragment: int, *, mark: int, tokens: int) -> None:
        """Trainer, with its parameters in the slot: they are as of own step ``mark``."""
        block = self.control[fragment]
        block["mark"] = mark
        block["tokens"] = tokens
        self.pass_on(fragment, SlotState.OFFERED)

    def offered(self, fragment: int) -> tuple[int, int]:
        """Agent, in state OFFERED: the mark, and this incarnation's tokens up to it."""
        block = self.control[fragment]
        return int(block["mark"]), int(block["tokens"])

    def took_in(self, fragment: int, order: Order, *, step: int, tokens: int) -> None:
        """Trainer: the slot's order was carried out at own step ``step``."""
        block = self.control[fragment]
        block["base_version"] = order.version
        block["base_lineage"] = np.frombuffer(order.lineage, np.uint8)
        if order.operation is Adoption.SET:
            # Whatever was not yet in that version has been overwritten just now.
            block["base_mark"], block["base_tokens"] = step, tokens
        elif order.mark is not None:
            block["base_mark"], block["base_tokens"] = order.mark, order.tokens
        block["has_base"] = 1
        block["adopted_step"], block["adopted_tokens"] = step, tokens
        self.pass_on(fragment, SlotState.BASE if self.coarse else SlotState.FREE)

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

    @property
    def loss(self) -> float | None:
        loss = float(self._progress["loss"][0])
        return loss if np.isfinite(loss) else None

    @property
    def blocked_s(self) -> float:
        return float(self._progress["blocked_s"][0])

    def report(
        self,
        *,
        step: int,
        tokens: int,
        step_time_s: float,
        batch_tokens_max: int,
        loss: float | None,
        blocked_s: float,
    ) -> None:
        """Trainer: how far it is."""
        self._progress[0] = (
            step,
            tokens,
            step_time_s,
            batch_tokens_max,
            0,
            float("nan") if loss is None else loss,
            blocked_s,
            0,
        )

    def _touch(self) -> None:
        """Have every page in this process's tables, so that no safe point pays for it.

        Of a slot of 30 MB the first copy took 20 ms, and 6 after this.
        """
        with contextlib.suppress(OSError):  # before Linux 5.14 and elsewhere: the first copy does
            self._map.madvise(_MADV_POPULATE_WRITE)

    def close(self) -> None:
        """Unmap. Views handed out before keep their part of the mapping alive until they go."""
        if self._descriptor < 0:
            return
        os.close(self._descriptor)
        self._descriptor = -1
        self._slots = []
        # The map itself is released with its last view: closing it under one would be an error.


def _round_up(size: int) -> int:
    return -(-size // _PAGE_BYTES) * _PAGE_BYTES


_first = threading.Lock()
_second = threading.Lock()


def _fence() -> None:
    """Nothing read or written before is moved behind this, nothing after it before.

    Python has no fence of its own. Releasing one lock and then taking another is one on every
    machine: a release is not reordered with a later acquire, and neither lets its own side pass.
    """
    with _first:
        pass
    with _second:
        pass


def _nameless_file(size: int) -> int:
    """A file of ``size`` bytes that ends with its last descriptor, its pages reserved now.

    Linux has such files outside /dev/shm, which containers keep at 64 MB.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("shoal-slots", os.MFD_CLOEXEC)
    else:
        descriptor, path = tempfile.mkstemp(prefix="shoal-slots-")
        Path(path).unlink()
    try:
        os.ftruncate(descriptor, size)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        os.close(descriptor)
        raise MemoryUnavailable(size, error.strerror or str(error)) from error
    return descriptor
