"""Exports for llama.cpp, read back with the reader of the package ``gguf``."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from peer import cli
from peer.extras.export.tokenizer import byte_characters
from peer.run_file.sections import GptModel, HfModel, RunFile
from tests.peer.extras.export.exported_run import LLAMA, RUN, save_run
from tests.peer.full_disk import files_of_at_most

NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "blk.1.attn_norm.weight": "model.layers.1.input_layernorm.weight",
    "blk.1.ffn_gate.weight": "model.layers.1.mlp.gate_proj.weight",
    "blk.1.ffn_up.weight": "model.layers.1.mlp.up_proj.weight",
    "blk.1.ffn_down.weight": "model.layers.1.mlp.down_proj.weight",
    "blk.1.attn_v.weight": "model.layers.1.self_attn.v_proj.weight",
    "blk.1.attn_output.weight": "model.layers.1.self_attn.o_proj.weight",
}


def with_model(**changes: Any) -> RunFile:
    return msgspec.structs.replace(RUN, model=msgspec.structs.replace(RUN.model, **changes))


def in_order_of_gguf(values: torch.Tensor, heads: int) -> torch.Tensor:
    """Row 2i of a head is feature i, row 2i + 1 feature i + E/2."""
    rows = values.shape[0] // heads
    order = [h * rows + i + half for h in range(heads) for i in range(rows // 2) for half in (0, 1)]
    at = torch.tensor(order)
    odd = torch.arange(len(order)) % 2 == 1
    return values[torch.where(odd, at - 1 + rows // 2, at)]


def read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    import gguf

    found = gguf.GGUFReader(path)
    tensors = {}
    for each in found.tensors:
        shape = tuple(int(n) for n in reversed(each.shape))
        data = np.array(each.data)
        if each.tensor_type == gguf.GGMLQuantizationType.BF16:
            tensors[each.name] = torch.from_numpy(data.view(np.int16)).view(torch.bfloat16)
        else:
            assert each.tensor_type == gguf.GGMLQuantizationType.F32
            tensors[each.name] = torch.from_numpy(data)
        tensors[each.name] = tensors[each.name].view(shape)
    return tensors, {name: field.contents() for name, field in found.fields.items()}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("run", "architecture", "heads"),
    [
        (with_model(width=64, heads=4, kv_heads=2), "llama", (4, 2)),
        (with_model(width=64, heads=4, qk_norm=True, tied_head=False), "qwen3", (4, 4)),
        pytest.param(
            msgspec.structs.replace(RUN, model=LLAMA), "llama", (2, 2), marks=pytest.mark.slow
        ),  # with transformers, whose import takes seconds
    ],
)
def test_a_model_for_llama_cpp_has_the_parameters_of_the_one_for_transformers(
    run: RunFile, architecture: str, heads: tuple[int, int], dtype: str, tmp_path: Path
) -> None:
    pytest.importorskip("gguf", reason="the extra 'gguf' is not installed")
    save_run(tmp_path / "peer", run)
    options = ["--dtype", dtype]
    for to, out in (("gguf", "model.gguf"), ("hf", "hf")):
        arguments = ["export", str(tmp_path / "peer"), str(tmp_path / out), "--to", to, *options]
        assert cli.run(arguments) == 0
    ours = load_file(tmp_path / "hf" / "model.safetensors")
    tensors, fields = read(tmp_path / "model.gguf")
    assert len(tensors) == len(ours)
    for found, name in NAMES.items():
        expected = ours[name] if ours[name].ndim > 1 else ours[name].float()
        assert torch.equal(tensors[found], expected), found
    for found, name, count in zip(("attn_q", "attn_k"), ("q_proj", "k_proj"), heads, strict=True):
        expected = ours[f"model.layers.1.self_attn.{name}.weight"]
        if architecture == "llama":
            expected = in_order_of_gguf(expected, count)
        assert torch.equal(tensors[f"blk.1.{found}.weight"], expected)
    assert fields["general.architecture"] == architecture
    assert fields["shoal.run_id"] == run.run_id
    assert fields[f"{architecture}.attention.head_count_kv"] == heads[1]
    assert fields["tokenizer.ggml.tokens"] == byte_characters()
    assert not fields["tokenizer.ggml.add_bos_token"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "model.gguf", "peer"]


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (GptModel(layers=1, width=16, heads=2, context=32, mlp="gelu"), "'arcee'"),
        (GptModel(layers=1, width=16, heads=2, context=32, logit_soft_cap=30.0), "'vaultgemma'"),
        (HfModel(config={"model_type": "gpt2", "n_layer": 1}), "'gpt2'"),
    ],
)
def test_a_model_that_llama_cpp_would_compute_otherwise_is_refused(
    model: GptModel | HfModel, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_run(tmp_path / "peer", msgspec.structs.replace(RUN, model=model), small_model())
    out = tmp_path / "model.gguf"
    assert cli.run(["export", str(tmp_path / "peer"), str(out), "--to", "gguf"]) == 2
    errors = capsys.readouterr().err
    assert says in errors and "convert_hf_to_gguf.py" in errors and errors.count("\n") == 1
    assert not out.exists()


def small_model() -> torch.nn.Module:
    """A small model in place of that of a run file: what is refused is not built."""
    return torch.nn.Linear(4, 4)


def test_a_file_for_llama_cpp_needs_a_package_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_run(tmp_path / "peer")
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "gguf" else there(name)
    )
    out = tmp_path / "model.gguf"
    assert cli.run(["export", str(tmp_path / "peer"), str(out), "--to", "gguf"]) == 2
    assert "pip install 'shoal[gguf]'" in capsys.readouterr().err


def test_nothing_is_left_when_the_disk_fills_in_the_middle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gguf", reason="the extra 'gguf' is not installed")
    save_run(tmp_path / "peer")
    place = tmp_path / "place"
    place.mkdir()
    arguments = ["export", str(tmp_path / "peer"), str(place / "model.gguf"), "--to", "gguf"]
    for size in (300, 60_000, 131_000):  # the last one holds model.safetensors
        with files_of_at_most(size):
            assert cli.run(arguments) == 2
        assert "cannot write" in capsys.readouterr().err
        assert list(place.iterdir()) == []
    assert cli.run(arguments) == 0
