"""``python -m docs.pictures.badges`` draws, in a row, what ``pyproject.toml`` says of the project.

Nothing else: no server of somebody else draws them, and none says anything that the tree does not.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from docs.pictures.draw import FOLDER, LETTER, style

PROJECT = FOLDER.parents[1] / "pyproject.toml"
KEPT = FOLDER / "badges.svg"
HEIGHT, GAP = 24, 8


def facts(described: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What each badge is about, and what it says."""
    project = described["project"]
    stage = [each for each in project["classifiers"] if each.startswith("Development Status")]
    yield "version", f"{project['version']}, {stage[0].rpartition(' - ')[2].lower()}"
    yield "Python", f"{project['requires-python'].removeprefix('>=')} or newer"
    yield "licence", project["license"]
    yield "types", "mypy, strict" if described["tool"]["mypy"]["strict"] else "none"


def drawn(described: Mapping[str, Any]) -> str:
    badges = [*facts(described)]
    parts, x = [], 0.0
    for name, text in badges:
        widths = [len(each) * LETTER + 14 for each in (name, text)]
        for kind, word, width in zip(("back", "head"), (name, text), widths, strict=True):
            parts.append(
                f'<rect class="{kind}" x="{x + 1:.1f}" y="1" width="{width:.1f}" '
                f'height="{HEIGHT - 2}" rx="4"/>'
                f'<text class="ink" x="{x + 1 + width / 2:.1f}" y="16" text-anchor="middle">'
                f"{escape(word)}</text>"
            )
            x += width
        x += GAP
    title = "; ".join(f"{name}: {text}" for name, text in badges)
    size = f'width="{x - GAP + 2:.0f}" height="{HEIGHT}" viewBox="0 0 {x - GAP + 2:.0f} {HEIGHT}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<title>{escape(title)}'
        f"</title>\n<style>{style()}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def described() -> dict[str, Any]:
    return tomllib.loads(PROJECT.read_text(encoding="utf-8"))


if __name__ == "__main__":
    KEPT.write_text(drawn(described()), encoding="utf-8")
