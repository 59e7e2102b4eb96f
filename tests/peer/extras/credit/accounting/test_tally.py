"""The tally: what is taken into it, that uniting is order-free, and how it divides into days."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from dht.identity import Identity
from peer.contributors import sentence
from peer.extras.credit.accounting import reports as days
from peer.extras.credit.accounting import statements as words
from peer.extras.credit.accounting.contributors import contributors, tokens_by_day
from peer.extras.credit.accounting.proof import ProvenMap, Totals
from peer.extras.credit.accounting.reports import Report, report
from peer.extras.credit.accounting.tally import Part, Tally, everything
from tests.peer.extras.credit.accounting.books import (
    ANNA,
    BORIS,
    CLARA,
    DAY,
    DORA,
    RUN,
    named,
    nothing,
    proven,
)


def tally(*maps: ProvenMap, me: Identity = ANNA) -> Tally:
    made = Tally(RUN, me.peer_id, fragments=2)
    made.unite(Part(maps=maps), today=DAY, believes=everything)
    return made


def take(made: Tally, *reports: Report, today: int = DAY) -> bool:
    return made.unite(Part(reports=reports), today=today, believes=everything)


def totals(**tokens: int) -> Totals:
    people = {"anna": ANNA, "boris": BORIS, "clara": CLARA}
    return Totals.of({people[name].peer_id: count for name, count in tokens.items()})


def test_the_total_of_a_peer_is_its_largest_count_of_any_fragment() -> None:
    made = tally(proven({ANNA: 70, BORIS: 20}), proven({ANNA: 60, BORIS: 30}, fragment=1))
    assert named(made.totals.by_peer) == {"A": 70, "B": 30}


def test_of_two_sides_of_a_fork_the_heavier_counts_alone() -> None:
    light, heavy = proven({ANNA: 50}, version=9), proven({ANNA: 20, BORIS: 40}, version=3)
    for maps in ((light, heavy), (heavy, light)):
        assert named(tally(*maps).totals.by_peer) == {"A": 20, "B": 40}


def test_a_map_that_its_lineage_does_not_bind_is_not_taken() -> None:
    true = proven({ANNA: 50, BORIS: 10})
    inflated = proven({ANNA: 50, BORIS: 10**9})
    lie = replace(true, map=inflated.map)
    made = tally(true)
    assert not made.unite(Part(maps=(lie,)), today=DAY, believes=everything)
    assert named(made.totals.by_peer) == {"A": 50, "B": 10}


def test_a_map_of_a_link_that_nobody_certifies_is_not_taken() -> None:
    made = tally(proven({ANNA: 50}))
    lie = proven({ANNA: 50, BORIS: 10**9}, version=99)
    assert not made.unite(Part(maps=(lie,)), today=DAY, believes=nothing)
    assert named(made.totals.by_peer) == {"A": 50}


def test_a_fragment_that_the_run_does_not_have_is_not_taken() -> None:
    made = tally(proven({ANNA: 50}))
    assert not made.unite(
        Part(maps=(proven({BORIS: 99}, fragment=2),)), today=DAY, believes=everything
    )


def test_days_sum_to_the_totals_and_the_last_report_of_a_day_divides_them() -> None:
    made = tally(proven({ANNA: 100, BORIS: 60}))
    take(made, report(ANNA, RUN, DAY - 2, totals(anna=30)))
    take(made, report(ANNA, RUN, DAY - 2, totals(anna=40, boris=10)))
    take(made, report(BORIS, RUN, DAY - 2, totals(anna=35, boris=10)))
    take(made, report(BORIS, RUN, DAY, totals(anna=90, boris=60)))
    assert [named(day) for day in made.by_day().values()] == [
        {"A": 40, "B": 10},
        {"A": 60, "B": 50},
    ]
    assert tokens_by_day(made) == {DAY - 2: 50, DAY: 110}


def test_work_that_was_lost_with_its_lineage_counts_on_no_day() -> None:
    made = tally(proven({ANNA: 100, BORIS: 20}))
    for each in (ANNA, BORIS):
        take(made, report(each, RUN, DAY - 1, totals(anna=70, boris=50, clara=5)))
    take(made, report(ANNA, RUN, DAY, totals(anna=100, boris=20)))
    assert [named(day) for day in made.by_day().values()] == [{"A": 70, "B": 20}, {"A": 30}]


def test_a_report_adds_no_tokens_whatever_it_claims() -> None:
    made = tally(proven({ANNA: 100, BORIS: 60}))
    take(made, report(BORIS, RUN, DAY - 1, totals(anna=1, boris=10**12)))
    take(made, report(ANNA, RUN, DAY, totals(anna=100, boris=60)))
    assert named(made.totals.by_peer) == {"A": 100, "B": 60}
    assert sum(sum(day.values()) for day in made.by_day().values()) == 160


def test_one_of_three_reporters_cannot_move_work_into_another_day() -> None:
    made = tally(proven({ANNA: 100, BORIS: 60, CLARA: 40}))
    honest = totals(anna=50, boris=30, clara=20)
    for each in (ANNA, BORIS):
        take(made, report(each, RUN, DAY - 1, honest))
    take(made, report(CLARA, RUN, DAY - 1, totals(anna=50, boris=30, clara=10**9)))
    take(made, report(ANNA, RUN, DAY, totals(anna=100, boris=60, clara=40)))
    assert named(made.by_day()[DAY - 1]) == {"A": 50, "B": 30, "C": 20}


def test_where_few_report_a_day_each_alone_dates_only_its_own_work() -> None:
    """One report of a day long ago had all work of the run done on that day."""
    made = tally(proven({ANNA: 100, BORIS: 60, CLARA: 40}))
    take(made, report(CLARA, RUN, DAY - 999, totals(anna=10**9, boris=10**9, clara=10**9)))
    take(made, report(ANNA, RUN, DAY - 1, totals(anna=50, boris=30, clara=40)))
    take(made, report(CLARA, RUN, DAY - 1, totals(anna=10**9, boris=10, clara=40)))
    take(made, report(ANNA, RUN, DAY, totals(anna=100, boris=60, clara=40)))
    assert [named(day) for day in made.by_day().values()] == [
        {"C": 40},
        {"A": 50, "B": 10},
        {"A": 50, "B": 50},
    ]


@pytest.mark.parametrize(
    "given",
    [
        report(DORA, RUN, DAY, totals(anna=1)),
        report(ANNA, RUN, DAY + 2, totals(anna=1)),
        report(ANNA, RUN, -1, totals(anna=1)),
        replace(report(ANNA, RUN, DAY, totals(anna=1)), totals=totals(anna=2)),
        replace(report(ANNA, RUN, DAY, totals(anna=1)), peer=BORIS.peer_id),
        replace(report(ANNA, RUN, DAY, totals(anna=1)), day=DAY - 1),
    ],
    ids=["a stranger's", "of the future", "of before", "changed", "another's", "another day's"],
)
def test_a_report_that_is_no_contributors_word_on_this_day_is_not_taken(given: Report) -> None:
    made = tally(proven({ANNA: 100, BORIS: 60}))
    assert not take(made, given)
    assert made.reports == {}


def test_a_badly_signed_report_does_not_keep_a_good_one_out() -> None:
    made = tally(proven({ANNA: 100, BORIS: 60}))
    bad = replace(report(BORIS, RUN, DAY, totals(boris=60)), signature=bytes(64))
    good = report(ANNA, RUN, DAY, totals(anna=50))
    assert take(made, bad, good)
    assert made.reports == {DAY: (good,)}


def test_old_days_are_dropped_and_their_work_is_kept() -> None:
    made = tally(proven({ANNA: 10_000}))
    for number in range(days.DAYS_MAX + 5):
        take(made, report(ANNA, RUN, DAY + number, totals(anna=number + 1)), today=DAY + number)
    assert len(made.reports) == days.DAYS_MAX
    assert sum(sum(day.values()) for day in made.by_day().values()) == 10_000


def test_a_peer_reports_only_if_it_has_contributed_and_something_has_changed() -> None:
    made = tally(proven({ANNA: 100}))
    assert not made.report(BORIS, DAY)
    assert made.report(ANNA, DAY)
    assert not made.report(ANNA, DAY)
    made.unite(Part(maps=(proven({ANNA: 120}, version=2),)), today=DAY, believes=everything)
    assert made.report(ANNA, DAY)
    assert [each.totals.total for each in made.reports[DAY]] == [120]


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
    told = [
        report(who, RUN, DAY - day, totals(anna=rng.randint(1, 50), boris=rng.randint(1, 50)))
        for who in people
        for day in range(3)
        for _ in range(3)
    ]
    said = [words.state(who, RUN, number, f"{number}") for who in people for number in range(4)]
    begin = (proven(dict.fromkeys(people, 1)),)  # all are contributors before anything is heard
    ends = []
    for _ in range(20):
        made = tally(*begin)
        parts = [Part(maps=(m,)) for m in maps]
        parts += [Part(reports=(r,)) for r in told]
        parts += [Part(statements=(s,)) for s in said]
        parts += rng.choices(parts, k=10)
        rng.shuffle(parts)
        for part in parts:
            made.unite(part, today=DAY, believes=everything)
        ends.append(made.part)
    assert all(end == ends[0] for end in ends)
    merged = tally(*begin)
    assert merged.unite(ends[0], today=DAY, believes=everything)
    assert not merged.unite(ends[0], today=DAY, believes=everything)


# Names and keys


def state(made: Tally, who: Identity, name: str, *keys: Identity, now: float = 1.0) -> bool:
    return made.state(who, name, [key.peer_id for key in keys], now)


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
    own = words.state(BORIS, RUN, 9, "the owner of all")
    forged = type(own)(ANNA.peer_id, own.sequence, own.name, own.keys, own.signature)
    other = words.state(ANNA, type(RUN)("ab" * 32), 9, "of another run")
    for each in (forged, other):
        assert not made.unite(Part(statements=(each,)), today=DAY, believes=everything)
    assert made.statements == {}


def test_statements_of_strangers_are_not_kept() -> None:
    made = tally(proven({ANNA: 75}))
    stranger = words.state(DORA, RUN, 1, "dora")
    assert not made.unite(Part(statements=(stranger,)), today=DAY, believes=everything)


def test_keys_are_one_owners_only_if_each_names_the_other() -> None:
    made = tally(proven({ANNA: 60, BORIS: 30, CLARA: 10}))
    state(made, ANNA, "anna", BORIS)
    assert len(contributors(made)) == 3, "boris has not agreed"
    state(made, BORIS, "", ANNA)
    rows = contributors(made)
    assert [(row.shown, row.tokens, row.share) for row in rows] == [
        ("anna", 90, "90.0%"),
        (f"peer {CLARA.peer_id[-8:]}", 10, "10.0%"),
    ]
    assert rows[0].peers == (ANNA.peer_id, BORIS.peer_id)


def test_keys_belong_together_by_way_of_a_third_one() -> None:
    made = tally(proven({ANNA: 60, BORIS: 30, CLARA: 10}))
    state(made, ANNA, "anna", BORIS)
    state(made, BORIS, "", ANNA, CLARA)
    state(made, CLARA, "", BORIS)
    assert [row.tokens for row in contributors(made)] == [100]
    state(made, BORIS, "", ANNA, now=2.0)
    assert [row.tokens for row in contributors(made)] == [90, 10], "boris has taken it back"


@pytest.mark.parametrize("name", ["x" * 41, "two\nlines", "\x1b[2J"])
def test_a_name_that_others_would_not_take_is_refused_with_the_rule(name: str) -> None:
    made = tally(proven({ANNA: 60}))
    with pytest.raises(ValueError, match="at most 40 printable characters"):
        state(made, ANNA, name)


def test_shares_sum_to_the_whole() -> None:
    made = tally(proven({ANNA: 1, BORIS: 1, CLARA: 1}))
    assert sum(row.per_mille for row in contributors(made)) == 1000


# Another topic


def test_where_a_run_goes_on_under_another_topic_no_map_from_before_counts() -> None:
    """As after a rollback: the run's own count is smaller, and old signatures count no more."""
    made = tally(proven({ANNA: 100, BORIS: 60}))
    made.follow(b"a" * 16)
    take(made, report(ANNA, RUN, DAY - 1, totals(anna=80, boris=60)))
    take(made, report(ANNA, RUN, DAY, totals(anna=100, boris=60)))
    before = made.part
    made.follow(b"b" * 16)
    assert made.totals.total == 0
    back = Part(maps=(proven({ANNA: 50, BORIS: 20}),), topic=b"b" * 16)
    assert made.unite(back, today=DAY, believes=everything)
    assert not made.unite(replace(before, reports=()), today=DAY, believes=everything)
    assert named(made.totals.by_peer) == {"A": 50, "B": 20}
    assert sum(sum(day.values()) for day in made.by_day().values()) == 70
    made.follow(b"b" * 16)
    assert made.totals.total == 70
