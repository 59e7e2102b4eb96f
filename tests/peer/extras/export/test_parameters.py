"""The exported architecture computes what the built-in model computes."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from peer.errors import Unusable
from peer.extras.export.parameters import (
    Dtype,
    config_of,
    converted,
    in_bf16,
    mlp_width,
    rows_of,
)
from peer.model.recipes.gpt import Gpt
from peer.run_file.sections import GptModel
from peer.storage.tensor_file import Tensor, write_safetensors

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

SMALL = GptModel(layers=2, width=32, heads=4, context=64, vocabulary=80, mlp_width=40)

SHAPES = {
    f"{mlp}{norm}{tied}{heads}": msgspec.structs.replace(
        SMALL, mlp=mlp, qk_norm=bool(norm), tied_head=bool(tied), kv_heads=2 if heads else None
    )
    for mlp, norm, tied, heads in itertools.product(
        ("swiglu", "gelu"), ("", "-qk_norm"), ("", "-tied"), ("", "-grouped")
    )
} | {
    f"capped{tied}": msgspec.structs.replace(
        SMALL, logit_soft_cap=3.0, tied_head=bool(tied), kv_heads=1
    )
    for tied in ("", "-tied")
}
OTHER = {
    "one head": msgspec.structs.replace(SMALL, heads=1),
    "large base": msgspec.structs.replace(SMALL, rotary_base=500_000.0, mlp_width=None),
    "long": msgspec.structs.replace(SMALL, context=700),
}


def trained(shape: GptModel) -> Gpt:
    """A model whose parameters are nowhere zero or one."""
    torch.manual_seed(0)
    model = Gpt(shape)
    model.draw_weights(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def tensors_of(model: Gpt) -> dict[str, Tensor]:
    """The parameters in pieces, as fragments hold them."""
    found = {}
    for name, parameter in model.named_parameters():
        flat = parameter.detach().numpy().reshape(-1)
        pieces = np.array_split(flat, 3) if parameter.ndim > 1 else [flat]
        found[name] = Tensor("F32", tuple(parameter.shape), pieces)
    return found


def loaded(shape: GptModel, model: Gpt, folder: Path, dtype: Dtype) -> Any:
    tensors = tensors_of(model)
    config = config_of(shape, mlp_width=mlp_width(tensors), dtype=dtype, end=0)
    (folder / "config.json").write_text(json.dumps(config))
    made = converted(shape, tensors, dtype=dtype)
    if dtype == "bf16":
        made = {name: in_bf16(tensor) for name, tensor in made.items()}
    with (folder / "model.safetensors").open("wb") as file:
        write_safetensors(file, made, metadata={"format": "pt"})
    other, told = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(told.values()), told
    return other.eval()


@pytest.mark.parametrize("name", [*SHAPES, *OTHER])
def test_logits_are_equal_to_fp32_rounding(name: str, tmp_path: Path) -> None:
    shape = (SHAPES | OTHER)[name]
    model = trained(shape)
    other = loaded(shape, model, tmp_path, "fp32")
    tokens = torch.randint(0, shape.vocabulary, (2, shape.context))
    with torch.no_grad():
        ours, theirs = model(tokens), other(tokens).logits
    assert ours.std() > 0.5
    torch.testing.assert_close(theirs, ours, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["swiglu-qk_norm-tied", "capped", "capped-tied"])
def test_logits_in_bf16_are_those_of_rounded_parameters(name: str, tmp_path: Path) -> None:
    model = trained(SHAPES[name])
    other = loaded(SHAPES[name], model, tmp_path, "bf16")
    assert other.dtype == torch.bfloat16
    tokens = torch.randint(0, 80, (2, 64))
    with torch.no_grad():
        ours, theirs = model(tokens), other(tokens).logits.float()
        rounded = model.to(torch.bfloat16)(tokens).float()
    # As far from the model in fp32 as the same model in bf16 is.
    assert (theirs - ours).norm() < 1.5 * (rounded - ours).norm()


@pytest.mark.parametrize("other", [{"qk_norm": True}, {"mlp": "gelu"}])
def test_a_model_without_a_counterpart_is_refused_by_name(other: dict[str, Any]) -> None:
    shape = msgspec.structs.replace(SMALL, logit_soft_cap=30.0, **other)
    ((key, _),) = other.items()
    with pytest.raises(Unusable, match=f"logit_soft_cap = 30 and {key} = .*would need"):
        config_of(shape, mlp_width=40, dtype="fp32", end=None)


def test_a_cap_other_than_the_models_is_noticed(tmp_path: Path) -> None:
    """The comparison of logits can fail: the cap is not lost within rounding."""
    shape = SHAPES["capped"]
    model = trained(shape)
    other = loaded(msgspec.structs.replace(shape, logit_soft_cap=4.0), model, tmp_path, "fp32")
    tokens = torch.randint(0, 80, (1, 64))
    with torch.no_grad():
        assert not torch.allclose(model(tokens), other(tokens).logits, atol=1e-2)


def test_rows_are_cut_across_pieces_without_a_copy() -> None:
    values = np.arange(40, dtype=np.float32)
    tensor = Tensor("F32", (10, 4), [values[:7], values[7:30], values[30:]])
    part = rows_of(tensor, 1, 8)
    assert part.shape == (7, 4)
    pieces = [np.asarray(piece) for piece in part.pieces]
    assert np.array_equal(np.concatenate(pieces), values[4:32])
    assert all(np.shares_memory(piece, values) for piece in pieces)
