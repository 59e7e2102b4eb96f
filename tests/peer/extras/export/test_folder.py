"""An exported folder is a model that transformers loads as it is, or it is not there."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from blake3 import blake3
from safetensors import safe_open

from averaging.history.merged_map import MergedMap
from peer.errors import NotWritten, Unusable
from peer.extras.export.card import Measured, RunFacts, card, facts_in_folder, spread
from peer.extras.export.folder import RUN_FILE, Export, check_exportable, write_folder
from peer.extras.export.parameters import model_of
from peer.extras.export.tokenizer import bytes_tokenizer
from peer.model.recipes import held_out_loss
from peer.model.weights import load_weights
from peer.run_file.sections import CustomModel, RunFile
from peer.storage.checkpoint import CheckpointFolder
from peer.storage.home import OUTER
from peer.storage.outer_state import OuterState, load_outer
from tests.peer.commands_said import said
from tests.peer.extras.export.exported_run import LLAMA, RUN, save_run, trained_model
from tests.peer.full_disk import files_of_at_most

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

TEXT = "def f(x):\n    return x  # Ā"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("peer")
    save_run(folder)
    return folder


def load(folder: Path) -> tuple[Any, Any]:
    model, told = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(told.values()), told
    return model.eval(), transformers.AutoTokenizer.from_pretrained(folder)


def test_an_exported_run_is_loaded_by_transformers_with_its_tokenizer(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model"
    code, output, errors = said(["export", str(run_dir), str(out), "--to", "hf", "--json"], capsys)
    assert code == 0, errors
    record = json.loads(output)
    assert record["run_id"] == RUN.run_id and record["tokens"] == 3000
    assert {path.name for path in out.iterdir()} == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        RUN_FILE,
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert blake3((out / RUN_FILE).read_bytes()).hexdigest() == RUN.run_id
    model, tokenizer = load(out)
    tokens = tokenizer(TEXT, return_tensors="pt")
    assert bytes(tokens["input_ids"][0].tolist()) == TEXT.encode()
    with torch.no_grad():
        ours = trained_model(RUN)(tokens["input_ids"])
        torch.testing.assert_close(model(**tokens).logits, ours, rtol=1e-5, atol=1e-5)
    assert model.generation_config.eos_token_id == 0
    generated = model.generate(**tokens, max_new_tokens=2)
    assert generated.shape[1] <= tokens["input_ids"].shape[1] + 2
    with safe_open(out / "model.safetensors", "pt") as file:
        assert file.metadata()["shoal_model"] == record["model"]


def test_a_model_of_transformers_comes_back_with_the_same_parameters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = msgspec.structs.replace(RUN, model=LLAMA)
    model = trained_model(run)
    save_run(tmp_path / "peer", run, model)
    out = tmp_path / "model"
    assert said(["export", str(tmp_path / "peer"), str(out), "--to", "hf"], capsys)[0] == 0
    loaded, _ = load(out)
    state, expected = loaded.state_dict(), model.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert loaded.config.eos_token_id == 0


@pytest.mark.parametrize("model", [RUN.model, LLAMA])
def test_bf16_is_the_rounded_model(
    model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = msgspec.structs.replace(RUN, model=model)
    save_run(tmp_path / "peer", run)
    options = ["--to", "hf", "--dtype", "bf16"]
    code, _, errors = said(
        ["export", str(tmp_path / "peer"), str(tmp_path / "b"), *options], capsys
    )
    assert code == 0, errors
    loaded, _ = load(tmp_path / "b")
    assert loaded.dtype == torch.bfloat16
    tokens = torch.arange(32)[None]
    with torch.no_grad():
        got = loaded(tokens).logits.float()
        ours = trained_model(run).to(torch.bfloat16)(tokens)
    expected = (ours if isinstance(ours, torch.Tensor) else ours.logits).float()
    torch.testing.assert_close(got, expected, rtol=0.05, atol=0.05)


def test_a_file_in_bf16_goes_back_into_the_model(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.safetensors"
    assert said(["export", str(run_dir), str(out), "--dtype", "bf16"], capsys)[0] == 0
    model, expected = trained_model(replace_seed(RUN)), trained_model(RUN)
    load_weights(model, out)
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs.to(torch.bfloat16).float())


def replace_seed(run: RunFile) -> RunFile:
    return msgspec.structs.replace(run, random_seed=5)


def test_the_parameters_of_a_folder_are_those_of_the_run(run_dir: Path) -> None:
    outer = load_outer(CheckpointFolder(run_dir / OUTER))
    assert outer is not None
    sequences = torch.randint(0, 256, (4, 33)).numpy()
    assert held_out_loss(model_of(outer), sequences) == held_out_loss(trained_model(RUN), sequences)


# --- facts ------------------------------------------------------------------------------------


def described(outer: OuterState) -> str:
    return card(outer, RunFacts(), tokenizer=None, dtype="float32", kind="small")


def test_the_card_has_the_facts_and_names_nobody_who_has_not_signed_for_it(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model"
    assert said(["export", str(run_dir), str(out), "--to", "hf"], capsys)[0] == 0
    card = (out / "README.md").read_text()
    assert "\nlicense: apache-2.0\n" in card
    assert "A run of \\<b\\>tests\\</b\\>." in card
    assert f"| run | `{RUN.run_id}` |" in card
    assert "| tokens | 3,000 in sequences of 32 |" in card
    assert "| peers | 3 peers |" in card
    assert not any(name in card for name in ("anna", "cla", "guest"))
    assert "| homepage | <https://example.org/small> |" in card
    assert "| 1,100 | 2004-11-09 11:33 UTC | 5.5000 | 7.9348 |" in card
    assert "2.2500 nats per token at 3,100 tokens" in card


def test_facts_in_a_folder_without_a_log_are_those_of_the_parameters(tmp_path: Path) -> None:
    outer = save_run(tmp_path)
    (tmp_path / "events.jsonl").unlink()
    assert facts_in_folder(tmp_path, outer) == RunFacts()
    assert "| peers | 3 peers |" in described(outer)


def test_the_card_of_a_model_of_one_peer_does_not_speak_of_many(run_dir: Path) -> None:
    outer = load_outer(CheckpointFolder(run_dir / OUTER))
    assert outer is not None
    assert "Many peers trained this model" in described(outer)
    (anna, mark), *_ = outer.states[0].merged.items()
    alone = (replace(state, merged=MergedMap({anna: mark})) for state in outer.states)
    text = described(replace(outer, states=tuple(alone)))
    assert "One peer trained this model with Shoal" in text and "Many peers" not in text


def test_a_long_history_is_thinned_with_its_ends_kept() -> None:
    long = tuple(Measured(version, 1.0, 1000 * version) for version in range(1000))
    kept = spread(long, 10)
    assert (len(kept), kept[0].version, kept[-1].version) == (10, 0, 999)
    assert spread(kept, 10) == kept


# --- what cannot be written -------------------------------------------------------------------


@pytest.mark.parametrize("model", [RUN.model, LLAMA])
@pytest.mark.parametrize("size", [300, 5_000, 60_000])
def test_nothing_is_left_when_the_disk_fills_in_the_middle(
    model: Any, size: int, tmp_path: Path
) -> None:
    run = msgspec.structs.replace(RUN, model=model)
    outer = save_run(tmp_path / "peer", run)
    place = tmp_path / "place"
    place.mkdir()
    whole = Export(outer=outer, tokenizer=bytes_tokenizer(32))
    with files_of_at_most(size), pytest.raises(NotWritten, match="cannot write"):
        write_folder(whole, place / "model")
    assert list(place.iterdir()) == []
    write_folder(whole, place / "model")
    assert [path.name for path in place.iterdir()] == ["model"]


def test_a_folder_that_has_something_in_it_is_not_touched(
    run_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "mine").write_text("kept")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    code, _, errors = said(["export", str(run_dir), ".", "--to", "hf"], capsys)
    assert code == 2 and "cannot write .: it exists" in errors and errors.count("\n") == 1
    (tmp_path / "here").rmdir()
    for out, why in ((tmp_path, "it exists"), (tmp_path / "no" / "a", "its folder does not exist")):
        code, _, errors = said(["export", str(run_dir), str(out), "--to", "hf"], capsys)
        assert code == 2 and why in errors and errors.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    shutil.rmtree(tmp_path / "empty", ignore_errors=True)
    (tmp_path / "empty").mkdir()
    assert said(["export", str(run_dir), str(tmp_path / "empty"), "--to", "hf"], capsys)[0] == 0


def test_models_that_transformers_does_not_know_are_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Unusable):
        check_exportable(RunFile(model=CustomModel()))
    capped = msgspec.structs.replace(RUN.model, logit_soft_cap=30.0, qk_norm=True)
    save_run(tmp_path / "peer", msgspec.structs.replace(RUN, model=capped))
    out = str(tmp_path / "model")
    code, _, errors = said(["export", str(tmp_path / "peer"), out, "--to", "hf"], capsys)
    assert code == 2 and "logit_soft_cap = 30 and qk_norm = true" in errors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["peer"]


def test_a_run_without_a_tokenizer_is_exported_without_one(tmp_path: Path) -> None:
    outer = save_run(tmp_path / "peer")
    write_folder(Export(outer=outer), tmp_path / "model")
    card = (tmp_path / "model" / "README.md").read_text()
    assert "AutoTokenizer" not in card and "names no tokenizer" in card
    assert not (tmp_path / "model" / "tokenizer.json").exists()
