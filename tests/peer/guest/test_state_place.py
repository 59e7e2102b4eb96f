"""The machine's report about its memory and its file systems."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from peer.guest.state_place import VOLATILE, file_system, memory_bytes


@pytest.mark.parametrize(("limit", "counts"), [("1000000\n", True), ("max\n", False)])
def test_the_limit_of_a_container_counts_as_its_memory(
    tmp_path: Path, limit: str, counts: bool
) -> None:
    path = tmp_path / "memory.max"
    path.write_text(limit)
    whole = psutil.virtual_memory().total
    assert memory_bytes((path, tmp_path / "missing")) == (1e6 if counts else whole)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no such folder here")
def test_files_in_memory_are_known_by_their_file_system() -> None:
    assert file_system(Path("/dev/shm/some/folder")) in VOLATILE
