"""Line numbers of the settings in a TOML text, which ``tomllib`` does not report."""

from __future__ import annotations

import tomllib


class TomlLines:
    """The line of each table and key of a valid TOML text.

    A table in a list has its index in its path: ``("data", "sources", "0", "weight")``.

    The scanner relies on the text being valid TOML, so it only needs to recognize
    where a key, a string or a bracket begins and ends.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._line = 1
        self._known: dict[tuple[str, ...], int] = {}
        self._sizes: dict[tuple[str, ...], int] = {}
        """Number of tables so far in each list of tables."""
        table: tuple[str, ...] = ()
        while self._skip_blank(newlines=True):
            if text[self._at] == "[":
                listed = text.startswith("[[", self._at)
                self._step(2 if listed else 1)
                table = self._key()
                if listed:
                    index = self._sizes.setdefault(table, 0)
                    self._sizes[table] += 1
                    table = (*table, str(index))
                self._note(table)
                while self._at < len(text) and text[self._at] == "]":
                    self._step()
            else:
                self._assignment(table)

    def of(self, path: tuple[str, ...]) -> int | None:
        """The line of a setting, or of the nearest table that contains it."""
        while path:
            if path in self._known:
                return self._known[path]
            path = path[:-1]
        return None

    def _note(self, path: tuple[str, ...]) -> None:
        for size in range(1, len(path) + 1):
            self._known.setdefault(path[:size], self._line)

    def _step(self, count: int = 1) -> None:
        self._line += self._text.count("\n", self._at, self._at + count)
        self._at += count

    def _skip_blank(self, *, newlines: bool) -> bool:
        blank = " \t\r\n" if newlines else " \t"
        while self._at < len(self._text):
            if self._text[self._at] == "#":
                end = self._text.find("\n", self._at)
                self._step((len(self._text) if end < 0 else end) - self._at)
            elif self._text[self._at] in blank:
                self._step()
            else:
                return True
        return False

    def _key(self) -> tuple[str, ...]:
        """A dotted key; stops at the first character after it."""
        parts: list[str] = []
        while True:
            self._skip_blank(newlines=False)
            start = self._at
            if self._text[start] in "\"'":
                self._string()
                quoted = self._text[start : self._at]
                parts.append(next(iter(tomllib.loads(f"{quoted}=0"))))
            else:
                while self._text[self._at] not in " \t.=]":
                    self._step()
                parts.append(self._text[start : self._at])
            self._skip_blank(newlines=False)
            if self._text[self._at] != ".":
                return tuple(parts)
            self._step()

    def _assignment(self, table: tuple[str, ...]) -> None:
        path = (*table, *self._key())
        self._note(path)
        self._step()  # "="
        self._value(path)

    def _value(self, path: tuple[str, ...]) -> None:
        self._skip_blank(newlines=False)
        first = self._text[self._at]
        if first in "\"'":
            self._string()
        elif first in "[{":
            self._step()
            index = 0
            while self._skip_blank(newlines=True) and self._text[self._at] not in "]}":
                if self._text[self._at] == ",":
                    self._step()
                elif first == "{":
                    self._assignment(path)
                else:
                    if self._text[self._at] == "{":
                        self._note((*path, str(index)))
                    self._value((*path, str(index)))
                    index += 1
            self._step()
        else:
            while self._at < len(self._text) and self._text[self._at] not in ",]}#\n":
                self._step()

    def _string(self) -> None:
        quote = self._text[self._at]
        long = self._text.startswith(quote * 3, self._at)
        mark = quote * 3 if long else quote
        self._step(len(mark))
        while not self._text.startswith(mark, self._at):
            self._step(2 if quote == '"' and self._text[self._at] == "\\" else 1)
        self._step(len(mark))
        while long and self._text.startswith(quote, self._at):  # """a"""" ends in a quote
            self._step()
