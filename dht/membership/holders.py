"""Whom to ask for a key without searching for it: one of those who had it, in turns.

A record lies on several peers, and a search asks all of them for everything they have
under the key. Where nothing is missed, one of them is enough. Pure: no clock, no network.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

KEYS_MAX = 512
KNOWN_FOR_S = 90.0
"""After so long a search has to tell anew: others are nearer to the key meanwhile."""

Holder = TypeVar("Holder", bound=Hashable)


@dataclass(slots=True)
class Holders(Generic[Holder]):
    """What the last search for each key told."""

    _known: OrderedDict[str, tuple[float, deque[Holder]]] = field(default_factory=OrderedDict)

    def found(self, key: str, holders: Iterable[Holder], *, now: float) -> None:
        """A search ended: these answered with records. Nobody, if the key is empty."""
        self._known.pop(key, None)
        in_turn = deque(holders)
        if in_turn:
            self._known[key] = (now, in_turn)
        while len(self._known) > KEYS_MAX:
            self._known.popitem(last=False)

    def next(self, key: str, *, now: float) -> Holder | None:
        """Whose turn it is; ``None`` when the key has to be searched for."""
        found_at, in_turn = self._known.get(key, (0.0, None))
        if in_turn is None:
            return None
        if not in_turn or now - found_at >= KNOWN_FOR_S:
            del self._known[key]
            return None
        in_turn.rotate(-1)
        return in_turn[-1]

    def lost(self, key: str, holder: Holder) -> None:
        """It did not answer, or has nothing under this key any longer."""
        known = self._known.get(key)
        if known is not None and holder in known[1]:
            known[1].remove(holder)
