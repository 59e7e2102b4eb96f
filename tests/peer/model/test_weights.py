from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from peer.model.weights import WeightsUnfit, load_weights, save_weights


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


def test_an_index_cannot_refer_to_files_elsewhere(tmp_path: Path) -> None:
    save_weights(nn.Linear(3, 2), tmp_path / "secret.safetensors")
    inside = tmp_path / "inside"
    inside.mkdir()
    index = {"weight_map": dict.fromkeys(("weight", "bias"), "../secret.safetensors")}
    (inside / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(WeightsUnfit):
        load_weights(nn.Linear(3, 2), inside)
