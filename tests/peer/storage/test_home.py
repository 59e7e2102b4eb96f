"""A peer's folder: made when it is needed, and one process's at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from peer.errors import FolderInUse, FolderUnusable
from peer.storage.home import only_process, peer_folder


def test_a_folder_is_created_with_its_parents(tmp_path: Path) -> None:
    with peer_folder(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b").is_dir()


def test_an_unusable_folder_is_reported_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    message = r"file.* cannot be used: .*--directory"
    with pytest.raises(FolderUnusable, match=message), peer_folder(tmp_path / "file"):
        pass
    with pytest.raises(FolderUnusable, match="Is a directory"), peer_folder(tmp_path):
        tmp_path.write_text("a folder is no file")


def test_a_second_peer_in_one_folder_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    in_use = pytest.raises(FolderInUse, match="--directory")
    with only_process(tmp_path), in_use, only_process(tmp_path):
        pass
    with only_process(tmp_path):
        pass
