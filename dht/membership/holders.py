"""Nodes that the last search for a key found, to be asked without another search. Pure.

A record is stored on several nodes, and a search asks all of them for everything that they have
under the key. Where no record is missing, asking one of them is enough; and to store a record
nothing has to be asked at all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

from dht.bounded_mapping import BoundedMapping, by_age

KEYS_MAX = 512
KNOWN_FOR_S = 90.0
"""Time after which the key is searched for again: other nodes may be nearer to it by then."""

Holder = TypeVar("Holder", bound=Hashable)


class Holders(Generic[Holder]):
    """The nodes that the last search for each key found."""

    def __init__(self) -> None:
        self._known = BoundedMapping[str, tuple[float, deque[Holder]]](
            "holders", KEYS_MAX, worth=by_age
        )

    def found(self, key: str, holders: Iterable[Holder], *, now: float) -> None:
        """Note the nodes that answered a search with records; none if the key is empty."""
        in_turn = deque(holders)
        if in_turn:
            self._known.renew(key, (now, in_turn))
        else:
            self._known.pop(key, None)

    def next(self, key: str, *, now: float) -> Holder | None:
        """The node to ask next; ``None`` if the key has to be searched for."""
        in_turn = self._fresh(key, now)
        if not in_turn:
            return None
        in_turn.rotate(-1)
        return in_turn[-1]

    def all(self, key: str, *, now: float) -> tuple[Holder, ...]:
        """All nodes, in the order of the search; none if the key has to be searched for."""
        return tuple(self._fresh(key, now))

    def _fresh(self, key: str, now: float) -> deque[Holder]:
        found_at, in_turn = self._known.get(key, (0.0, deque[Holder]()))
        if now - found_at >= KNOWN_FOR_S:
            self._known.pop(key, None)
            return deque()
        return in_turn

    def lost(self, key: str, holder: Holder) -> None:
        """Drop a node that did not answer or has no more records under this key."""
        known = self._known.get(key)
        if known is not None and holder in known[1]:
            known[1].remove(holder)
