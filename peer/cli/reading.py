"""``shoal docs``: the documents that are installed with the package."""

from __future__ import annotations

import difflib
import re
import sys
from importlib.metadata import files
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument

from peer.cli.application import SEE, UsageError, can_draw

commands = typer.Typer()

ANCHOR = re.compile(r'<a id="([\w-]+)"></a>\n?')
"""A name of a section beside that of its heading: of an error that it explains."""

ROLES = ("lend", "run", "research", "host", "understand", "reference", "develop")
"""The folders of the documents, one for each kind of reader."""


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


def chapters() -> dict[str, str]:
    """Every page and every section, by the names that it has in links. Of two sections with one
    name, the first one."""
    whole = {name: path.read_text(encoding="utf-8") for name, path in pages().items()}
    found: dict[str, str] = {}
    for page in whole.values():
        for section in re.split(r"^(?=##+ )", page, flags=re.MULTILINE)[1:]:
            text = ANCHOR.sub("", section).replace("\n\n\n", "\n\n")
            for name in (slug(section.partition("\n")[0].lstrip("# ")), *ANCHOR.findall(section)):
                found.setdefault(name, text)
    return found | whole


def section_of(error: BaseException) -> str | None:
    """The name of the section about an error, for ``shoal docs``, if the documents are there."""
    known = chapters()
    for kind in type(error).__mro__:
        name = hyphened(kind.__name__)
        if name in known:
            return name
    return None


def hyphened(name: str) -> str:
    """``FolderInUse`` as ``folder-in-use``."""
    return re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower()


def slug(title: str) -> str:
    """The name that a heading has in links."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def title_of(path: Path) -> str:
    with path.open(encoding="utf-8") as lines:
        return next(lines, "").removeprefix("# ").strip()
