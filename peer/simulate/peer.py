"""One simulated peer: its clock, its learner's steps, and a node for each fragment.

Steps are no events: a peer wakes at the step at which something is due, and counts the steps in
between whenever it is asked for the time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from averaging.history.state import FragmentState
from averaging.round.interface.inputs import (
    Due,
    GiveWay,
    Offered,
    PeerSilent,
    Progressed,
    StepsCounted,
)
from averaging.round.interface.phase import Phase
from averaging.round.opinions.silence import LastHeard
from averaging.round.turns import NO_PLACE, Turns
from averaging.rules.line_pace import exchanges_at_once
from averaging.simulated.node import HELD_MAX, FragmentNode
from dht.identity import PeerId
from dht.memory.event_heap import EventHeap, Timer
from dht.memory.network import SimulatedNetwork
from peer.simulate.learner import Seat, Trainee

_DRAWN = 256
"""Number of step durations drawn at a time."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Speed and regularity of a peer."""

    step_time_s: float
    jitter: float
    waits_after_steps: int | None
    """Steps after an offer at which the learner waits for the round; ``None``: never."""
    exchanges_max: int
    misses: float
    """Probability that the peer misses a round, and with it all rounds of the fragment during the
    next ``miss_steps`` steps."""
    miss_steps: int
    snapshot_s: tuple[float, float]
    """Range of the time that copying a fragment out takes."""


class SimulatedPeer:
    """One incarnation of one peer. An ``Owner`` of nodes."""

    def __init__(
        self,
        name: PeerId,
        number: int,
        incarnation: int,
        *,
        heap: EventHeap,
        network: SimulatedNetwork,
        trainee: Trainee,
        pace: Pace,
        rng: np.random.Generator,
    ) -> None:
        self.name = name
        self.number = number
        self.incarnation = incarnation
        self.alive = True
        self.nodes: list[FragmentNode] = []
        self.seats: list[Seat] = []
        self.trainee = trainee
        self.pace = pace
        self.began_at = heap.now
        self._waited_s = 0.0
        self._heap = heap
        self._network = network
        self._rng = rng
        self._durations: deque[float] = deque()
        self._next_step_at = heap.now + self._duration(0)
        self._blocked_since: float | None = None
        self._wanted: list[FragmentNode] = []
        self._copying: list[FragmentNode] = []
        self._copied_again: set[FragmentNode] = set()
        """Nodes that want another copy as soon as the one under way, which is outdated, is made."""
        self._missing: dict[int, int] = {}
        """Step until which the rounds of a fragment are missed."""
        self._wake: Timer | None = None
        self._wakes_at: float | None = None
        """Intended wake-up time. The timer may be an older one that fires earlier."""
        self._held: list[Callable[[], None]] = []
        self._last_heard = LastHeard()
        self._turns = Turns()

    def __repr__(self) -> str:
        return f"SimulatedPeer({self.name}, {self.incarnation}, step={self.trainee.step})"

    # Owner

    def now(self) -> float:
        """Count the steps up to now, and return the time."""
        self._count_steps()
        return self._heap.now

    def when_awake(self, action: Callable[[], None]) -> None:
        if not self.alive:
            return
        if self._network.is_paused(self.name):
            if len(self._held) < HELD_MAX:
                self._held.append(action)
        else:
            action()

    def wants_snapshot(self, node: FragmentNode) -> bool:
        if node in self._copying:
            self._copied_again.add(node)
            return True
        if not (self._has_place() and self._is_free(node)):
            self._heap.call_in(0.0, self.when_awake, partial(self._turn_away, node))
            return True
        if self._misses(node):
            return False
        low, high = self.pace.snapshot_s
        if high > 0.0:
            self._copying.append(node)
            self._heap.call_in(
                self._rng.uniform(low, high), self.when_awake, partial(self._copied, node)
            )
        else:
            self._wanted.append(node)
        return True

    def _copied(self, node: FragmentNode) -> None:
        self._copying.remove(node)
        self.now()
        if node not in self._copied_again:
            node.run(node.offer())
            return
        self._copied_again.discard(node)
        if node.machine.phase is Phase.WANTED and not self.wants_snapshot(node):
            node.take(Offered(None))

    def _is_free(self, node: FragmentNode) -> bool:
        return not node.is_busy and node not in self._wanted and node not in self._copying

    def _has_place(self) -> bool:
        exchanging = sum(node.machine.own_round is not None for node in self.nodes)
        machine = self.nodes[0].machine
        return exchanging < exchanges_at_once(
            machine.peers.bytes_per_s,
            most=self.pace.exchanges_max,
            slow_bytes_s=machine.policy.slow_link_bytes_s,
        )

    def _turn_away(self, node: FragmentNode) -> None:
        self._turns.turn_away(node.machine)
        node.take(GiveWay(NO_PLACE))

    def _has_its_turn_later(self, node: FragmentNode) -> bool:
        return node.machine.fragment in self._turns and not self._has_place()

    def _let_in(self) -> None:
        """Let fragments that were turned away have their turn while there is a place."""
        now = self.now()
        while self._has_place():
            machine = self._turns.next(now, is_free=lambda index: self._is_free(self.nodes[index]))
            if machine is None:
                return
            self.nodes[machine.fragment].take(Due())

    def _misses(self, node: FragmentNode) -> bool:
        """Decide whether the peer misses this round (``Pace.misses``)."""
        step, fragment = self.trainee.step, node.fragment.index
        if step < self._missing.get(fragment, 0):
            return True
        if not self.pace.misses or self._rng.random() >= self.pace.misses:
            return False
        self._missing[fragment] = step + self.pace.miss_steps
        return True

    def heard(self, peer: PeerId) -> None:
        self._last_heard.heard(peer, self._heap.now)

    def silent(self, peer: PeerId, since: float) -> None:
        if self._last_heard.is_silent(peer, since=since):
            for node in self.nodes:
                node.take(PeerSilent(peer))

    def ran(self, node: FragmentNode) -> None:
        if self._turns:
            self._heap.call_in(0.0, self.when_awake, self._let_in)
        self._schedule()

    # Time and steps

    def begin(self) -> None:
        """Begin to train. All nodes have been added."""
        self._schedule()

    def crash(self) -> None:
        self._count_steps()
        self.alive = False
        for node in self.nodes:
            node.stop()
        if self._wake is not None:
            self._wake.cancel()

    def pause(self) -> None:
        self._count_steps()

    def resume(self) -> None:
        """Wake up: the interrupted step starts again, and held actions are carried out."""
        self._next_step_at = self._heap.now + self._duration(0)
        held, self._held = self._held, []
        for action in held:
            self.when_awake(action)
        if self.alive:
            self._schedule()

    def _duration(self, ahead: int) -> float:
        """Duration of the step that follows after ``ahead`` other steps."""
        pace = self.pace
        if not pace.jitter:
            return pace.step_time_s
        while len(self._durations) <= ahead:
            drawn = 1.0 + pace.jitter * self._rng.standard_normal(_DRAWN)
            self._durations.extend((pace.step_time_s * np.maximum(0.2, drawn)).tolist())
        return self._durations[ahead]

    def _limit(self) -> int | None:
        """The step at which the learner waits for a round, if it is to wait."""
        after = self.pace.waits_after_steps
        if after is None:
            return None
        marks = [seat.own.snapshot_step for seat in self.seats if seat.snapshot is not None]
        return min(marks) + after if marks else None

    def _count_steps(self) -> None:
        now, trainee = self._heap.now, self.trainee
        if now < self._next_step_at and self._blocked_since is None:
            return
        if not self.alive or self._network.is_paused(self.name):
            return
        limit = self._limit()
        if self._blocked_since is not None:
            if limit is not None and trainee.step >= limit:
                return
            self._waited_s += now - self._blocked_since
            self._blocked_since = None
            self._next_step_at = now + self._duration(0)
        begun = trainee.step
        while self._next_step_at <= now:
            if limit is not None and trainee.step >= limit:
                self._blocked_since = self._next_step_at - self._duration(0)
                break
            trainee.step += 1
            if self._durations:
                self._durations.popleft()
            self._next_step_at += self._duration(0)
        if trainee.step != begun:
            for node in self.nodes:
                node.machine.handle(StepsCounted(trainee.step), self.now())

    def _schedule(self) -> None:
        """Set the timer for the step at which something is due."""
        at = self._wakes_at = self._due_at()
        if self._wake is not None:
            if at is not None and self._wake.when <= at:
                return  # it fires too early, and is set again then
            self._wake.cancel()
            self._wake = None
        if at is not None:
            self._wake = self._heap.call_at(at, self._woken)

    def _due_at(self) -> float | None:
        if not self.alive or not self.nodes or self._network.is_paused(self.name):
            return None
        self._count_steps()
        if self._blocked_since is not None:
            return None
        step = self.trainee.step
        due = [
            node.machine.due_time.due_step - 1
            for node in self.nodes
            if node.machine.phase is Phase.IDLE and not self._has_its_turn_later(node)
        ]
        if self._wanted:
            due.append(step + 1)
        limit = self._limit()
        if not due or (limit is not None and step >= limit):
            return None
        ahead = max(step + 1, min(due)) - step
        if self.pace.jitter:
            lasts_s = sum(self._duration(n) for n in range(1, ahead))
        else:
            lasts_s = sum([self.pace.step_time_s] * (ahead - 1))
        return self._next_step_at + lasts_s

    def _woken(self) -> None:
        self._wake = None
        if self._wakes_at is not None and self._wakes_at > self._heap.now:
            self._wake = self._heap.call_at(self._wakes_at, self._woken)
            return
        self.when_awake(self._safe_point)

    def _safe_point(self) -> None:
        now = self.now()
        wanted, self._wanted = self._wanted, []
        for node in wanted:
            node.run(node.offer())
        for node in self.nodes:
            machine = node.machine
            waits = self._has_its_turn_later(node)
            effects = machine.handle(
                Progressed(self.trainee.step, self.pace.step_time_s, waits), now
            )
            if effects:
                node.run(effects)
        self._schedule()

    # Looking at it

    @property
    def states(self) -> list[FragmentState]:
        return [node.state for node in self.nodes if node.state is not None]

    def up_s(self) -> float:
        return self._heap.now - self.began_at

    def blocked_s(self) -> float:
        """Time for which the learner has waited for rounds, the wait under way included."""
        since = self._blocked_since
        return self._waited_s + (0.0 if since is None else self._heap.now - since)
