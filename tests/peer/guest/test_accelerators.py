"""What other programs use of accelerators, by samples like those of NVIDIA's driver."""

from __future__ import annotations

import pytest

from peer.guest.accelerators import Accelerators, Use, others_share
from peer.guest.other_programs import Process

TRAINER, AGENT, GAME, RENDERER, UNKNOWN = 10, 11, 20, 21, 99
PROCESSES = {
    TRAINER: Process(1, ("python", "train.py"), 0.0, 0.0),
    AGENT: Process(TRAINER, ("python", "-m", "peer.agent"), 0.0, 0.0),
    GAME: Process(1, ("game",), 0.0, 0.0),
    RENDERER: Process(1, ("blender",), 0.0, 0.0),
}


def use(pid: int, share: float, *, device: int = 0, at_us: int = 1) -> Use:
    return Use(device, pid, at_us, share)


@pytest.mark.parametrize(
    ("uses", "share"),
    [
        ([], 0.0),
        ([use(TRAINER, 0.98)], 0.0),
        ([use(UNKNOWN, 0.98)], 0.0),  # this trainer, as it is called outside of its container
        ([use(TRAINER, 0.5), use(GAME, 0.4)], 0.4),
        ([use(GAME, 0.25), use(RENDERER, 0.5)], 0.75),
        ([use(GAME, 0.25, at_us=1), use(GAME, 0.75, at_us=2)], 0.5),
        ([use(GAME, 0.25, device=0), use(RENDERER, 0.5, device=1)], 0.5),
        ([use(GAME, 0.75), use(RENDERER, 0.5)], 1.0),
    ],
)
def test_the_busiest_device_counts_without_shoal(uses: list[Use], share: float) -> None:
    assert others_share(uses, PROCESSES) == share


def test_each_look_is_at_what_came_since_the_last_one() -> None:
    asked = []
    answers = iter([[use(GAME, 1.0, at_us=5)], [use(GAME, 0.5, at_us=9)], []])

    def read(since_us: int) -> list[Use]:
        asked.append(since_us)
        return next(answers)

    accelerators = Accelerators(read)
    assert [accelerators.others_share(PROCESSES) for _ in range(3)] == [0.0, 0.5, 0.0]
    assert asked == [0, 5, 9]


def test_without_a_driver_nobody_uses_one() -> None:
    assert Accelerators().others_share(PROCESSES) == 0.0
