"""The folder of exports: complete at any moment, bounded, and served by any web server."""

from __future__ import annotations

import functools
import http.server
import json
import threading
import urllib.request
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from peer.errors import NotWritten
from peer.extras.export.facts import Measured
from peer.extras.site.publishing.feed import ATOM, Entry, atom
from peer.extras.site.publishing.shelf import FEED, INDEX, LATEST, NotAShelf, Shelf, published
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


def test_the_newest_export_is_at_latest_and_first_in_the_feed(shelf: Shelf) -> None:
    first, second = add(shelf, 1), add(shelf, 2)
    with served(shelf.folder) as url:
        feed = ET.fromstring(read(url + FEED))
        entries = feed.findall(f"{{{ATOM}}}entry")
        assert len(entries) == 2
        assert feed.findtext(f"{{{ATOM}}}title") == "ours & <theirs>"
        links = {each.get("rel"): each for each in entries[0].findall(f"{{{ATOM}}}link")}
        weights = read(url + str(links["enclosure"].get("href")))
        assert weights == b"weights of " + second.name.encode()
        assert links["enclosure"].get("length") == str(len(weights))
        assert read(url + f"{LATEST}/model.safetensors") == weights
        index = json.loads(read(url + INDEX))
        assert [each["name"] for each in index["exports"]] == [first.name, second.name]
    assert entries[0].findtext(f"{{{ATOM}}}summary") == (
        "2 k tokens merged, held-out loss 1.500 at 1.8 k tokens, model 0000000000000002"
    )


def test_old_exports_make_room(shelf: Shelf) -> None:
    names = [add(shelf, number).name for number in (1, 2, 3, 4)]
    assert [each.name for each in shelf.entries()] == names[2:]
    there = {path.name for path in shelf.folder.iterdir()}
    assert there == {*names[2:], FEED, INDEX, LATEST}
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
        FEED,
        INDEX,
        LATEST,
    }


@pytest.mark.parametrize("size", [0, 4, 300, 900])
def test_a_disk_that_fills_in_the_middle_leaves_the_export_before_as_it_was(
    shelf: Shelf, size: int
) -> None:
    """The first writes fit and a later one does not, in turn in the export, index and feed."""
    before = add(shelf, 1)
    index, feed = ((shelf.folder / name).read_bytes() for name in (INDEX, FEED))

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
        assert (index, feed) == tuple((shelf.folder / name).read_bytes() for name in (INDEX, FEED))
    again = add(shelf, 3)
    assert published(shelf.folder)[-1] == again
    assert not [path for path in shelf.folder.iterdir() if path.name.startswith(".")]


def test_latest_and_feed_have_the_newest_after_a_kill_right_after_the_index(shelf: Shelf) -> None:
    add(shelf, 1)
    older = (shelf.folder / FEED).read_bytes()
    newest = add(shelf, 2)
    whole = (shelf.folder / FEED).read_bytes()
    (shelf.folder / LATEST).unlink()
    (shelf.folder / FEED).write_bytes(older)
    shelf.check()
    assert shelf.newest(newest.model) == newest
    assert (shelf.folder / LATEST).resolve().name == newest.name
    assert (shelf.folder / FEED).read_bytes() == whole


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("all of it")
    with pytest.raises(NotAShelf, match=r"it has other files in it, such as 'thesis\.tex'"):
        Shelf(tmp_path, RUN, keep=2).check()
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_folder_with_exports_of_another_run_is_left_alone(shelf: Shelf) -> None:
    add(shelf, 1)
    with pytest.raises(NotAShelf, match="it has exports of run 'ours & <theirs>'"):
        Shelf(shelf.folder, RunFile(name="another"), keep=2).check()


def test_a_feed_is_legal_xml_whatever_the_run_is_called() -> None:
    data = atom("ab" * 32, "a\x00b\x1b\ud800 <c> & 'd'".encode(errors="replace").decode(), [])
    assert ET.fromstring(data).findtext(f"{{{ATOM}}}title") == "a b ? <c> & 'd'"
