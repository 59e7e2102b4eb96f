"""A cache of tokens and downloads that belongs to another user of the machine."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from peer.data.text.downloads import Downloads
from peer.data.text.token_cache import TokenCache
from peer.run_file.places import Place

NOBODY = 65534


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user may read, other than pytest's."""
    made = Path(tempfile.mkdtemp())
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@contextmanager
def as_a_reader(folder: Path) -> Iterator[None]:
    """Be a user who may read a folder and not write there."""
    if os.geteuid() == 0:
        os.seteuid(NOBODY)
        try:
            yield
        finally:
            os.seteuid(0)
        return
    folder.chmod(0o555)
    try:
        yield
    finally:
        folder.chmod(0o755)


def test_tokens_of_another_user_are_read(folder: Path) -> None:
    """To note the use of the file was refused, which ended training."""
    tokens = np.arange(9, dtype=np.uint16)
    TokenCache(folder).write("abc", tokens[:6], tokens[6:])
    with as_a_reader(folder):
        found = TokenCache(folder).read("abc")
        assert found is not None
        assert (found.train.tolist(), found.held_out.tolist()) == ([0, 1, 2, 3, 4, 5], [6, 7, 8])


def test_a_download_of_another_user_is_used(folder: Path) -> None:
    content = b"downloaded before"
    digest = hashlib.sha256(content).hexdigest()
    (folder / digest).write_bytes(content)
    with as_a_reader(folder):
        path = Downloads(folder).fetch(Place("https://example.org/a.bin", digest))
        assert path.read_bytes() == content
