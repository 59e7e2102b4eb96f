"""The tally: what it counts, and that uniting names is order-free."""

from __future__ import annotations

import random

import pytest

from dht.identity import Identity
from peer.contributors import sentence
from peer.extras.credit.accounting.tally import Tally, contributors, stated
from tests.peer.extras.credit.accounting.books import (
    ANNA,
    BORIS,
    CLARA,
    DORA,
    RUN,
    merged,
    named,
    tally,
)


def test_the_total_of_a_peer_is_its_largest_count_of_any_fragment() -> None:
    made = tally({ANNA: 70, BORIS: 20}, {ANNA: 60, BORIS: 30})
    assert named(made.totals) == {"A": 70, "B": 30}


def test_where_the_run_is_taken_back_the_smaller_counts_are_those_of_the_run() -> None:
    made = tally({ANNA: 100, BORIS: 60})
    made.count([merged({ANNA: 50})])
    assert named(made.totals) == {"A": 50}


def test_names_united_in_any_order_and_repeatedly_end_alike() -> None:
    rng = random.Random(7)
    people = (ANNA, BORIS, CLARA)
    said = [stated(who, RUN, number, f"{number}") for who in people for number in range(4)]
    ends = []
    for _ in range(20):
        made = tally(dict.fromkeys(people, 1))
        parts = said + rng.choices(said, k=10)
        rng.shuffle(parts)
        for part in parts:
            made.unite([part])
        ends.append(made.statements)
    assert all(end == ends[0] for end in ends)
    assert {each.name for each in ends[0].values()} == {"3"}
    assert not made.unite(ends[0].values()), "nothing of it is new"


def state(made: Tally, who: Identity, name: str) -> bool:
    return made.state(who, name, now=1.0)


def test_a_contributor_is_shown_by_the_name_that_it_has_signed_and_otherwise_by_its_key() -> None:
    made = tally({ANNA: 75, BORIS: 25})
    assert state(made, ANNA, "Anna of the Alps")
    assert sentence(contributors(made)) == (
        f"contributors: Anna of the Alps 75.0%, peer {BORIS.peer_id[-8:]} 25.0%"
    )
    assert not state(made, ANNA, "Anna of the Alps"), "it has said so"
    assert state(made, ANNA, "")
    assert contributors(made)[0].name == ""


def test_nobody_can_name_another_peer() -> None:
    made = tally({ANNA: 75, BORIS: 25})
    own = stated(BORIS, RUN, 9, "the owner of all")
    forged = type(own)(ANNA.peer_id, own.sequence, own.name, own.signature)
    other = stated(ANNA, type(RUN)("ab" * 32), 9, "of another run")
    for each in (forged, other):
        assert not made.unite([each])
    assert made.statements == {}


def test_a_name_goes_with_the_work_of_a_lighter_side() -> None:
    """Otherwise tallies differed: those that had not seen that side took no such name."""
    made = tally({ANNA: 50, BORIS: 10})
    assert state(made, BORIS, "boris")
    made.count([merged({ANNA: 70})])
    assert made.statements == {}
    assert not state(made, BORIS, "boris"), "it has contributed nothing now"


def test_statements_of_strangers_are_not_kept() -> None:
    assert not tally({ANNA: 75}).unite([stated(DORA, RUN, 1, "dora")])


@pytest.mark.parametrize("name", ["x" * 33, "two\nlines", "\x1b[2J"])
def test_a_name_that_no_peer_may_have_is_not_taken(name: str) -> None:
    assert not tally({ANNA: 60}).unite([stated(ANNA, RUN, 1, name)])


def test_shares_sum_to_the_whole() -> None:
    made = tally({ANNA: 1, BORIS: 1, CLARA: 1})
    assert sum(row.per_mille for row in contributors(made)) == 1000
