"""Tables of what others can cause: a bounded mapping that forgets what is worth the least.

Keys of peers cost nothing, so whoever may add an entry may add as many as he likes. A table that
forgets its oldest entries then forgets what is oldest and most valuable: the founders of a run, the
strikes of a liar, the first of two statements that contradict each other. So every table names what
an entry is *worth* (work done, standing, strikes, the time until which it matters), and a new entry
takes the place of those that are worth no more than itself, or it is not kept.

Among entries of equal worth those go first whose author has the most of them, so nobody fills a
table at the cost of others. The oldest goes first among the rest.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from weakref import WeakSet

Key = TypeVar("Key")
Value = TypeVar("Value")

ENTRY_BYTES: Final = 256
"""Memory of an entry of a table that does not measure sizes."""

PROCESS_BYTES_MAX: Final = 128 << 20
"""Memory of all tables of a process that is one peer."""

DROPPED_SHARE: Final = 1 / 16
"""Share of a full table that is dropped at once: each search for the least reads all of it."""


def by_age(key: object, value: object) -> float:
    """Worth of entries that are all worth the same: the oldest one goes.

    For what this peer itself causes, and for what costs nobody anything when it is forgotten.
    """
    return 0.0


class BoundedMapping(dict[Key, Value]):
    """A ``dict`` with at most ``limit`` entries, which take at most ``bytes_max`` bytes.

    The age of an entry is that of its key; setting a known key again does not make it younger.
    """

    __slots__ = (
        "__weakref__", "_author", "_bytes", "_size", "_worth", "bytes_max", "limit", "name"
    )  # fmt: skip

    __hash__ = object.__hash__  # type: ignore[assignment]  # ``ALL`` is a set of tables

    def __init__(
        self,
        name: str,
        limit: int,
        *,
        worth: Callable[[Key, Value], float],
        author: Callable[[Key, Value], Hashable] | None = None,
        size: Callable[[Key, Value], int] | None = None,
        bytes_max: float = math.inf,
    ) -> None:
        """``name``: what metrics call the table. ``size``: memory of an entry that may be large."""
        if limit < 1:
            raise ValueError(f"limit is {limit}; a mapping holds at least 1 entry")
        super().__init__()
        self.name = name
        self.limit = limit
        self.bytes_max = bytes_max
        self._worth = worth
        self._author = author
        self._size = size
        self._bytes = 0
        ALL.add(self)

    @property
    def measures(self) -> bool:
        """True if the table measures the size of its entries."""
        return self._size is not None

    @property
    def bytes_held(self) -> int:
        return self._bytes if self.measures else len(self) * ENTRY_BYTES

    @property
    def _fits(self) -> bool:
        return len(self) <= self.limit and self._bytes <= self.bytes_max

    def __setitem__(self, key: Key, value: Value) -> None:
        if self._size is not None:
            if key in self:
                self._bytes -= self._size(key, self[key])
            self._bytes += self._size(key, value)
        super().__setitem__(key, value)
        if not self._fits:
            self._drop_for(key)
        if self._size is not None:
            ALL.make_room()

    def _drop_for(self, new: Key) -> None:
        """Drop entries that are worth no more than a new one until it fits, else the new one."""
        if self._worth is by_age and self._author is None:
            while not self._fits:
                self._drop(next(iter(self)))
            return
        worth_of_new = self._worth(new, self[new])
        others = (self._worth(key, value) for key, value in self.items() if key != new)
        if min(others, default=math.inf) > worth_of_new:
            self._drop(new)
            return
        for dropped, (worth, key) in enumerate(self._least_first()):
            enough = dropped >= self.limit * DROPPED_SHARE or worth > worth_of_new or key == new
            if self._fits and enough:
                return
            if worth > worth_of_new or key == new:
                self._drop(new)
                return
            self._drop(key)

    def _least_first(self) -> list[tuple[float, Key]]:
        """All entries with their worth, in the order in which they are dropped."""
        newer: Counter[Hashable] = Counter()
        ranked: list[tuple[float, int, int, Key]] = []
        for age, (key, value) in enumerate(reversed(self.items())):
            rank = 0
            if self._author is not None:
                author = self._author(key, value)
                rank, newer[author] = newer[author], newer[author] + 1
            ranked.append((self._worth(key, value), -rank, -age, key))
        ranked.sort(key=lambda entry: entry[:3])
        return [(worth, key) for worth, _, _, key in ranked]

    def drop_least(self) -> None:
        """Drop the entry that is worth the least, for another table that needs the memory."""
        if self:
            self._drop(self._least_first()[0][1])

    def _drop(self, key: Key) -> None:
        del self[key]
        ALL.dropped[self.name] += 1

    def renew(self, key: Key, value: Value) -> None:
        """Set a key that becomes the youngest, whether it is known or not."""
        self.pop(key, None)
        self[key] = value

    def __delitem__(self, key: Key) -> None:
        if self._size is not None:
            self._bytes -= self._size(key, self[key])
        super().__delitem__(key)

    def pop(self, key: Key, *default: Any) -> Any:
        if self._size is not None and key in self:
            self._bytes -= self._size(key, self[key])
        return super().pop(key, *default)

    # Those of ``dict`` call none of the above, as these do.
    popitem = MutableMapping.popitem
    clear = MutableMapping.clear
    setdefault = MutableMapping.setdefault
    update = MutableMapping.update

    def __ior__(self, other: Any) -> BoundedMapping[Key, Value]:  # type: ignore[override,misc]
        self.update(other)
        return self


@dataclass(frozen=True, slots=True)
class TableUse:
    """Use of all tables of one name in a process."""

    tables: int = 0
    places: int = 0
    entries: int = 0
    bytes: int = 0
    dropped: int = 0
    """Entries that were not kept, or gave way to others, since the process began."""


class Tables:
    """All tables of a process, and the memory that they may take together.

    Only tables that measure sizes give way: any other takes little memory when it is full.
    """

    def __init__(self) -> None:
        self.bytes_max = math.inf
        """Set by a process that is one peer. A simulation has many peers in one process."""
        self.dropped: Counter[str] = Counter()
        self._tables: WeakSet[BoundedMapping[Any, Any]] = WeakSet()

    def __iter__(self) -> Iterator[BoundedMapping[Any, Any]]:
        return iter(self._tables)

    def add(self, table: BoundedMapping[Any, Any]) -> None:
        self._tables.add(table)

    def make_room(self) -> None:
        """While the tables take too much memory, the largest drops what is worth the least."""
        if math.isinf(self.bytes_max):
            return
        measured = [table for table in self._tables if table.measures]
        while sum(table.bytes_held for table in measured) > self.bytes_max:
            max(measured, key=lambda table: table.bytes_held).drop_least()

    def use(self) -> dict[str, TableUse]:
        """The use of all tables by name, sorted."""
        used: dict[str, TableUse] = {}
        for table in self._tables:
            known = used.get(table.name, TableUse())
            used[table.name] = TableUse(
                known.tables + 1,
                known.places + table.limit,
                known.entries + len(table),
                known.bytes + table.bytes_held,
                self.dropped[table.name],
            )
        return dict(sorted(used.items()))


ALL: Final = Tables()
"""The tables of this process."""
