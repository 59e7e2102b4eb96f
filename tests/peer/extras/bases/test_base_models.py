"""The published model that a run begins from: named by an author, verified by peers."""

from __future__ import annotations

import json
import resource
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from dht.identity import PeerId
from peer import cli
from peer.data.sources import open_data
from peer.data.text.downloads import file_sha256
from peer.errors import DataUnavailable, RunFileError
from peer.extras.bases.base_models import (
    BaseUnavailable,
    base_folder,
    missing_bytes,
    missing_files,
    published,
)
from peer.model.recipes import build_model
from peer.model.recipes.hf import BaseUnfit
from peer.run_file.places import BaseModel, base_of, pinned, place_of
from peer.run_file.reading import parse
from peer.run_file.sections import FilesData, FileSource, HfModel, RunFile
from peer.run_file.writing import to_toml
from tests.peer.extras.bases.published_model import NAME, publish
from tests.peer.hub_server import COMMIT, Hub, hub_server

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
huggingface_hub = pytest.importorskip("huggingface_hub")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish(tmp_path_factory.mktemp("published") / "tiny")


@pytest.fixture(scope="module")
def in_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = publish(tmp_path_factory.mktemp("published") / "sharded", shard="40KB")
    assert len(list(found.glob("*.safetensors"))) > 2
    return found


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "shoal" / "data"


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_server({NAME: folder}) as served:
        at_hub(served, tmp_path, monkeypatch)
        yield served


def at_hub(served: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let huggingface_hub use the server, as ``HF_ENDPOINT`` does when it is imported."""
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", served.url)
    template = served.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_STORED_TOKENS_PATH", str(tmp_path / "no-tokens"))
    monkeypatch.delenv("HF_TOKEN", raising=False)


def run_from(named: str) -> RunFile:
    found = published(named)
    model = HfModel(
        config=found.config,
        config_unset=list(found.config_unset),
        base=found.source,
        base_files=list(found.files),
    )
    return parse(to_toml(RunFile(model=model)))


def same(model: torch.nn.Module, folder: Path) -> bool:
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    found = model.state_dict()
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name].float()) for name in expected
    )


def test_a_run_begins_from_a_model_of_the_hub(
    hub: Hub, home: Path, folder: Path, tmp_path: Path
) -> None:
    run = run_from(NAME)
    assert base_of(run.model) == BaseModel(
        f"{NAME}@{COMMIT}",
        tuple(place_of(name) for name in run.model.base_files),  # type: ignore[union-attr]
    )
    assert not any("store" in path for path, _ in hub.asked)  # the author downloads no weights
    assert missing_files(run, cache_dir=home) != ()
    size = (folder / "model.safetensors").stat().st_size
    assert missing_bytes(run, cache_dir=home) == size
    found = base_folder(run, cache_dir=home, data_dir=tmp_path)
    assert same(build_model(run, base=found), folder)
    assert missing_files(run, cache_dir=home) == ()
    assert missing_bytes(run, cache_dir=home) == 0
    hub.asked.clear()
    assert base_folder(run, cache_dir=home, data_dir=tmp_path) == found
    assert hub.asked == []


def test_a_download_from_the_hub_goes_on_where_it_ended(
    hub: Hub, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_from(NAME)
    hub.ends_after = [10_000, 20_000]
    monkeypatch.setattr("peer.data.text.downloads.PAUSES_S", (0.0, 0.0))
    base_folder(run, cache_dir=home, data_dir=tmp_path)
    ranges = [wanted for path, wanted in hub.asked if path.startswith("/store/")]
    assert ranges == [None, "bytes=10000-", "bytes=30000-"]


def test_a_gated_model_is_had_with_the_token_of_the_user_which_goes_to_the_hub_alone(
    hub: Hub, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_from(NAME)
    hub.token = "hf_mine"
    with pytest.raises(BaseUnavailable, match=f"answered 401 .*{NAME} and log in with `hf auth"):
        base_folder(run, cache_dir=home, data_dir=tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    base_folder(run, cache_dir=home, data_dir=tmp_path)
    assert hub.seen_by_store == [None]


def test_a_base_in_several_files_is_read_whole(
    in_shards: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub_server({NAME: in_shards}) as hub:
        at_hub(hub, tmp_path, monkeypatch)
        run = run_from(NAME)
        found = base_folder(run, cache_dir=home, data_dir=tmp_path)
    assert same(build_model(run, base=found), in_shards)


def test_a_size_that_a_server_does_not_tell_is_unknown(hub: Hub, home: Path, folder: Path) -> None:
    run = run_from(NAME)
    hub.token = "only-with-it"
    assert missing_bytes(run, cache_dir=home) is None


def test_a_run_begins_from_a_folder_in_the_data_folder(
    folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    run = run_from("tiny")
    found = base_folder(run, cache_dir=home, data_dir=folder.parent)
    assert same(build_model(run, base=found), folder)
    with pytest.raises(BaseUnavailable, match=r"there is no .*elsewhere.tiny.model.safetensors;"):
        base_folder(run, cache_dir=home, data_dir=folder.parent / "elsewhere")


@pytest.mark.parametrize("named", ["./nowhere", "nowhere", "../a/b", "model.gguf"])
def test_a_folder_that_is_not_there_is_told_from_a_name_on_the_hub(named: str, home: Path) -> None:
    """`--base ./nowhere` was refused with the hub's rules for names."""
    with pytest.raises(BaseUnavailable, match="it is no folder here; a model on the hub is named"):
        published(named)


def test_a_base_with_another_hash_is_refused_with_both(folder: Path, home: Path) -> None:
    run = run_from(str(folder))
    wrong = "model.safetensors#sha256=" + "0" * 64
    run = msgspec.structs.replace(run, model=msgspec.structs.replace(run.model, base_files=[wrong]))
    with pytest.raises(BaseUnavailable, match=r"has the sha256 [0-9a-f]{64}, .* demands 000"):
        base_folder(run, cache_dir=home, data_dir=folder.parent)


def test_the_hashes_of_a_base_are_part_of_the_run_id(folder: Path, home: Path) -> None:
    run = run_from(str(folder))
    other = "model.safetensors#sha256=" + "0" * 64
    changed = msgspec.structs.replace(run.model, base_files=[other])
    assert msgspec.structs.replace(run, model=changed).run_id != run.run_id


def test_a_model_without_safetensors_is_refused(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text('{"model_type": "llama"}')
    (pickled / "pytorch_model.bin").write_bytes(b"pickle")
    told = "has no .safetensors files, but pytorch_model.bin: loading these can run code"
    with pytest.raises(BaseUnavailable, match=told):
        published(str(pickled))
    with hub_server({NAME: pickled}) as hub:
        at_hub(hub, tmp_path, monkeypatch)
        with pytest.raises(BaseUnavailable, match=told):
            published(NAME)


def test_a_folder_with_damaged_weights_is_refused(folder: Path, home: Path, tmp_path: Path) -> None:
    """Earlier, the hash of a file that was cut off got into the run file."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(BaseUnavailable, match=r"model.safetensors is damaged .*; save or fetch it"):
        published(str(copy))


def test_weights_that_lack_a_part_of_the_model_are_refused(folder: Path, home: Path) -> None:
    run = run_from(str(folder))
    base = base_folder(run, cache_dir=home, data_dir=folder.parent)
    larger = {**run.model.config, "num_hidden_layers": 3}  # type: ignore[union-attr]
    run = msgspec.structs.replace(run, model=msgspec.structs.replace(run.model, config=larger))
    with pytest.raises(BaseUnfit, match=r"model.layers.2.* not in its files"):
        build_model(run, base=base)


def test_a_null_of_a_published_configuration_stays_null(home: Path, tmp_path: Path) -> None:
    """The sliding window of Mistral is 4096 tokens if the key is left out."""
    config = transformers.MistralConfig(sliding_window=None, hidden_size=32)
    config.save_pretrained(tmp_path / "mistral")
    save_file({}, tmp_path / "mistral" / "model.safetensors")
    run = run_from(str(tmp_path / "mistral"))
    assert isinstance(run.model, HfModel)
    again = dict.fromkeys(run.model.config_unset or ()) | run.model.config
    assert again["sliding_window"] is None
    model: Any = build_model(
        msgspec.structs.replace(run, model=msgspec.structs.replace(run.model, base=None)),
        weights=False,
    )
    assert model.config.sliding_window is None


@pytest.mark.parametrize(
    ("base", "files", "told"),
    [
        ("owner/name@main", ["m.safetensors#sha256=" + "0" * 64], "commit, 40 hex digits"),
        (f"{NAME}@{COMMIT}", None, "model.base_files is unset"),
        (f"{NAME}@{COMMIT}", ["m.safetensors"], "needs the hash"),
        (f"{NAME}@{COMMIT}", ["m.bin#sha256=" + "0" * 64], "other formats can run code"),
        (f"{NAME}@{COMMIT}", ["../m.safetensors#sha256=" + "0" * 64], "without a folder"),
        ("https://example.org/m/", ["m.safetensors#sha256=" + "0" * 64], "a model on the hub"),
        ("../mine", ["m.safetensors#sha256=" + "0" * 64], "inside the data folder"),
        (None, ["m.safetensors#sha256=" + "0" * 64], "model.base is unset"),
    ],
)
def test_a_base_against_its_rules_is_refused(
    base: str | None, files: list[str] | None, told: str
) -> None:
    text = to_toml(RunFile(model=HfModel(config={"model_type": "llama"}, base_files=files)))
    if base is not None:
        text = text.replace("# base = ...", f'base = "{base}"')
    with pytest.raises(RunFileError) as raised:
        parse(text)
    assert told in str(raised.value)


def test_a_new_run_file_has_commit_and_hashes(
    hub: Hub, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["run", "new", "--base", NAME, "--data", "python_stdlib"]) == 0
    output = capsys.readouterr().out
    run = parse(output)
    assert isinstance(run.model, HfModel)
    assert run.model.base == f"{NAME}@{COMMIT}"
    (file,) = run.model.base_files or []
    assert file.startswith("model.safetensors#sha256=")
    assert "Base     owner/tiny@c0ffee000000, which the founder alone fetches" in output


def test_a_disk_that_fills_leaves_nothing_half_written_under_the_name(
    hub: Hub, home: Path, tmp_path: Path, folder: Path
) -> None:
    run = run_from(NAME)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(BaseUnavailable, match=r"takes no more of it .* free some space"):
            base_folder(run, cache_dir=home, data_dir=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    (part,) = (home / "models").iterdir()
    assert part.suffix == ".part"
    assert 0 < part.stat().st_size <= 50_000
    found = base_folder(run, cache_dir=home, data_dir=tmp_path)
    assert same(build_model(run, base=found), folder)
    assert [path.suffix for path in (home / "models").iterdir()] == [""]


def test_a_founder_without_its_base_is_told_how_to_get_it(folder: Path, home: Path) -> None:
    run = run_from(str(folder))
    with pytest.raises(ValueError, match=r"pass base=peer\.fetch_base\(run\)"):
        build_model(run)
    build_model(run, draw=False)  # a peer that joins gets the parameters of the run


def test_a_base_is_fetched_only_by_its_names(folder: Path, home: Path, tmp_path: Path) -> None:
    """An index beside the weights, which has no hash, is not followed."""
    run = run_from(str(folder))
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "/etc/passwd"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    try:
        base = base_folder(run, cache_dir=home, data_dir=folder.parent)
        assert base is not None
        assert {path.name for path in base.iterdir()} == {
            "generation_config.json",
            "model.safetensors",
        }
    finally:
        (folder / "model.safetensors.index.json").unlink()


def test_a_tokenizer_larger_than_the_base_is_refused(
    folder: Path, home: Path, tmp_path: Path
) -> None:
    made = pytest.importorskip("tokenizers").ByteLevelBPETokenizer()
    made.train_from_iterator(["so it is"] * 9, vocab_size=262, special_tokens=["<|end|>"])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.jsonl").write_text('{"text": "so it is"}\n' * 99)
    data = FilesData(
        sources=[FileSource(files=["a.jsonl"])],
        tokenizer=pinned("tokenizer.json", file_sha256(tmp_path / "tokenizer.json")),
        end_token="<|end|>",
    )
    run = msgspec.structs.replace(run_from(str(folder)), data=data)
    with pytest.raises(DataUnavailable, match=r"has 26\d tokens, the model has 256: use the token"):
        open_data(run, peer_id=PeerId("anna"), cache_dir=home, data_dir=tmp_path)
