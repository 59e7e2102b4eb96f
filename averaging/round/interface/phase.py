"""The phases of a peer in one fragment, its stages in a round, and the timers of these.

See ``averaging.round.machine``.
"""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """The activity of a peer in one fragment."""

    IDLE = "idle"
    WANTED = "wanted"
    JOINING = "joining"
    ENTERED = "entered"
    CATCHING = "catching"
    FOLDING = "folding"


UNCOMMITTED = (Phase.WANTED, Phase.JOINING)
"""An attempt to get into a round that can still be abandoned."""


class Stage(StrEnum):
    """The progress of one member in a round."""

    UPLOADING = "uploading"
    """The commit holds for this peer; it knows no seal."""
    SEALED = "sealed"
    """This peer knows the contributors and waits for merged slices."""
    APPLYING = "applying"
    """All merged slices are here. The round can no longer fail for this peer."""
    FINISHED = "finished"
    VOID = "void"
    FORSWORN = "forsworn"
    """Given up, with a vow never to finish: other members count on it."""


class RoundTimer(StrEnum):
    """A time for which a participation waits in a round that it may still finish.

    The deadline of the round, the takeover, and the times to try uploads again are not among them.
    """

    RESEND = "resend"
    """Reports and questions are sent again."""
    OVERDUE = "overdue"
    """Merged slices should be here."""
    IN_VAIN = "in_vain"
    """The round is given up if the members that are missing are not heard by then."""


class LastTimer(StrEnum):
    """A time for which a participation waits that is out of its round, or has finished it."""

    FADE = "fade"
    """The round ends for all, whatever its members on probation do."""
    SHOW = "show"
    """The members that have finished get the signatures of the others that have."""
