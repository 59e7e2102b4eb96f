import math
import random

import numpy as np
import pytest
from multiaddr import Multiaddr

from dht.addresses import parse
from dht.errors import ANOTHER_PEER, AddressError
from dht.identity import Identity, PeerId
from dht.membership import seeds
from dht.membership.seeds import (
    CONNECT_TIMEOUT_S,
    SEEDS_MAX,
    Seed,
    SeedPlanner,
)

ME = Identity.from_seed(b"m" * 32).peer_id


def peer(number: int) -> PeerId:
    return Identity.from_seed(number.to_bytes(32, "big")).peer_id


def at(number: int, port: int = 1) -> Multiaddr:
    return parse(f"/ip4/203.0.113.{number}/tcp/{port}/p2p/{peer(number)}")


def planner(*seeds: Multiaddr, cached: tuple[Multiaddr, ...] = (), seed: int = 0) -> SeedPlanner:
    plan = SeedPlanner(ME, np.random.default_rng(seed))
    plan.add(seeds, "seed", now=0.0)
    plan.add(cached, "cached", now=0.0)
    return plan


def fail_all(plan: SeedPlanner, now: float, reason: str = "refused") -> list[Multiaddr]:
    attempts = plan.due(now)
    for attempt in attempts:
        plan.failed(attempt, reason, now=now)
    return [attempt.address for attempt in attempts]


def test_everybody_is_tried_at_once_seeds_before_cached_peers() -> None:
    plan = planner(at(1), at(2), cached=(at(3),))
    assert [attempt.address for attempt in plan.due(0.0)] == [at(1), at(2), at(3)]
    assert plan.due(0.0) == []
    assert plan.next_at() == math.inf


def test_attempts_at_once_are_limited_and_the_others_follow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(seeds, "ATTEMPTS_AT_ONCE", 4)
    plan = planner(*(at(number) for number in range(1, 7)))
    first = plan.due(0.0)
    assert len(first) == 4
    plan.failed(first[0], "refused", now=0.5)
    assert len(plan.due(0.5)) == 1


@pytest.mark.parametrize("seed", range(50))
def test_an_address_is_retried_for_ever_and_never_less_often_than_every_25_seconds(
    seed: int,
) -> None:
    plan = planner(at(1), seed=seed)
    now = 0.0
    pauses = []
    for _ in range(200):
        assert fail_all(plan, now) == [at(1)]
        pauses.append(plan.next_at() - now)
        now = plan.next_at()
    assert max(pauses) + CONNECT_TIMEOUT_S < 25
    assert 0.75 <= pauses[0] <= 1.25
    assert pauses[0] < pauses[1] < pauses[2]
    assert len(set(pauses[10:])) > 150, "without jitter all peers would come back together"


def test_a_connected_seed_is_left_alone_and_looked_for_as_soon_as_it_is_lost() -> None:
    plan = planner(at(1))
    (attempt,) = plan.due(0.0)
    plan.succeeded(attempt, now=0.25)
    plan.met({peer(1)}, lonely=False, now=1.0)
    assert plan.due(100.0) == []

    plan.met(set(), lonely=True, now=100.0)
    assert 100.0 <= plan.next_at() <= 101.0
    assert [a.address for a in plan.due(101.0)] == [at(1)]


def test_a_seed_that_answered_but_never_shows_up_as_connected_is_tried_again() -> None:
    plan = planner(at(1))
    (attempt,) = plan.due(0.0)
    plan.succeeded(attempt, now=0.0)
    plan.met(set(), lonely=True, now=1.0)
    assert plan.next_at() <= 2.0


def test_a_seed_met_in_another_way_needs_no_attempt() -> None:
    plan = planner(at(1), at(1, port=2))
    plan.met({peer(1)}, lonely=False, now=0.0)
    assert plan.due(0.0) == []


def test_cached_peers_are_left_alone_in_company_and_tried_when_lonely() -> None:
    plan = planner(at(1), cached=(at(2),))
    plan.met({peer(3)}, lonely=False, now=0.0)
    assert [a.address for a in plan.due(0.0)] == [at(1)]
    plan.met(set(), lonely=True, now=10.0)
    assert at(2) in [a.address for a in plan.due(11.0)]


def test_bad_news_are_told_once_with_each_address_and_its_own_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(seeds, "ATTEMPTS_AT_ONCE", 1)
    plan = planner(at(1), at(2))
    (first,) = plan.due(0.0)
    assert plan.report() is None, "not before all were tried"
    plan.failed(first, "connection\n refused", now=0.0)
    assert plan.report() is None
    (second,) = plan.due(0.0)
    plan.failed(second, "no answer within 5 s", now=5.0)

    report = plan.report()
    assert report is not None
    text = str(report)
    assert f"{at(1)}: connection refused" in text
    assert f"{at(2)}: no answer within 5 s" in text
    assert "\n" not in text and "shoal docs no-peer-answers" in text
    for now in (10.0, 20.0, 30.0):
        fail_all(plan, now)
        assert plan.report() is None, "told twice"


def test_where_other_peers_answer_the_advice_is_about_the_ids_of_the_addresses() -> None:
    """The advice was to check that the peer is running; it answered."""
    plan = planner(at(1))
    plan.failed(plan.due(0.0)[0], f"{ANOTHER_PEER}: {'1' * 52}", now=0.0)
    text = str(plan.report())
    assert f"{at(1)}: another peer answers there: {'1' * 52}; " in text
    assert "the ids after /p2p/ are misspelt or no longer used: ask for a new link" in text
    assert "is running" not in text


@pytest.mark.parametrize("seeds", [(), (at(1),)], ids=["no seed", "a seed"])
def test_peers_met_earlier_are_counted_and_not_called_bootstrap_peers(
    seeds: tuple[Multiaddr, ...],
) -> None:
    """A bootstrap peer whose members had all left told 3 kB about its own bootstrap addresses."""
    plan = planner(*seeds, cached=tuple(at(number) for number in range(10, 42)))
    for now in range(0, 60, 5):
        fail_all(plan, now)
    text = str(plan.report())
    assert "32 addresses of peers met earlier" in text and len(text) < 400
    assert str(at(10)) not in text
    assert ("bootstrap" in text, f"{at(1)}: refused" in text) == (bool(seeds), bool(seeds))


def test_bad_news_are_told_again_after_somebody_had_answered() -> None:
    plan = planner(at(1))
    fail_all(plan, 0.0)
    assert plan.report() is not None
    plan.met({peer(1)}, lonely=False, now=10.0)
    plan.met(set(), lonely=True, now=20.0)
    assert plan.report() is None
    fail_all(plan, 21.0)
    assert plan.report() is not None


def test_no_news_is_told_while_anybody_is_connected_or_without_addresses() -> None:
    plan = planner(at(1))
    plan.met({peer(5)}, lonely=False, now=0.0)
    fail_all(plan, 0.0)
    assert plan.report() is None
    assert planner().report() is None


def test_an_endless_reason_is_cut() -> None:
    plan = planner(at(1))
    fail_all(plan, 0.0, "x" * 100_000)
    assert len(str(plan.report())) < 1000


def test_a_seed_without_a_peer_id_is_refused_with_the_cure() -> None:
    with pytest.raises(AddressError, match="end in /p2p/PEER"):
        planner(parse("/ip4/203.0.113.7/tcp/7700"))


def test_a_peer_is_not_its_own_seed_and_addresses_are_limited() -> None:
    plan = planner(parse(f"/ip4/203.0.113.7/tcp/1/p2p/{ME}"))
    assert plan.given() == []
    many = planner(*(at(number % 250 + 1, port=number + 1) for number in range(300)))
    assert len(many.given()) == SEEDS_MAX


@pytest.mark.parametrize("seed", range(100))
def test_through_any_weather_each_seed_that_is_up_is_met_within_30_seconds(seed: int) -> None:
    rng = random.Random(seed)
    plan = planner(at(1), at(2), at(3), cached=(at(4), at(5)), seed=seed)
    up: dict[PeerId, float | None] = {peer(n): None for n in range(1, 6)}
    connected: set[PeerId] = set()
    pending: list[tuple[float, Seed]] = []
    now = 0.0
    while now < 600.0:
        now += 0.5
        if rng.random() < 0.01:
            which = peer(rng.randint(1, 3))
            up[which] = now if up[which] is None else None
            if up[which] is None:
                connected.discard(which)
        for ready_at, attempt in list(pending):
            if ready_at <= now:
                pending.remove((ready_at, attempt))
                if up[attempt.peer] is not None:
                    connected.add(attempt.peer)
                    plan.succeeded(attempt, now=now)
                else:
                    plan.failed(attempt, "refused", now=now)
        plan.met(connected, lonely=not connected, now=now)
        pending += [(now + rng.uniform(0, 5), attempt) for attempt in plan.due(now)]
        for which, since in up.items():
            late = since is not None and now - since > 30.0 and which not in connected
            assert not late, f"seed {seed}: a peer up since {since} is not met at {now}"


def test_a_peer_that_hears_of_nobody_any_more_looks_at_its_own_line() -> None:
    """A home whose cable was out for a minute was told to check whether a bootstrap peer runs."""
    plan = planner(at(1), at(2))
    for attempt in plan.due(0.0):
        plan.succeeded(attempt, now=0.1)
    plan.met([peer(number) for number in range(1, 6)], lonely=False, now=1.0)
    plan.met([], lonely=True, now=30.0)
    while (told := plan.report()) is None:
        fail_all(plan, plan.next_at())
    assert "all 5 connected peers fell silent" in str(told)
    assert "own line" in str(told)

    alone = planner(at(1))
    fail_all(alone, 0.0)
    assert "check that one of them is running" in str(alone.report())
