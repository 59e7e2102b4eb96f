"""This build shows and writes what its snapshots have. ``python -m tests.golden`` writes them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peer.storage.checkpoint import CheckpointFolder
from peer.storage.outer_state import load_outer
from tests.golden import snapshots


@pytest.mark.parametrize("name", snapshots.TEXTS)
def test_the_text_is_that_of_the_snapshot(name: str, tmp_path: Path) -> None:
    expected = (snapshots.HERE / name).read_text(encoding="utf-8").splitlines()
    assert snapshots.TEXTS[name](tmp_path).splitlines() == expected


OUTPUT = Path(__file__).parents[2] / "docs" / "reference" / "output.md"

ELSEWHERE = ("figures", "fates", "paths")
"""Fields whose own keys are on other pages, or are names of no field."""


def fields(shown: Any) -> Iterator[str]:
    """Names of the fields of a masked record; names in capitals stand for values."""
    if isinstance(shown, list):
        for part in shown:
            yield from fields(part)
    elif isinstance(shown, dict):
        for name, part in shown.items():
            if not name.isupper():
                yield name
            if name not in ELSEWHERE:
                yield from fields(part)


def rows_of(command: str, page: str) -> str:
    """The rows about a command, with those below that are about a part of its record."""
    rows, is_its = [], False
    for row in page.splitlines():
        cell = row.split("|")[1] if row.startswith("| ") else ""
        is_its = any(f"`{name}`" in cell for name in (command, command.split()[-1])) or (
            is_its and cell.startswith(" its ")
        )
        rows += [row] if is_its else []
    return "\n".join(rows)


def test_every_field_of_a_record_is_on_the_page_of_output() -> None:
    page = OUTPUT.read_text(encoding="utf-8")
    records = json.loads((snapshots.HERE / "json.txt").read_text(encoding="utf-8"))
    del records["simulate"]  # its columns are those of its table
    missing = {
        f"{name} of {command}"
        for command, record in records.items()
        for name in fields(record)
        if f"`{name}`" not in rows_of(command.partition(",")[0], page)
    }
    assert not missing, f"add them to {OUTPUT.name}"


def test_a_checkpoint_is_written_as_in_the_snapshot(tmp_path: Path) -> None:
    written = snapshots.write_checkpoint(tmp_path, snapshots.a_run())
    assert snapshots.files(written.parent) == snapshots.files(snapshots.CHECKPOINT)


def test_the_checkpoint_of_the_snapshot_is_read(tmp_path: Path) -> None:
    shutil.copytree(snapshots.CHECKPOINT, tmp_path / "outer")
    outer = load_outer(CheckpointFolder(tmp_path / "outer"))
    assert outer is not None and outer.run == snapshots.a_run()
    assert outer.directives == (b"a directive",)
    for found, expected in zip(outer.states, snapshots.states(), strict=True):
        assert (found.version, found.lineage, found.history) == (
            expected.version,
            expected.lineage,
            expected.history,
        )
        assert list(found.chain) == list(expected.chain)
        assert dict(found.merged.items()) == dict(expected.merged.items())
        assert np.array_equal(found.theta, expected.theta)
        assert np.array_equal(found.momentum, expected.momentum)
