"""Weights in files: there and back, other names for the same tensors, files that do not fit."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from averaging.history.state import FragmentState
from peer.model.weights import WeightsUnfit, load_weights, save_weights
from peer.storage.outer_state import named_tensors
from peer.storage.tensor_file import write_safetensors
from peer.trainer.parameters import Buffers, model_layout


class Net(nn.Module):
    """A model with tied weights, a persistent buffer and one that is not persistent."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embedding.weight
        self.register_buffer("scratch", torch.rand(2), persistent=False)
        assert self.norm.running_mean is not None
        nn.init.normal_(self.norm.running_mean)


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_saved_weights_can_be_loaded_and_tied_ones_are_saved_once(tmp_path: Path) -> None:
    save_weights(Net(0), tmp_path / "deep" / "m.safetensors")
    assert set(load_file(tmp_path / "deep" / "m.safetensors")) == {
        "embedding.weight",
        "head.bias",
        *("norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"),
        "norm.num_batches_tracked",
    }
    model = Net(1)
    load_weights(model, tmp_path / "deep" / "m.safetensors")
    assert same(model, Net(0))
    assert model.head.weight is model.embedding.weight
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["m.safetensors"]


def test_a_file_may_have_the_other_name_of_a_tied_weight(tmp_path: Path) -> None:
    tensors = dict(Net(0).state_dict())
    del tensors["embedding.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    model = Net(1)
    load_weights(model, tmp_path)
    assert same(model, Net(0))


def test_a_checkpoint_in_several_files_is_read_by_its_index(tmp_path: Path) -> None:
    tensors = dict(Net(0).state_dict())
    del tensors["head.weight"]
    places = {}
    for n, (name, tensor) in enumerate(tensors.items()):
        save_file({name: tensor}, tmp_path / f"part-{n}.safetensors")
        places[name] = f"part-{n}.safetensors"
    index = json.dumps({"weight_map": places})
    (tmp_path / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    model = Net(1)
    load_weights(model, tmp_path)
    assert same(model, Net(0))


def test_values_are_cast_to_the_dtypes_of_the_model(tmp_path: Path) -> None:
    save_weights(nn.Linear(3, 2), tmp_path / "m.safetensors")
    model = nn.Linear(3, 2).to(torch.bfloat16)
    load_weights(model, tmp_path / "m.safetensors")
    assert model.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"weight": torch.zeros(2, 3)}, "'bias' is not in it"),
        (
            {"weight": torch.zeros(2, 3), "bias": torch.zeros(2), "more": torch.zeros(1)},
            "'more' is not in the model",
        ),
        ({"weight": torch.zeros(3, 2), "bias": torch.zeros(2)}, r"'weight' has the shape \(3, 2\)"),
    ],
)
def test_weights_of_another_model_are_refused_and_change_nothing(
    tmp_path: Path, tensors: dict[str, torch.Tensor], reason: str
) -> None:
    save_file(tensors, tmp_path / "m.safetensors")
    model = nn.Linear(3, 2)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    with pytest.raises(WeightsUnfit, match=reason):
        load_weights(model, tmp_path / "m.safetensors")
    assert all(torch.equal(model.state_dict()[name], p) for name, p in before.items())


@pytest.mark.parametrize("content", [None, b"", b"no tensors", b"\xff" * 64])
def test_an_invalid_file_is_reported_in_one_line(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "m.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(WeightsUnfit) as caught:
        load_weights(nn.Linear(3, 2), path)
    assert "\n" not in str(caught.value)


def test_a_file_with_other_names_only_is_taken_for_an_export_to_transformers(
    tmp_path: Path,
) -> None:
    """`shoal start --weights` listed twenty names on either side, and not what to do."""
    path = tmp_path / "m.safetensors"
    save_weights(nn.Sequential(nn.Linear(3, 2)), path)
    with pytest.raises(WeightsUnfit, match="export without --to"):
        load_weights(nn.Linear(3, 2), path)
    save_weights(nn.Linear(3, 2, bias=False), path)
    with pytest.raises(WeightsUnfit) as caught:
        load_weights(nn.Linear(3, 2), path)
    assert "export without --to" not in str(caught.value)


@pytest.mark.parametrize("index", ["", "[]", '{"weight_map": []}', "{}", "[" * 100_000])
def test_a_damaged_index_is_reported_in_one_line(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(WeightsUnfit) as caught:
        load_weights(nn.Linear(3, 2), tmp_path)
    assert "\n" not in str(caught.value)


def test_an_index_cannot_refer_to_files_elsewhere(tmp_path: Path) -> None:
    save_weights(nn.Linear(3, 2), tmp_path / "secret.safetensors")
    inside = tmp_path / "inside"
    inside.mkdir()
    index = {"weight_map": dict.fromkeys(("weight", "bias"), "../secret.safetensors")}
    (inside / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(WeightsUnfit):
        load_weights(nn.Linear(3, 2), inside)


def exported(
    model: nn.Module, path: Path, value: float, *, buffers: Buffers = "own"
) -> dict[str, torch.Tensor]:
    """Write what a run has of a model, as ``shoal export`` does: its parameters, in fp32."""
    layout = model_layout(model, 3, buffers=buffers)
    states = [
        FragmentState.founded(
            layout.hash, part.index, np.arange(part.size, dtype=np.float32) + value, 0
        )
        for part in layout.fragments
    ]
    with path.open("wb") as file:
        metadata = {"format": "pt", "shoal_run_id": "5f" * 32}
        write_safetensors(file, named_tensors(layout, states), metadata=metadata)
    return load_file(path)


def test_buffers_that_a_run_has_merged_go_back_into_the_model(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    tensors = exported(model, tmp_path / "run.safetensors", 0.6, buffers="mean")
    assert set(tensors) == set(model.state_dict())
    assert load_weights(model, tmp_path / "run.safetensors").missing == ()
    for name, held in model.state_dict().items():
        value = tensors[name]
        assert torch.equal(held.float(), value if held.is_floating_point() else value.round()), name
    counted = float(tensors["1.num_batches_tracked"])
    held_count = model.get_buffer("1.num_batches_tracked")
    assert counted % 1 != 0 and int(held_count) == round(counted)


def test_the_export_of_a_partly_frozen_model_goes_back_into_it(tmp_path: Path) -> None:
    model = Net(0)
    model.norm.weight.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors = exported(model, tmp_path / "run.safetensors", 3.0)
    assert set(tensors) == {"embedding.weight", "head.bias", "norm.bias"}
    unmatched = load_weights(model, tmp_path / "run.safetensors")
    assert unmatched.superfluous == () and "norm.weight" in unmatched.missing
    assert model.head.weight is model.embedding.weight
    for name, tensor in model.state_dict().items():
        expected = before[name] if name in unmatched.missing else tensors.get(name)
        if name != "head.weight":
            assert expected is not None and torch.equal(tensor, expected), name


def test_an_export_without_a_trained_parameter_is_refused(tmp_path: Path) -> None:
    frozen = Net(0)
    frozen.norm.weight.requires_grad_(False)
    exported(frozen, tmp_path / "run.safetensors", 3.0)
    with pytest.raises(WeightsUnfit, match=r"'norm\.weight' is not in it"):
        load_weights(Net(0), tmp_path / "run.safetensors")


def test_at_most_ten_names_are_listed_and_the_brave_load_what_fits(tmp_path: Path) -> None:
    tensors = {f"extra.{n:02}": torch.zeros(1) for n in range(12)} | {"weight": torch.ones(2, 3)}
    save_file(tensors, tmp_path / "m.safetensors")
    model = nn.Linear(3, 2)
    with pytest.raises(WeightsUnfit) as caught:
        load_weights(model, tmp_path / "m.safetensors")
    told = str(caught.value)
    assert "'bias' is not in it" in told and "'extra.09' and 2 more are not in the model" in told
    unmatched = load_weights(model, tmp_path / "m.safetensors", strict=False)
    assert unmatched.missing == ("bias",) and len(unmatched.superfluous) == 12
    assert torch.equal(model.weight, torch.ones(2, 3))
    save_file({"other": torch.zeros(1)}, tmp_path / "none.safetensors")
    with pytest.raises(WeightsUnfit, match="'weight' is not in it"):
        load_weights(nn.PReLU(3), tmp_path / "none.safetensors", strict=False)


class Adapted(nn.Module):
    """Named as peft names a linear layer with an adapter and a head that is trained whole."""

    def __init__(self, adapter: str) -> None:
        super().__init__()
        self.peft_config = {adapter: object()}
        layer, head = nn.Module(), nn.Module()
        layer.base_layer = nn.Linear(4, 3).requires_grad_(False)
        layer.lora_A = nn.ModuleDict({adapter: nn.Linear(4, 2, bias=False)})
        layer.lora_B = nn.ModuleDict({adapter: nn.Linear(2, 3, bias=False)})
        head.original_module = nn.Linear(3, 2).requires_grad_(False)
        head.modules_to_save = nn.ModuleDict({adapter: nn.Linear(3, 2)})
        inner = nn.ModuleDict({"layer": layer, "head": head})
        self.base_model = nn.ModuleDict({"model": inner})


def test_an_adapter_is_found_by_the_names_that_peft_writes(tmp_path: Path) -> None:
    written = {
        "base_model.model.layer.lora_A.weight": torch.full((2, 4), 1.0),
        "base_model.model.layer.lora_B.weight": torch.full((3, 2), 2.0),
        "base_model.model.head.weight": torch.full((2, 3), 3.0),
        "base_model.model.head.bias": torch.full((2,), 4.0),
    }
    save_file(written, tmp_path / "adapter_model.safetensors")
    model = Adapted("default")
    load_weights(model, tmp_path)
    inner: Any = model.base_model["model"]
    assert torch.equal(inner["layer"].lora_B["default"].weight, torch.full((3, 2), 2.0))
    assert torch.equal(inner["head"].modules_to_save["default"].bias, torch.full((2,), 4.0))
    assert not torch.equal(inner["head"].original_module.bias, torch.full((2,), 4.0))
    tensors = exported(model, tmp_path / "run.safetensors", 5.0)
    load_weights(model, tmp_path / "run.safetensors")
    for name, tensor in tensors.items():
        assert torch.equal(model.get_parameter(name), tensor), name


def test_the_adapter_of_peft_itself_goes_there_and_back(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="the extra 'hf' is not installed")

    def adapted(seed: int) -> Any:
        torch.manual_seed(0)
        base = nn.Sequential(OrderedDict(first=nn.Linear(4, 3), last=nn.Linear(3, 2)))
        lora = peft.LoraConfig(r=2, target_modules=["first"], modules_to_save=["last"])
        model = peft.get_peft_model(base, lora)
        torch.manual_seed(seed)
        for parameter in model.parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter)
        return model

    def trained(model: Any) -> dict[str, torch.Tensor]:
        return {name: p for name, p in model.named_parameters() if p.requires_grad}

    one, other = adapted(1), adapted(2)
    one.save_pretrained(tmp_path / "adapter")
    load_weights(other, tmp_path / "adapter")
    assert all(torch.equal(p, trained(other)[name]) for name, p in trained(one).items())
    tensors = exported(one, tmp_path / "run.safetensors", 5.0)
    load_weights(one, tmp_path / "run.safetensors")
    assert tensors.keys() == trained(one).keys()
    assert all(torch.equal(p, tensors[name]) for name, p in trained(one).items())
