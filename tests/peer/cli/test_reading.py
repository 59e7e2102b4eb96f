"""``shoal docs`` finds every page that there is, and says which ones there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from peer import cli
from peer.documents import ROLES, chapters, pages

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
