"""``shoal docs`` finds every page that there is, and says which ones there are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from peer import cli
from peer.events.table import EXPLAINED, TABLE, Audience, on_screen
from peer.installed import ROLES, chapters, pages

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


ORDINARY = {"fetch_failed", "nobody_answered", "paused", "peer_lost"}
"""Problems on the screen without a section of their own: tried again by itself, named by their own
text, or asked for."""


def test_every_warning_on_the_screen_names_its_section() -> None:
    problem = Audience.SCREEN | Audience.TROUBLE
    problems = {row.name for row in TABLE.values() if row.audience & problem == problem}
    assert problems - EXPLAINED == ORDINARY
    sections = {name: name.replace("_", "-") for name in EXPLAINED}
    assert {name for name, section in sections.items() if section not in chapters()} == set()
    told = on_screen({"event": "disk_full", "text": "no room"})
    assert told == "no room (shoal docs disk-full)"


def calls(function: str) -> Iterator[tuple[str, ast.Call]]:
    """Calls of ``module.function`` in the packages, with their places."""
    module, _, name = function.rpartition(".")
    for package in ("averaging", "dht", "peer"):
        for path in sorted((DOCS.parent / package).rglob("*.py")):
            source = path.read_text(encoding="utf-8")
            if f".{name}(" not in source:  # to parse all modules takes seconds
                continue
            for node in ast.walk(ast.parse(source)):
                match node:
                    case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=called)) if (
                        called == name and owner.endswith(module)
                    ):
                        yield f"{path.relative_to(DOCS.parent)}:{node.lineno}", node


def test_every_python_warning_names_its_section() -> None:
    warned = list(calls("warnings.warn"))
    unexplained = []
    for place, call in warned:
        match call.args[0]:
            case ast.Call(
                func=ast.Name(id="explained"), args=[_, ast.Constant(value=str(section))]
            ):
                assert section in chapters(), place
            case _:
                unexplained.append(place.partition(":")[0])
    assert unexplained == ["peer/trainer/session.py"], "the sentence of an event, which names it"
    assert len(warned) > 5


def test_every_warning_of_a_log_has_a_row_that_says_what_to_do() -> None:
    warned = set()
    for place, call in calls("logger.warning"):
        assert isinstance(call.args[0], ast.Constant), place
        name = str(call.args[0].value).partition(" ")[0]
        if name == "%s":
            assert place.startswith("peer/extras/hosting/"), "an event that is in TABLE"
        else:
            warned.add(name)
    rows = re.findall(r"^\| `(\w+)` \|", pages()["log-warnings"].read_text("utf-8"), re.MULTILINE)
    assert len(rows) == len(set(rows))
    assert set(rows) == warned
