"""When to tell the owner of a peer that merged work was given up with a side of a fork.

Fragments change sides one by one, each when it is due, and some of the work may be pending again or
merged after all. So the loss is told once, when the count has stood still for a cycle, or when the
peer goes.
"""

from __future__ import annotations

QUIET_S = 60.0
CYCLES = 1.5


class GivenUpWork:
    """Watches the number of tokens that were discarded as ``ledger.APART``."""

    __slots__ = ("_seen", "_since", "_told")

    def __init__(self, tokens: float) -> None:
        """``tokens``: discarded in earlier lives of this peer."""
        self._told = self._seen = tokens
        self._since = 0.0

    def __repr__(self) -> str:
        return f"GivenUpWork(told={self._told:g}, seen={self._seen:g})"

    def look(self, tokens: float, *, now: float, cycle_s: float) -> int | None:
        """Number of tokens given up since the last time that it was told; ``None``: not now.

        ``cycle_s``: time in which each fragment is due once; ``math.inf`` as ``now`` is the end.
        """
        if tokens != self._seen:
            self._seen, self._since = tokens, now
        # Tokens that were merged after all are no loss, and lost again they are one.
        self._told = min(self._told, tokens)
        lost = round(tokens - self._told)
        if lost < 1 or now - self._since < max(QUIET_S, CYCLES * cycle_s):
            return None
        self._told = tokens
        return lost
