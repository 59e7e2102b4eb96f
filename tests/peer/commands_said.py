"""What a ``shoal`` command prints, and its exit code, in the process of the test."""

from __future__ import annotations

import json
from typing import Any

import pytest

from peer import cli


def said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, output and errors of a command, without what was printed before it."""
    capsys.readouterr()
    code = cli.run(arguments)
    output, errors = capsys.readouterr()
    return code, output, errors


def record(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The JSON object that a command prints with ``--json``."""
    code, output, errors = said([*arguments, "--json"], capsys)
    assert code == 0, errors
    found: dict[str, Any] = json.loads(output)
    return found
