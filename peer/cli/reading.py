"""``shoal docs``: the documents that are installed with the package."""

from __future__ import annotations

import difflib
import sys
from importlib.metadata import files
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument

from peer.cli.application import SEE, UsageError, can_draw

commands = typer.Typer()

ROLES = ("lend", "run", "research", "host", "understand", "reference", "develop")
"""The folders of the documents, one for each kind of reader."""


@commands.command(rich_help_panel=SEE)
def docs(
    page: Annotated[
        str | None, Argument(help="Name of a page; by default all pages are listed.")
    ] = None,
) -> int:
    """Print a page of the documents, or list them.

    Example: shoal docs limits
    """
    found = pages()
    if page is None:
        for path in found.values():
            print(f"shoal docs {path.stem:<18} {path.parent.name}: {title_of(path)}")
        return 0
    name = page.removesuffix(".md").rpartition("/")[2]
    if name not in found:
        near = difflib.get_close_matches(page, found, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"there is no page {page!r}{hint}; 'shoal docs' lists all")
    text = found[name].read_text(encoding="utf-8")
    if not can_draw(sys.stdout):
        print(text)
        return 0
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console()
    with console.pager(styles=True):
        console.print(Markdown(text))
    return 0


def pages() -> dict[str, Path]:
    """Every page by its name, in the order of its readers: of a clone, or as installed."""
    clone = Path(__file__).parents[2] / "docs"
    if clone.is_dir():
        known = list(clone.glob("*/*.md"))
    else:
        known = [
            Path(str(file.locate()))
            for file in files("shoal") or ()
            if file.suffix == ".md" and file.parent.name in ROLES
        ]
    known = [path for path in known if path.parent.name in ROLES]
    known.sort(key=lambda path: (ROLES.index(path.parent.name), path.stem))
    return {path.stem: path for path in known}


def title_of(path: Path) -> str:
    with path.open(encoding="utf-8") as lines:
        return next(lines, "").removeprefix("# ").strip()
