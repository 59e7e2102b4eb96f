"""A mapping that forgets its oldest entries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

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

    def renew(self, key: Key, value: Value) -> None:
        """Set a key that becomes the youngest, whether it is known or not."""
        self.pop(key, None)
        self[key] = value

    # ``dict`` does not come by ``__setitem__`` in these

    def setdefault(self, key: Key, default: Value) -> Value:
        """Return the value of a key, which is set to ``default`` if it is new."""
        if key not in self:
            self[key] = default
            return default
        return self[key]

    def update(self, *others: Mapping[Key, Value] | Iterable[tuple[Key, Value]]) -> None:  # type: ignore[override]
        for other in others:
            new: dict[Key, Value] = dict(other)
            for key in new:
                self[key] = new[key]

    def __ior__(self, other: Any) -> BoundedMapping[Key, Value]:  # type: ignore[override,misc]
        self.update(other)
        return self
