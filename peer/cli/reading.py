"""``shoal docs``: the documents that are installed with the package."""

from __future__ import annotations

import difflib
import sys
from typing import Annotated

import typer
from typer import Argument

from peer.cli.application import SEE, UsageError, can_draw
from peer.installed import chapters, pages, title_of

commands = typer.Typer()


@commands.command(rich_help_panel=SEE)
def docs(
    page: Annotated[
        str | None,
        Argument(help="Name of a page or of a section; by default all pages are listed."),
    ] = None,
) -> int:
    """Print a page or a section of the documents, or list the pages.

    Example: shoal docs limits
    """
    if page is None:
        for path in pages().values():
            print(f"shoal docs {path.stem:<18} {path.parent.name}: {title_of(path)}")
        return 0
    texts = chapters()
    name = page.removesuffix(".md").rpartition("/")[2]
    if name not in texts:
        near = difflib.get_close_matches(page, texts, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"there is no page {page!r}{hint}; 'shoal docs' lists all")
    text = texts[name]
    if not can_draw(sys.stdout):
        print(text)
        return 0
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console()
    with console.pager(styles=True):
        console.print(Markdown(text))
    return 0
