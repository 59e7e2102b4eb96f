"""The trainer's side of the shared memory: offer and adopt fragments, never wait.

``Learner.step`` is the safe point. It runs after an optimizer step, on the trainer's thread, and is
the only place where parameters are read or changed. It looks at one state word per fragment
(``peer.bridge.shared_memory``) and does what is asked for: one copy out for an offer, one addition
in place for an adoption. ``peer.trainer.device_copies`` makes the copies.

A fragment whose copy takes longer than a safe point may is spread over the next ones. Some units of
an offer are then a step or two newer than its mark says. That costs nothing: of each value, exactly
the offered part is subtracted when the merged value comes back, and the tokens of those steps count
as merged one cycle later.

With safe points of 1 ms, which copy at least a sixth of a fragment each, agent and daemon at nice
level 5, and the slots' pages mapped beforehand, the 99th percentile of the blocked
time of a paced trainer beside three others on two cores fell from 12 to 1.2 ms.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from averaging.numbers.layout import Layout
from peer.bridge.shared_memory import Adoption, AdoptionOrder, SharedTensors, SlotState
from peer.signals import held_back
from peer.status import Training
from peer.trainer.device_copies import (
    DirectCopies,
    LocalPiece,
    Piece,
    copies_of_device,
    local_pieces,
)

_STEP_TIMES = 31
"""Number of steps that the median step time is taken over."""

_BLOCKED_TIMES = 8192
"""Number of steps that percentiles of the blocked time are taken over."""

BUDGET_S, BUDGET_SHARE = 0.001, 0.01
"""A safe point begins no further unit after so long, or after this share of a step if that is more,
unless a fragment would then take more than ``device_copies.STEPS_MAX`` safe points. Where a step
takes a second, a copy of 4 ms that was spread over three of them was as many seconds late, and its
round did not wait for it."""

SET_VALUES = AdoptionOrder(Adoption.SET, version=0, lineage=b"", mark=None, tokens=0)
"""Sets values that are no version of the run's for the agent to know of."""


class Learner:
    """Offers and adopts fragments of a model at its safe points.

    ``ring`` is called when a slot is passed to the agent. It must return at once.
    """

    def __init__(
        self,
        memory: SharedTensors,
        layout: Layout,
        parameters: Mapping[str, torch.Tensor],
        *,
        ring: Callable[[], None],
        clock: Callable[[], float] = time.perf_counter,
        budget_s: float = BUDGET_S,
        pieces: Sequence[Sequence[Piece]] | None = None,
    ) -> None:
        """``budget_s``: time for copies in one safe point, at least; infinite: copies are never
        spread.

        ``pieces``: the units of each fragment, if ``parameters`` are not all in this process.
        """
        self._memory = memory
        self._ring = ring
        self._clock = clock
        self._budget_s = budget_s
        self._layout = layout
        self._pieces: Sequence[Sequence[Piece]]
        if pieces is None:
            here = [local_pieces(fragment, parameters) for fragment in layout.fragments]
            self._pieces, self._copies = here, copies_of_device(memory, here)
        else:
            self._pieces, self._copies = pieces, DirectCopies(memory, pieces)
        self._offering: dict[int, tuple[int, int]] = {}
        self._adopting: dict[int, AdoptionOrder] = {}
        self._offers = [0] * memory.fragments
        self._step_times: deque[float] = deque(maxlen=_STEP_TIMES)
        self._blocked = np.zeros(_BLOCKED_TIMES, np.float64)
        self._blocked_count = 0
        self._blocked_total_s = 0.0
        self._first_at: float | None = None
        self._last_at: float | None = None
        self._batch_tokens_max = 0
        self._adopted: list[tuple[int, int]] = []
        self.overwritten: set[int] = set()
        """Fragments whose parameters were overwritten; emptied by the object that acts on them."""
        self.steps = 0
        """Optimizer steps of this incarnation."""
        self.tokens = 0
        self.loss: float | None = None

    def __repr__(self) -> str:
        return f"Learner(steps={self.steps}, tokens={self.tokens}, {self._memory!r})"

    # --- the safe point -----------------------------------------------------------------------

    def step(self, tokens: int, *, on_count: Callable[[], None] | None = None) -> None:
        """Count an optimizer step on ``tokens`` tokens, and exchange what is asked for.

        ``on_count`` is called in between, to write the counters to disk before a peer can hear of
        this step.
        """
        if tokens < 0:
            raise ValueError(f"tokens is {tokens}; a step has none or some")
        began = self._clock()
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
        budget_s = max(self._budget_s, BUDGET_SHARE * self.step_time_s)
        self._exchange(until=began + budget_s)
        self._count_blocked(began)

    def exchange(self, *, adopts: bool = True) -> None:
        """Exchange without a step, before training begins or while it pauses.

        ``adopts``: false while parameters must stay as they are.
        """
        began = self._clock()
        self._exchange(adopts=adopts)
        self._count_blocked(began)

    def merged_steps(self, fragment: int) -> int:
        """Own steps up to the last one that is in the version held, or was given up."""
        base = self._memory.base(fragment)
        return 0 if base is None else base.mark

    def wait_for_round(
        self,
        fragment: int,
        *,
        deadline: float,
        pause: Callable[[float], None] = time.sleep,
        possible: Callable[[], bool] = lambda: True,
        leaving: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Stay at this safe point until ``fragment`` has been through a round (synchronous runs).

        Returns whether a version was adopted. It was not if the round failed, ``deadline`` (on the
        learner's clock) passed, nothing is in flight and ``possible()`` is false, or ``leaving()``
        is true, whatever is in flight: the agent then withdraws what was offered.
        """
        began, memory = self._clock(), self._memory
        before, offers = memory.base(fragment), self._offers[fragment]
        while self._clock() < deadline:
            self._exchange()
            if fragment in self._offering or fragment in self._adopting:
                self._copies.wait(fragment)
                continue
            if leaving():
                break
            free = memory.state(fragment) is SlotState.FREE
            if free and (
                memory.base(fragment) != before
                or self._offers[fragment] != offers
                or not possible()
            ):
                break
            pause(0.0005)
        self._count_blocked(began)
        return memory.base(fragment) != before

    def _exchange(self, until: float = math.inf, *, adopts: bool = True) -> None:
        states = self._memory.states()
        if any(states):
            # A half-adopted version would be taken for a whole one, and a half-written slot
            # for parameters.
            with held_back():
                self._exchange_slots(states, until, adopts=adopts)

    def _exchange_slots(self, states: Sequence[int], until: float, *, adopts: bool) -> None:
        rang = False

        def enough() -> bool:
            return self._clock() >= until

        # Adopt before offering: an offer is then based on the newest version.
        for fragment, state in enumerate(states):
            if state == SlotState.ADOPT and adopts:
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
            self._copies.start_adoption(fragment, order)
            self._adopting[fragment] = order  # not before: a device may lack the memory
        if not self._copies.advance(fragment, enough):
            return False
        del self._adopting[fragment]
        self._memory.note_adoption(fragment, order, step=self.steps, tokens=self.tokens)
        if order.operation is Adoption.SET:
            self.overwritten.add(fragment)
        self._adopted.append((fragment, order.version))
        return True

    def _offer(self, fragment: int, enough: Callable[[], bool]) -> bool:
        if fragment not in self._offering:
            self._copies.start_offer(fragment)
            self._offering[fragment] = (self.steps, self.tokens)
        if not self._copies.advance(fragment, enough):
            return False
        mark, tokens = self._offering.pop(fragment)
        self._offers[fragment] += 1
        self._memory.offer(fragment, mark=mark, tokens=tokens)
        return True

    @torch.no_grad()
    def set_parameters(self, value_of: Callable[[str], torch.Tensor]) -> None:
        """Set every parameter to ``value_of`` its name, an fp32 tensor on the host."""
        self._finish_copies()
        for fragment, pieces in zip(self._layout.fragments, self._pieces, strict=True):
            for unit, piece in zip(fragment.units, pieces, strict=True):
                values = value_of(unit.tensor).reshape(-1)[unit.start : unit.end]
                piece.adopt(values, SET_VALUES, coarse=False)

    @torch.no_grad()
    def measured_with(
        self, fragment: int, states: Sequence[torch.Tensor], measure: Callable[[], float]
    ) -> list[float] | None:
        """The results of ``measure`` with each of these states of a fragment, at a safe point.

        The parameters are the same afterwards, to the last bit. ``None``: a copy of the fragment is
        under way, or its parameters are not all in this process. Raises ``ValueError`` if a state
        has another size than the fragment.
        """
        size = self._layout.fragments[fragment].size
        if any(state.numel() != size for state in states):
            raise ValueError(f"fragment {fragment} has {size} values, not as many as these states")
        pieces = self._pieces[fragment]
        local = [piece for piece in pieces if isinstance(piece, LocalPiece)]
        if fragment in self._offering or fragment in self._adopting or len(local) < len(pieces):
            return None
        kept = [piece.values().clone() for piece in local]
        results = []
        try:
            for state in states:
                for piece in local:
                    piece.put(state[piece.where])
                results.append(measure())
        finally:
            with held_back():
                for piece, values in zip(local, kept, strict=True):
                    piece.put(values)
        return results

    def take_adopted(self) -> list[tuple[int, int]]:
        """Fragments and versions adopted since the last call."""
        adopted, self._adopted = self._adopted, []
        return adopted

    # --- figures --------------------------------------------------------------------------------

    @property
    def step_time_s(self) -> float:
        """Median of the last step times; 0 before the second step."""
        return statistics.median(self._step_times) if self._step_times else 0.0

    @property
    def training(self) -> Training:
        """The figures that this loop itself gives."""
        recent = self._blocked[: min(self._blocked_count, _BLOCKED_TIMES)]
        elapsed = 0.0
        if self._first_at is not None and self._last_at is not None:
            elapsed = self._last_at - self._first_at
        return Training(
            steps=self.steps,
            tokens=self.tokens,
            step_time_s=self.step_time_s,
            loss=self.loss,
            trained_s=elapsed,
            blocked_s=self._blocked_total_s,
            blocked_p99_ms=1e3 * float(np.percentile(recent, 99)) if recent.size else 0.0,
        )

    def _report(self) -> None:
        self._memory.report(
            step=self.steps,
            tokens=self.tokens,
            step_time_s=self.step_time_s,
            batch_tokens_max=self._batch_tokens_max,
        )

    def _count_blocked(self, began: float) -> None:
        seconds = self._clock() - began
        self._blocked[self._blocked_count % _BLOCKED_TIMES] = seconds
        self._blocked_count += 1
        self._blocked_total_s += seconds

    def close(self) -> None:
        """Finish copies in flight and release the shared memory.

        A half-adopted version is adopted whole, so that the parameters are of one version.
        """
        self._finish_copies()
        self._copies.close()

    def _finish_copies(self) -> None:
        for fragment in (*self._offering, *self._adopting):
            self._copies.wait(fragment)
        for fragment in self._adopting:
            self._copies.advance(fragment, lambda: False)
        self._offering.clear()
        self._adopting.clear()
