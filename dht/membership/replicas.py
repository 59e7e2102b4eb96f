"""Choice of the nodes at which the records under a key are stored and looked up. Pure.

Those nearest to the key, as in any distributed hash table. But keys of nodes cost nothing, so an
attacker that tries enough of them owns the places nearest to any key. Therefore:

- nodes of one network take less than half of the replicas, as long as there are others: addresses
  are not free;
- the seeds of a run hold all of its records besides. A peer that joins by a link relies on its
  seeds anyway, and no number of keys puts another node in their place. They are asked only by
  thorough look-ups: quick ones, of which there are many more, are spread over the nodes near the
  key.

``Holders`` remembers the nodes that the last search for a key found, to be asked without another
search. A search asks all of them for everything that they have under the key. Where no record is
missing, asking one of them is enough; and to store a record nothing has to be asked at all.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

from dht.bounded_mapping import BoundedMapping, by_age

ALIKE_MAX = 2
"""Limit of nodes that have something in common among those that are chosen first."""

SEEDS_MAX = 3
"""Seeds that hold the records under one key, and are asked for them."""

N = TypeVar("N")


def apart(
    nearest_first: Iterable[N], rules: Sequence[Callable[[N], Hashable | None]], *, count: int
) -> list[N]:
    """The first ``count`` nodes, of which at most ``ALIKE_MAX`` have the same by any rule.

    A rule tells what a node has, or ``None``. Where there are not enough such nodes, those follow
    that break the last rule only, then those that break the last two, and so on.
    """
    chosen: list[N] = []
    left = nearest_first
    for applied in range(len(rules), -1, -1):
        if len(chosen) < count:
            left = _take(chosen, left, rules[:applied], count)
    return chosen


def _take(
    chosen: list[N],
    nearest_first: Iterable[N],
    rules: Sequence[Callable[[N], Hashable | None]],
    count: int,
) -> list[N]:
    """Add nodes that keep the rules, up to ``count`` in all. Returns the others seen."""
    members = [Counter(map(rule, chosen)) for rule in rules]
    others: list[N] = []
    for node in nearest_first:
        if len(chosen) == count:
            break
        has = [rule(node) for rule in rules]
        pairs = [(seen, what) for seen, what in zip(members, has, strict=True) if what is not None]
        if any(seen[what] >= ALIKE_MAX for seen, what in pairs):
            others.append(node)
            continue
        for seen, what in pairs:
            seen[what] += 1
        chosen.append(node)
    return others


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
