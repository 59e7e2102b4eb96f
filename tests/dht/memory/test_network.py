"""The virtual clock and the simulated network, without asyncio."""

from __future__ import annotations

import math
from functools import partial

import pytest

from dht.identity import PeerId
from dht.memory.event_heap import EventHeap
from dht.memory.network import OrderedChannel, SimulatedNetwork, Weather
from tests.dht.memory.weather import STORM

ANNA, BORIS, CLARA = PeerId("anna"), PeerId("boris"), PeerId("clara")
STILL = Weather(latency_s=(0.1, 0.1), bandwidth_bytes_s=1e6)


def run(heap: EventHeap, *, until: float = math.inf) -> None:
    """Run what is scheduled up to and including this time, at which the clock then stands."""
    heap.run_while((), until)
    if until != math.inf:
        heap.now = until


class Post:
    """Sends messages and writes down what became of them, and when."""

    def __init__(self, weather: Weather = STILL, seed: int = 0) -> None:
        self.heap = EventHeap()
        self.network = SimulatedNetwork(self.heap, weather, seed)
        self.log: list[tuple[float, str]] = []

    def note(self, text: str) -> None:
        self.log.append((round(self.heap.now, 6), text))

    def transfer(self, sender: PeerId, receiver: PeerId, name: str, size_bytes: int = 0) -> None:
        self.network.send(
            sender,
            receiver,
            size_bytes,
            lambda: self.note(name),
            lambda: self.note(f"{name} lost"),
        )


def test_events_run_in_order_of_time_and_ties_in_order_of_scheduling() -> None:
    heap = EventHeap()
    ran: list[str] = []
    heap.call_at(2.0, ran.append, "late")
    heap.call_at(1.0, ran.append, "first")
    heap.call_at(1.0, ran.append, "second")
    heap.call_in(0.5, lambda: heap.call_at(0.0, ran.append, "overdue"))

    run(heap)
    assert heap.events == 5
    assert ran == ["overdue", "first", "second", "late"]
    assert heap.now == 2.0


def test_events_run_up_to_and_including_the_last_moment() -> None:
    heap = EventHeap()
    ran: list[int] = []
    for when in (1, 2, 3):
        heap.call_at(when, ran.append, when)

    heap.run_while((), 2.0)
    assert (ran, heap.now, len(heap)) == ([1, 2], 2.0, 1)


def test_a_cancelled_timer_does_not_run_and_costs_no_memory() -> None:
    heap = EventHeap()
    ran: list[int] = []
    timers = [heap.call_at(10.0 + number, ran.append, number) for number in range(1000)]
    for timer in timers[:-1]:
        timer.cancel()
        timer.cancel()

    assert len(heap) == 1
    assert len(heap._entries) < 200
    run(heap)
    timers[-1].cancel()
    assert ran == [999]
    assert len(heap) == 0


def test_a_message_takes_latency_and_the_slower_line() -> None:
    post = Post()
    post.network.set_link(BORIS, down_bytes_s=0.5e6)
    post.transfer(ANNA, BORIS, "small")
    post.transfer(ANNA, BORIS, "large", 1_000_000)
    run(post.heap)

    assert post.log == [(0.1, "small"), (2.1, "large")]
    assert post.network.traffic(ANNA) == (1_000_000, 0)
    assert post.network.traffic(BORIS) == (0, 1_000_000)


def test_bulk_queues_at_the_uplink_and_at_the_downlink_but_small_messages_pass() -> None:
    post = Post()
    post.transfer(ANNA, BORIS, "a to b", 1_000_000)
    post.transfer(ANNA, CLARA, "a to c", 1_000_000)
    post.transfer(BORIS, CLARA, "b to c", 1_000_000)
    post.transfer(ANNA, BORIS, "hello", 100)
    run(post.heap)

    # Clara's line is taken by Boris' bytes, which come in first, until 1.1.
    assert post.log == [(0.1001, "hello"), (1.1, "a to b"), (1.1, "b to c"), (2.1, "a to c")]


def test_a_transfer_under_way_goes_on_at_the_new_speed_of_the_line() -> None:
    post = Post()
    post.network.set_link(BORIS, down_bytes_s=0.1e6)
    post.transfer(ANNA, BORIS, "one", size_bytes=1_000_000)
    post.transfer(ANNA, BORIS, "other", size_bytes=1_000_000)
    run(post.heap, until=5.1)  # half of the first one is there

    post.network.set_link(BORIS, down_bytes_s=1e6)
    run(post.heap)

    assert post.log == [(5.6, "one"), (6.6, "other")]


def test_a_long_partition_loses_messages_and_a_short_one_delays_them() -> None:
    post = Post()
    post.network.partition([[ANNA]])
    post.transfer(ANNA, BORIS, "cut off")
    post.transfer(BORIS, CLARA, "other side")
    run(post.heap, until=10.1)
    assert post.log == [(0.1, "other side"), (10.1, "cut off lost")]

    post.transfer(ANNA, BORIS, "delayed")
    run(post.heap, until=15.0)
    post.network.heal()
    run(post.heap)
    assert post.log[2:] == [(15.0, "delayed")]


def test_a_transfer_under_way_when_the_partition_comes_does_not_arrive() -> None:
    post = Post()
    post.transfer(ANNA, BORIS, "under way")
    run(post.heap, until=0.05)
    post.network.partition([[ANNA], [BORIS]])
    run(post.heap)
    assert post.log == [(10.1, "under way lost")]


def test_a_paused_peer_hears_late_and_speaks_late() -> None:
    post = Post()
    post.network.pause(BORIS)
    post.transfer(ANNA, BORIS, "one")
    post.transfer(ANNA, BORIS, "two")
    post.transfer(BORIS, ANNA, "reply")
    run(post.heap, until=60.0)
    assert post.log == []
    post.network.resume(BORIS)
    run(post.heap)
    assert post.log == [(60.0, "one"), (60.0, "two"), (60.1, "reply")]


def test_a_crashed_peer_is_silent_and_its_unsent_messages_are_gone() -> None:
    post = Post()
    post.transfer(ANNA, BORIS, "half sent", 1_000_000)
    post.transfer(ANNA, BORIS, "sent")
    run(post.heap, until=0.05)
    post.network.crash(ANNA)
    post.transfer(ANNA, BORIS, "said by the dead")
    post.transfer(BORIS, ANNA, "anybody there")
    run(post.heap)
    assert post.log == [(0.1, "sent"), (10.15, "anybody there lost")]


def test_a_restarted_peer_tells_those_who_wait_for_its_former_self() -> None:
    post = Post()
    post.transfer(ANNA, BORIS, "to the old one")
    post.network.crash(BORIS)
    run(post.heap, until=5.0)
    post.network.restart(BORIS)
    post.transfer(ANNA, BORIS, "to the new one")
    run(post.heap)
    assert post.log == [(5.1, "to the new one"), (5.1, "to the old one lost")]


def test_nothing_is_called_back_at_a_peer_that_crashed_meanwhile() -> None:
    post = Post()
    post.network.partition([[ANNA]])
    post.transfer(ANNA, BORIS, "cut off")
    run(post.heap, until=1.0)
    post.network.crash(ANNA)
    post.network.restart(ANNA)
    run(post.heap)
    assert post.log == []


def test_a_lane_keeps_the_order_in_a_storm() -> None:
    post = Post(STORM)
    channel = OrderedChannel()
    for number in range(100):
        arrived = partial(post.note, str(number))
        post.network.send(ANNA, BORIS, 10, arrived, partial(post.note, "lost"), channel=channel)
    run(post.heap)
    assert [text for _, text in post.log] == [str(number) for number in range(100)]


def storm_log(seed: int) -> list[tuple[float, str]]:
    post = Post(STORM, seed)
    peers = [PeerId(f"peer-{number}") for number in range(10)]
    for number in range(500):
        sender, receiver = peers[number % 10], peers[(number * 7 + 1) % 10]
        post.heap.call_at(
            number * 0.01, post.transfer, sender, receiver, str(number), number * 1000
        )
    post.heap.call_at(2.0, post.network.partition, [peers[:5]])
    post.heap.call_at(3.0, post.network.crash, peers[3])
    post.heap.call_at(4.0, post.network.pause, peers[7])
    post.heap.call_at(6.0, post.network.heal)
    post.heap.call_at(7.0, post.network.restart, peers[3])
    post.heap.call_at(9.0, post.network.resume, peers[7])
    run(post.heap)
    return post.log


def test_the_same_seed_gives_the_same_storm_and_another_seed_another() -> None:
    assert storm_log(1) == storm_log(1)
    assert storm_log(1) != storm_log(2)


@pytest.mark.parametrize("seed", range(20))
def test_a_message_in_a_storm_arrives_or_is_reported_as_lost_once(seed: int) -> None:
    log = [text.removesuffix(" lost") for _, text in storm_log(seed)]
    assert len(log) == len(set(log)), f"seed {seed}"
    assert any(text.endswith("lost") for _, text in storm_log(seed))


def test_transfers_out_of_a_site_share_one_line_and_those_within_it_do_not() -> None:
    post = Post()
    for peer in (ANNA, BORIS):
        post.network.set_link(peer, up_bytes_s=1e7, down_bytes_s=1e7)
    post.network.share_line([ANNA, BORIS], up_bytes_s=1e5, down_bytes_s=1e5, latency_s=0.001)
    post.transfer(ANNA, CLARA, "anna's", 100_000)
    post.transfer(BORIS, CLARA, "boris's", 100_000)
    post.transfer(ANNA, BORIS, "at home", 100_000)
    run(post.heap)

    assert post.log == [(0.011, "at home"), (1.1, "anna's"), (2.1, "boris's")]
    assert post.network.traffic(ANNA) == (200_000, 0)


def test_transfers_into_a_site_share_one_line() -> None:
    post = Post()
    post.network.share_line([ANNA, BORIS], up_bytes_s=1e5, down_bytes_s=1e5, latency_s=0.001)
    post.transfer(CLARA, ANNA, "to anna", 100_000)
    post.transfer(CLARA, BORIS, "to boris", 100_000)
    run(post.heap)

    assert post.log == [(1.1, "to anna"), (2.1, "to boris")]
