"""Tallies as bytes: what is asked for arrives, and nothing that is known is sent again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from averaging.history.lineage import bound
from averaging.history.merged_map import Mark, MergedMap
from averaging.history.parent_maps import ParentMap
from averaging.messages import Link
from dht.identity import Identity, RunId
from peer.extras.credit.accounting import wire
from peer.extras.credit.accounting.tally import Part, ProvenMap, Tally, everything, stated
from peer.extras.credit.reading import load_tally, save_tally
from tests.peer.extras.credit.accounting.books import ANNA, BORIS, RUN, a_tally, proven


def example() -> Tally:
    return a_tally(fragments=40)


def asks(asking: Tally, answering: Tally) -> Part:
    data = wire.encode_some(wire.missing(answering, wire.summary(asking)))
    return wire.unpacked(wire.CALL.decode(data))


def test_a_part_is_what_it_was_before_it_was_encoded() -> None:
    part = example().part
    assert wire.decode(wire.encode(part)) == part
    assert wire.decode(wire.encode(Part())) == Part()


def test_a_newcomer_gets_all_and_then_nothing_more() -> None:
    known, new = example(), Tally(RUN, fragments=40)
    assert new.unite(asks(new, known), believes=everything)
    assert replace(new.part, topic=known.topic) == known.part
    assert asks(new, known) == asks(known, new) == Part()


def test_only_what_is_new_is_sent() -> None:
    known, other = example(), example()
    newer = proven({ANNA: 999, BORIS: 5}, fragment=7, version=99)
    known.unite(Part(maps=(newer,)), believes=everything)
    known.state(BORIS, "Boris", now=5.0)
    part = asks(other, known)
    assert part.maps == (newer,)
    assert known.statements[BORIS.peer_id] in part.statements and len(part.statements) <= 2
    assert asks(known, other).maps == ()


def test_a_tally_that_does_not_fit_an_answer_arrives_in_several() -> None:
    """Two thousand contributors and forty fragments."""
    peers = [Identity.from_seed(n.to_bytes(32, "big")) for n in range(2000)]
    known = Tally(RUN, fragments=40)
    for fragment in range(40):
        marks = {
            p.peer_id: Mark(n, n, 10**9 + (7919 * n * (fragment + 1)) % 10**8)
            for n, p in enumerate(peers, fragment + 1)
        }
        content = ParentMap(MergedMap(marks), bytes(32))
        link = Link(1, bound(content.history, content.merged.digest()), content.merged.tokens)
        known.maps[fragment] = ProvenMap(fragment, link, content)
    said = tuple(stated(each, RUN, 1, each.peer_id[-30:]) for each in peers)
    assert known.unite(Part(statements=said), believes=everything)
    assert len(wire.encode(known.part)) > wire.PART_MAX_BYTES
    new = Tally(RUN, fragments=40)
    answers = 0
    while (part := asks(new, known)) != Part():
        answers += 1
        assert answers < 50
        assert new.unite(part, believes=everything)
    assert (new.maps, new.statements) == (known.maps, known.statements)
    assert answers > 1


def test_the_summary_of_a_long_run_is_small() -> None:
    assert len(wire.CALL.request(RUN, wire.summary(example()))) < 2000


@pytest.mark.parametrize("data", [b"", b"\x90", b"x" * 40, wire.encode(Part())[:-1]])
def test_bytes_that_are_no_part_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a part of a tally"):
        wire.decode(data)


def test_a_summary_of_another_run_is_refused() -> None:
    other = Tally(RunId("ab" * 32), fragments=1)
    with pytest.raises(ValueError, match="this peer is in run 5f5f"):
        wire.CALL.asked(wire.CALL.request(other.run, wire.summary(other)), RUN)


def test_a_tally_survives_in_a_folder(tmp_path) -> None:  # type: ignore[no-untyped-def]
    known = example()
    save_tally(tmp_path, wire.encode(known.part))
    assert load_tally(tmp_path, RUN, 40).part == known.part
    (tmp_path / "tally").write_bytes(b"damaged")
    assert load_tally(tmp_path, RUN, 40).part == Part()
