"""The limit of calls that each peer may make."""

from dht.identity import Identity, PeerId
from dht.membership.call_budget import CallBudget


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
