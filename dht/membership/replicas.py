"""Choice of the nodes at which the records under a key are stored and looked up. Pure.

Those nearest to the key, as in any distributed hash table. But keys of nodes cost nothing, so an
attacker that tries enough of them owns the places nearest to any key. Therefore:

- nodes of one network take less than half of the replicas, as long as there are others: addresses
  are not free;
- the seeds of a run hold all of its records besides. A peer that joins by a link relies on its
  seeds anyway, and no number of keys puts another node in their place. They are asked only by
  thorough look-ups: quick ones, of which there are many more, are spread over the nodes near the
  key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

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
