"""The commands that the pages of results name exist, and their options parse."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.command_faults import fault_of

ROOT = Path(__file__).parent.parent


def commands() -> list[str]:
    """Each command that is named in full, without the environment that is set for it."""
    pages = (ROOT / "docs/research").glob("results*.md")
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    return sorted(set(re.findall(r"`(?:[A-Z_]+=\S+ )*((?:shoal|pytest|python -m) [^`\n]+)`", text)))


def test_the_commands_are_found() -> None:
    """Without it nothing would fail if the document wrote them in another way."""
    assert len(commands()) > 40


@pytest.mark.parametrize("line", commands())
def test_a_command_can_be_given(line: str) -> None:
    assert fault_of(line) is None


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("shoal simulates", "no command"),
        ("shoal simulate --seed-count 3", "No such option"),
        ("python -m examples.paper.quality.run --seed-count 3", "No such option"),
        ("python -m examples.paper.gone.run --seeds 3", "is not there"),
        ("pytest tests/gone.py", "is not there"),
        ("pytest tests/test_layers.py -k a_test_of_another_file", "no test"),
        ("python -m tests.benchmark.gone", "is not there"),
        ("python -m tests.benchmark.audit_cost --member 3", "--member"),
        ("python -m tests.benchmark.averaging --member 3", "No such option"),
    ],
)
def test_a_command_that_cannot_be_given_is_found(line: str, fault: str) -> None:
    assert fault in (fault_of(line) or "")
