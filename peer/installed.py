"""The installation: parts that it may lack, and the documents.

Such parts are ``peer.extras``, and packages of its ``pip`` extras. The core names modules of
``peer.extras`` to these functions alone, and where they are needed. So it is imported, and takes
part in a run, without them. Of the documents there are pages, their sections, and those of errors;
``shoal docs`` prints them (``cli.reading``).
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from importlib.metadata import files
from pathlib import Path
from typing import Any

from peer.errors import ExtraMissing, Failure, PartMissing


def extra(module: str) -> Any:
    """A module by its name in ``peer.extras``. Raises ``PartMissing`` where it is left out."""
    for there in extras(module):
        return there
    raise PartMissing(module)


def extras(*modules: str) -> list[Any]:
    """Those of the modules that are there."""
    there = []
    for module in modules:
        name = f"peer.extras.{module}"
        try:
            there.append(importlib.import_module(name))
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # of a package that the module imports
    return there


def needed(module: str, what: str, *, extra: str = "hf") -> Any:
    """A module of such a package, which ``what`` needs. Raises ``ExtraMissing``."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ExtraMissing(what, module.partition(".")[0], extra) from error


def check_installed(package: str, what: str, *, extra: str = "hf") -> None:
    """Raise ``ExtraMissing`` if the package is not there. It is not imported."""
    if importlib.util.find_spec(package) is None:
        raise ExtraMissing(what, package, extra)


def hub_errors() -> tuple[type[Exception], ...]:
    """Errors of requests to the hub of Hugging Face, whose package is installed.

    A server that cannot be reached is an error of its HTTP library, which is another one in every
    other release and derives neither from ``OSError`` nor from an error of the package. Its base
    class is one of ``HfHubHTTPError``.
    """
    errors = needed("huggingface_hub.errors", "the hub")
    return (OSError, ValueError, RuntimeError, *errors.HfHubHTTPError.__bases__)


# --- documents ----------------------------------------------------------------------------------

ANCHOR = re.compile(r'<a id="([\w-]+)"></a>\n?')
"""A name of a section beside that of its heading: of an error that it explains."""

ROLES = ("lend", "run", "research", "host", "understand", "reference", "develop")
"""The folders of the documents, one for each kind of reader."""


def pages() -> dict[str, Path]:
    """Every page by its name, in the order of its readers: of a clone, or as installed."""
    clone = Path(__file__).parents[1] / "docs"
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
    sections: dict[str, str] = {}
    for page in whole.values():
        for section in re.split(r"^(?=##+ )", page, flags=re.MULTILINE)[1:]:
            text = ANCHOR.sub("", section).replace("\n\n\n", "\n\n")
            for name in (slug(section.partition("\n")[0].lstrip("# ")), *ANCHOR.findall(section)):
                sections.setdefault(name, text)
    return sections | whole


def section_of(error: BaseException) -> str | None:
    """The name of the section about an error, for ``shoal docs``, if the documents are there."""
    known = chapters()
    kinds = (hyphened(kind.__name__) for kind in type(error).__mro__)
    names = (error.section,) if isinstance(error, Failure) else kinds
    return next((name for name in names if name in known), None)


def hyphened(name: str) -> str:
    """``FolderInUse`` as ``folder-in-use``."""
    return re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower()


def slug(title: str) -> str:
    """The name that a heading has in links."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def title_of(path: Path) -> str:
    with path.open(encoding="utf-8") as lines:
        return next(lines, "").removeprefix("# ").strip()
