"""The protocol number: which forms of messages and records two builds have in common.

One number counts the changes of everything that peers, or the trainer and the agent of one peer,
say to each other. A build speaks the newest one and, from the second on, the one before it. So a
run goes over to another release peer by peer, and nobody has to stop.

- **Between two peers.** Each states the range that it speaks in its signed record. To a partner a
  peer speaks the newest number that both know, and the oldest one until it has the partner's
  record. A decoder never skips what it does not know: the sender leaves out what is too new.
- **In a round.** What all members sign or hash is in one form, that of the newest number for which
  every member has signed its join. The commit names the number.
- **Two numbers apart** is too far: such peers refuse each other, and say which side is too old.

docs/develop/messages.md says how a message is changed. Pure.
"""

from __future__ import annotations

from typing import Final, TypeAlias

OLDEST: Final = 1
NEWEST: Final = 1

Range: TypeAlias = tuple[int, int]
"""Oldest and newest number that a build speaks."""

SPOKEN: Final[Range] = OLDEST, NEWEST

RELEASE: Final = "0.1.0"
"""Release that this is; peers show it in their records."""

UPGRADE: Final = "`pip install RELEASE` (a newer wheel, or a clone after `git pull`)"
"""Command that upgrades an installation, in its checkout."""


def common(theirs: Range, ours: Range = SPOKEN) -> int | None:
    """The newest number that both sides speak; ``None`` if they have none in common."""
    newest = min(ours[1], theirs[1])
    return newest if newest >= max(ours[0], theirs[0]) else None


def text(spoken: Range) -> str:
    """A range as it is shown to people."""
    oldest, newest = spoken
    return str(newest) if oldest == newest else f"{oldest} to {newest}"


def advice(theirs: Range, ours: Range = SPOKEN) -> str:
    """The rest of a refusal of a side with which we have no number in common: who has to upgrade.

    "They" are the other side, which the sentence has named.
    """
    if theirs[0] > ours[1]:
        return f"this side is too old: upgrade it with {UPGRADE}, and start it again"
    return "the other side is too old: its owner has to upgrade it, nothing needs doing here"


def not_spoken(number: int, ours: Range = SPOKEN) -> str:
    """The refusal of bytes that name a number which this build does not speak."""
    return f"it is of protocol {number}, this side speaks {text(ours)}: " + advice(
        (number, number), ours
    )
