"""The limit of calls that each peer may make."""

from dht.identity import Identity, PeerId
from dht.membership.call_budget import CallBudget, CallQueue, CallRate


def peer(number: int) -> PeerId:
    return Identity.from_seed(number.to_bytes(32, "big")).peer_id


def test_a_peer_has_so_many_calls_in_any_minute() -> None:
    budget = CallBudget(2)
    assert [budget.spend(peer(1), now) for now in (0.0, 30.0, 59.9, 60.0, 60.1)] == [
        True,
        True,
        False,
        True,
        False,
    ]
    assert budget.spend(peer(2), 60.1), "another peer has its own"


def test_a_budget_forgets_the_longest_silent_first() -> None:
    budget = CallBudget(1, peers_max=2)
    for number in (1, 2, 1, 3):
        budget.spend(peer(number), 0.0)
    assert not budget.spend(peer(1), 1.0)
    assert budget.spend(peer(2), 1.0)


def test_a_rate_lets_a_burst_pass_and_then_so_many_a_second() -> None:
    rate = CallRate(2.0, 4.0)
    assert [rate.spend(b"anna", 0.0) for _ in range(6)] == [True] * 4 + [False] * 2
    assert rate.spend(b"boris", 0.0)
    assert [rate.spend(b"anna", 10.0) for _ in range(5)] == [True] * 4 + [False]
    assert not rate.spend(b"boris", 0.0, tokens=100.0) or not rate.spend(b"boris", 0.9)
    assert rate.spend(b"boris", 2.0), "a large reply costs a second at most"


def test_a_rate_forgets_the_longest_silent_peer() -> None:
    rate = CallRate(1.0, 1.0, peers_max=2)
    for peer in (b"anna", b"boris", b"clara"):
        assert rate.spend(peer, 0.0)
    assert rate.spend(b"anna", 0.0) and not rate.spend(b"clara", 0.0)


def test_a_peer_is_frugal_while_it_has_half_of_its_burst() -> None:
    rate = CallRate(2.0, 8.0)
    assert rate.is_frugal(b"anna", 0.0), "a peer that never called"
    for _ in range(4):
        rate.spend(b"anna", 0.0)
    assert rate.is_frugal(b"anna", 0.0)
    rate.spend(b"anna", 0.0)
    assert not rate.is_frugal(b"anna", 0.4)
    assert rate.is_frugal(b"anna", 0.5)


def test_calls_of_frugal_peers_begin_before_those_of_the_others() -> None:
    queue: CallQueue[int] = CallQueue()
    for number in range(3):
        queue.put(b"flood", number, is_frugal=False)
    queue.put(b"flood too", 3, is_frugal=False)
    queue.put(b"anna", 10, is_frugal=True)
    assert len(queue) == 5
    assert queue.take(8) == [(b"anna", 10), (b"flood", 0)]
    # Those of the others, one of each peer in turn.
    assert [queue.take(8) for _ in range(3)] == [
        [(b"flood too", 3)],
        [(b"flood", 1)],
        [(b"flood", 2)],
    ]
    assert not queue and queue.take(8) == []


def test_frugal_peers_take_turns_and_keep_the_others_from_starving() -> None:
    queue: CallQueue[int] = CallQueue()
    for peer in (b"anna", b"anna", b"boris"):
        queue.put(peer, 0, is_frugal=True)
    queue.put(b"flood", 9, is_frugal=False)
    assert queue.take(2) == [(b"anna", 0), (b"boris", 0), (b"flood", 9)]
    assert queue.take(2) == [(b"anna", 0)]
