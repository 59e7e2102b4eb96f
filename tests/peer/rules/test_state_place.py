"""The state goes into files where it would take much of the memory and they are on a disk."""

from __future__ import annotations

import pytest

from peer.rules.state_place import check_wish, choose_place

MEMORY = 32e9
VALUES = 1_000_000_000
"""Values of a state of a quarter of that memory."""


@pytest.mark.parametrize(
    ("wish", "values", "on_disk"),
    [
        ("auto", VALUES, True),
        ("auto", VALUES - 1, False),
        ("on", 1, True),
        ("off", 100 * VALUES, False),
    ],
)
def test_the_wish_and_the_share_of_the_memory_decide(wish: str, values: int, on_disk: bool) -> None:
    place = choose_place(wish, values, memory_bytes=MEMORY, free_bytes=1e15, volatile=None)
    assert place.on_disk is on_disk
    assert bool(place.text) is on_disk, "people hear of what is unusual"


@pytest.mark.parametrize(
    ("free_bytes", "volatile", "reason"),
    [(8e9 - 1, None, "of disk are free"), (1e15, "tmpfs", "tmpfs")],
)
@pytest.mark.parametrize("wish", ["auto", "on"])
def test_without_room_or_on_a_disk_in_memory_it_stays_in_memory_and_says_why(
    wish: str, free_bytes: float, volatile: str | None, reason: str
) -> None:
    place = choose_place(
        wish, VALUES, memory_bytes=MEMORY, free_bytes=free_bytes, volatile=volatile
    )
    assert not place.on_disk
    assert reason in place.text


def test_another_wish_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'yes'; it is one of auto, on, off"):
        check_wish("yes")
