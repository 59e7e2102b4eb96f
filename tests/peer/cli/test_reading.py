"""``shoal docs`` finds every page that there is, and says which ones there are."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from dht.presence.dialler import DialLimited
from peer import cli
from peer.cli.reading import ANCHOR, ROLES, chapters, hyphened, pages, section_of
from peer.errors import NobodyMet

DOCS = Path(__file__).parents[3] / "docs"


def test_lists_every_page_with_the_command_that_prints_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.run(["docs"]) == 0
    listed = capsys.readouterr().out.splitlines()
    written = [path for role in ROLES for path in DOCS.glob(f"{role}/*.md")]
    assert {line.split()[2] for line in listed} == {path.stem for path in written}
    assert len(listed) == len(written), "two pages have one name"


def test_prints_a_page_as_it_is_written_where_no_terminal_reads_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("limits", "lend/limits.md"):
        assert cli.run(["docs", name]) == 0
        assert capsys.readouterr().out == f"{(DOCS / 'lend/limits.md').read_text()}\n"


def test_prints_a_section_that_a_message_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["docs", "no-peer-answers"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("## No peer answers\n") and printed.count("\n## ") == 0


NAMED = re.compile(r"shoal docs ([a-z][a-z-]+)")


@pytest.mark.parametrize("package", ["averaging", "dht", "peer"])
def test_what_messages_name_is_there(package: str) -> None:
    source = "\n".join(path.read_text() for path in (DOCS.parent / package).rglob("*.py"))
    missing = {name for name in NAMED.findall(source) if name not in chapters()}
    assert not missing


def test_a_page_that_is_not_there_is_refused_with_the_nearest_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.run(["docs", "limit"]) == 2
    assert "did you mean 'limits'?" in capsys.readouterr().err


def test_no_page_is_of_a_reader_that_is_not_listed() -> None:
    assert {path.parent.name for path in DOCS.glob("*/*.md")} == set(ROLES) & {
        path.parent.name for path in pages().values()
    }


INSIDE = {
    "ExpectedError": "the base of all",
    "DhtError": "the base of those of dht/",
    "AveragingError": "the base of those of averaging/",
    "PeerError": "the base of those of peer/",
    "PathError": "the base of those of a file",
    "Interrupted": "somebody pressed Ctrl-C",
    "SearchInterrupted": "the same",
    "LeftEarly": "the same",
    "DialLimited": "a call is made later; told like `PeerUnreachable`",
    "BadPayload": "a stranger's bytes are refused and counted",
    "LineageBroken": "another source is asked",
    "BulkRefused": "another way is taken",
    "FetchFailed": "an event says so, and it is tried again",
    "Abandoned": "a transfer that nobody waits for",
    "CodecsDiffer": "numpy's codecs are used, and an event says so",
    "CodecsNotCompiled": "the same",
}
"""Errors without a section, each with what happens instead of a message, or why it has none."""


def errors() -> set[str]:
    """The names of all classes of the source that extend an expected error."""
    bases: dict[str, set[str]] = {"ExpectedError": set()}
    for package in ("averaging", "dht", "peer"):
        for path in (DOCS.parent / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    found = {base.id for base in node.bases if isinstance(base, ast.Name)}
                    bases.setdefault(node.name, set()).update(found)
    known = {"ExpectedError"}
    while more := {name for name, above in bases.items() if above & known} - known:
        known |= more
    return known


def test_every_error_that_people_meet_has_a_section() -> None:
    named = {hyphened(name): name for name in errors()}
    missing = {name for short, name in named.items() if short not in chapters()}
    assert missing == INSIDE.keys()


def test_a_section_is_named_for_no_error_that_is_gone() -> None:
    written = "\n".join(path.read_text() for path in pages().values())
    shorts = {hyphened(name) for name in errors()}
    assert set(ANCHOR.findall(written)) - shorts == {"loop-warning"}, "a warning, and no error"


def test_an_error_of_a_kind_without_a_section_has_that_of_its_base() -> None:
    assert section_of(NobodyMet("here", "nobody")) == "nobody-met"
    assert section_of(DialLimited("anna", "later")) == "peer-unreachable"
    assert section_of(OSError()) is None
