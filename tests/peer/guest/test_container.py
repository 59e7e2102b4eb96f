"""The machine's report about the limits of a container."""

from __future__ import annotations

from pathlib import Path

import pytest

from peer.guest.container import container_processors


@pytest.mark.parametrize(
    ("limit", "processors"),
    [("400000 100000\n", 4), ("150000 100000\n", 2), ("5000 100000\n", 1), ("max 100000\n", None)],
)
def test_the_time_that_a_container_may_use_is_that_of_so_many_processors(
    tmp_path: Path, limit: str, processors: int | None
) -> None:
    path = tmp_path / "cpu.max"
    path.write_text(limit)
    assert container_processors(path) == processors
    assert container_processors(tmp_path / "missing") is None
