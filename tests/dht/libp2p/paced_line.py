"""A home line, packet by packet: several TCP connections upload over it, paced by ``Pace``.

Each connection sends two packets at a time at its rate, and its window doubles within a round trip
until it suffices. The receiver acknowledges every second packet. The kernel's round trip is
smoothed, and starts with the first packet of those acknowledged. No packet is lost unless the queue
is full.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dht.libp2p.lane.pacing import LOOK_S, Pace, Sample, shares

STEP_S = 0.0005
PACKET_BYTES, HEADERS_BYTES = 1448, 66
BURST = 2
BUFFER_S = 0.2
FIRST_WINDOW = 10


@dataclass(slots=True)
class _Connection:
    rate: float = float("inf")
    window: float = FIRST_WINDOW
    in_flight: int = 0
    next_burst_at: float = 0.0
    rtt_s: float = 0.0
    acked_bytes: int = 0
    """Since the last look."""

    unacknowledged: list[float] = field(default_factory=list)
    """Times at which the packets were sent that have arrived, and are not acknowledged yet."""

    def kernel_rate(self) -> float:
        """The rate at which the kernel paces: the window within a round trip, or the limit."""
        return min(self.rate, 2 * self.window * PACKET_BYTES / max(self.rtt_s, STEP_S))

    def take_acknowledgement(self, count: int, rtt_s: float, *, lost: bool) -> None:
        if lost:
            self.window = max(FIRST_WINDOW, 0.7 * self.window)
        else:
            self.rtt_s = self.rtt_s + (rtt_s - self.rtt_s) / 8 if self.rtt_s else rtt_s
            self.acked_bytes += count * PACKET_BYTES
            self.window += count * (self.in_flight >= 0.9 * self.window)
        self.in_flight -= count


@dataclass(slots=True)
class Seen:
    """The queue in seconds at each look, and the share of the line that was used."""

    queues_s: Sequence[float]
    used: float


class PacedLine:
    """``connections`` that have more to send while ``sends``, on a line of ``rate`` bytes/s."""

    def __init__(
        self,
        rate: float,
        *,
        connections: int,
        rtt_s: float,
        sends: Callable[[float], bool] = lambda now: True,
    ) -> None:
        self.pace = Pace()
        self._line, self._rtt_s, self._sends = rate, rtt_s, sends
        self._connections = [_Connection() for _ in range(connections)]
        self._now = 0.0
        self._credit = 0.0
        self._queue: deque[tuple[int, float]] = deque()
        """Connection and time of sending of each packet in front of the line."""

        self._coming: deque[tuple[float, int, float]] = deque()
        """For each packet, when it arrives at the queue, its connection and its time of sending."""

        self._acknowledgements: deque[tuple[float, int, int, float, bool]] = deque()
        """For each acknowledgement, when it arrives, for which connection, how many packets, since
        when, and if lost."""

        self._carried = 0

    def run(self, seconds: float, *, settled_s: float) -> Seen:
        """The measurements from ``settled_s`` on."""
        queues: list[float] = []
        next_look_at = LOOK_S
        while self._now < seconds:
            self._now += STEP_S
            self._carry()
            self._acknowledge()
            self._send()
            if self._now >= next_look_at:
                next_look_at += LOOK_S
                self._look()
                if self._now < settled_s:
                    self._carried = 0
                else:
                    queues.append(len(self._queue) * (PACKET_BYTES + HEADERS_BYTES) / self._line)
        return Seen(queues, self._carried / (seconds - settled_s) / self._line)

    def _carry(self) -> None:
        size = PACKET_BYTES + HEADERS_BYTES
        while self._coming and self._coming[0][0] <= self._now:
            _, index, sent_at = self._coming.popleft()
            if len(self._queue) * size < BUFFER_S * self._line:
                self._queue.append((index, sent_at))
            else:
                self._answer(index, 1, sent_at, lost=True)
        self._credit = min(self._credit + self._line * STEP_S, 2.0 * size)
        while self._queue and self._credit >= size:
            self._credit -= size
            self._carried += size
            index, sent_at = self._queue.popleft()
            waiting = self._connections[index].unacknowledged
            waiting.append(sent_at)
            if len(waiting) >= BURST:
                self._answer(index, len(waiting), waiting[0], lost=False)
                waiting.clear()

    def _answer(self, index: int, count: int, sent_at: float, *, lost: bool) -> None:
        at = self._now + self._rtt_s / 2
        self._acknowledgements.append((at, index, count, sent_at, lost))

    def _acknowledge(self) -> None:
        while self._acknowledgements and self._acknowledgements[0][0] <= self._now:
            at, index, count, sent_at, lost = self._acknowledgements.popleft()
            self._connections[index].take_acknowledgement(count, at - sent_at, lost=lost)

    def _send(self) -> None:
        if not self._sends(self._now):
            return
        for index, each in enumerate(self._connections):
            while each.next_burst_at <= self._now and each.in_flight + BURST <= each.window:
                for _ in range(BURST):
                    self._coming.append((self._now + self._rtt_s / 2, index, self._now))
                each.in_flight += BURST
                pause_s = BURST * PACKET_BYTES / each.kernel_rate()
                each.next_burst_at = max(each.next_burst_at, self._now - 0.005) + pause_s

    def _look(self) -> None:
        active = self._sends(self._now)
        known = [e for e in self._connections if e.rtt_s and (active or e.in_flight)]
        samples = [
            Sample(
                each.acked_bytes,
                each.rtt_s,
                self._rtt_s,
                has_more=self._sends(self._now),
                gap_s=BURST * PACKET_BYTES / each.rate,
                in_flight_bytes=each.in_flight * PACKET_BYTES,
            )
            for each in known
        ]
        rate = self.pace.look(samples, passed_s=LOOK_S)
        delivered = [each.acked_bytes / LOOK_S for each in known]
        for each, share in zip(known, shares(rate, delivered), strict=True):
            each.rate, each.acked_bytes = share, 0
