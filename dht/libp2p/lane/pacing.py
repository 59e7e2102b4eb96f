"""Uploads that leave room for others on the own line.

TCP fills the queue in front of a home line, and everything else on that line waits behind it: up to
seconds, where a router has much memory. The idea of LEDBAT (RFC 6817) is to measure that queue as
the time by which a round trip takes longer than the shortest one, and to keep it at ``TARGET_S``.
Here the kernel measures round trips (``TCP_INFO``) and paces each connection
(``SO_MAX_PACING_RATE``), so a large frame does not leave in one burst; ``Pace`` decides the rate of
all connections together. The queue is what the connections have in common, so the least of theirs
counts: a slow line at the other end of one of them is no reason to slow the others down.

A measured queue is old: it tells of bytes sent a round trip ago, which the queue itself makes
longer, and two looks are taken together. A rate that answers to it swings, and the queue with it,
between nothing and three times the target. But the number of bytes under way is known at once: more
than a round trip's worth will lengthen the queue, fewer will shorten it. The rate answers to the
queue that is to be expected (a Smith predictor).

The kernel sends two packets at a time, and a round trip may last from one burst to the next one: at
50 kB/s that is 58 ms more than without pacing. It counts as a queue only as far as there are bytes
under way to fill one. Otherwise a rate that has once become small holds itself there: with five
peers on two cores two of them stayed at 50 kB/s on lines of 20 and 100 Mbit/s, and their uploads
missed every deadline.

Limits: a queue in front of the *incoming* line lengthens round trips as well, and cannot be told
from one in front of the outgoing line; ``FLOOR_SHARE`` keeps it, or a neighbour that fills the
line, from stopping an upload.
Connections within ``NEAR_S`` are not paced: they do not pass a home line. Where the kernel has
neither option (other than Linux), nothing is paced.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

LOOK_S = 0.05
REST_S = 0.25
"""Time between two looks while nothing is being sent."""

TARGET_S = 0.02
"""The queue that is kept in front of the line: less than half of what a probe may feel."""

SETTLE_S = 0.15
"""Time in which a deviation from the target is corrected. Three looks."""

TOO_MUCH = 4.0
"""A queue of more targets than this is drained at half of what is delivered, if that is less than
the estimate of the line: it may have become slower."""

FIRST_BYTES_S = 1e6
"""A usual home line's; a fast one is found by doubling, at 1 Gbit/s within seven round trips."""

LEAST_BYTES_S = 50e3
MOST_BYTES_S = 1e10
FLOOR_SHARE = 0.2
"""The rate does not fall below this share of the best delivered in the last ``BEST_FOR_S``."""

BEST_FOR_S = 30.0
SLOWER_S = 0.5
"""Time after which a line that delivers less than it is given counts as slower than it was."""

GROWTH, GROWTH_PER_S, GROWTH_MAX = 0.02, 0.05, 0.5
"""Growth within a round trip while there is no queue, more the longer there is none, at most."""

HOLD_S = 0.2
"""Time, beyond a round trip, before it grows: the queue that was there may be on its way back."""

SMOOTHING = 0.3
"""Weight of the newest look in the delivered rate."""

LINE_UP, LINE_DOWN = 0.15, 0.3
"""Weight of the delivered rate in the estimate of the line, while there is a queue: a line that is
thought too fast fills its queue, one that is thought too slow only has a shorter one."""

MORE_MAX, LESS_MAX = 0.15, 0.5
"""Limits of the correction, as shares of the line."""

SHARE_THAT_COUNTS = 0.05
"""A connection with less of the acknowledged bytes says nothing about the line."""

USES_SHARE = 0.8
"""A connection that delivers less than this part of an equal share leaves the rest to others."""

LOOKS_TOGETHER = 2
BURST_BYTES = 2 * 1448
"""The kernel sends at least two packets at once. The receiver acknowledges every second one."""

UNSENT_S, UNSENT_MIN_BYTES, UNSENT_MAX_BYTES = 0.2, 16 << 10, 1 << 30
"""Time's worth of bytes that the kernel takes before it has sent them. It would take all that a
round has for a slow line at once, and share the line among rounds that should have it in turn."""

NEAR_S = 0.002
TCP_INFO_BYTES = 168
SO_MAX_PACING_RATE = 47


@dataclass(frozen=True, slots=True)
class Sample:
    """Progress and delay of one connection since the last look."""

    acked_bytes: int
    rtt_s: float
    least_rtt_s: float
    has_more: bool
    """More bytes wait to be sent."""

    gap_s: float = 0.0
    """Time from one burst to the next at the connection's own rate."""

    in_flight_bytes: int = 0
    """Bytes sent and not acknowledged."""

    @property
    def queue_s(self) -> float:
        return max(0.0, self.rtt_s - self.least_rtt_s - self.gap_s)


class Pace:
    """The rate of all uploads together. Pure: the caller looks at the clock."""

    def __init__(self) -> None:
        self.rate = FIRST_BYTES_S
        """Bytes per second that may be sent."""

        self.queue_s = 0.0
        """The last measured queue of the own line."""

        self._queues: deque[float] = deque(maxlen=LOOKS_TOGETHER)
        """The last measurements. A single long one may be a wireless network's."""

        self._line = FIRST_BYTES_S
        """Estimate of the line's rate."""

        self._delivered = 0.0
        self._starts = True
        """No queue was seen yet: the rate doubles within a round trip."""

        self._best: deque[tuple[float, float]] = deque()
        """Times and delivered rates of the last ``BEST_FOR_S``, falling."""

        self._now = 0.0
        self._clear_since = 0.0
        self._carried_at = 0.0
        """Time at which the line last carried what it was given, or had no long queue."""

    def look(self, samples: Sequence[Sample], *, passed_s: float) -> float:
        """Take in what the connections did in ``passed_s``, and return the new rate."""
        self._now += passed_s
        acked = sum(sample.acked_bytes for sample in samples)
        if not acked or passed_s <= 0:
            self._clear_since += passed_s  # only while something is sent the line proves clear
            return self.rate
        most = max(sample.acked_bytes for sample in samples)
        enough = min(SHARE_THAT_COUNTS * acked, most)  # the share of each of many is small
        telling = [sample for sample in samples if sample.acked_bytes >= enough]
        self._queues.append(self._measured_s(telling, samples))
        self.queue_s = min(self._queues)
        rtt_s = max(LOOK_S, min(sample.least_rtt_s for sample in telling))
        self._delivered += SMOOTHING * (acked / passed_s - self._delivered)
        self._note_best()
        # Only a sender that is held up by this rate tells whether the line has room for more.
        is_full = any(s.has_more for s in samples) and self._delivered > 0.7 * self.rate
        if self.queue_s >= TARGET_S / 2:
            self._starts, self._clear_since = False, self._now
            weight = LINE_UP if self._delivered > self._line else LINE_DOWN
            self._line += weight * (self._delivered - self._line)
        elif is_full:
            clear_s = self._now - self._clear_since - rtt_s - HOLD_S
            growth = min(GROWTH + GROWTH_PER_S * clear_s, GROWTH_MAX) if clear_s > 0 else 0.0
            growth = 1.0 if self._starts else growth
            self._line *= 1 + growth * min(1.0, passed_s / rtt_s)
        self._line = min(MOST_BYTES_S, max(self._line, self._floor()))
        base = self._line
        if self.queue_s > TOO_MUCH * TARGET_S:
            base = min(base, self._delivered)
        ahead_s = 0.0 if self._starts else self._ahead_s(telling)
        correction = (TARGET_S - max(0.0, self.queue_s + ahead_s)) / SETTLE_S
        self.rate = base * (1 + max(-LESS_MAX, min(MORE_MAX, correction)))
        self.rate = max(self.rate, self._floor())
        return self.rate

    def _measured_s(self, telling: Sequence[Sample], samples: Sequence[Sample]) -> float:
        """The queue that the bytes met which were acknowledged last."""
        acked = sum(s.acked_bytes for s in telling)
        shortest_s = sum(s.least_rtt_s * s.acked_bytes for s in telling) / acked
        # A packet that waits for a second one, to be acknowledged with it, is no longer queued.
        in_flight = sum(max(0, s.in_flight_bytes - BURST_BYTES // 2) for s in samples)
        least_s = min(s.queue_s for s in telling)
        most_s = min(s.rtt_s - s.least_rtt_s for s in telling)
        return max(least_s, min(most_s, in_flight / self._line - shortest_s))

    def _ahead_s(self, telling: Sequence[Sample]) -> float:
        """Time by which the queue will be longer when what is under way has arrived there."""
        acked = sum(s.acked_bytes for s in telling)
        carried = self._line * sum(s.rtt_s * s.acked_bytes for s in telling) / acked
        excess = sum(s.in_flight_bytes for s in telling) - carried
        grain = BURST_BYTES / 2 * len(telling)  # smaller differences mean nothing
        return (max(0.0, excess - grain) + min(0.0, excess + grain)) / self._line

    def _note_best(self) -> None:
        has_queue = self.queue_s > TOO_MUCH * TARGET_S
        if not has_queue or self._delivered > 0.8 * self.rate:
            self._carried_at = self._now
        elif self._now - self._carried_at > SLOWER_S:
            self._best.clear()
        while self._best and self._best[-1][1] <= self._delivered:
            self._best.pop()
        self._best.append((self._now, self._delivered))
        while self._best[0][0] < self._now - BEST_FOR_S:
            self._best.popleft()

    @property
    def best(self) -> float:
        """The best rate that was delivered lately; 0: nothing was measured."""
        return self._best[0][1] if self._best else 0.0

    def _floor(self) -> float:
        return max(LEAST_BYTES_S, FLOOR_SHARE * self.best)


def shares(rate: float, delivered: Sequence[float]) -> list[float]:
    """The rate of each connection that is sending, of which these rates were delivered lately.

    Nobody gets less than an equal share. Unused parts of shares are divided among the connections
    that use theirs. So all together exceed the rate at most by the part that is not used now, and
    those that begin at once do not exceed it at all.
    """
    equal = rate / max(1, len(delivered))
    takers = sum(each >= USES_SHARE * equal for each in delivered)
    spare = sum(max(0.0, equal - each) for each in delivered) / max(1, takers)
    return [equal + (spare if each >= USES_SHARE * equal else 0.0) for each in delivered]


# --- carrying it out ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Info:
    """The part of the kernel's ``struct tcp_info`` that is used here."""

    rtt_s: float
    least_rtt_s: float
    acked_bytes: int
    in_flight_bytes: int
    unsent_bytes: int

    @classmethod
    def of(cls, connected: socket.socket) -> _Info | None:
        """``None`` where the kernel does not tell."""
        try:
            raw = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
        except (OSError, AttributeError):
            return None
        if len(raw) < TCP_INFO_BYTES:
            return None
        (packet_bytes,) = struct.unpack_from("=I", raw, 16)
        unacked, arrived, lost, sent_again = struct.unpack_from("=IIII", raw, 24)
        (rtt_us,) = struct.unpack_from("=I", raw, 68)
        (acked,) = struct.unpack_from("=Q", raw, 120)
        unsent, least_us = struct.unpack_from("=II", raw, 144)
        # Bytes that arrived out of order, or were lost, are in no queue although nothing
        # acknowledges them.
        packets = max(0, unacked - arrived - lost + sent_again)
        return cls(rtt_us / 1e6, least_us / 1e6, acked, packets * packet_bytes, unsent)


class Pacer:
    """Paces the sockets of a lane for as long as ``run`` runs."""

    def __init__(self, sockets: Callable[[], Iterable[tuple[Hashable, socket.socket]]]) -> None:
        """``sockets``: the connections that are open now, and the socket of each."""
        self.pace = Pace()
        self._sockets = sockets
        self._acked: dict[Hashable, int] = {}
        """Bytes acknowledged at the last look, by connection."""

        self._rates: dict[Hashable, float] = {}
        """The rate of each connection since the last look."""

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        looked_at = loop.time()
        while True:
            pause_s = LOOK_S if self._look(loop.time() - looked_at) else REST_S
            looked_at = loop.time()
            await asyncio.sleep(pause_s)

    def _look(self, passed_s: float) -> bool:
        """Adapt all rates. Says whether something is being sent."""
        before, self._acked = self._acked, {}
        rates, self._rates = self._rates, {}
        sending: list[tuple[Hashable, socket.socket, Sample]] = []
        resting: list[tuple[Hashable, socket.socket]] = []
        for connection, each in self._sockets():
            info = _Info.of(each)
            if info is None or not info.least_rtt_s or info.least_rtt_s < NEAR_S:
                continue
            self._acked[connection] = info.acked_bytes
            acked = info.acked_bytes - before.get(connection, info.acked_bytes)
            if acked or info.unsent_bytes or info.in_flight_bytes:
                has_more = info.unsent_bytes > 0
                gap_s = BURST_BYTES / rates.get(connection, MOST_BYTES_S)
                sample = Sample(
                    acked, info.rtt_s, info.least_rtt_s, has_more, gap_s, info.in_flight_bytes
                )
                sending.append((connection, each, sample))
            else:
                resting.append((connection, each))
        rate = self.pace.look([sample for _, _, sample in sending], passed_s=passed_s)
        delivered = [sample.acked_bytes / max(passed_s, LOOK_S) for _, _, sample in sending]
        for (connection, each, _), share in zip(sending, shares(rate, delivered), strict=True):
            self._limit(connection, each, share)
        for connection, each in resting:
            self._limit(connection, each, rate / (len(sending) + 1))
        return bool(sending)

    def _limit(self, connection: Hashable, connected: socket.socket, rate: float) -> None:
        self._rates[connection] = rate
        unsent = max(UNSENT_MIN_BYTES, min(int(UNSENT_S * rate), UNSENT_MAX_BYTES))
        pace = struct.pack("=Q", int(rate))
        with contextlib.suppress(OSError, AttributeError):  # it was closed, or the kernel cannot
            connected.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, pace)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, unsent)
