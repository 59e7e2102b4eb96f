"""Merged maps: marks, unions and digests."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from averaging.history.merged_map import Mark, MergedMap
from dht.identity import PeerId

ANNA, BORIS, CLARA = PeerId("anna"), PeerId("boris"), PeerId("clara")


def test_work_is_covered_up_to_its_mark_in_its_incarnation() -> None:
    merged = MergedMap().with_work(ANNA, 2, 100, 5000)

    assert merged.covers(ANNA, 2, 100)
    assert merged.covers(ANNA, 2, 1)
    assert not merged.covers(ANNA, 2, 101)
    assert not merged.covers(ANNA, 1, 1), "an earlier life's last work is not known to be merged"
    assert not merged.covers(ANNA, 3, 1)
    assert not merged.covers(BORIS, 2, 1)


def test_tokens_add_up_across_incarnations() -> None:
    merged = MergedMap().with_work(ANNA, 1, 10, 100).with_work(BORIS, 5, 1, 7)
    merged = merged.with_work(ANNA, 1, 20, 100).with_work(ANNA, 2, 3, 30)

    assert merged[ANNA] == Mark(2, 3, 230)
    assert merged.tokens == 237


def test_a_fork_counts_nothing_twice() -> None:
    before = MergedMap().with_work(ANNA, 1, 10, 100).with_work(BORIS, 1, 10, 100)
    mine = before.with_work(ANNA, 1, 20, 50)
    theirs = before.with_work(BORIS, 1, 30, 70).with_work(CLARA, 1, 1, 1)

    both = mine.united(theirs)
    assert both.tokens == 150 + 170 + 1
    assert both[ANNA].step == 20
    assert both[BORIS].step == 30


marks = st.builds(Mark, st.integers(0, 3), st.integers(0, 5), st.integers(0, 9))


maps = st.dictionaries(st.sampled_from([ANNA, BORIS, CLARA]), marks).map(MergedMap)


@given(maps, maps, maps)
def test_uniting_is_a_maximum(a: MergedMap, b: MergedMap, c: MergedMap) -> None:
    assert a.united(a) == a
    assert a.united(b) == b.united(a)
    assert a.united(b.united(c)) == a.united(b).united(c)
    both = a.united(b)
    assert both.tokens >= max(a.tokens, b.tokens)
    for side in (a, b):
        for peer, mark in side.items():
            assert both[peer].tokens >= mark.tokens
            same_life = both[peer].incarnation == mark.incarnation
            assert both.covers(peer, mark.incarnation, mark.step) == same_life


def test_the_digest_of_a_known_map_never_changes() -> None:
    marks = {ANNA: Mark(1, 2, 3), BORIS: Mark(4, 5, 6)}
    assert MergedMap(marks).digest().hex() == (
        "6d25b46c8eda0e075e5a5f38a4448839c8a92601b9a7bac3550ca76ea9fc78aa"
    )


def test_the_digest_does_not_depend_on_the_order_of_entries() -> None:
    entries = [(ANNA, Mark(1, 2, 3)), (BORIS, Mark(1, 2, 3)), (CLARA, Mark(9, 9, 9))]
    digests = set()
    for seed in range(6):
        random.Random(seed).shuffle(entries)
        digests.add(MergedMap(dict(entries)).digest())
    assert len(digests) == 1
    assert MergedMap().digest() not in digests
    assert MergedMap({ANNA: Mark(1, 2, 4)}).digest() != MergedMap({ANNA: Mark(1, 3, 3)}).digest()
