from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest

from dht.identity import PeerId
from peer.data.batches.sequences import Data
from peer.data.hub import check_files, checked_commit, commit_of, hub_tokenizer_file
from peer.data.sources import open_data
from peer.errors import DataUnavailable, ExtraMissing
from peer.run_file.sections import Evaluation, HfData, RunFile
from tests.peer.data.file_corpus import limit_workers
from tests.peer.hub_server import COMMIT, Hub, hub_server, leave_hub_out_of_reach

ANNA = PeerId("anna")


def test_a_missing_extra_is_one_line_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ExtraMissing, match=r"pip install 'shoal\[hf\]'"):
        open_data(
            RunFile(data=HfData(dataset="a/b")),
            peer_id=ANNA,
            cache_dir=Path("unused"),
            data_dir=Path("unused"),
        )


def test_a_hub_that_cannot_be_reached_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's HTTP library has errors of its own, which ended `shoal run new` in a traceback."""
    leave_hub_out_of_reach(monkeypatch)
    with pytest.raises(DataUnavailable, match="the commit of a/b is not known: "):
        commit_of("a/b")
    with pytest.raises(DataUnavailable, match=r"a/b: .*refused"):
        open_data(
            RunFile(data=HfData(dataset="a/b")),
            peer_id=ANNA,
            cache_dir=tmp_path,
            data_dir=tmp_path,
        )


@pytest.mark.parametrize("name", ["dataset", "tokenizer"])
def test_a_name_of_the_hub_is_never_taken_for_a_folder_of_the_user(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets", reason="the extra 'hf' is not installed")
    (tmp_path / "private" / "notes").mkdir(parents=True)
    (tmp_path / "private" / "notes" / "diary.txt").write_text("mine " * 1000)
    monkeypatch.chdir(tmp_path)
    recipe = msgspec.structs.replace(
        HfData(dataset="shoal-no/such-dataset"), **{name: "private/notes"}
    )
    with pytest.raises(DataUnavailable, match="private/notes' is a name on the hub"):
        open_data(
            RunFile(data=recipe), peer_id=ANNA, cache_dir=tmp_path / "cache", data_dir=tmp_path
        )


def test_a_dataset_is_read_from_its_own_files_only() -> None:
    own = "hf://datasets/a/b@c0ffee/"
    check_files("a/b", [own + "x.parquet", own + "data/y.jsonl"])
    for file in (
        "/home/anna/.ssh/id_ed25519",
        "http://192.168.0.1/status.json",
        "hf://datasets/a/bc@c0ffee/x.jsonl",
        "zip://x.json::/home/anna/mine.zip",
        own + "../../../x.jsonl",
    ):
        with pytest.raises(DataUnavailable, match="refers to a file outside of it"):
            check_files("a/b", [own + "y.jsonl", file])


@pytest.mark.parametrize("named", ["README.md", ".huggingface.yaml"])
@pytest.mark.parametrize(
    "files",
    [
        "http://192.168.0.1/reboot",
        [{"split": "train", "path": ["x.json", "zip://x.json::http://192.168.0.1/mine.zip"]}],
        {"train": "/home/anna/.ssh/*"},
        "~/notes/*.txt",
        "zip::mine.zip",
        "data/../../other/x.json",
    ],
)
def test_a_dataset_that_refers_to_outside_files_is_refused_before_they_are_opened(
    named: str, files: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="the extra 'hf' is not installed")

    def download(dataset: str, name: str, *, repo_type: str, revision: str) -> str:
        assert (dataset, repo_type, revision) == ("a/b", "dataset", "c0ffee")
        if not (tmp_path / name).exists():
            raise hub.errors.EntryNotFoundError(name)
        return str(tmp_path / name)

    monkeypatch.setattr(hub, "hf_hub_download", download)
    monkeypatch.setattr(
        hub.HfApi, "dataset_info", lambda *_, revision: SimpleNamespace(sha="c0ffee")
    )

    def write(files: object) -> None:
        config = {"config_name": "default", "delimiter": "::", "data_files": files}
        card = json.dumps({"configs": [config]})
        text = f"---\n{card}\n---\n# A dataset\n" if named == "README.md" else card
        (tmp_path / named).write_text(text)

    assert checked_commit("a/b", "main") == "c0ffee"
    write(["data/*.json", "**/x.parquet", ""])
    assert checked_commit("a/b", "main") == "c0ffee"
    write(files)
    with pytest.raises(DataUnavailable, match="a/b refers to a place outside of it"):
        checked_commit("a/b", "main")


def test_a_tokenizer_of_the_hub_is_looked_at_before_a_package_loads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="the extra 'hf' is not installed")
    transformers = pytest.importorskip("transformers")
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "BPE"}, "decoder": {"type": "?"}}')
    monkeypatch.setattr(hub, "hf_hub_download", lambda *n, **m: str(tmp_path / "tokenizer.json"))
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", None)  # is not asked
    with pytest.raises(DataUnavailable, match=r"a/b'.* its decoder is of the kind '\?'"):
        hub_tokenizer_file("a/b@c0ffee", tmp_path)


class LocalNetwork(BaseHTTPRequestHandler):
    """A router's page of settings, which anybody in the joiner's network may ask."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(f"{self.command} {self.path}")
        self.send_response(204)
        self.end_headers()

    do_HEAD = do_GET  # noqa: N815  # of the base class


@pytest.fixture
def network() -> Iterator[str]:
    """The address of a machine in the joiner's network."""
    LocalNetwork.asked.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), LocalNetwork) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/reboot"
        server.shutdown()
        thread.join()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub of this machine's user, for this process and those that it starts."""
    package = pytest.importorskip("huggingface_hub", reason="the extra 'hf' is not installed")
    datasets = pytest.importorskip("datasets", reason="the extra 'hf' is not installed")
    with hub_server() as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setattr(package.constants, "ENDPOINT", served.url)
        monkeypatch.setattr(package.constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
        template = served.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(package.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", served.url)
        package.HfFileSystem.clear_instance_cache()
        yield served
        package.HfFileSystem.clear_instance_cache()


def parquet(columns: Mapping[str, Any], **how: Any) -> bytes:
    pyarrow = pytest.importorskip("pyarrow", reason="the extra 'hf' is not installed")
    written = io.BytesIO()
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table(columns), written, **how)
    return written.getvalue()


def opened(tmp_path: Path, peer: PeerId = ANNA, **recipe: Any) -> Data:
    data = HfData(dataset="a/b", revision=COMMIT, held_out=0.2, sequence_length=32, **recipe)
    return open_data(
        RunFile(data=data, evaluation=Evaluation(sequences=8)),
        peer_id=peer,
        cache_dir=tmp_path / str(peer),
        data_dir=tmp_path,
    )


def test_a_dataset_of_the_hub_is_read_by_ranges_as_other_files_are(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("peer.data.pieces.time", SimpleNamespace(sleep=pauses.append))
    noise = np.random.default_rng(1).bytes(3 << 20).hex()  # cannot be compressed by much
    texts = [noise[at : at + 4096] for at in range(0, len(noise), 4096)]
    image = {"bytes": None, "path": "http://127.0.0.1:1/reboot"}
    hub.files["a/b"] = {
        "README.md": b"",
        "data/train-0.parquet": parquet({"text": texts, "photo": [image] * len(texts)}),
        "data/train-1.parquet": parquet({"text": texts[::-1], "photo": [None] * len(texts)}),
        "data/test-0.parquet": parquet({"text": ["x"], "photo": [None]}),
    }
    hub.refuses_parts = 2
    data = opened(tmp_path)
    assert pauses == [1.0, 4.0]
    assert "hf: a/b" in data.description
    assert "2 files" in data.description
    first, state = data.train.next(4), data.train.state()
    following = data.train.next(2000)
    assert first.shape == (4, 33)
    assert (following < 256).all()
    whole = len(hub.files["a/b"]["data/train-0.parquet"])
    ranges = [wanted.removeprefix("bytes=").split("-") for _, wanted in hub.asked if wanted]
    assert all(int(stop) - int(start) < whole for start, stop in ranges)
    again = opened(tmp_path)
    again.train.restore_position(state)
    assert (again.train.next(2000) == following).all()
    other = opened(tmp_path, PeerId("bert"))
    assert (other.held_out == data.held_out).all()
    assert (other.train.next(4) != first).any()


def test_examples_of_the_hub_are_whole_and_text_in_lines_is_read(hub: Hub, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+1", "completion": str(n + 1)} for n in range(400)]
    lines = "\n".join(map(json.dumps, rows)).encode()
    hub.files["a/b"] = {"train.jsonl": lines}
    data = opened(tmp_path, form="completion")
    assert data.train.next(4).shape == (4, 33)
    assert (data.train.next(4) < 0).any()  # prompts are not predicted


@pytest.mark.parametrize(
    ("files", "recipe", "told"),
    [
        ({"train.jsonl": b"{}"}, {"split": "dev"}, "no split 'dev'; it has train: set data.split"),
        ({"train.csv": b"text\na\n"}, {}, r"the file 'train.csv'; .*branch refs/convert/parquet"),
        ({"train.jsonl": b'{"body": "a"}\n'}, {}, r"no text in the field 'text', .* fields body"),
        ({}, {}, "a/b: .* doesn't contain any data files"),
    ],
    ids=["split", "format", "column", "empty"],
)
def test_a_dataset_that_cannot_be_read_says_why(
    files: dict[str, bytes], recipe: dict[str, Any], told: str, hub: Hub, tmp_path: Path
) -> None:
    hub.files["a/b"] = files
    with pytest.raises(DataUnavailable, match=told):
        opened(tmp_path, **recipe)


def test_a_file_of_the_hub_that_unfolds_ends_its_own_process_only(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="the extra 'hf' is not installed")
    limit_workers(monkeypatch, "MEMORY_MAX_BYTES", 256 << 20)
    repeated = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0] * 1000, pyarrow.int32()), pyarrow.array(["ab " * 6_000_000])
    )
    hub.files["a/b"] = {"train.parquet": parquet({"text": repeated}, store_schema=False)}
    with pytest.raises(DataUnavailable, match=r"far more than the file says|too much memory"):
        opened(tmp_path)


def test_what_a_hub_redirects_to_is_public(network: str) -> None:
    """A process that reads the hub's files connects to no address of the joiner's network."""
    program = (
        "import socket, sys, urllib.request\n"
        "from dht.public_ip import is_public\n"
        "from peer.processes import refuse_network\n"
        "refuse_network(is_public)\n"
        "socket.getaddrinfo('localhost', 80)\n"
        "try:\n    urllib.request.urlopen(sys.argv[1])\n"
        "except OSError as error:\n    print(error)\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", program, network], capture_output=True, text=True, check=False
    )
    assert "nothing is fetched" in said.stdout, said.stderr
    assert LocalNetwork.asked == []
