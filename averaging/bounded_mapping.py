"""A mapping that forgets its oldest entries."""

from __future__ import annotations

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class BoundedMapping(dict[Key, Value]):
    """A ``dict`` with at most ``limit`` entries: setting a new key drops the oldest ones.

    The age of an entry is that of its key; setting a known key again does not make it younger.
    """

    __slots__ = ("limit",)

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"limit is {limit}; a mapping holds at least 1 entry")
        super().__init__()
        self.limit = limit

    def __setitem__(self, key: Key, value: Value) -> None:
        super().__setitem__(key, value)
        while len(self) > self.limit:
            del self[next(iter(self))]
