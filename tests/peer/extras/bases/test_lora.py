"""Adapters of a published model: what is trained, exchanged and exported."""

from __future__ import annotations

import importlib.util
import json
import math
import socket
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest
import torch

from peer import cli
from peer.errors import RunFileError
from peer.extras.bases.base_models import base_folder
from peer.extras.bases.lora import QuantizerMissing, merged
from peer.model.naming import named_parameters
from peer.model.recipes import build_model, build_optimizer, next_token_loss
from peer.model.recipes.counting import measured
from peer.run_file.reading import parse
from peer.run_file.sections import AdamwInner, HfModel, Lora, RunFile
from peer.run_file.writing import to_toml
from peer.trainer.computing.choices import Choices
from peer.trainer.computing.engine import Engine
from peer.trainer.computing.probing import probe
from peer.trainer.needs import needs_of
from peer.trainer.parameters import exchanged_tensors, frozen_parameters, recipe_layout
from tests.peer.extras.bases.adapted_run import LORA, adapted_model, adapted_run
from tests.peer.extras.bases.published_model import publish
from tests.peer.extras.export.exported_run import save_run

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

TOKENS = torch.arange(96).reshape(3, 32) % 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish(tmp_path_factory.mktemp("published") / "tiny")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(TOKENS).logits
    return found.float()


def with_lora(run: RunFile, **changed: Any) -> RunFile:
    assert isinstance(run.model, HfModel) and run.model.lora is not None
    lora = msgspec.structs.replace(run.model.lora, **changed)
    return msgspec.structs.replace(run, model=msgspec.structs.replace(run.model, lora=lora))


def test_a_model_with_adapters_begins_as_its_base_and_trains_the_adapters_alone(
    folder: Path, cache: Path
) -> None:
    run = adapted_run(folder)
    base = base_folder(run, cache_dir=cache, data_dir=folder.parent)
    model = build_model(run, base=base).eval()
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert torch.equal(logits(model), logits(plain))
    names = set(exchanged_tensors(model, "own"))
    assert len(names) == 2 * 2 * 2
    assert all(".lora_A." in name or ".lora_B." in name for name in names)
    assert recipe_layout(run).size == sum(
        p.numel() for p in exchanged_tensors(model, "own").values()
    )
    optimizer = build_optimizer(run, model)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters() if p.requires_grad}


@pytest.mark.parametrize("lora", [LORA, None])
def test_a_model_that_begins_from_a_published_one_is_in_training_and_can_recompute(
    lora: Lora | None, folder: Path, cache: Path
) -> None:
    run = adapted_run(folder)
    assert isinstance(run.model, HfModel)
    run = msgspec.structs.replace(run, model=msgspec.structs.replace(run.model, lora=lora))
    model = build_model(run, base=base_folder(run, cache_dir=cache, data_dir=folder.parent))
    assert all(module.training for module in model.modules())
    saved_bytes = []
    for lean in (False, True):
        engine = Engine(run, model, build_optimizer(run, model), Choices(micro_batch=1, lean=lean))
        saved_bytes.append(probe(engine, 1).peak_bytes)
    assert saved_bytes[1] < saved_bytes[0]


def test_the_first_adapters_have_the_same_bits_for_the_same_seed(folder: Path, cache: Path) -> None:
    run = adapted_run(folder)
    base = base_folder(run, cache_dir=cache, data_dir=folder.parent)
    first, again = (dict(named_parameters(build_model(run, base=base))) for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    down = first["model.layers.0.self_attn.q_proj.lora_A.default.weight"]
    assert float(down.detach().std()) == pytest.approx(1 / math.sqrt(3 * 32), rel=0.2)
    other = msgspec.structs.replace(run, random_seed=1)
    changed = dict(named_parameters(build_model(other, base=base)))
    assert not torch.equal(changed["model.layers.0.self_attn.q_proj.lora_A.default.weight"], down)


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("qq_proj", "'qq_proj', which is the name of no layer of the model; .* q_proj, k_proj"),
        ("embed_tokens", "'embed_tokens', which is the name of no linear layer"),
    ],
)
def test_a_target_that_matches_nothing_is_refused_with_the_names_of_layers(
    folder: Path, target: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = with_lora(adapted_run(folder), targets=["q_proj", target])
    with pytest.raises(RunFileError, match=told):
        recipe_layout(run)
    (tmp_path / "run.toml").write_text(to_toml(run))
    assert cli.run(["run", "check", str(tmp_path / "run.toml")]) == 2
    assert target in capsys.readouterr().err


def test_a_run_file_with_adapters_is_read_back_as_written(folder: Path) -> None:
    run = adapted_run(folder)
    assert parse(to_toml(run)) == run
    assert "[model.lora]" in to_toml(run)
    with pytest.raises(RunFileError, match=r"model\.lora\.rank is 0; it must be .* from 1"):
        parse(to_toml(run).replace("rank = 4", "rank = 0"))
    with pytest.raises(RunFileError, match=r"did you mean 'rank'|rank"):
        parse(to_toml(run).replace("rank = 4", "rang = 4"))
    without = msgspec.structs.replace(run.model, base=None, base_files=None)
    with pytest.raises(RunFileError, match=r"model\.base is unset; \[model\.lora\] adapts"):
        parse(to_toml(msgspec.structs.replace(run, model=without)))


@pytest.mark.parametrize("base_dtype", ["fp32", "bf16"])
def test_adapters_are_trained_in_fp32_on_a_base_of_either_type(
    folder: Path, cache: Path, base_dtype: str
) -> None:
    run = with_lora(adapted_run(folder), base_dtype=base_dtype)
    run = msgspec.structs.replace(run, inner=AdamwInner(learning_rate=0.02))
    base = base_folder(run, cache_dir=cache, data_dir=folder.parent)
    model = build_model(run, base=base)
    before = frozen_parameters(model)
    choices = Choices(precision="fp32", micro_batch=2, compile=False, lean=False)
    engine = Engine(run, model, build_optimizer(run, model), choices)
    losses = []
    for _ in range(20):
        losses.append(float(engine.gradients(TOKENS)))
        engine.apply()
    assert losses[-1] < losses[0] - 0.01
    assert frozen_parameters(model) == before
    assert all(p.dtype == torch.float32 for p in model.parameters() if p.requires_grad)
    expected = torch.float32 if base_dtype == "fp32" else torch.bfloat16
    adapted: Any = model
    assert adapted.get_output_embeddings().weight.dtype == expected


def test_merged_adapters_compute_what_adapters_compute(folder: Path, cache: Path) -> None:
    model = adapted_model(adapted_run(folder), folder, cache)
    expected = logits(model)
    whole = merged(model)
    torch.testing.assert_close(logits(whole), expected, rtol=1e-4, atol=1e-5)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert whole.state_dict().keys() == plain.state_dict().keys()
    assert not torch.allclose(logits(plain), expected, atol=1e-3)


@pytest.fixture
def run_dir(folder: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a peer of a run with adapters, whose base is in its data folder."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    run = adapted_run(folder)
    save_run(tmp_path / "peer", run, adapted_model(run, folder, cache))
    (tmp_path / "peer" / "data").mkdir()
    (tmp_path / "peer" / "data" / folder.name).symlink_to(folder)
    return tmp_path / "peer"


def test_a_run_with_adapters_is_exported_as_a_model_of_transformers(
    run_dir: Path, folder: Path, cache: Path, tmp_path: Path
) -> None:
    assert cli.run(["export", str(run_dir), str(tmp_path / "out"), "--to", "hf"]) == 0
    model, told = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(told.values()), told
    expected = logits(adapted_model(adapted_run(folder), folder, cache))
    torch.testing.assert_close(logits(model.eval()), expected, rtol=1e-4, atol=1e-5)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| base | tiny, adapted |" in card


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of peft
def test_adapters_are_exported_as_peft_loads_them_without_their_base(
    run_dir: Path, folder: Path, cache: Path, tmp_path: Path
) -> None:
    (run_dir / "data" / folder.name).unlink()
    # Here, as it takes two seconds to import, which every worker would spend that collects tests.
    peft = pytest.importorskip("peft", reason="the extra 'hf' is not installed")
    assert cli.run(["export", str(run_dir), str(tmp_path / "out"), "--to", "peft"]) == 0
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == folder.name
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model = peft.PeftModel.from_pretrained(plain, tmp_path / "out").eval()
    expected = logits(adapted_model(adapted_run(folder), folder, cache))
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)


def test_a_run_without_adapters_has_none_to_export(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_run(tmp_path / "peer")
    assert cli.run(["export", str(tmp_path / "peer"), str(tmp_path / "out"), "--to", "peft"]) == 2
    assert "trains no adapters but a whole model; `--to hf`" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_run_with_adapters_can_be_talked_to_and_measured(
    run_dir: Path, tmp_path: Path, folder: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["say", str(run_dir), "abc", "--seed", "1", "--max-tokens", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 5
    (tmp_path / "text.txt").write_text("A text. " * 50)
    arguments = ["eval", str(run_dir), "--text", str(tmp_path / "text.txt"), "--json"]
    assert cli.run(arguments) == 0
    (loss,) = json.loads(capsys.readouterr().out)["losses"]
    model = adapted_model(adapted_run(folder), folder, cache)
    tokens = torch.tensor([[0, *b"A text. " * 50][:33]])
    assert loss["nats_per_token"] == pytest.approx(
        float(next_token_loss(model, tokens).detach()), rel=0.2
    )


def test_a_base_that_is_missing_is_named_with_the_remedy(
    run_dir: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_dir / "data" / folder.name).unlink()
    assert cli.run(["say", str(run_dir), "abc"]) == 2
    assert "the base model tiny cannot be used: there is no" in capsys.readouterr().err


def test_the_needs_of_a_run_with_adapters_count_the_base(folder: Path) -> None:
    run = adapted_run(folder)
    parameters = sum(
        p.numel() for p in transformers.AutoModelForCausalLM.from_pretrained(folder).parameters()
    )
    sizes = {
        dtype: needs_of(with_lora(run, base_dtype=dtype)).frozen_bytes
        for dtype in ("fp32", "bf16", "int8", "nf4")
    }
    assert sizes["fp32"] == 4 * parameters and sizes["bf16"] == 2 * parameters
    assert sizes["nf4"] < sizes["int8"] < sizes["bf16"]
    needs = needs_of(run)
    adapters = needs.layout.size
    assert needs.device_bytes == 4 * parameters + 16 * adapters + 4 * 8  # and counts of steps
    size = measured(run.model, build_model(run, weights=False))
    assert size.frozen_bytes == 4 * parameters
    assert size.parameters == adapters


@pytest.mark.parametrize(
    ("installed", "says"),
    [(None, "'bitsandbytes' is not installed"), ("0.48.1", "0.48.1 needs a CUDA device")],
)
def test_a_base_in_few_bits_is_refused_where_bitsandbytes_does_not_work(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, installed: str | None, says: str
) -> None:
    run = with_lora(adapted_run(folder), base_dtype="nf4")
    base = base_folder(run, cache_dir=cache, data_dir=folder.parent)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    there = importlib.util.find_spec

    def find_spec(name: str) -> object:
        return installed if name == "bitsandbytes" else there(name)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setattr("peer.extras.bases.lora.version", lambda package: installed)
    with pytest.raises(QuantizerMissing, match=says) as refused:
        build_model(run, base=base)
    assert "pip install 'shoal[quantized]'" in str(refused.value)


@pytest.mark.slow  # the import of bitsandbytes takes seconds
@pytest.mark.parametrize(("base_dtype", "layer"), [("nf4", "Linear4bit"), ("int8", "Linear8bitLt")])
def test_adapters_learn_on_a_base_in_few_bits(
    folder: Path, cache: Path, base_dtype: str, layer: str
) -> None:
    pytest.importorskip("bitsandbytes", reason="the extra 'quantized' is not installed")
    losses = {}
    for dtype in (base_dtype, "bf16"):
        run = with_lora(adapted_run(folder), base_dtype=dtype)
        base = base_folder(run, cache_dir=cache, data_dir=folder.parent)
        model: Any = build_model(run, base=base)
        assert (type(model.model.layers[0].self_attn.k_proj).__name__ == layer) == (dtype != "bf16")
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        made = []
        for _ in range(8):
            loss = next_token_loss(model, TOKENS)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            made.append(float(loss.detach()))
        losses[dtype] = made
    assert losses[base_dtype][-1] < losses[base_dtype][0] - 0.02
    assert losses[base_dtype] == pytest.approx(losses["bf16"], rel=0.02)


def test_usual_targets_are_all_linear_layers_but_the_head(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["run", "new", "--base", str(folder), "--lora", "8", "--data", "python_stdlib"]
    assert cli.run(arguments) == 0
    run = parse(capsys.readouterr().out)
    assert isinstance(run.model, HfModel)
    assert run.model.lora == Lora(
        rank=8,
        alpha=16.0,
        targets=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    )
    assert LORA.targets[1] == "mlp.up_proj"


@pytest.fixture
def adapters(run_dir: Path, tmp_path: Path, folder: Path) -> Path:
    """Adapters that a run has exported, in a folder with a space in its name."""
    out = tmp_path / "my models" / "out"
    out.parent.mkdir()
    assert cli.run(["export", str(run_dir), str(out), "--to", "peft"]) == 0
    return out


SAYS = ["abc", "--temperature", "0", "--max-tokens", "8", "--json"]


def test_a_folder_of_adapters_speaks_as_the_run_does(
    run_dir: Path, adapters: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert cli.run(["say", str(run_dir), *SAYS]) == 0
    expected = json.loads(capsys.readouterr().out)["text"]
    assert cli.run(["say", str(adapters), *SAYS, "--data", str(folder.parent)]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == expected
    (adapters.parent / folder.name).symlink_to(folder)  # beside the adapters it is found
    assert cli.run(["say", str(adapters), *SAYS]) == 0, capsys.readouterr().err
    assert json.loads(capsys.readouterr().out)["text"] == expected
    (adapters / "shoal_run.json").unlink()
    assert cli.run(["say", str(adapters), *SAYS]) == 2
    assert "load them with the package peft" in capsys.readouterr().err


def test_adapters_without_their_base_or_in_a_pickle_are_one_line(
    adapters: Path,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def look_up(*arguments: object, **options: object) -> NoReturn:
        raise socket.gaierror(socket.EAI_NONAME, "there is no network")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)

    def complaint() -> str:
        capsys.readouterr()
        assert cli.run(["say", str(adapters), *SAYS]) == 2
        output, errors = capsys.readouterr()
        assert output == "" and errors.count("\n") == 1
        return errors

    assert "the base model tiny cannot be used: there is no" in complaint()
    (adapters.parent / folder.name).symlink_to(publish(tmp_path / "another", seed=2))
    assert "the run file demands" in complaint()
    (adapters.parent / folder.name).unlink()
    (adapters.parent / folder.name).symlink_to(folder)
    weights = adapters / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    assert "cannot load a model from the folder" in complaint()
    weights.rename(adapters / "adapter_model.bin")
    assert "it has no adapter_model.safetensors; other formats are not read" in complaint()
