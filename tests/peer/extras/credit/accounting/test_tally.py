"""The tally: what is taken into it, and that uniting is order-free."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from dht.identity import Identity
from peer.contributors import sentence
from peer.extras.credit.accounting.tally import (
    Part,
    ProvenMap,
    Tally,
    confirmed,
    contributors,
    everything,
    stated,
    unproven,
)
from tests.peer.extras.credit.accounting.books import (
    ANNA,
    BORIS,
    CLARA,
    DORA,
    RUN,
    named,
    nothing,
    proven,
)


def tally(*maps: ProvenMap) -> Tally:
    made = Tally(RUN, fragments=2)
    made.unite(Part(maps=maps), believes=everything)
    return made


def test_the_total_of_a_peer_is_its_largest_count_of_any_fragment() -> None:
    made = tally(proven({ANNA: 70, BORIS: 20}), proven({ANNA: 60, BORIS: 30}, fragment=1))
    assert named(made.totals) == {"A": 70, "B": 30}


def test_of_two_sides_of_a_fork_the_heavier_counts_alone() -> None:
    light, heavy = proven({ANNA: 50}, version=9), proven({ANNA: 20, BORIS: 40}, version=3)
    for maps in ((light, heavy), (heavy, light)):
        assert named(tally(*maps).totals) == {"A": 20, "B": 40}


def test_a_map_that_its_lineage_does_not_bind_is_not_taken() -> None:
    true = proven({ANNA: 50, BORIS: 10})
    inflated = proven({ANNA: 50, BORIS: 10**9})
    lie = replace(true, map=inflated.map)
    made = tally(true)
    assert not made.unite(Part(maps=(lie,)), believes=everything)
    assert named(made.totals) == {"A": 50, "B": 10}


def test_a_map_of_a_link_that_nobody_certifies_is_not_taken() -> None:
    made = tally(proven({ANNA: 50}))
    lie = proven({ANNA: 50, BORIS: 10**9}, version=99)
    assert not made.unite(Part(maps=(lie,)), believes=nothing)
    assert named(made.totals) == {"A": 50}


def test_a_fragment_that_the_run_does_not_have_is_not_taken() -> None:
    made = tally(proven({ANNA: 50}))
    assert not made.unite(Part(maps=(proven({BORIS: 99}, fragment=2),)), believes=everything)


def test_uniting_in_any_order_and_repeatedly_ends_in_the_same_tally() -> None:
    rng = random.Random(7)
    people = (ANNA, BORIS, CLARA)
    maps = [
        proven(
            {who: rng.randint(1, 99) for who in people}, fragment=f, version=v, history=bytes([v])
        )
        for f in range(2)
        for v in range(4)
    ]
    said = [stated(who, RUN, number, f"{number}") for who in people for number in range(4)]
    begin = (proven(dict.fromkeys(people, 1)),)  # all are contributors before anything is heard
    ends = []
    for _ in range(20):
        made = tally(*begin)
        parts = [Part(maps=(m,)) for m in maps]
        parts += [Part(statements=(s,)) for s in said]
        parts += rng.choices(parts, k=10)
        rng.shuffle(parts)
        for part in parts:
            made.unite(part, believes=everything)
        ends.append(made.part)
    assert all(end == ends[0] for end in ends)
    merged = tally(*begin)
    assert merged.unite(ends[0], believes=everything)
    assert not merged.unite(ends[0], believes=everything)


# Names


def state(made: Tally, who: Identity, name: str) -> bool:
    return made.state(who, name, now=1.0)


def test_a_contributor_is_shown_by_the_name_that_it_has_signed_and_otherwise_by_its_key() -> None:
    made = tally(proven({ANNA: 75, BORIS: 25}))
    assert state(made, ANNA, "Anna of the Alps")
    assert sentence(contributors(made)) == (
        f"contributors: Anna of the Alps 75.0%, peer {BORIS.peer_id[-8:]} 25.0%"
    )
    assert not state(made, ANNA, "Anna of the Alps"), "it has said so"
    assert state(made, ANNA, "")
    assert contributors(made)[0].name == ""


def test_nobody_can_name_another_peer() -> None:
    made = tally(proven({ANNA: 75, BORIS: 25}))
    own = stated(BORIS, RUN, 9, "the owner of all")
    forged = type(own)(ANNA.peer_id, own.sequence, own.name, own.signature)
    other = stated(ANNA, type(RUN)("ab" * 32), 9, "of another run")
    for each in (forged, other):
        assert not made.unite(Part(statements=(each,)), believes=everything)
    assert made.statements == {}


def test_a_name_goes_with_the_work_of_a_lighter_side() -> None:
    """Otherwise tallies differed: those that had not seen that side took no such name."""
    made = tally(proven({ANNA: 50, BORIS: 10}, version=9))
    assert state(made, BORIS, "boris")
    assert made.unite(Part(maps=(proven({ANNA: 70}, version=3),)), believes=everything)
    assert made.statements == {}
    assert not state(made, BORIS, "boris"), "it has contributed nothing now"


def test_statements_of_strangers_are_not_kept() -> None:
    made = tally(proven({ANNA: 75}))
    stranger = stated(DORA, RUN, 1, "dora")
    assert not made.unite(Part(statements=(stranger,)), believes=everything)


@pytest.mark.parametrize("name", ["x" * 33, "two\nlines", "\x1b[2J"])
def test_a_name_that_no_peer_may_have_is_not_taken(name: str) -> None:
    made = tally(proven({ANNA: 60}))
    assert not made.unite(Part(statements=(stated(ANNA, RUN, 1, name),)), believes=everything)


def test_shares_sum_to_the_whole() -> None:
    made = tally(proven({ANNA: 1, BORIS: 1, CLARA: 1}))
    assert sum(row.per_mille for row in contributors(made)) == 1000


# Another topic


def test_where_a_run_goes_on_under_another_topic_no_map_from_before_counts() -> None:
    """As after a rollback: the run's own count is smaller, and old signatures count no more."""
    made = tally(proven({ANNA: 100, BORIS: 60}))
    made.follow(b"a" * 16)
    before = made.part
    made.follow(b"b" * 16)
    assert made.totals == {}
    back = Part(maps=(proven({ANNA: 50, BORIS: 20}),), topic=b"b" * 16)
    assert made.unite(back, believes=everything)
    assert not made.unite(before, believes=everything)
    assert named(made.totals) == {"A": 50, "B": 20}
    made.follow(b"b" * 16)
    assert named(made.totals) == {"A": 50, "B": 20}


def read(*parts: Part) -> Tally:
    made = unproven(RUN)
    made.unite(confirmed(parts), believes=everything)
    return made


def test_one_peer_alone_cannot_add_tokens() -> None:
    true = Part(maps=(proven({ANNA: 10, BORIS: 5}, version=7),))
    liar = Part(maps=(proven({ANNA: 10, BORIS: 10**9}, version=8),))
    behind = Part(maps=(proven({ANNA: 8, BORIS: 5}, version=6),))
    assert named(read(true, liar, behind).totals) == {"A": 10, "B": 5}
    assert named(read(liar, true).totals) == {"A": 10, "B": 5}


def test_the_word_of_a_single_peer_is_taken() -> None:
    assert named(read(Part(maps=(proven({ANNA: 10}),))).totals) == {"A": 10}
    assert read().totals == {}
