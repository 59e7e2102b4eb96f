"""The phases of a peer in one fragment, and its stages in a round.

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
