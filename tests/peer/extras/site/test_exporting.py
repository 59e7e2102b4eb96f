"""Exports in processes of their own: published, uploaded to a stand-in of the hub, and ended."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from peer import cli
from peer.errors import Unusable
from peer.extras.bases.base_models import BaseUnavailable
from peer.extras.export import folder
from peer.extras.export.folder import WEIGHTS, Export, folder_beside
from peer.extras.site import exporting
from peer.extras.site.exporting import NoRepository, NotPushed, Publishing, check_repository
from peer.extras.site.keeping import PublicSide, Publisher
from peer.extras.site.shelf import LATEST, Shelf, published
from peer.run_file.sections import CustomModel
from peer.storage.checkpoint import CheckpointFolder
from peer.storage.home import OUTER
from peer.storage.outer_state import load_outer, outer_content
from tests.peer.extras.bases.adapted_run import adapted_model, adapted_run
from tests.peer.extras.bases.published_model import publish as publish_base
from tests.peer.extras.export.exported_run import RUN, save_run
from tests.peer.hub_server import TOKEN, Hub, hub_server
from tests.processes import Child

huggingface_hub = pytest.importorskip("huggingface_hub", reason="the extra 'hf' is not installed")
constants = pytest.importorskip("huggingface_hub.constants")

NAME = "ada/small"


@pytest.fixture
def publishing(tmp_path: Path) -> Publishing:
    return Publishing(
        folder=tmp_path / "exports",
        every_s=3600.0,
        keep=2,
        repository=None,
        cache=tmp_path / "data",
    )


def publish(what: Publishing, peer: Path) -> list[tuple[str, Mapping[str, Any]]]:
    """The events of publishing what is new."""
    news: list[tuple[str, Mapping[str, Any]]] = []
    asyncio.run(publisher(what, peer, news).publish())
    return news


def publisher(what: Publishing, peer: Path, news: list[tuple[str, Mapping[str, Any]]]) -> Publisher:
    told: Any = SimpleNamespace(
        directory=peer, event=lambda name, **fields: news.append((name, fields))
    )
    return Publisher(told, what)


def publish_here(what: Publishing, peer: Path) -> list[tuple[str, Mapping[str, Any]]]:
    """Do in this process what a process of its own does."""
    news: list[tuple[str, Mapping[str, Any]]] = []
    exporting.publish(what, peer, lambda name, fields: news.append((name, fields)), now=time.time())
    return news


def train_on(peer: Path) -> None:
    """Another checkpoint, of a model with the same parameters at later versions."""
    outer = save_run(peer)
    states = [replace(state, version=5, lineage=bytes(32)) for state in outer.states]
    folder = CheckpointFolder(peer / OUTER)
    folder.save(*outer_content(run=outer.run, layout=outer.layout, states=states))


def test_a_checkpoint_is_published_once_and_the_next_one_again(
    publishing: Publishing, tmp_path: Path
) -> None:
    peer = tmp_path / "peer"
    assert publish(publishing, peer) == [], "there is no checkpoint yet"
    save_run(peer)
    [(name, fields)] = publish_here(publishing, peer)
    assert name == "published" and fields["tokens"] == 3000
    latest = publishing.folder / LATEST
    with safe_open(latest / "model.safetensors", "pt") as file:
        assert file.metadata()["shoal_model"] == fields["model"]
    assert "held-out loss" in (latest / "README.md").read_text()
    assert published(publishing.folder)[-1].loss == 2.25
    assert publish_here(publishing, peer) == []
    train_on(peer)
    assert [name for name, _ in publish_here(publishing, peer)] == ["published"]
    assert len(published(publishing.folder)) == 2


def test_two_keepers_may_publish_in_one_folder(
    publishing: Publishing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one removed the files of the first as those of a killed process."""
    save_run(tmp_path / "a")
    train_on(tmp_path / "b")
    news: dict[str, list[str]] = {}
    is_writing = threading.Event()

    def slowly(export: Export, out: Path) -> None:
        with folder_beside(out) as temporary:
            is_writing.set()
            time.sleep(0.5)
            (temporary / WEIGHTS).write_bytes(b"weights")
            temporary.rename(out)

    def keeper(name: str) -> None:
        news[name] = [event for event, _ in publish_here(publishing, tmp_path / name)]

    monkeypatch.setattr(folder, "write_folder", slowly)
    first = threading.Thread(target=keeper, args=("a",))
    first.start()
    assert is_writing.wait(60)
    keeper("b")
    first.join()
    assert news == {"a": ["published"], "b": ["published"]}
    assert len(published(publishing.folder)) == 2


def test_after_a_wait_for_another_keeper_the_newest_checkpoint_is_published(
    publishing: Publishing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upload takes up to an hour, and the one from before it became the latest export."""
    save_run(tmp_path / "peer")
    alone = Shelf.alone

    @contextmanager
    def after_a_wait(shelf: Shelf) -> Iterator[None]:
        train_on(tmp_path / "peer")
        with alone(shelf):
            yield

    monkeypatch.setattr(Shelf, "alone", after_a_wait)
    assert [name for name, _ in publish_here(publishing, tmp_path / "peer")] == ["published"]
    newest = load_outer(CheckpointFolder(tmp_path / "peer" / OUTER, reads_only=True))
    assert newest is not None
    assert [entry.model for entry in published(publishing.folder)] == [newest.model]


def test_adapters_are_published_on_their_base(publishing: Publishing, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    published_base = publish_base(tmp_path / "published" / "tiny")
    run = adapted_run(published_base)
    peer = tmp_path / "peer"
    save_run(peer, run, adapted_model(run, published_base, tmp_path / "cache"))
    with pytest.raises(BaseUnavailable, match="there is no"):
        publish_here(publishing, peer)
    assert not (publishing.folder / LATEST).exists()
    (peer / "data").mkdir()
    (peer / "data" / "tiny").symlink_to(published_base)
    assert [name for name, _ in publish_here(publishing, peer)] == ["published"]
    assert cli.run(["export", str(peer), str(tmp_path / "out"), "--to", "hf"]) == 0
    expected = load_file(tmp_path / "out" / "model.safetensors")
    found = load_file(publishing.folder / LATEST / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name].to(found[name])) for name in found)


def test_a_failure_of_the_process_is_told_once_and_in_one_line(
    publishing: Publishing, tmp_path: Path
) -> None:
    peer = tmp_path / "peer"
    save_run(peer)
    publishing.folder.mkdir()
    (publishing.folder / "thesis.tex").touch()
    news: list[tuple[str, Mapping[str, Any]]] = []
    exports = publisher(publishing, peer, news)

    async def twice() -> None:
        assert not await exports.publish()
        assert not await exports.publish()

    asyncio.run(twice())
    [(name, fields)] = news
    assert name == "publish_failed"
    assert "it has other files in it, such as 'thesis.tex'" in fields["text"]
    assert "\n" not in fields["text"]


def pushed(
    publishing: Publishing, peer: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, **others: str
) -> list[tuple[str, Mapping[str, Any]]]:
    """Do in this process what a process does that finds the hub in its environment."""
    for key, value in {"HF_TOKEN": TOKEN, **others}.items():
        monkeypatch.setenv(key, value)
    hub.token = TOKEN
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    api = huggingface_hub.HfApi()  # the package's own was made with its usual endpoint
    monkeypatch.setattr(huggingface_hub, "create_repo", api.create_repo)
    monkeypatch.setattr(huggingface_hub, "upload_folder", api.upload_folder)
    return publish_here(replace(publishing, repository=NAME), peer)


@contextmanager
def refused_in_one_line(told: str, *, secret: str) -> Iterator[None]:
    with pytest.raises(NotPushed) as caught:
        yield
    text = str(caught.value)
    assert text.startswith(f"not uploaded to {NAME}: ") and told in text and "\n" not in text
    assert secret not in text


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of the library's own
def test_an_upload_that_is_refused_is_told_and_the_next_one_replaces_the_files_before(
    publishing: Publishing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = tmp_path / "peer"
    save_run(peer)
    with hub_server() as hub:
        hub.files[NAME] = {"model-00002-of-00002.safetensors": b"old", "notes.md": b"the owner's"}
        hub.commits[NAME] = []
        hub.refuses_commits = 403
        with refused_in_one_line("storage", secret=TOKEN):
            pushed(publishing, peer, hub, monkeypatch)
        hub.refuses_commits = None
        again = pushed(publishing, peer, hub, monkeypatch)
        assert [name for name, _ in again] == ["pushed"], again
        files = hub.files[NAME]
    (export,) = published(publishing.folder)
    assert export.uploaded_to == NAME
    latest = publishing.folder / LATEST
    assert files.pop("notes.md") == b"the owner's"
    assert files == {path.name: path.read_bytes() for path in latest.iterdir()}
    [message] = hub.commits[NAME]
    assert message.startswith("3 k tokens merged, held-out loss 2.250 at 3.1 k tokens, model ")


def test_a_wrong_token_is_told_in_one_line_and_the_export_stays(
    publishing: Publishing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_run(tmp_path / "peer")
    with hub_server() as hub, refused_in_one_line("401", secret="hf_wrong"):
        pushed(publishing, tmp_path / "peer", hub, monkeypatch, HF_TOKEN="hf_wrong")
    assert len(published(publishing.folder)) == 1


@pytest.mark.parametrize("name", ["small", "ada/small/more", "../x", "ada/sm all", ""])
def test_a_name_that_is_no_repository_is_refused(name: str) -> None:
    with pytest.raises(NoRepository, match="it is not OWNER/NAME"):
        check_repository(name)


def test_without_a_token_nothing_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from peer.extras.site.exporting import check_repository; check_repository('ada/small')"
    environment = {**os.environ, "HF_HOME": str(tmp_path)}
    environment.pop("HF_TOKEN", None)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert "this user has no token for the hub; get one by `hf auth login`" in done.stderr


def test_the_process_that_exports_ends_with_its_parent(
    publishing: Publishing, tmp_path: Path
) -> None:
    what = msgspec.json.encode(publishing, enc_hook=str).decode()
    with Child("-m", "peer.extras.site.exporting", str(tmp_path / "peer"), what) as child:
        child.process.send_signal(signal.SIGSTOP)  # it cannot be done before its parent is gone
        child.end_input()
        child.process.send_signal(signal.SIGCONT)
        assert child.wait() in (0, 1)


def test_a_model_that_transformers_does_not_know_is_refused_before_the_run_is_met(
    tmp_path: Path,
) -> None:
    what = Publishing(
        folder=tmp_path / "exports", every_s=60.0, keep=1, repository=None, cache=tmp_path
    )
    with pytest.raises(Unusable):
        PublicSide(what, None).check(msgspec.structs.replace(RUN, model=CustomModel()))
    assert not (tmp_path / "exports").exists()
