"""The folder of exports: complete at any moment, bounded, and served by any web server."""

from __future__ import annotations

import functools
import http.server
import json
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from peer.errors import NotWritten
from peer.extras.export.card import Measured
from peer.extras.site.shelf import (
    INDEX,
    LATEST,
    Entry,
    NotAShelf,
    Shelf,
    published,
)
from peer.run_file.sections import RunFile
from tests.peer.full_disk import files_of_at_most

RUN = RunFile(name="ours & <theirs>")


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    made = Shelf(tmp_path / "exports", RUN, keep=2)
    made.check()
    return made


def write(out: Path) -> None:
    out.mkdir()
    (out / "model.safetensors").write_bytes(b"weights of " + out.name.encode())
    (out / "README.md").write_text("a card")


def add(shelf: Shelf, number: int) -> Entry:
    measured = Measured(number, 3.0 / number, 900 * number)
    return shelf.add(f"{number:016x}", 1000 * number, measured, write, now=1e9 + number)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """A static web server on the folder."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    handler.log_message = lambda *args: None  # type: ignore[attr-defined]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            server.shutdown()
            thread.join()


def read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as answer:
        data: bytes = answer.read()
        return data


def test_the_newest_export_is_at_latest_and_last_in_the_index(shelf: Shelf) -> None:
    first, second = add(shelf, 1), add(shelf, 2)
    with served(shelf.folder) as url:
        index = json.loads(read(url + INDEX))
        assert [each["name"] for each in index["exports"]] == [first.name, second.name]
        weights = read(url + f"{second.name}/{second.weights}")
        assert weights == b"weights of " + second.name.encode()
        assert index["exports"][1]["size_bytes"] == len(weights)
        assert read(url + f"{LATEST}/model.safetensors") == weights
    assert second.summary == (
        "2 k tokens merged, held-out loss 1.500 at 1.8 k tokens, model 0000000000000002"
    )


def test_old_exports_make_room(shelf: Shelf) -> None:
    names = [add(shelf, number).name for number in (1, 2, 3, 4)]
    assert [each.name for each in shelf.entries()] == names[2:]
    there = {path.name for path in shelf.folder.iterdir()}
    assert there == {*names[2:], INDEX, LATEST}
    assert (shelf.folder / LATEST).resolve().name == names[3]


def test_an_export_that_is_already_published_is_known(shelf: Shelf) -> None:
    assert shelf.newest("0000000000000001") is None
    first = add(shelf, 1)
    assert shelf.newest("0000000000000001") == first
    shelf.note_upload(first, "ada/ours")
    assert shelf.newest("0000000000000001") == replace(first, uploaded_to="ada/ours")
    add(shelf, 2)
    assert shelf.newest("0000000000000001") is None, "it is not the newest"


def test_files_left_by_a_killed_process_are_removed_and_listed_nowhere(shelf: Shelf) -> None:
    add(shelf, 1)
    (shelf.folder / ".2001-09-09T014642Z-unfinished.ab12").mkdir()
    (shelf.folder / ".exports.json.12ab").write_text("{")
    write(shelf.folder / "2001-09-09T014642Z-not-listed")
    assert [each.tokens for each in shelf.entries()] == [1000]
    add(shelf, 3)
    assert {path.name for path in shelf.folder.iterdir()} == {
        *(each.name for each in shelf.entries()),
        INDEX,
        LATEST,
    }


@pytest.mark.parametrize("size", [0, 4, 300, 600])
def test_a_disk_that_fills_in_the_middle_leaves_the_export_before_as_it_was(
    shelf: Shelf, size: int
) -> None:
    """The first writes fit and a later one does not, in turn in the export and the index."""
    before = add(shelf, 1)
    index = (shelf.folder / INDEX).read_bytes()

    def write_much(out: Path) -> None:
        try:
            write(out)
        except OSError as error:
            raise NotWritten(str(out), str(error)) from error

    with files_of_at_most(size), pytest.raises(NotWritten):
        shelf.add("2" * 16, 2000, None, write_much, now=2e9)
    assert (shelf.folder / LATEST / "model.safetensors").read_bytes().endswith(b"1")
    listed = published(shelf.folder)
    assert listed[0] == before
    for each in listed:
        assert (shelf.folder / each.name / each.weights).stat().st_size == each.size_bytes
    if size < 300:
        assert index == (shelf.folder / INDEX).read_bytes()
    again = add(shelf, 3)
    assert published(shelf.folder)[-1] == again
    assert not [path for path in shelf.folder.iterdir() if path.name.startswith(".")]


def test_latest_leads_to_the_newest_after_a_kill_right_after_the_index(shelf: Shelf) -> None:
    add(shelf, 1)
    newest = add(shelf, 2)
    (shelf.folder / LATEST).unlink()
    shelf.check()
    assert shelf.newest(newest.model) == newest
    assert (shelf.folder / LATEST).resolve().name == newest.name


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("all of it")
    with pytest.raises(NotAShelf, match=r"it has other files in it, such as 'thesis\.tex'"):
        Shelf(tmp_path, RUN, keep=2).check()
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_folder_with_exports_of_another_run_is_left_alone(shelf: Shelf) -> None:
    add(shelf, 1)
    with pytest.raises(NotAShelf, match="it has exports of run 'ours & <theirs>'"):
        Shelf(shelf.folder, RunFile(name="another"), keep=2).check()
