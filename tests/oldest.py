"""Prints the oldest version that ``pyproject.toml`` allows of each package, for ``make oldest``."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def oldest(project: Mapping[str, Any]) -> Iterator[str]:
    """A constraint for each requirement that has a lower bound."""
    extras = project["optional-dependencies"].values()
    for requirement in sorted({*chain(project["dependencies"], *extras)}):
        name, version, marker = _parts(requirement)
        if version:
            yield f"{name}=={version}{marker}"


def _parts(requirement: str) -> tuple[str, str, str]:
    found = re.fullmatch(r"([\w.-]+)(?:\[\w+\])?(?:[>=]=([\w.]+))?(?:,[^;]*)?(;.*)?", requirement)
    return (found[1], found[2] or "", found[3] or "") if found else ("", "", "")


if __name__ == "__main__":
    sys.stdout.writelines(
        f"{line}\n" for line in oldest(tomllib.loads(PROJECT.read_text())["project"])
    )
