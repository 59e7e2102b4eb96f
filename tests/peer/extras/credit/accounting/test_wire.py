"""Tallies as bytes: what is asked for arrives, and nothing that is known is sent again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from averaging.history.merged_map import Mark, MergedMap
from averaging.history.parent_maps import ParentMap
from averaging.messages import Link
from dht.identity import Identity, RunId
from peer.extras.credit.accounting import wire
from peer.extras.credit.accounting.proof import ProvenMap
from peer.extras.credit.accounting.reports import report
from peer.extras.credit.accounting.tally import Part, Tally, everything
from peer.extras.credit.kept import load_tally, save_tally
from tests.peer.extras.credit.accounting.books import ANNA, BORIS, CLARA, DAY, RUN, a_tally, proven


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
    known, new = example(), Tally(RUN, CLARA.peer_id, fragments=40)
    assert new.unite(asks(new, known), today=DAY, believes=everything)
    assert replace(new.part, topic=known.topic) == known.part
    assert asks(new, known) == asks(known, new) == Part()


def test_only_what_is_new_is_sent() -> None:
    known, other = example(), example()
    newer = proven({ANNA: 999, BORIS: 5}, fragment=7, version=99)
    known.unite(Part(maps=(newer,)), today=DAY, believes=everything)
    known.report(BORIS, DAY)
    known.state(BORIS, "Boris", [], now=5.0)
    part = asks(other, known)
    assert part.maps == (newer,)
    assert {each.day for each in part.reports} == {DAY}
    assert known.statements[BORIS.peer_id] in part.statements and len(part.statements) <= 2
    assert asks(known, other).maps == ()


def test_a_tally_that_does_not_fit_an_answer_arrives_in_several() -> None:
    """A thousand contributors, and the reports of more than a year."""
    peers = [Identity.from_seed(n.to_bytes(32, "big")) for n in range(1000)]
    merged = MergedMap({p.peer_id: Mark(1, 1, 10**9 + n) for n, p in enumerate(peers)})
    content = ParentMap(merged, bytes(32))
    lineage = proven({ANNA: 1}).link.lineage
    known = Tally(RUN, peers[0].peer_id, fragments=2)
    known.maps = {f: ProvenMap(f, Link(1, lineage, 1), content) for f in range(2)}
    for day in range(DAY - 399, DAY + 1):
        known.report(peers[0], day)
    assert len(wire.encode(known.part)) > 0
    new = Tally(RUN, peers[1].peer_id, fragments=2)
    new.maps = dict(known.maps)
    answers = 0
    while (part := asks(new, known)) != Part():
        answers += 1
        assert answers < 50
        assert new.unite(part, today=DAY, believes=everything)
    assert new.reports == known.reports


def test_the_summary_of_a_long_run_is_small() -> None:
    assert len(wire.CALL.request(RUN, wire.summary(example()))) < 2000


@pytest.mark.parametrize("day", [0, 10_957, DAY - 5000])
def test_a_clock_that_begins_in_the_past_leaves_a_tally_that_can_ask(day: int) -> None:
    """Machines whose battery is empty begin in 1970 or 2000, until they have met a time server."""
    known, other = example(), example()
    assert not other.unite(
        Part(reports=(report(BORIS, RUN, day, other.totals),)), today=DAY, believes=everything
    )
    known.report(ANNA, day)
    assert asks(known, other).maps == ()
    known.report(ANNA, DAY + 1)
    assert day not in known.reports
    assert asks(known, other) == Part()


def test_a_clock_that_was_years_ahead_removes_no_days(tmp_path: Path) -> None:
    """They were all removed, and again with each start, as its own day stayed."""
    known, other = example(), example()
    days = set(known.reports)
    known.report(ANNA, DAY + 5000)
    assert set(known.reports) == {*days, DAY + 5000}
    save_tally(tmp_path, wire.encode(known.part))
    known = load_tally(tmp_path, RUN, ANNA.peer_id, 40)
    assert set(known.reports) == {*days, DAY + 5000}
    known.report(ANNA, DAY)
    assert set(known.reports) == {*days, DAY, DAY + 5000}
    assert asks(known, other).maps == ()


@pytest.mark.parametrize("data", [b"", b"\x90", b"x" * 40, wire.encode(Part())[:-1]])
def test_bytes_that_are_no_part_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a part of a tally"):
        wire.decode(data)


def test_a_summary_of_another_run_is_refused() -> None:
    other = Tally(RunId("ab" * 32), ANNA.peer_id, fragments=1)
    with pytest.raises(ValueError, match="this peer is in run 5f5f"):
        wire.CALL.asked(wire.CALL.request(other.run, wire.summary(other)), RUN)


def test_a_tally_survives_in_a_folder(tmp_path) -> None:  # type: ignore[no-untyped-def]
    known = example()
    save_tally(tmp_path, wire.encode(known.part))
    assert load_tally(tmp_path, RUN, ANNA.peer_id, 40).part == known.part
    (tmp_path / "tally").write_bytes(b"damaged")
    assert load_tally(tmp_path, RUN, ANNA.peer_id, 40).part == Part()
