"""The trainer's side of the shared memory: copy parameters out, take deltas in, never wait.

``Learner.step`` is the safe point. It runs after an optimizer step, on the
trainer's thread, and is the only place where parameters are read or changed.
It looks at one state word per fragment (``peer.bridge.shared_memory``) and does what is asked:
one copy out for an offer, one add in place for an adoption.

On CUDA both go over a side stream, with the shared memory pinned: a safe point
starts a copy, and a later one finds it done; a fragment has a buffer on the device meanwhile.
Elsewhere they are plain copies, unit by
unit, so that no temporary is larger than a unit. A fragment that takes longer than a safe point
may is spread over the next ones. Then some of an offer's units are a step or two newer than its
mark says. That costs nothing: of each value, what was offered is what is subtracted when the
merged one comes back, and the tokens of those steps count as merged one cycle later.
"""

from __future__ import annotations

import contextlib
import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from averaging.numbers.layout import Fragment, Layout, TensorSpec
from peer.bridge.shared_memory import Adoption, Order, SharedTensors, SlotState
from peer.errors import PeerError, RunRefused
from peer.model import recipes
from peer.run_file.sections import CustomModel, RunFile

logger = logging.getLogger(__name__)

_STEP_TIMES = 31
"""The median step time is over so many steps."""

_BLOCKED_TIMES = 8192
"""Percentiles of the blocked time are over so many steps."""

BUDGET_S = 0.001
"""A safe point copies for so long, and ends what it is at (a unit) ..."""

STEPS_MAX = 6
"""... unless a fragment would then take more steps than this."""


class NothingToTrain(PeerError):
    """A model without a single trainable parameter."""

    exit_code = 2

    def __str__(self) -> str:
        return "no parameter of the model has requires_grad; there is nothing to train together"


class LayoutUnknown(PeerError):
    """The run's model is not in its run file."""

    exit_code = 2

    def __init__(self, run: str) -> None:
        super().__init__(run)
        self.run = run

    def __str__(self) -> str:
        return (
            f"the model of run {self.run!r} is 'custom': only a program that brings it can take "
            "part, with peer.join(..., model=...)"
        )


def trained_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """What is exchanged: parameters with ``requires_grad``, tied ones once, by their first name."""
    found = {name: p for name, p in recipes.trained_parameters(model).items() if p.numel()}
    if not found:
        raise NothingToTrain
    return found


def specs_of(parameters: Mapping[str, torch.Tensor]) -> list[TensorSpec]:
    """What ``averaging.numbers.layout`` needs to know of them."""
    return [
        TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in parameters.items()
    ]


def model_layout(model: torch.nn.Module, fragments: int) -> Layout:
    """How a model is cut into fragments: the same at every peer of a run."""
    parameters = trained_parameters(model)
    return Layout.build(
        specs_of(parameters),
        fragments,
        embeddings=recipes.embedding_names(model) & parameters.keys(),
        heads=recipes.head_names(model) & parameters.keys(),
    )


def recipe_layout(run: RunFile) -> Layout:
    """That of the run's own model. Raises ``LayoutUnknown`` if its callers bring the model."""
    if isinstance(run.model, CustomModel):
        raise LayoutUnknown(run.name)
    return model_layout(recipes.build_model(run, weights=False), run.outer.fragments)


def is_coarse(parameters: Mapping[str, torch.Tensor]) -> bool:
    """Whether some are kept in fewer than 32 bits, so that taking in a delta rounds."""
    return any(tensor.dtype.itemsize < 4 for tensor in parameters.values())


def check_layout(layout: Layout, expected_hash: str | None) -> None:
    """Raise ``RunRefused`` if the run was made for other parameters."""
    if expected_hash is not None and layout.hash.hex() != expected_hash:
        raise RunRefused("the layout of the model", layout.hash.hex(), expected_hash)


class Piece(Protocol):
    """One unit of a fragment: a run of values of a parameter, wherever they are kept."""

    @property
    def where(self) -> slice:
        """Its values in the fragment."""
        ...

    def offer(self, part: torch.Tensor) -> None:
        """Copy the values into their part of the slot."""
        ...

    def adopt(self, part: torch.Tensor, order: Order, *, coarse: bool) -> None:
        """Take in that part of the slot. If coarse, leave in it what ``take_in`` returns."""
        ...


@dataclass(frozen=True, slots=True)
class _Piece:
    """One unit: a run of values of a parameter, and where they are in the fragment."""

    parameter: torch.nn.Parameter
    start: int
    end: int
    where: slice

    def offer(self, part: torch.Tensor) -> None:
        part.copy_(self.values())

    def adopt(self, part: torch.Tensor, order: Order, *, coarse: bool) -> None:
        values = self.values()
        held = take_in(values, part.to(values.device), order, coarse=coarse)
        self.written(values)
        if held is not None:
            part.copy_(held)

    def values(self) -> torch.Tensor:
        """The parameter's values themselves where its memory allows, else a copy of them.

        Looked up at each safe point: some libraries exchange a parameter's storage.
        """
        return self.parameter.data.reshape(-1)[self.start : self.end]

    def written(self, values: torch.Tensor) -> None:
        """Make sure that what was done to ``values()`` is in the parameter."""
        data = self.parameter.data
        if not data.is_contiguous():
            flat = data.reshape(-1)
            flat[self.start : self.end] = values
            data.copy_(flat.view(data.shape))


def _pieces(fragment: Fragment, parameters: Mapping[str, torch.nn.Parameter]) -> tuple[_Piece, ...]:
    return tuple(
        _Piece(parameters[unit.tensor], unit.start, unit.end, unit.values)
        for unit in fragment.units
    )


class _Mover(Protocol):
    """How values travel between the parameters of a fragment and its slot."""

    def start_offer(self, fragment: int) -> None: ...

    def start_adoption(self, fragment: int, order: Order) -> None: ...

    def go_on(self, fragment: int, enough: Callable[[], bool]) -> bool:
        """Do more of what was started, until ``enough()``, without waiting. Whether it is done."""
        ...

    def wait(self, fragment: int) -> None:
        """Wait for the device, until ``go_on`` would be done."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class BlockedTime:
    """How long the trainer's thread was in the safe point, in milliseconds."""

    p99_ms: float
    max_ms: float
    cpu_p99_ms: float
    """Of the processor time that was used there. What is beyond it, this thread spent waiting
    for a processor that other programs had."""
    total_s: float
    elapsed_s: float
    """From the first step to the last one."""

    @property
    def fraction(self) -> float:
        return self.total_s / self.elapsed_s if self.elapsed_s > 0 else 0.0


class Learner:
    """Offers and adopts fragments of a model at its safe points.

    ``ring`` is called when a slot's turn passes to the agent. It must return at once.
    """

    def __init__(
        self,
        memory: SharedTensors,
        layout: Layout,
        parameters: Mapping[str, torch.nn.Parameter],
        *,
        ring: Callable[[], None],
        clock: Callable[[], float] = time.perf_counter,
        budget_s: float = BUDGET_S,
        pieces: Sequence[Sequence[Piece]] | None = None,
    ) -> None:
        """``budget_s``: how long one safe point copies; infinite for whoever must not spread it.

        ``pieces``: the units of each fragment, where ``parameters`` are not all in this process.
        """
        self._memory = memory
        self._ring = ring
        self._clock = clock
        self._budget_s = budget_s
        self._mover = (
            _mover(memory, [_pieces(fragment, parameters) for fragment in layout.fragments])
            if pieces is None
            else _PlainMover(memory, _slots(memory), pieces)
        )
        self._offering: dict[int, tuple[int, int]] = {}
        self._adopting: dict[int, Order] = {}
        self._offers = [0] * memory.fragments
        self._step_times: deque[float] = deque(maxlen=_STEP_TIMES)
        self._blocked = np.zeros(_BLOCKED_TIMES, np.float64)
        self._blocked_cpu = np.zeros(_BLOCKED_TIMES, np.float64)
        self._blocked_count = 0
        self._blocked_total_s = 0.0
        self._blocked_max_s = 0.0
        self._first_at: float | None = None
        self._last_at: float | None = None
        self._batch_tokens_max = 0
        self._adopted: list[tuple[int, int]] = []
        self.steps = 0
        """Optimizer steps of this incarnation."""
        self.tokens = 0
        self.loss: float | None = None

    def __repr__(self) -> str:
        return f"Learner(steps={self.steps}, tokens={self.tokens}, {self._memory!r})"

    # --- the safe point -----------------------------------------------------------------------

    def step(self, tokens: int, *, on_count: Callable[[], None] | None = None) -> None:
        """One optimizer step on ``tokens`` tokens was made; exchange what is asked for.

        ``on_count`` is called after counting and before exchanging: whoever keeps
        counters on disk must write them before a peer can hear of this step.
        """
        if tokens < 0:
            raise ValueError(f"tokens is {tokens}; a step has none or some")
        began, cpu = self._clock(), time.thread_time()
        if self._last_at is not None:
            self._step_times.append(began - self._last_at)
        self._last_at = began
        if self._first_at is None:
            self._first_at = began
        self.steps += 1
        self.tokens += tokens
        self._batch_tokens_max = max(self._batch_tokens_max, tokens)
        if on_count is not None:
            on_count()
        self._report()
        self._exchange(until=began + self._budget_s)
        self._count_blocked(self._clock() - began, time.thread_time() - cpu)

    def exchange(self) -> None:
        """A safe point without a step: between training and whatever else the caller does."""
        began, cpu = self._clock(), time.thread_time()
        self._exchange()
        self._count_blocked(self._clock() - began, time.thread_time() - cpu)

    def settle(
        self,
        fragment: int,
        *,
        deadline: float,
        pause: Callable[[float], None] = time.sleep,
        going_on: Callable[[], bool] = lambda: True,
        leaving: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Stay at this safe point until ``fragment`` has been through a round (synchronous runs).

        Returns whether a version was taken in; not, when the round came to nothing, ``deadline``
        (on the learner's clock) passed, nothing is under way and ``going_on()`` is false, or
        ``leaving()``, whatever is under way: then the agent withdraws what was offered.
        """
        began, cpu = self._clock(), time.thread_time()
        memory = self._memory
        before, offers = memory.base(fragment), self._offers[fragment]
        while self._clock() < deadline:
            self._exchange()
            if fragment in self._offering or fragment in self._adopting:
                self._mover.wait(fragment)
                continue
            if leaving():
                break
            free = memory.state(fragment) is SlotState.FREE
            if free and (
                memory.base(fragment) != before
                or self._offers[fragment] != offers
                or not going_on()
            ):
                break
            pause(0.0005)
        self._count_blocked(self._clock() - began, time.thread_time() - cpu)
        return memory.base(fragment) != before

    def _exchange(self, until: float = math.inf) -> None:
        states = self._memory.states()
        if not any(states):
            return
        rang = False

        def enough() -> bool:
            return self._clock() >= until

        # Adopt before offering: what is offered then starts from the newest version.
        for fragment, state in enumerate(states):
            if state == SlotState.ADOPT:
                rang |= self._adopt(fragment, enough)
        for fragment, state in enumerate(states):
            if state == SlotState.WANTED:
                rang |= self._offer(fragment, enough)
        if rang:
            self._ring()

    def _adopt(self, fragment: int, enough: Callable[[], bool]) -> bool:
        order = self._adopting.get(fragment)
        if order is None:
            order = self._memory.order(fragment)
            self._adopting[fragment] = order
            self._mover.start_adoption(fragment, order)
        if not self._mover.go_on(fragment, enough):
            return False
        del self._adopting[fragment]
        self._memory.took_in(fragment, order, step=self.steps, tokens=self.tokens)
        self._adopted.append((fragment, order.version))
        return True

    def _offer(self, fragment: int, enough: Callable[[], bool]) -> bool:
        if fragment not in self._offering:
            self._offering[fragment] = (self.steps, self.tokens)
            self._mover.start_offer(fragment)
        if not self._mover.go_on(fragment, enough):
            return False
        mark, tokens = self._offering.pop(fragment)
        self._offers[fragment] += 1
        self._memory.offer(fragment, mark=mark, tokens=tokens)
        return True

    def taken_in(self) -> list[tuple[int, int]]:
        """Fragments and versions adopted since the last call."""
        adopted, self._adopted = self._adopted, []
        return adopted

    # --- figures --------------------------------------------------------------------------------

    @property
    def step_time_s(self) -> float:
        """Median over the last steps; 0 before the second one."""
        return statistics.median(self._step_times) if self._step_times else 0.0

    @property
    def blocked(self) -> BlockedTime:
        recent = self._blocked[: min(self._blocked_count, _BLOCKED_TIMES)]
        recent_cpu = self._blocked_cpu[: recent.size]
        p99 = np.percentile(recent, 99) if recent.size else 0.0
        cpu_p99 = np.percentile(recent_cpu, 99) if recent.size else 0.0
        elapsed = 0.0
        if self._first_at is not None and self._last_at is not None:
            elapsed = self._last_at - self._first_at
        return BlockedTime(
            p99_ms=1e3 * float(p99),
            max_ms=1e3 * self._blocked_max_s,
            cpu_p99_ms=1e3 * float(cpu_p99),
            total_s=self._blocked_total_s,
            elapsed_s=elapsed,
        )

    def _report(self) -> None:
        self._memory.report(
            step=self.steps,
            tokens=self.tokens,
            step_time_s=self.step_time_s,
            batch_tokens_max=self._batch_tokens_max,
            loss=self.loss,
            blocked_s=self._blocked_total_s,
        )

    def _count_blocked(self, seconds: float, cpu_s: float) -> None:
        self._blocked[self._blocked_count % _BLOCKED_TIMES] = seconds
        self._blocked_cpu[self._blocked_count % _BLOCKED_TIMES] = cpu_s
        self._blocked_count += 1
        self._blocked_total_s += seconds
        self._blocked_max_s = max(self._blocked_max_s, seconds)

    def close(self) -> None:
        """Let go of the shared memory. Copies under way are waited for.

        A version that was taken in by half is taken in whole: parameters stay what somebody meant.
        """
        for fragment in (*self._offering, *self._adopting):
            self._mover.wait(fragment)
        for fragment in self._adopting:
            self._mover.go_on(fragment, lambda: False)
        self._mover.close()


def _slots(memory: SharedTensors) -> list[torch.Tensor]:
    return [torch.from_numpy(memory.slot(index)) for index in range(memory.fragments)]


def _mover(memory: SharedTensors, pieces: Sequence[tuple[_Piece, ...]]) -> _Mover:
    devices = {piece.parameter.device for fragment in pieces for piece in fragment}
    slots = _slots(memory)
    if len(devices) == 1 and (device := next(iter(devices))).type == "cuda":
        return _LaneMover(memory, slots, pieces, device, _CudaLane(device))
    return _PlainMover(memory, slots, pieces)


class _PlainMover:
    """Copies on the trainer's thread, unit by unit: CPU, MPS, and models on several devices."""

    def __init__(
        self,
        memory: SharedTensors,
        slots: Sequence[torch.Tensor],
        pieces: Sequence[Sequence[Piece]],
    ) -> None:
        self._coarse = memory.coarse
        self._slots = slots
        self._pieces = pieces
        self._under_way: dict[int, Iterator[None]] = {}

    def start_offer(self, fragment: int) -> None:
        self._under_way[fragment] = self._offers(fragment)

    def start_adoption(self, fragment: int, order: Order) -> None:
        self._under_way[fragment] = self._adoptions(fragment, order)
        if order.operation is Adoption.SET:
            # It overwrites the steps that are made meanwhile, so there must be none.
            self.go_on(fragment, lambda: False)

    @torch.no_grad()
    def go_on(self, fragment: int, enough: Callable[[], bool]) -> bool:
        least = -(-len(self._pieces[fragment]) // STEPS_MAX)
        for done, _ in enumerate(self._under_way[fragment], start=1):
            if done >= least and enough():
                return False
        return True

    def _offers(self, fragment: int) -> Iterator[None]:
        """Stops between two pieces."""
        slot = self._slots[fragment]
        for index, piece in enumerate(self._pieces[fragment]):
            if index:
                yield
            piece.offer(slot[piece.where])

    def _adoptions(self, fragment: int, order: Order) -> Iterator[None]:
        slot = self._slots[fragment]
        for index, piece in enumerate(self._pieces[fragment]):
            if index:
                yield
            piece.adopt(slot[piece.where], order, coarse=self._coarse)

    def wait(self, fragment: int) -> None:
        return

    def close(self) -> None:
        self._under_way.clear()
        self._slots = ()


def take_in(
    values: torch.Tensor, given: torch.Tensor, order: Order, *, coarse: bool
) -> torch.Tensor | None:
    """Change ``values`` as ordered, in fp32 arithmetic.

    Returns, for coarse parameters, what to tell the agent: for ADD, by how much the values
    really moved; for SET and BLEND, the base: what
    of the new values is not own work (DESIGN 3.4).
    """
    if not coarse:
        if order.operation is Adoption.ADD:
            values.add_(given)
        elif order.operation is Adoption.SET:
            values.copy_(given)
        else:
            # Exactly alpha * now + (1 - alpha) * given, without a temporary.
            values.mul_(order.alpha).add_(given, alpha=1.0 - order.alpha)
        return None
    before = values.to(torch.float32)
    if values.dtype == torch.float32:
        before = before.clone()
    if order.operation is Adoption.ADD:
        values.copy_(before + given)
        return values.to(torch.float32) - before
    if order.operation is Adoption.SET:
        values.copy_(given)
        return values.to(torch.float32)
    own = (before - given) * order.alpha
    values.copy_(given + own)
    return values.to(torch.float32) - own


class Lane(Protocol):
    """A second queue of work on a device, beside the one that trains there."""

    def follow(self) -> None:
        """What is queued here from now on waits for what the trainer has queued so far."""
        ...

    def queue(self) -> AbstractContextManager[Any]:
        """What is asked for inside is queued here."""
        ...

    def mark(self) -> Mark:
        """The end of what is queued here so far."""
        ...

    def pin(self, slot: torch.Tensor) -> bool:
        """Keep memory where the device can reach it by itself. Not always to be had."""
        ...

    def unpin(self, slot: torch.Tensor) -> None: ...


class Mark(Protocol):
    """A place in a lane, as ``torch.cuda.Event`` is one."""

    def query(self) -> bool:
        """Whether the device is past it. Never waits."""
        ...

    def synchronize(self) -> None: ...


class _CudaLane:
    """A side stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def follow(self) -> None:
        self._side.wait_stream(torch.cuda.current_stream(self._device))

    def queue(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._side)

    def mark(self) -> Mark:
        mark: Mark = self._side.record_event()
        return mark

    def pin(self, slot: torch.Tensor) -> bool:
        size_bytes = slot.numel() * slot.element_size()
        if int(_cuda_runtime().cudaHostRegister(slot.data_ptr(), size_bytes, 0)) == 0:
            return True
        # CUDA remembers that, and the next kernel to be launched would fail with it: be that this.
        with contextlib.suppress(RuntimeError):
            torch.empty(1, device=self._device).fill_(1.0)
        return False

    def unpin(self, slot: torch.Tensor) -> None:
        _cuda_runtime().cudaHostUnregister(slot.data_ptr())


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class _LaneMover:
    """Copies over a lane, through a device buffer, into pinned shared memory.

    The device buffer is filled and added by the trainer's own queue, so that the next optimizer
    step can follow at once; the slow copies between device and host run beside it. A buffer is the
    trainer's queue's: it is let go only when the lane is past its copy, and so it needs no
    ``record_stream``. Nothing waits for a whole lane either: another fragment may be in it.
    """

    def __init__(
        self,
        memory: SharedTensors,
        slots: Sequence[torch.Tensor],
        pieces: Sequence[tuple[_Piece, ...]],
        device: torch.device,
        lane: Lane,
    ) -> None:
        self._coarse = memory.coarse
        self._slots = slots
        self._pieces = pieces
        self._device = device
        self._lane = lane
        self._pinned = [slot for slot in slots if lane.pin(slot)]
        if len(self._pinned) < len(slots):
            # Then a copy is a blocking one, which waits for all that the trainer has queued.
            logger.warning("slots_not_pinned count=%d", len(slots) - len(self._pinned))
        self._under_way: dict[int, tuple[torch.Tensor, Mark]] = {}
        self._to_add: dict[int, Order] = {}

    @torch.no_grad()
    def start_offer(self, fragment: int) -> None:
        buffer = self._buffer(fragment)
        for piece in self._pieces[fragment]:
            buffer[piece.where].copy_(piece.values())
        self._copy(fragment, buffer, self._slots[fragment], buffer)

    def start_adoption(self, fragment: int, order: Order) -> None:
        buffer = self._buffer(fragment)
        self._copy(fragment, buffer, buffer, self._slots[fragment])
        self._to_add[fragment] = order

    def go_on(self, fragment: int, enough: Callable[[], bool]) -> bool:
        buffer, copied = self._under_way[fragment]
        if not copied.query():
            return False
        del self._under_way[fragment]
        order = self._to_add.pop(fragment, None)
        if order is None:
            return True
        self._add(fragment, buffer, order)
        # Coarse parameters: the answer travels down before the turn passes.
        return fragment not in self._under_way

    def wait(self, fragment: int) -> None:
        if fragment in self._under_way:
            self._under_way[fragment][1].synchronize()

    @torch.no_grad()
    def _add(self, fragment: int, buffer: torch.Tensor, order: Order) -> None:
        for piece in self._pieces[fragment]:
            values = piece.values()
            held = take_in(values, buffer[piece.where], order, coarse=self._coarse)
            piece.written(values)
            if held is not None:
                buffer[piece.where].copy_(held)
        if self._coarse:
            self._copy(fragment, buffer, self._slots[fragment], buffer)

    def _copy(
        self, fragment: int, buffer: torch.Tensor, target: torch.Tensor, source: torch.Tensor
    ) -> None:
        """Copy between buffer and slot, once the trainer's queue is done with the buffer."""
        self._lane.follow()
        with self._lane.queue():
            target.copy_(source, non_blocking=True)
            self._under_way[fragment] = (buffer, self._lane.mark())

    def _buffer(self, fragment: int) -> torch.Tensor:
        return torch.empty(self._slots[fragment].numel(), dtype=torch.float32, device=self._device)

    def close(self) -> None:
        for _, copied in self._under_way.values():
            copied.synchronize()
        self._under_way.clear()
        for slot in self._pinned:
            self._lane.unpin(slot)
        self._pinned = []
        self._slots = ()
