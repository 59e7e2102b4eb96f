"""The documents name only what is there, and stay short enough to be read."""

from __future__ import annotations

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ENTRIES_MAX = 16
"""Files and folders at the root that a visitor sees: those without a dot."""
RECORDS = ("CHANGELOG.md", "results")
"""Documents that describe earlier versions too, whose paths may be gone."""

ELSEWHERE = re.compile(
    r"\b(?:DESIGN|REFERENCE|HIVEMIND|HOUSE|STYLE|TRUST|TRAINING|USERS)(?:\.md\b|,? \d)"
    r"|\bissues? [A-Z]\b"
)
"""References to texts that a reader of the repository does not have."""


@cache
def tracked() -> tuple[Path, ...]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    paths = (ROOT / name for name in listed.stdout.decode().split("\0") if name)
    return tuple(path for path in paths if path.exists())


def documents() -> list[Path]:
    return [path for path in tracked() if path.suffix == ".md"]


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_the_first_look_at_the_repository_shows_few_entries() -> None:
    entries = {path.relative_to(ROOT).parts[0] for path in tracked()}
    assert len([name for name in entries if not name.startswith(".")]) <= ENTRIES_MAX


@pytest.mark.parametrize("document", documents(), ids=named)
def test_links_lead_somewhere(document: Path) -> None:
    missing = []
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        file, _, anchor = target.partition("#")
        if file.startswith("http"):
            continue
        path = (document.parent / file) if file else document
        if not path.exists() or (anchor and anchor not in anchors(path)):
            missing.append(target)
    assert not missing, "\n".join(missing)


def anchors(path: Path) -> set[str]:
    """The names that headings of a document have as targets of links."""
    titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize(
    "document", [path for path in documents() if not path.name.startswith(RECORDS)], ids=named
)
def test_files_that_a_document_names_exist(document: Path) -> None:
    missing = []
    for name in re.findall(
        r"`((?:peer|dht|averaging|tests|examples)/[\w/.]*)`", document.read_text()
    ):
        if not (ROOT / name).exists():
            missing.append(name)
    assert not missing, "\n".join(missing)


def test_pages_that_the_source_names_exist() -> None:
    source = "\n".join(path.read_text() for path in tracked() if path.suffix == ".py")
    pages = set(re.findall(r"\bdocs/[a-z]+/[a-z-]+\.md\b", source))
    assert len(pages) > 10
    assert not [page for page in pages if not (ROOT / page).exists()]


def test_tests_that_a_document_names_exist() -> None:
    texts = "\n".join(path.read_text() for path in documents())
    mentioned = set(re.findall(r"`(test_\w+)`", texts))
    tests = "\n".join(path.read_text() for path in tracked() if path.name.startswith("test_"))
    assert len(mentioned) > 50
    assert not mentioned - set(re.findall(r"def (test_\w+)\(", tests))


def test_nothing_refers_to_texts_that_are_not_in_the_repository() -> None:
    wrong = []
    for path in tracked():
        if path.suffix not in {".py", ".md", ".toml", ".html"} or path == Path(__file__):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if ELSEWHERE.search(line):
                wrong.append(f"{named(path)}:{number}: {line.strip()[:80]}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "text", ["(DESIGN 3.4)", "HIVEMIND.md, fact 5", "REFERENCE 2.1", "issue C"]
)
def test_a_reference_to_a_missing_text_is_recognized(text: str) -> None:
    assert ELSEWHERE.search(text)


def rooms() -> list[Path]:
    packages = {ROOT / name for name in ("averaging", "dht", "peer")}
    return sorted(
        path.parent
        for path in tracked()
        if path.name == "__init__.py" and packages.intersection(path.parents)
    )


@pytest.mark.parametrize("room", rooms(), ids=named)
def test_the_map_of_a_room_names_its_modules_and_rooms(room: Path) -> None:
    inside = {path.relative_to(room) for path in tracked() if room in path.parents}
    modules = {path.stem for path in inside if path.suffix == ".py" and len(path.parts) == 1}
    folders = {path.parts[0] for path in inside if path.name == "__init__.py"} - {"__init__.py"}
    names = {name for name in modules | folders if not name.startswith("__")}
    assert not names - names_in(ast.get_docstring(ast.parse((room / "__init__.py").read_text())))


def test_the_map_of_the_tree_names_every_room() -> None:
    text = (ROOT / "docs/develop/map.md").read_text(encoding="utf-8")
    assert not {named(room) for room in rooms() if not re.search(rf"\b{room.name}\b", text)}


def names_in(text: str | None) -> set[str]:
    """The words in double backquotes, and those at the start of a row of a table."""
    quoted = " ".join(re.findall(r"``([^`]*)``", text or ""))
    return {*re.findall(r"\w+", quoted), *re.findall(r"^    (\w+)  ", text or "", re.MULTILINE)}


def test_a_word_of_a_sentence_is_no_name_of_a_map() -> None:
    text = "Start with ``host``; phases\n\n    table   every event of a phase\n    in a line"
    assert names_in(text) == {"host", "table"}
