"""The rate of uploads, on a simulated line, and what the kernel tells about a connection."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable, Sequence

import pytest

from dht.libp2p.lane import pacing
from dht.libp2p.lane.pacing import (
    BURST_BYTES,
    FLOOR_SHARE,
    LEAST_BYTES_S,
    LOOK_S,
    LOOKS_TOGETHER,
    Pace,
    Pacer,
    Sample,
    shares,
)
from tests.dht.libp2p.lane_ends import HERE
from tests.dht.libp2p.paced_line import PacedLine

MBIT = 125_000.0
BUFFER_S = 0.5


class Line:
    """A line with a queue of ``BUFFER_S``; acknowledgements come back a round trip later.

    TCP's window doubles within a round trip, from ten packets on, and is halved by a loss.
    """

    def __init__(self, rtt_s: float) -> None:
        self.rtt_s = rtt_s
        self.queue_bytes = 0.0
        self.in_flight_bytes = 0.0
        self._window = 15_000.0
        self._under_way: deque[tuple[float, float]] = deque([(0.0, 0.0)] * round(rtt_s / LOOK_S))

    def pass_on(self, sent: float, rate: float) -> tuple[float, float]:
        """Send for the time between two looks; returns acknowledged bytes and their queue."""
        under_way = self.queue_bytes + sum(each for each, _ in self._under_way)
        self._window *= 1 + min(1.0, LOOK_S / self.rtt_s)
        self.queue_bytes += max(0.0, min(sent, self._window - under_way))
        if self.queue_bytes > BUFFER_S * rate:
            self.queue_bytes = BUFFER_S * rate
            self._window = max(15_000.0, under_way / 2)
        delivered = min(self.queue_bytes, rate * LOOK_S)
        self.queue_bytes -= delivered
        self._under_way.append((delivered, self.queue_bytes / rate))
        acked, queue_s = self._under_way.popleft()
        looks = self.rtt_s / LOOK_S
        self.in_flight_bytes = self.queue_bytes + delivered * (looks - round(looks))
        self.in_flight_bytes += sum(each for each, _ in self._under_way)
        return acked, queue_s


def upload(
    rate_of: Callable[[float], float],
    *,
    seconds: float,
    rtt_s: float = 0.1,
    offered: Callable[[float], float] = lambda now: float("inf"),
    other_queue_s: Callable[[float], float] = lambda now: 0.0,
) -> list[tuple[float, float, float]]:
    """Time, rate of delivery and queue at each look. ``rate_of``: the line's rate."""
    pace, line = Pace(), Line(rtt_s)
    seen = []
    for index in range(round(seconds / LOOK_S)):
        now = index * LOOK_S
        sent = min(pace.rate, offered(now)) * LOOK_S
        acked, queue_s = line.pass_on(sent, rate_of(now))
        gap_s = BURST_BYTES / pace.rate
        rtt = rtt_s + queue_s + other_queue_s(now) + gap_s
        seen.append((now, acked / LOOK_S, line.queue_bytes / rate_of(now)))
        has_more = offered(now) > pace.rate
        in_flight = int(line.in_flight_bytes + acked / LOOK_S * other_queue_s(now))
        pace.look([Sample(int(acked), rtt, rtt_s, has_more, gap_s, in_flight)], passed_s=LOOK_S)
    return seen


def mean(seen: Sequence[tuple[float, float, float]], since: float, column: int) -> float:
    values = [each[column] for each in seen if each[0] >= since]
    return sum(values) / len(values)


@pytest.mark.parametrize("rtt_s", [0.02, 0.05, 0.1, 0.15, 0.3])
@pytest.mark.parametrize("mbit", [1, 5, 20, 100, 500])
def test_an_idle_line_is_used_and_its_queue_stays_short(rtt_s: float, mbit: float) -> None:
    seen = upload(lambda now: mbit * MBIT, seconds=40, rtt_s=rtt_s)
    assert mean(seen, 10, 1) >= 0.93 * mbit * MBIT
    late = sorted(queue for now, _, queue in seen if now >= 10)
    assert mean(seen, 10, 2) < 0.04
    assert late[int(0.95 * len(late))] < 0.05


@pytest.mark.parametrize("rtt_s", [0.02, 0.05, 0.15])
@pytest.mark.parametrize("connections", [1, 2, 4])
def test_the_queue_does_not_swing(connections: int, rtt_s: float) -> None:
    """Earlier, the queue swung between nothing and three times the target: the measured queue is an
    old one."""
    line = PacedLine(10 * MBIT, connections=connections, rtt_s=rtt_s)
    seen = line.run(25.0, settled_s=5.0)
    assert seen.used > 0.97
    late = sorted(seen.queues_s)[int(0.95 * len(seen.queues_s))]
    assert late < 0.04


@pytest.mark.parametrize("connections", [1, 4])
def test_connections_that_begin_together_after_a_pause_do_not_fill_the_queue(
    connections: int,
) -> None:
    """Each of them had the whole line at first, as none of the others had delivered anything."""
    line = PacedLine(
        10 * MBIT, connections=connections, rtt_s=0.05, sends=lambda now: now % 2.9 > 0.3
    )
    seen = line.run(25.0, settled_s=5.0)
    assert seen.used > 0.85, "nine tenths of the time something is sent"
    assert sorted(seen.queues_s)[int(0.95 * len(seen.queues_s))] < 0.06


def test_a_line_that_becomes_slow_and_fast_again_is_followed() -> None:
    def rate(now: float) -> float:
        return (1 if 20 <= now < 40 else 20) * MBIT

    seen = upload(rate, seconds=80)
    slow = [each for each in seen if 25 <= each[0] < 40]
    assert mean(slow, 0, 1) >= 0.9 * 1 * MBIT
    assert mean([each for each in slow if each[0] > 32], 0, 2) < 0.1
    assert mean(seen, 70, 1) >= 0.9 * 20 * MBIT
    assert mean(seen, 70, 2) < 0.05


@pytest.mark.parametrize("connections", [20, 21, 60])
def test_many_connections_of_which_each_sends_little_are_paced(connections: int) -> None:
    """Each had less than the twentieth that counts, and nothing was left to measure."""
    pace = Pace()
    sample = Sample(
        rtt_s=0.05,
        least_rtt_s=0.04,
        acked_bytes=3000,
        in_flight_bytes=6000,
        has_more=True,
    )
    for _ in range(50):
        pace.look([sample] * connections, passed_s=LOOK_S)
    assert pace.best > 0.5 * connections * 3000 / LOOK_S


def test_a_sender_with_little_to_send_learns_nothing_about_the_line() -> None:
    pace = Pace()
    before = pace.rate
    for _ in range(200):
        pace.look([Sample(1000, 0.1, 0.1, False)], passed_s=LOOK_S)
    assert pace.rate == pytest.approx(before, rel=0.3)
    assert pace.look([], passed_s=LOOK_S) == pace.rate


def test_a_queue_that_is_not_its_own_slows_it_down_and_does_not_stop_it() -> None:
    """Another program fills the line from second 20 on."""
    seen = upload(
        lambda now: 20 * MBIT,
        seconds=30,
        other_queue_s=lambda now: 0.2 if now >= 20 else 0.0,
    )
    late = [each for each in seen if 25 <= each[0] < 28]
    assert mean(late, 0, 1) < 0.5 * 20 * MBIT
    assert min(each[1] for each in late) >= 0.9 * FLOOR_SHARE * 20 * MBIT
    assert LEAST_BYTES_S < FLOOR_SHARE * 20 * MBIT


def test_its_own_pauses_between_packets_do_not_keep_it_slow() -> None:
    """Two peers of five stayed at the least rate for good, on lines that were idle."""
    seen = upload(
        lambda now: 20 * MBIT,
        seconds=300,
        other_queue_s=lambda now: 0.2 if 20 <= now < 250 else 0.0,
    )
    filled = [each for each in seen if 200 <= each[0] < 250]
    assert mean(filled, 0, 1) < 2 * LEAST_BYTES_S, "the other program has had the line for long"
    assert mean(seen, 280, 1) >= 0.9 * 20 * MBIT


def test_single_long_round_trips_are_no_queue() -> None:
    """One look in three meets a pause of a wireless network."""
    seen = upload(
        lambda now: 20 * MBIT,
        seconds=40,
        other_queue_s=lambda now: 0.15 if round(now / LOOK_S) % 3 == 0 else 0.0,
    )
    assert mean(seen, 10, 1) >= 0.9 * 20 * MBIT


def test_a_slow_line_at_the_other_end_of_one_connection_is_no_reason() -> None:
    pace = Pace()
    near = Sample(100_000, 0.05, 0.05, True)
    far = Sample(100_000, 0.55, 0.05, True)
    pace.look([near, far], passed_s=LOOK_S)
    assert pace.queue_s == 0.0
    quiet = Sample(100, 0.05, 0.05, False)
    for _ in range(LOOKS_TOGETHER):
        pace.look([quiet, far], passed_s=LOOK_S)
    assert pace.queue_s == pytest.approx(0.5), "who sends next to nothing meets no queue"


def test_a_connection_gets_what_the_others_leave() -> None:
    assert shares(90.0, []) == []
    assert shares(90.0, [30.0, 30.0, 30.0]) == [30.0, 30.0, 30.0]
    assert shares(90.0, [10.0, 40.0]) == [45.0, 85.0]
    assert shares(90.0, [0.0, 0.0, 0.0]) == [30.0, 30.0, 30.0], "those that begin at once"
    assert shares(90.0, [100.0, 100.0]) == [45.0, 45.0]


async def test_the_kernel_tells_about_connections_and_takes_their_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On loopback, which counts as near and is not paced unless the bound is lifted."""
    loop = asyncio.get_running_loop()
    with (
        socket.create_server((HERE, 0)) as server,
        socket.create_connection(server.getsockname()) as one,
        server.accept()[0] as other,
    ):
        one.setblocking(False)
        other.setblocking(False)
        pacer = Pacer(lambda: [("one", one)])
        for near_s in (pacing.NEAR_S, 0.0):
            monkeypatch.setattr(pacing, "NEAR_S", near_s)
            assert not pacer._look(LOOK_S)
            await loop.sock_sendall(one, bytes(100_000))
            got = 0
            while got < 100_000:
                got += len(await loop.sock_recv(other, 1 << 16))
            assert pacer._look(LOOK_S) is (near_s == 0.0)
        told = one.getsockopt(socket.SOL_SOCKET, pacing.SO_MAX_PACING_RATE, 8)
        assert int.from_bytes(told, "little") == pytest.approx(pacer.pace.rate, abs=1.0)


@pytest.mark.parametrize(("rate", "takes_all"), [(100e3, False), (100e6, True)])
def test_the_kernel_takes_no_more_than_a_slow_line_carries_soon(
    rate: float, takes_all: bool
) -> None:
    with socket.create_server((HERE, 0)) as server, socket.socket() as one:
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1448)  # loopback's has 64 KiB
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        one.connect(server.getsockname())
        one.setblocking(False)
        pacing.Pacer(tuple)._limit(one, one, rate)
        sent = 0
        with server.accept()[0], contextlib.suppress(BlockingIOError):
            while sent < 1 << 18:
                sent += one.send(bytes(1 << 12))
        if takes_all:
            assert sent >= 1 << 18
        else:
            assert sent < rate, "a second's worth, with the first packets, which are not paced"
