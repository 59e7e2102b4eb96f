from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest

from dht.identity import PeerId
from peer.data.base_models import BaseUnavailable
from peer.data.batches.sequences import Data
from peer.data.hub import (
    Streamed,
    _in_worker,
    check_files,
    checked_commit,
    commit_of,
    hub_tokenizer_file,
)
from peer.data.published import published
from peer.data.sources import open_data
from peer.errors import DataUnavailable, ExtraMissing
from peer.publishing.hub import NotPushed, push
from peer.run_file.sections import (
    HfData,
    RunFile,
)

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


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub at whose address nothing listens."""
    hub = pytest.importorskip("huggingface_hub", reason="the extra 'hf' is not installed")
    pytest.importorskip("datasets", reason="the extra 'hf' is not installed")
    monkeypatch.setattr(hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(hub, "create_repo", hub.HfApi().create_repo)  # made with the endpoint
    monkeypatch.setenv("HF_TOKEN", "hf_none")


@pytest.mark.usefixtures("no_hub")
def test_a_hub_that_cannot_be_reached_is_told_in_one_line(tmp_path: Path) -> None:
    """The hub's HTTP library has errors of its own, which ended `shoal run new` in a traceback."""
    with pytest.raises(DataUnavailable, match="the commit of a/b is not known: "):
        commit_of("a/b")
    with pytest.raises(BaseUnavailable, match="refused"):
        published("a/b", cache_dir=tmp_path)
    with pytest.raises(NotPushed, match="refused"):
        push(tmp_path, "a/b", message="an export")
    with pytest.raises(DataUnavailable, match=r"a/b: .*refused"):
        open_data(
            RunFile(data=HfData(dataset="a/b")),
            peer_id=ANNA,
            cache_dir=tmp_path,
            data_dir=tmp_path,
        )


@pytest.mark.usefixtures("no_hub")
def test_documents_that_cannot_be_read_any_more_are_an_error_of_the_data() -> None:
    import huggingface_hub

    class EndsEarly:
        num_shards = 1

        def shard(self, num_shards: int, index: int) -> EndsEarly:
            return self

        def skip(self, n: int) -> EndsEarly:
            return self

        def __iter__(self) -> Iterator[Mapping[str, Any]]:
            yield {"text": "a"}
            huggingface_hub.HfApi().dataset_info("a/b")

    rows = iter(Streamed(EndsEarly()).shard(1, 0))
    assert next(rows) == {"text": "a"}
    with pytest.raises(DataUnavailable, match="refused"):
        next(rows)


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


DATASET = "datasets.packaged_modules.{0}.{0}"


def test_a_dataset_is_read_from_its_own_files_only() -> None:
    own = "hf://datasets/a/b@c0ffee/"
    check_files("a/b", DATASET.format("parquet"), {"train": [own + "x.parquet"], "test": []})
    for file in (
        "/home/anna/.ssh/id_ed25519",
        "http://192.168.0.1/status.json",
        "hf://datasets/a/bc@c0ffee/x.json",
        "zip://x.json::/home/anna/mine.zip",
        own + "../../../x.json",
    ):
        with pytest.raises(DataUnavailable, match="refers to a file outside of it"):
            check_files("a/b", DATASET.format("json"), {"train": [own + "y.json"], "test": [file]})
    with pytest.raises(DataUnavailable, match="has the format 'webdataset'"):
        check_files("a/b", DATASET.format("webdataset"), {"train": [own + "x.tar"]})


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


def test_the_real_datasets_package_says_which_files_it_would_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra 'hf' is not installed")
    diary = tmp_path / "diary.txt"
    diary.write_text("mine")
    builder = datasets.load_dataset_builder("text", data_files=[str(diary)])
    with pytest.raises(DataUnavailable, match=r"a/b refers to a file .*diary.txt"):
        check_files("a/b", type(builder).__module__, builder.config.data_files)


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HfData:
    """A recipe whose tokenizer has come from the hub."""
    tokenizers = pytest.importorskip("tokenizers", reason="the extra 'hf' is not installed")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<e>": 0, "a": 1, "b": 2}, "<e>"))
    made.save(str(tmp_path / "words.json"))
    found = (tmp_path / "words.json", "<e>")
    monkeypatch.setattr("peer.data.hub.hub_tokenizer_file", lambda *named: found)
    return HfData(dataset="a/b", tokenizer="a/words")


def test_texts_of_the_hub_are_encoded_in_a_process_of_their_own(
    words: HfData, tmp_path: Path
) -> None:
    tokenize, facts = _in_worker(words, tmp_path, vocabulary=3)
    assert [tokens.tolist() for tokens in tokenize(["a", "ab", "b"])] == [[1, 0], [0, 0], [2, 0]]
    assert (facts.end, facts.vocabulary) == (0, 3)
    with pytest.raises(DataUnavailable, match="has 3 tokens, the model has 2"):
        _in_worker(words, tmp_path, vocabulary=2)


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


def opened_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, features: Any, **columns: Any
) -> Data:
    """A dataset whose author has written these types of columns into its file, opened."""
    pyarrow = pytest.importorskip("pyarrow", reason="the extra 'hf' is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    datasets = pytest.importorskip("datasets")
    declared = json.dumps({"info": {"features": features}}).encode()
    # Types that do not suit the declared ones would be taken instead of them.
    image = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    types: dict[str | None, Any] = {
        **{"Image": image, "Audio": image, "Video": image, "Pdf": image, "Value": None},
        "List": pyarrow.list_(image),
        None: pyarrow.struct([("name", pyarrow.string()), ("photo", image)]),
    }
    arrays = {
        name: pyarrow.array(column, types[features[name].get("_type")])
        for name, column in columns.items()
    }
    table = pyarrow.table(arrays).replace_schema_metadata({b"huggingface": declared})
    parquet.write_table(table, tmp_path / "x.parquet")
    builder = datasets.load_dataset_builder(
        "parquet", data_files=str(tmp_path / "x.parquet"), cache_dir=str(tmp_path / "cache")
    )
    # From here on as if it had come from the hub.
    builder.config.data_files = {"train": ["hf://datasets/a/b@c0ffee/x.parquet"]}
    monkeypatch.setattr("peer.data.hub.checked_commit", lambda *named: "c0ffee")
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *named, **more: builder)
    streaming = builder.as_streaming_dataset

    def streamed(split: str) -> Any:
        builder.config.data_files = {"train": [str(tmp_path / "x.parquet")]}
        return streaming(split=split)

    monkeypatch.setattr(builder, "as_streaming_dataset", streamed)
    return open_data(
        RunFile(data=HfData(dataset="a/b", held_out=0.2, sequence_length=32)),
        peer_id=ANNA,
        cache_dir=tmp_path / "tokens",
        data_dir=tmp_path,
    )


TEXT = {"dtype": "string", "_type": "Value"}
DOCUMENTS = [f"{number} is a number. " * 30 for number in range(100)]


@pytest.mark.parametrize(
    "nested",
    [
        lambda image: image,
        lambda image: {"_type": "List", "feature": image},
        lambda image: {"name": TEXT, "photo": image},
    ],
    ids=["image", "list", "struct"],
)
def test_images_beside_the_text_of_a_dataset_are_not_fetched(
    nested: Any, network: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They had a joiner's machine send requests to any address of its own network."""
    pytest.importorskip("PIL", reason="Pillow, which decodes images, is not installed")
    image = {"bytes": None, "path": network}
    declared = nested({"_type": "Image"})
    value: Any = image
    if "photo" in declared:
        value = {"name": "a", "photo": image}
    elif declared["_type"] == "List":
        value = [image]
    data = opened_with(
        tmp_path,
        monkeypatch,
        {"text": TEXT, "extra": declared},
        text=DOCUMENTS,
        extra=[value] * len(DOCUMENTS),
    )
    assert data.train.next(4).shape == (4, 33)
    assert LocalNetwork.asked == []


@pytest.mark.parametrize("kind", ["Image", "Audio", "Video", "Pdf"])
def test_a_column_of_no_text_is_refused_before_its_first_row(
    kind: str, network: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"bytes": None, "path": network}] * 10
    with pytest.raises(DataUnavailable, match=f"the column 'text' is no text, but {kind}"):
        opened_with(tmp_path, monkeypatch, {"text": {"_type": kind}}, text=rows)
    assert LocalNetwork.asked == []


def test_a_dataset_without_the_column_says_which_ones_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataUnavailable, match="no column 'text'; the columns are body: set data"):
        opened_with(tmp_path, monkeypatch, {"body": TEXT}, body=DOCUMENTS)
