"""The phases of a peer in one fragment, and its timers: see ``averaging.round.machine``."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """The activity of a peer in one fragment."""

    IDLE = "idle"
    WANTED = "wanted"
    JOINING = "joining"
    PROMISED = "promised"
    ENTERED = "entered"
    CATCHING = "catching"
    FOLDING = "folding"


UNCOMMITTED = (Phase.WANTED, Phase.JOINING, Phase.PROMISED)
"""An attempt to get into a round that can still be abandoned."""


class Timer(StrEnum):
    """A deadline of a machine outside of rounds. Timers that are due together ring in this order.

    A timer that rings in another phase than its own is ignored.
    """

    ANSWER = "answer"
    """The leader's next message."""
    CATCHING = "catching"
    """The end of ``CatchUp`` or ``Rebase``."""
    FOLDING = "folding"
    """The end of ``Fold``."""
    SNAPSHOT = "snapshot"
    """The learner's answer to ``TakeSnapshot``."""
