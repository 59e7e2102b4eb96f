"""The board keeps a bounded number of losses, rounds and events."""

from __future__ import annotations

from typing import Any

from peer.events.board import POINTS_MAX, SHOWN_MAX, Board
from peer.events.names import Names
from tests.peer.events.written_events import ANNA, CLARA, a_round


def a_board() -> Board:
    return Board(Names({ANNA: "anna"}))


def told(event: str, /, **fields: Any) -> dict[str, Any]:
    return {"at": 5.0, "event": event, **fields}


def test_rounds_are_kept_with_the_names_of_peers() -> None:
    board = a_board()
    board.note(told("peer_joined", peer=CLARA, name="clara", text="clara joined"))
    board.note(told("round", **a_round()))
    (kept,) = board.plain()["rounds"]
    assert kept["members"] == ["anna", "sBoris", "clara"]
    assert kept["left_out"] == {"clara": "not in every slice by the deadline"}
    assert kept["mine"] is True
    assert "fragment 2 version 7" in kept["text"]


def test_ordinary_steps_of_a_round_are_not_listed() -> None:
    board = a_board()
    for name in ("joining", "closed", "heard_finished", "idle", "checkpoint"):
        board.note(told(name, fragment=1))
    assert board.plain()["events"] == []


def test_events_are_found_by_their_text_newest_first() -> None:
    board = a_board()
    for version in range(300):
        board.note(told("round", **a_round(version=version, fragment=version % 3)))
    board.note(told("work_lost", fragment=5, tokens=512, reason="crash"))
    assert [event["text"] for event in board.search("of WORK in fragment 5")] == [
        "lost 512 tokens of work in fragment 5: the process that did it ended before it was merged "
        "(crash)"
    ]
    found = board.search("fragment 1")
    assert "fragment 1 version 298" in found[0]["text"]
    assert len(found) == SHOWN_MAX
    assert len(board.plain()["rounds"]) == 200


def test_a_long_run_keeps_the_whole_curve_in_a_bounded_number_of_points() -> None:
    board = a_board()
    for second in range(20 * POINTS_MAX):
        board.sample(tokens=second, loss=float(second))
    losses = board.plain()["losses"]
    assert POINTS_MAX / 4 < len(losses) <= POINTS_MAX
    assert losses[0][0] < 0.1 * 20 * POINTS_MAX
    assert losses[-1][0] > 0.9 * 20 * POINTS_MAX


def test_samples_between_two_merges_are_one_point_of_the_curve_with_their_mean() -> None:
    """The run's tokens stand still meanwhile: the curve was a stair of vertical jumps."""
    board = a_board()
    for tokens, loss in ((0, 4.0), (0, 3.0), (0, float("nan")), (0, 2.0), (90, 2.0), (90, 1.0)):
        board.sample(tokens=tokens, loss=loss)
    assert board.plain()["losses"] == [[0, 3.0], [90, 1.5]]


def test_a_held_out_loss_is_placed_at_the_tokens_when_it_was_measured() -> None:
    board = a_board()
    board.sample(tokens=700, loss=None)
    board.note(told("measured", loss=2.5, version=3, tokens=600, peer=ANNA))
    assert board.plain()["held_out"] == [[600, 2.5]]
    assert board.plain()["losses"] == []


def test_the_curve_stays_while_the_states_that_a_run_was_taken_back_to_are_fetched() -> None:
    """A peer without them counts no tokens meanwhile, and lost its whole curve."""
    board = a_board()
    for tokens in (100, 200, 300):
        board.sample(tokens=tokens, loss=3.0)
        board.note(told("measured", loss=4.0, tokens=tokens))
    board.sample(tokens=0, loss=2.75)
    board.sample(tokens=200, loss=2.5)
    kept = board.plain()
    assert [tokens for tokens, _ in kept["losses"]] == [100, 200]
    assert [tokens for tokens, _ in kept["held_out"]] == [100, 200]
