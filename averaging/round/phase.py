"""What a peer is doing about a fragment. What each means is told in ``averaging.round.machine``."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    IDLE = "idle"
    WANTED = "wanted"
    JOINING = "joining"
    PROMISED = "promised"
    ENTERED = "entered"
    CATCHING = "catching"
    FOLDING = "folding"
