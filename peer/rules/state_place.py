"""The place of the run's state at a peer: memory, or files of its folder.

It is a choice of the machine: bits and rounds are the same. In files a state takes as much of the
disk as it would take of the memory, and each round writes 8 bytes for each value of its fragment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from peer.quantities import bytes_text

StateOnDisk: TypeAlias = Literal["auto", "on", "off"]

SHARE_OF_MEMORY = 0.25
"""Share of the machine's memory from which on ``auto`` keeps a state in files."""

VALUE_BYTES = 8
"""Theta and momentum of one value."""


@dataclass(frozen=True, slots=True)
class StatePlace:
    """The choice, and a sentence about it."""

    on_disk: bool
    text: str
    """Empty if nobody needs to hear of it."""


def check_wish(wish: str) -> None:
    """Raise ``ValueError`` unless it is a value of ``--state-on-disk``."""
    if wish not in (known := get_args(StateOnDisk)):
        raise ValueError(f"--state-on-disk is {wish!r}; it is one of {', '.join(known)}")


def choose_place(
    wish: str, values: int, *, memory_bytes: float, free_bytes: float, volatile: str | None
) -> StatePlace:
    """The place of a state of so many values.

    ``free_bytes``: of the disk of the peer's folder; ``volatile``: the kind of its file system, if
    that keeps files in memory.
    """
    size = VALUE_BYTES * values
    share = size / memory_bytes
    if wish == "off" or (wish == "auto" and share < SHARE_OF_MEMORY):
        return StatePlace(False, "")
    why = f"{bytes_text(size)}, {share:.0%} of the memory"
    if volatile is not None:
        return StatePlace(
            False,
            f"the run's state ({why}) stays in memory: its folder is there as well, {volatile}",
        )
    if free_bytes < size:
        return StatePlace(
            False,
            f"the run's state ({why}) stays in memory: {bytes_text(free_bytes)} of disk are free",
        )
    return StatePlace(
        True,
        f"keeps the run's state ({why}) in files of its folder; --state-on-disk off: in memory",
    )
