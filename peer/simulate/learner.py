"""A simulated learner as its averager sees it: it makes steps in virtual time, at its own pace.

It offers and adopts fragments. Adoption follows ``averaging.history.adoption``, as it does for a
live trainer. Training is lazy: steps are only counted while time passes, and computed all at once
before the parameters are read or changed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from averaging.history.adoption import Adopted, Origin, OwnWork, Parting
from averaging.history.state import FragmentState
from averaging.live.learner_port import Progress, Snapshot
from averaging.numbers.arrays import Float32s
from averaging.round.interface.inputs import Offer
from averaging.virtual.swarm import Peer, Swarm
from dht.memory.event_heap import Timer
from peer.simulate.problems.problem import LocalTraining, Places


@dataclass(slots=True, eq=False)
class Trainee:
    """All parameters of one learner, and the number of steps that it has made."""

    training: LocalTraining
    places: Places
    step_tokens: int
    rate: Callable[[], float]
    """Current share of the peak learning rate."""
    step: int = 0
    """Number of steps made so far, whether or not they are computed yet."""
    loss: float | None = None
    _computed: int = 0

    @property
    def values(self) -> Float32s:
        """The parameters as of ``step``."""
        behind = self.step - self._computed
        if behind:
            self._computed = self.step
            self.loss = self.training.train(behind, rate=self.rate())
        return self.training.values


class Seat:
    """One fragment of a learner."""

    def __init__(
        self,
        trainee: Trainee,
        state: FragmentState,
        *,
        missed_kept: float = 1.0,
        upload: Callable[[Float32s, Float32s], Float32s] | None = None,
    ) -> None:
        """The learner's parameters are ``state.theta`` already. ``missed_kept``: share of its own
        displacement that it keeps when a version does not contain it; a live peer keeps all.
        ``upload(base, values)``: the values that a member that poisons uploads instead of its own.
        """
        self.own = OwnWork(state, step=trainee.step)
        self._trainee = trainee
        self._fragment = state.fragment
        self._missed_kept = np.float32(missed_kept)
        self._upload = upload
        self._made_up: Float32s | None = None

    @property
    def base(self) -> Float32s:
        return self.own.base

    @property
    def snapshot(self) -> Float32s | None:
        own = self.own.snapshot
        return own if own is None or self._upload is None else self._made_up

    @property
    def pending_steps(self) -> int:
        return self._trainee.step - self.own.merged_step

    def offer(self) -> Offer:
        trainee, own = self._trainee, self.own
        values = trainee.places.read(self._fragment, trainee.values)
        own.offer(values, step=trainee.step)
        if self._upload is not None:
            self._made_up = self._upload(own.base, values)
        return Offer(
            mark=trainee.step,
            steps=self.pending_steps,
            tokens=self.pending_steps * trainee.step_tokens,
            base_version=own.base_version,
            base_lineage=own.base_lineage,
            batch_tokens_max=trainee.step_tokens,
        )

    def release(self) -> None:
        self.own.release()

    def adopt(self, state: FragmentState, *, contained: int | None) -> None:
        trainee = self._trainee
        if contained is None and self._missed_kept == 0:
            self.discard(state)
            return
        if contained is None and self._missed_kept != 1:
            moved = trainee.places.read(self._fragment, trainee.values) - self.base
            self._set(self.base + self._missed_kept * moved)
        self._carry_out(self.own.adopt(state, contained, step=trainee.step))

    def rebase(self, state: FragmentState, parting: Parting) -> int | None:
        rebased = self.own.rebase(state, parting, step=self._trainee.step)
        if rebased is None:
            return None
        self._carry_out(rebased.adopted)
        return rebased.again_steps * self._trainee.step_tokens

    def discard(self, state: FragmentState) -> None:
        self._carry_out(self.own.discard(state, step=self._trainee.step))

    def _carry_out(self, adopted: Adopted) -> None:
        trainee, change = self._trainee, adopted.change
        if change.origin is not Origin.NONE:
            trainee.places.add(self._fragment, trainee.values, adopted.given)
        else:
            self._set(adopted.given)

    def _set(self, values: Float32s) -> None:
        trainee = self._trainee
        trainee.places.write(self._fragment, trainee.values, values)


_DRAWN = 64
"""Durations of steps are drawn so many at a time."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Speed and regularity of a learner."""

    step_time_s: float
    jitter: float
    waits_after_steps: int | None
    """Steps after an offer at which the learner waits for the round; ``None``: never."""
    misses: float
    """Probability that the peer misses a round, and with it all rounds of the fragment during the
    next ``miss_steps`` steps."""
    miss_steps: int


class Learner:
    """A ``LearnerPort`` for one life of one peer.

    A newcomer begins to train once it has a state of each fragment.
    """

    def __init__(
        self,
        swarm: Swarm,
        pace: Pace,
        trainee: Trainee,
        *,
        fragments: int,
        seat: Callable[[Trainee, FragmentState], Seat],
        states: Sequence[FragmentState],
        rng: np.random.Generator,
        begins: Callable[[], None],
    ) -> None:
        """``seat``: makes the one of a fragment. ``begins``: hears that training begins."""
        self.trainee = trainee
        self.began_at: float | None = None
        """When it began to train; ``None``: it has not."""
        self._swarm = swarm
        self._pace = pace
        self._new_seat = seat
        self._begins = begins
        self._rng = rng
        self._seats: list[Seat | None] = [None] * fragments
        self._peer: Peer | None = None
        self._stepped: asyncio.Event | None = None
        self._timer: Timer | None = None
        self._durations: deque[float] = deque()
        self._missing: dict[int, int] = {}
        """Step until which the rounds of a fragment are missed."""
        self._rests = False
        self._waited_s = 0.0
        self._blocked_since: float | None = None
        for state in states:
            self._sit(state)

    def __repr__(self) -> str:
        return f"Learner(step={self.trainee.step}, blocked={self._blocked_since is not None})"

    @property
    def seats(self) -> list[Seat]:
        """The fragments of which it has a state."""
        return [seat for seat in self._seats if seat is not None]

    @property
    def merged_steps(self) -> list[int]:
        return [0 if seat is None else seat.own.merged_step for seat in self._seats]

    @property
    def discarded_steps(self) -> list[int]:
        return [0 if seat is None else seat.own.discarded_steps for seat in self._seats]

    def up_s(self) -> float:
        return 0.0 if self.began_at is None else self._swarm.now - self.began_at

    def blocked_s(self) -> float:
        """Time for which it has waited for rounds, the wait under way included."""
        since = self._blocked_since
        return self._waited_s + (0.0 if since is None else self._swarm.now - since)

    # Time and steps

    def begin(self, peer: Peer) -> None:
        self._peer = peer
        self._begin_if_complete()

    def _begin_if_complete(self) -> None:
        if self._peer is not None and self.began_at is None and None not in self._seats:
            self.began_at = self._swarm.now
            self._begins()
            self._set_timer()

    def rest(self) -> None:
        self._rests = True
        self._stop()
        self._at_safe_point()

    def end(self) -> None:
        self._peer = None
        self._stop()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self) -> None:
        self._timer = self._swarm.call_in(self._duration(), self._step)

    def _duration(self) -> float:
        pace = self._pace
        if not pace.jitter:
            return pace.step_time_s
        if not self._durations:
            drawn = 1.0 + pace.jitter * self._rng.standard_normal(_DRAWN)
            self._durations.extend((pace.step_time_s * np.maximum(0.2, drawn)).tolist())
        return self._durations.popleft()

    def _step(self) -> None:
        peer = self._peer
        assert peer is not None
        if peer.sleeps:  # the step begins again
            self._set_timer()
            return
        self.trainee.step += 1
        self._at_safe_point()
        peer.stepped()
        self._set_timer()
        self._wait_if_due()

    def _at_safe_point(self) -> None:
        if self._stepped is not None:
            self._stepped.set()
            self._stepped = None

    def _wait_if_due(self) -> None:
        """Stop where too many steps have followed an offer."""
        after = self._pace.waits_after_steps
        if after is None or self._blocked_since is not None or self._timer is None:
            return
        marks = [seat.own.snapshot_step for seat in self.seats if seat.snapshot is not None]
        if marks and self.trainee.step >= min(marks) + after:
            self._blocked_since = self._swarm.now
            self._stop()

    def _go_on(self) -> None:
        """An offer has come back."""
        since, self._blocked_since = self._blocked_since, None
        if since is None or self._peer is None:
            return
        self._waited_s += self._swarm.now - since
        if self._rests:
            return
        self._set_timer()
        self._wait_if_due()

    # ``averaging.live.learner_port.LearnerPort``

    def progress(self) -> Progress:
        trainee = self.trainee
        return Progress(
            step=trainee.step,
            tokens=trainee.step * trainee.step_tokens,
            step_time_s=self._pace.step_time_s,
            batch_tokens_max=trainee.step_tokens,
        )

    async def snapshot(self, fragment: int, *, timeout_s: float) -> Snapshot | None:
        if self.began_at is None or self._misses(fragment):
            return None
        stands = self._rests or self._blocked_since is not None
        if not stands and not await self._reach_safe_point(timeout_s):
            return None
        seat = self._seats[fragment]
        if seat is None or self._peer is None:
            return None
        offer, values = seat.offer(), seat.snapshot
        assert values is not None
        self._wait_if_due()
        return Snapshot(
            base=seat.base,
            values=values,
            base_version=offer.base_version,
            base_lineage=offer.base_lineage,
            mark=offer.mark,
            steps=offer.steps,
            tokens=offer.tokens,
        )

    async def _reach_safe_point(self, timeout_s: float) -> bool:
        """Return after the step under way. ``False``: it takes too long."""
        if self._stepped is None:
            self._stepped = asyncio.Event()
        try:
            async with asyncio.timeout(timeout_s):
                await self._stepped.wait()
        except TimeoutError:
            return False
        return True

    def _misses(self, fragment: int) -> bool:
        """Decide whether the peer misses this round (``Pace.misses``)."""
        step = self.trainee.step
        if step < self._missing.get(fragment, 0):
            return True
        if not self._pace.misses or self._rng.random() >= self._pace.misses:
            return False
        self._missing[fragment] = step + self._pace.miss_steps
        return True

    def adopt(self, fragment: int, state: FragmentState, *, contained: int | None) -> None:
        seat = self._seats[fragment]
        if seat is None:
            self._sit(state)
            self._begin_if_complete()
        else:
            seat.adopt(state, contained=contained)
            self._go_on()

    def _sit(self, state: FragmentState) -> None:
        self.trainee.places.write(state.fragment, self.trainee.values, state.theta)
        self._seats[state.fragment] = self._new_seat(self.trainee, state)

    def rebase(self, fragment: int, state: FragmentState, parting: Parting) -> int | None:
        seat = self._seats[fragment]
        regained = None if seat is None else seat.rebase(state, parting)
        if regained is not None:
            self._go_on()
        return regained

    def discard(self, fragment: int, state: FragmentState, *, reason: str) -> None:
        seat = self._seats[fragment]
        if seat is None:
            self.adopt(fragment, state, contained=None)
        else:
            seat.discard(state)
            self._go_on()

    def passed(self, fragment: int, state: FragmentState) -> None:
        return

    def moved(self, fragment: int, before: FragmentState, after: FragmentState) -> None:
        return

    def misses_base(self, fragment: int) -> bool:
        return False

    def release(self, fragment: int) -> None:
        seat = self._seats[fragment]
        if seat is not None:
            seat.release()
            self._go_on()
