"""Line numbers of the settings in a TOML text, which ``tomllib`` does not report."""

from __future__ import annotations

import re
import tomllib
from typing import Any

_PART = r"""(?:[\w-]++|"[^"\n]*"|'[^'\n]*')"""
_KEY = rf"{_PART}(?:[ \t]*\.[ \t]*{_PART})*"
_LINE = re.compile(rf"[ \t]*(?:(\[\[?)[ \t]*({_KEY})[ \t]*\]\]?[ \t]*(?:#|$)|({_KEY})[ \t]*=)")
"""A line that begins a table, or a setting."""

_LONG_TEXT = re.compile(r"\"\"\"|'''")


class TomlLines:
    """The line of each table and key of a valid TOML text.

    A table in a list has its index in its path: ``("data", "sources", "0", "weight")``. What is
    inside of a value, such as of a table in braces, has the line of the value.
    """

    def __init__(self, text: str) -> None:
        self._known: dict[tuple[str, ...], int] = {}
        sizes: dict[tuple[str, ...], int] = {}
        table: tuple[str, ...] = ()
        in_text = False
        for number, line in enumerate(text.split("\n"), 1):
            found = None if in_text else _LINE.match(line)
            in_text ^= len(_LONG_TEXT.findall(line)) % 2 == 1
            if found is None:
                continue
            bracket, header, key = found.groups()
            if key is not None:
                self._note((*table, *_parts(key)), number)
                continue
            table = _parts(header)
            if bracket == "[[":
                index = sizes[table] = sizes.get(table, -1) + 1
                table = (*table, str(index))
            self._note(table, number)

    def of(self, path: tuple[str, ...]) -> int | None:
        """The line of a setting, or of the nearest table or value that contains it."""
        while path:
            if path in self._known:
                return self._known[path]
            path = path[:-1]
        return None

    def _note(self, path: tuple[str, ...], line: int) -> None:
        for size in range(1, len(path) + 1):
            self._known.setdefault(path[:size], line)


def _parts(key: str) -> tuple[str, ...]:
    """The parts of a dotted key."""
    inside: Any = tomllib.loads(f"{key} = 0")
    parts = []
    while isinstance(inside, dict):
        ((part, inside),) = inside.items()
        parts.append(part)
    return tuple(parts)
