"""Whole run files for tests, which name only what they are about."""

from __future__ import annotations

import tomllib

ALWAYS = {
    "model": 'recipe = "gpt"',
    "data": 'recipe = "python_stdlib"',
    "end": "tokens = 100_000_000",
}


def whole(text: str) -> str:
    """The text of a run file with those settings at their defaults that every file sets."""
    for section, line in ALWAYS.items():
        table = tomllib.loads(text).get(section)
        if table is None:
            text += f"\n[{section}]\n{line}\n"
        elif line.split()[0] not in table:
            text = text.replace(f"[{section}]\n", f"[{section}]\n{line}\n", 1)
    return text
