"""A reader outside the run takes the answers of a few peers together."""

from __future__ import annotations

from peer.extras.credit.accounting.tally import Part, Tally, confirmed, everything, unproven
from tests.peer.extras.credit.accounting.books import ANNA, BORIS, RUN, named, proven


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
