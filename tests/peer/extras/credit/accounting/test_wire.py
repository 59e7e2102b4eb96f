"""Tallies as bytes: what is asked for arrives, and nothing that is known is sent again."""

from __future__ import annotations

from pathlib import Path

import pytest

from averaging.history.merged_map import Mark, MergedMap
from dht.identity import Identity, RunId
from peer.extras.credit.accounting import wire
from peer.extras.credit.accounting.tally import Tally, contributors, stated
from peer.extras.credit.reading import load_tally, read, save_tally
from tests.peer.extras.credit.accounting.books import ANNA, BORIS, RUN, a_tally, named, tally


def asks(asking: Tally, answering: Tally) -> wire.Packed:
    asked = wire.CALL.asked(wire.CALL.request(RUN, wire.digests(asking)), RUN)
    return wire.CALL.decode(wire.CALL.encode(wire.answer(answering, asked)))


def told(tokens: dict[Identity, int]) -> wire.Packed:
    return wire.answer(tally(tokens), wire.NONE)


def test_a_newcomer_gets_all_names_and_then_nothing_more() -> None:
    known, new = a_tally(), tally({ANNA: 1, BORIS: 1})
    assert new.unite(asks(new, known).statements)
    assert new.statements == known.statements
    assert asks(new, known) == asks(known, new) == wire.Packed()


def test_only_what_is_new_is_sent() -> None:
    known, other = a_tally(), a_tally()
    known.state(BORIS, "Boris", now=5.0)
    answer = asks(other, known)
    assert known.statements[BORIS.peer_id] in answer.statements and len(answer.statements) <= 2
    assert answer.totals == {}, "each peer has its own"


def test_names_that_do_not_fit_an_answer_arrive_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "STATEMENTS_MAX", 100)
    peers = [Identity.from_seed(n.to_bytes(32, "big")) for n in range(300)]
    merged = MergedMap({peer.peer_id: Mark(1, 1, n + 1) for n, peer in enumerate(peers)})
    known, new = Tally(RUN), Tally(RUN)
    for each in (known, new):
        each.count([merged])
    known.unite(stated(each, RUN, 1, each.peer_id[-30:]) for each in peers)
    for _ in range(8):
        new.unite(asks(new, known).statements)
    assert new.statements == known.statements

    reader = read(RUN, [wire.answer(known, wire.NONE)])
    assert [row.name for row in contributors(reader)[:100]] == [
        row.name for row in contributors(known)[:100]
    ], "a reader is told the names of the largest"


def test_the_largest_answer_fits_the_limit_of_the_call() -> None:
    long = [stated(ANNA, RUN, 2**61, "\U0001f9a6" * 32)] * wire.STATEMENTS_MAX
    totals = {ANNA.peer_id[:-4] + f"{n:04}": 2**61 for n in range(wire.TOTALS_MAX)}
    packed = wire.Packed(totals=totals, statements=tuple(long))  # type: ignore[arg-type]
    assert len(wire.CALL.encode(packed)) < wire.ANSWER_MAX_BYTES


@pytest.mark.parametrize("data", [b"", b"\x90\x00", b"x" * 40, wire.encode(Tally(RUN))[:-1]])
def test_bytes_that_are_no_tally_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a part of a tally"):
        wire.decode(data)


def test_a_question_of_another_run_is_refused() -> None:
    with pytest.raises(ValueError, match="this peer is in run 5f5f"):
        wire.CALL.asked(wire.CALL.request(RunId("ab" * 32), wire.NONE), RUN)


def test_a_tally_survives_in_a_folder(tmp_path: Path) -> None:
    known = a_tally()
    save_tally(tmp_path, wire.encode(known))
    assert load_tally(tmp_path, RUN) == known
    (tmp_path / "tally").write_bytes(b"damaged")
    assert load_tally(tmp_path, RUN) == Tally(RUN)


def test_one_peer_alone_cannot_add_tokens() -> None:
    true, behind = told({ANNA: 10, BORIS: 5}), told({ANNA: 8, BORIS: 5})
    liar = told({ANNA: 10, BORIS: 10**9})
    assert named(read(RUN, [true, liar, behind]).totals) == {"A": 10, "B": 5}
    assert named(read(RUN, [liar, true]).totals) == {"A": 10, "B": 5}


def test_the_word_of_a_single_peer_is_taken() -> None:
    assert named(read(RUN, [told({ANNA: 10})]).totals) == {"A": 10}
    assert read(RUN, [wire.Packed()]).totals == {}
