"""What other programs use of accelerators, by recorded answers of the driver."""

from __future__ import annotations

import pytest

from peer.guest.accelerators import (
    Accelerators,
    Held,
    Reading,
    Use,
    share_of_accelerators,
)
from peer.guest.other_programs import Process

TRAINERS, AGENTS, GAME, RENDERER, UNKNOWN = 10, 11, 20, 21, 99
PROCESSES = {
    TRAINERS: Process(1, ("python", "train.py"), 0.0, 0.0),
    AGENTS: Process(TRAINERS, ("python", "-m", "peer.agent"), 0.0, 0.0),
    GAME: Process(1, ("game",), 0.0, 0.0),
    RENDERER: Process(1, ("blender",), 0.0, 0.0),
}


def use(pid: int, share: float, *, device: int = 0, at_us: int = 1) -> Use:
    return Use(device, pid, at_us, share)


@pytest.mark.parametrize(
    ("uses", "share"),
    [
        ([], 0.0),
        ([use(TRAINERS, 0.98)], 0.0),
        ([use(UNKNOWN, 0.98)], 0.0),  # this trainer, as it is called outside of its container
        ([use(TRAINERS, 0.5), use(GAME, 0.4)], 0.4),
        ([use(GAME, 0.25), use(RENDERER, 0.5)], 0.75),
        ([use(GAME, 0.25, at_us=1), use(GAME, 0.75, at_us=2)], 0.5),
        ([use(GAME, 0.25, device=0), use(RENDERER, 0.5, device=1)], 0.5),
        ([use(GAME, 0.75), use(RENDERER, 0.5)], 1.0),
    ],
)
def test_the_busiest_device_counts_without_shoal(uses: list[Use], share: float) -> None:
    assert share_of_accelerators(Reading(uses), PROCESSES) == share


def test_each_look_is_at_what_came_since_the_last_one() -> None:
    asked = []
    answers = iter([[use(GAME, 1.0, at_us=5)], [use(GAME, 0.5, at_us=9)], []])

    def read(since_us: int) -> Reading:
        asked.append(since_us)
        return Reading(next(answers))

    accelerators = Accelerators(read)
    assert [accelerators.others_share(PROCESSES) for _ in range(3)] == [0.0, 0.5, 0.0]
    assert asked == [0, 5, 9]


def test_without_a_driver_nobody_uses_one() -> None:
    assert Accelerators().others_share(PROCESSES) == 0.0


@pytest.mark.parametrize(
    ("held", "share"),
    [
        ([Held(0, GAME, 0.25), Held(0, RENDERER, 0.5)], 0.75),
        ([Held(0, TRAINERS, 0.75), Held(0, GAME, 0.25)], 0.25),
        ([Held(0, TRAINERS, 0.75), Held(1, GAME, 0.5)], 0.0),  # it has the other device alone
        ([Held(0, UNKNOWN, 0.5), Held(1, GAME, 0.5)], 0.5),
    ],
)
def test_memory_that_others_hold_counts_where_shoal_has_some(
    held: list[Held], share: float
) -> None:
    assert share_of_accelerators(Reading(held=held), PROCESSES) == share


def test_use_of_a_device_on_which_shoal_does_not_train_counts_for_nobody() -> None:
    reading = Reading([use(GAME, 1.0, device=1)], [Held(0, AGENTS, 0.5)])
    assert share_of_accelerators(reading, PROCESSES) == 0.0


def test_memory_counts_from_the_first_look_and_the_hottest_device_is_told() -> None:
    reading = Reading([use(GAME, 1.0)], [Held(0, GAME, 0.25)], celsius=81.0)
    accelerators = Accelerators(lambda since_us: reading)
    assert accelerators.others_share(PROCESSES) == 0.25
    assert accelerators.celsius == 81.0
