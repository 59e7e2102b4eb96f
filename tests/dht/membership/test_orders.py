"""Orders of a run's owner: their form, their signatures, and what is in force at a version."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dht.membership.credentials import (
    BANS_MAX,
    Directive,
    Refused,
    encode,
    read_directive,
)
from dht.membership.orders import (
    AMENDMENTS_MAX,
    FRAGMENTS_MAX,
    NONE,
    Amendment,
    Attested,
    End,
    Orders,
    Rollback,
    Root,
    Value,
    amended,
    problem,
    settings_at,
    words,
)
from dht.records import DIRECTIVE_MAX_BYTES
from tests.dht.membership.signers import DELEGATES, NOW, OWNER, OWNERS, RUN, admission

LARGEST = Orders(
    paused=True,
    end=End(version=2**53 - 1),
    attested=(Attested(2**53 - 1, bytes(32), bytes(32)),) * FRAGMENTS_MAX,
    rollback=Rollback(2**32, (Root(2**53 - 1, bytes(32)),) * FRAGMENTS_MAX),
)


def ordering(orders: Orders, number: int = 1) -> bytes:
    return encode(OWNERS.directive(number, frozenset(), orders))


def read(data: bytes) -> Directive | Refused:
    return read_directive(data, run=RUN, owner=OWNER.peer_id)


def test_orders_are_signed_and_read_back() -> None:
    orders = Orders(paused=True, amendments=amended(NONE, 30, {"inner.learning_rate": 5e-4}))
    verdict = read(ordering(orders))
    assert isinstance(verdict, Directive)
    assert verdict.orders == orders
    changed = msgspec.structs.replace(verdict, orders=NONE)
    refused = read(encode(changed))
    assert isinstance(refused, Refused) and "not signed" in refused.reason


def test_a_delegate_gives_no_orders() -> None:
    refused = read(encode(DELEGATES.directive(1, frozenset(), Orders(paused=True))))
    assert isinstance(refused, Refused)
    assert "only the owner" in refused.reason


@pytest.mark.parametrize(
    ("orders", "reason"),
    [
        (Orders(end=End()), "either a version or a moment"),
        (Orders(end=End(version=1, at=2)), "either a version or a moment"),
        (
            Orders(amendments=(Amendment(2, (("a.b", 1),)), Amendment(1, (("a.b", 1),)))),
            "ascending order of their versions",
        ),
        (Orders(amendments=(Amendment(1, (("b.b", 1), ("a.b", 1))),)), "settings"),
        (Orders(amendments=(Amendment(1, (("a.b", float("nan")),)),)), "finite"),
        (Orders(amendments=(Amendment(1, (("a.b", "\x1b[2J"),)),)), "cannot be printed"),
    ],
)
def test_orders_that_contradict_themselves_are_neither_signed_nor_believed(
    orders: Orders, reason: str
) -> None:
    assert reason in (problem(orders) or "")
    with pytest.raises(ValueError, match=reason):
        ordering(orders)
    refused = read(encode(msgspec.structs.replace(OWNERS.directive(1, frozenset()), orders=orders)))
    assert isinstance(refused, Refused) and reason in refused.reason


def test_the_largest_orders_fit_and_more_bans_than_fit_are_refused_with_the_remedy() -> None:
    assert len(ordering(LARGEST, 2**32)) <= DIRECTIVE_MAX_BYTES
    keys = frozenset(number.to_bytes(32, "big") for number in range(BANS_MAX))
    with pytest.raises(ValueError, match="ban whole invites instead of peers"):
        OWNERS.directive(1, keys, LARGEST)


def test_the_last_directive_of_the_owner_is_in_force() -> None:
    door = admission("open")
    assert door.orders == NONE
    assert isinstance(door.take(ordering(Orders(paused=True), 2), now=NOW), Directive)
    assert door.orders.paused
    refused = door.take(ordering(NONE, 1), now=NOW)
    assert isinstance(refused, Refused) and "does not replace its directive 2" in refused.reason
    assert door.orders.paused
    assert door.take(ordering(Orders(paused=True), 2), now=NOW) is None
    assert isinstance(door.take(ordering(NONE, 3), now=NOW), Directive)
    assert not door.orders.paused


def test_a_directive_that_a_peer_cannot_follow_is_refused_and_changes_nothing() -> None:
    door = admission("open")
    door._judge_orders = lambda orders: "it is paused" if orders.paused else None
    refused = door.take(ordering(Orders(paused=True), 5), now=NOW)
    assert refused == Refused("directive 5 cannot be followed: it is paused")
    assert door.owners_directive is None


def test_two_directives_with_one_number_end_as_the_same_one_at_all_peers() -> None:
    both = [ordering(Orders(paused=True), 4), ordering(Orders(end=End(version=9)), 4)]
    doors = [admission("open"), admission("open")]
    for data in both:
        doors[0].take(data, now=NOW)
    for data in reversed(both):
        doors[1].take(data, now=NOW)
    assert doors[0].orders == doors[1].orders != NONE
    assert doors[0].digest(NOW) == doors[1].digest(NOW)


names = st.sampled_from(["inner.learning_rate", "outer.codec", "end.tokens"])
changes = st.dictionaries(names, st.integers(1, 9), min_size=1, max_size=3)


@given(steps=st.lists(st.tuples(st.integers(0, 40), changes), max_size=30))
def test_the_owners_last_word_counts_from_its_version_on(
    steps: list[tuple[int, dict[str, Value]]],
) -> None:
    orders = NONE
    for version, settings in steps:
        orders = Orders(amendments=amended(orders, version, settings))
        assert problem(orders) is None
        assert len(orders.amendments) <= AMENDMENTS_MAX
        for later in (version, version + 1, 10_000):
            assert settings_at(orders, later).items() >= settings.items()
    if not steps:
        assert settings_at(orders, 10_000) == {}


def test_settings_change_at_their_version_and_not_before() -> None:
    orders = Orders(amendments=amended(NONE, 30, {"inner.learning_rate": 5e-4}))
    orders = Orders(amendments=amended(orders, 40, {"outer.codec": "int8"}))
    assert settings_at(orders, 29) == {}
    assert settings_at(orders, 30) == {"inner.learning_rate": 5e-4}
    assert settings_at(orders, 40) == {"inner.learning_rate": 5e-4, "outer.codec": "int8"}
    assert words(orders) == [
        "from version 30: inner.learning_rate = 0.0005",
        "from version 40: outer.codec = int8",
    ]


def test_every_order_has_words() -> None:
    told = "; ".join(words(LARGEST))
    for text in ("paused", "ends at version", "attested version", "rolled back by directive"):
        assert text in told
