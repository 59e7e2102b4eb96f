"""The schedule of sizes that simulated swarms and real processes share."""

from __future__ import annotations

import pytest

from tests.swarms.sizes import Change, Sizes, parse


def test_a_swarm_grows_and_shrinks_by_one_peer_at_a_time() -> None:
    sizes = parse("2,4,3", over_s=60.0)

    assert sizes == Sizes(
        2,
        (
            Change(15.0, starts=(2,)),
            Change(30.0, starts=(3,)),
            Change(60.0, ends=(0,)),
        ),
        60.0,
    )
    assert sizes.count == 4
    assert [sizes.at(at_s) for at_s in (0.0, 14.9, 15.0, 30.0, 59.9, 60.0)] == [2, 2, 3, 4, 4, 3]


def test_two_sizes_at_a_point_are_a_jump() -> None:
    crowd = parse("20,20/40,40", over_s=100.0)
    assert crowd.changes == (Change(50.0, starts=tuple(range(20, 40))),)

    loss = parse("40,40/4,4", over_s=100.0)
    assert loss.changes == (Change(50.0, ends=tuple(range(36))),)
    assert loss.count == 40


def test_the_oldest_end_first_and_nobody_comes_back() -> None:
    sizes = parse("3/2,4,2", over_s=40.0)

    ended = [peer for change in sizes.changes for peer in change.ends]
    started = [peer for change in sizes.changes for peer in change.starts]
    assert ended == [0, 1, 2]
    assert started == [3, 4]
    assert sizes.at(sizes.over_s) == 2


@pytest.mark.parametrize("text", ["", "2", "2,x", "2,40/20/2", "1,2", "2,-4"])
def test_other_texts_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"as in (2,40,2|20/40)"):
        parse(text, over_s=60.0)


def test_a_schedule_takes_time() -> None:
    with pytest.raises(ValueError, match="more than 0 s"):
        parse("2,4", over_s=0.0)
