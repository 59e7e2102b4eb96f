"""Sentences that come again and again: told once, then after pauses that double."""

from __future__ import annotations

from dht.bounded_mapping import BoundedMapping

PAUSE_FIRST_S = 60.0
PAUSE_MAX_S = 3600.0

SENTENCES_MAX = 64
"""Those that may be told again first are forgotten beyond it, and told anew."""


class Repeats:
    """Knows when each sentence was told, and says whether it is to be told now."""

    def __init__(self) -> None:
        self._told = BoundedMapping[str, tuple[float, float]](
            "sentences told", SENTENCES_MAX, worth=lambda _, told: told[0]
        )
        """Time at which each may be told again, and the pause after that."""

    def is_due(self, sentence: str, *, now: float) -> bool:
        """``True`` if the sentence is to be told, which is then noted."""
        again_at, pause_s = self._told.get(sentence, (now, PAUSE_FIRST_S))
        if now < again_at:
            return False
        self._told[sentence] = now + pause_s, min(PAUSE_MAX_S, 2 * pause_s)
        return True
