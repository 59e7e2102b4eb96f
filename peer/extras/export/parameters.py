"""The parameters of a run in a model of torch, or in an architecture of transformers.

They are cut and cast without a copy in memory. These architectures compute what the built-in model
computes:

| recipe | architecture |
|---|---|
| swiglu | Llama |
| swiglu, normalised queries and keys | Qwen3 |
| gelu | Arcee |
| gelu, normalised queries and keys | Apertus |
| swiglu, soft-capped logits | VaultGemma |

Rotary positions pair feature i with i + E/2 in all of them, as the built-in model does. VaultGemma
multiplies embeddings by the square root of the width and adds one to the weights of norms; both
are taken out of the parameters. Other combinations have no counterpart and are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from peer.errors import Unusable
from peer.model.naming import named_parameters
from peer.model.recipes import build_model
from peer.model.recipes.gpt import NORM_EPSILON
from peer.run_file.sections import GptModel, HfModel, RunFile
from peer.storage.outer_state import OuterState, named_tensors
from peer.storage.tensor_file import Tensor

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class _Mapped:
    """Pieces that are computed when they are read, one at a time."""

    pieces: Any
    change: Callable[[Array], Array]

    def __iter__(self) -> Iterator[Array]:
        return (self.change(np.asarray(piece)) for piece in self.pieces)


def rows_of(tensor: Tensor, start: int, stop: int) -> Tensor:
    """Some rows of a matrix, as views of its pieces."""
    row = math.prod(tensor.shape[1:])
    pieces, at = [], 0
    for piece in tensor.pieces:
        flat = np.asarray(piece).reshape(-1)
        first, last = max(0, start * row - at), min(flat.size, stop * row - at)
        if first < last:
            pieces.append(flat[first:last])
        at += flat.size
    return Tensor(tensor.dtype, (stop - start, *tensor.shape[1:]), pieces)


def mapped(tensor: Tensor, change: Callable[[Array], Array]) -> Tensor:
    """The tensor with each value changed; ``change`` keeps number and type of the values."""
    return Tensor(tensor.dtype, tensor.shape, _Mapped(tensor.pieces, change))


def in_bf16(tensor: Tensor) -> Tensor:
    """An fp32 tensor rounded to bf16."""
    return Tensor("BF16", tensor.shape, _Mapped(tensor.pieces, _rounded))


def _rounded(values: Array) -> Array:
    rounded: Array = torch.tensor(values).bfloat16().view(torch.int16).numpy()
    return rounded


M = TypeVar("M", bound=nn.Module)


def model_of(outer: OuterState, base: Path | None = None) -> nn.Module:
    """The run's own model with these parameters, in fp32. Raises what ``build_model`` raises.

    ``base``: folder with the weights below the run's adapters.
    """
    model = build_model(in_fp32(outer.run), draw=False, base=base)
    return filled(model, outer).eval()


def in_fp32(run: RunFile) -> RunFile:
    """The run with a base in fp32, in which processors compute and adapters are added exactly."""
    if not isinstance(run.model, HfModel) or run.model.lora is None:
        return run
    lora = msgspec.structs.replace(run.model.lora, base_dtype="fp32")
    return msgspec.structs.replace(run, model=msgspec.structs.replace(run.model, lora=lora))


@torch.no_grad()
def filled(model: M, outer: OuterState) -> M:
    """The model, with its parameters set to those of the run."""
    parameters = dict(named_parameters(model))
    for name, tensor in named_tensors(outer.layout, outer.states).items():
        values = parameters[name].view(-1)
        at = 0
        for piece in tensor.pieces:
            flat = torch.from_numpy(np.array(piece, np.float32).reshape(-1))
            values[at : at + flat.numel()] = flat
            at += flat.numel()
    return model


Dtype: TypeAlias = Literal["fp32", "bf16"]
Tensors: TypeAlias = dict[str, Tensor]

TORCH_NAMES: Mapping[Dtype, str] = {"fp32": "float32", "bf16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture, and where it differs from Llama."""

    model_type: str
    class_name: str
    settings: Mapping[str, Any]
    attention_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    is_gemma: bool = False
    """True if embeddings are multiplied by sqrt(width) and the weights of norms by 1 + w."""


def architecture_of(shape: GptModel) -> Architecture:
    """The architecture for this shape. Raises ``Unusable``."""
    cap = shape.logit_soft_cap
    if cap != "off":
        if shape.qk_norm or shape.mlp != "swiglu":
            other = "qk_norm = true" if shape.qk_norm else f"mlp = '{shape.mlp}'"
            raise Unusable(
                "no architecture of transformers is the same model as one with "
                f"logit_soft_cap = {cap:g} and {other}: it would need soft-capped logits in an "
                "architecture with normalised queries and keys, or without a gate in the "
                "feed-forward layer; `--to safetensors` writes the parameters alone",
                section="no-counterpart",
            )
        return _vault_gemma(shape, cap)
    match shape.mlp, shape.qk_norm:
        case "swiglu", False:
            return Architecture("llama", "LlamaForCausalLM", {"hidden_act": "silu"})
        case "swiglu", True:
            only = {"hidden_act": "silu", "use_sliding_window": False}
            return Architecture("qwen3", "Qwen3ForCausalLM", only)
        case "gelu", False:
            return Architecture("arcee", "ArceeForCausalLM", {"hidden_act": "gelu"})
        case _:
            return Architecture(
                "apertus",
                "ApertusForCausalLM",
                {"hidden_act": "gelu"},
                attention_norm="attention_layernorm",
                mlp_norm="feedforward_layernorm",
            )


def _vault_gemma(shape: GptModel, cap: float) -> Architecture:
    settings = {
        "hidden_activation": "silu",
        "final_logit_softcapping": cap,
        "attn_logit_softcapping": None,
        "query_pre_attn_scalar": shape.width // shape.heads,
        "layer_types": ["full_attention"] * shape.layers,
        "sliding_window": shape.context,  # no layer has one, and transformers wants a number
    }
    norm = "pre_feedforward_layernorm"
    return Architecture(
        "vaultgemma", "VaultGemmaForCausalLM", settings, mlp_norm=norm, is_gemma=True
    )


def config_of(shape: GptModel, *, mlp_width: int, dtype: Dtype, end: int | None) -> dict[str, Any]:
    """The content of ``config.json``. ``end``: the token that ends a document."""
    architecture = architecture_of(shape)
    return {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "intermediate_size": mlp_width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads or shape.heads,
        "head_dim": shape.width // shape.heads,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": NORM_EPSILON,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rotary_base},
        "rope_theta": shape.rotary_base,  # where transformers before version 5, and others, look
        "tie_word_embeddings": shape.tied_head,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": None,
        "dtype": TORCH_NAMES[dtype],
        **architecture.settings,
    }


def converted(shape: GptModel, tensors: Mapping[str, Tensor], *, dtype: Dtype) -> Tensors:
    """The parameters of the built-in model under the names of its architecture, in fp32.

    ``dtype``: the type that they will be written in. Raises ``Unusable``.
    """
    architecture = architecture_of(shape)
    made: Tensors = {"model.embed_tokens.weight": tensors["embedding.weight"]}
    if not shape.tied_head:
        made["lm_head.weight"] = tensors["head.weight"]
    for index in range(shape.layers):
        for name, tensor in _block(shape, architecture, tensors, f"blocks.{index}."):
            made[f"model.layers.{index}.{name}.weight"] = tensor
    made["model.norm.weight"] = tensors["norm.weight"]
    return _for_gemma(shape, made, dtype) if architecture.is_gemma else made


def _block(
    shape: GptModel, found: Architecture, tensors: Mapping[str, Tensor], prefix: str
) -> Iterator[tuple[str, Tensor]]:
    own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    features = shape.width // shape.heads
    yield found.attention_norm, own["attention_norm.weight"]
    yield found.mlp_norm, own["mlp_norm.weight"]
    start = 0
    for name, heads in (
        ("q_proj", shape.heads),
        ("k_proj", shape.kv_heads or shape.heads),
        ("v_proj", shape.kv_heads or shape.heads),
    ):
        stop = start + heads * features
        yield f"self_attn.{name}", rows_of(own["attention.query_key_value.weight"], start, stop)
        start = stop
    yield "self_attn.o_proj", own["attention.out.weight"]
    if shape.qk_norm:
        yield "self_attn.q_norm", own["attention.query_norm.weight"]
        yield "self_attn.k_norm", own["attention.key_norm.weight"]
    yield "mlp.down_proj", own["mlp.down.weight"]
    if shape.mlp == "swiglu":
        both = own["mlp.gate_up.weight"]
        inner = both.shape[0] // 2
        yield "mlp.gate_proj", rows_of(both, 0, inner)
        yield "mlp.up_proj", rows_of(both, inner, 2 * inner)
    else:
        yield "mlp.up_proj", own["mlp.up.weight"]


def _for_gemma(shape: GptModel, made: Tensors, dtype: Dtype) -> Tensors:
    """Take out of the parameters what VaultGemma puts in.

    A tied head is divided together with the embedding, so the last norm is multiplied.
    """
    scale = np.float32(math.sqrt(shape.width))
    if dtype == "bf16":  # the factor is rounded to the type of the weights
        scale = np.float32(torch.tensor(scale).bfloat16().item())
    last = scale if shape.tied_head else np.float32(1)

    def change(name: str) -> Callable[[Array], Array] | None:
        if name == "model.embed_tokens.weight":
            return lambda values: values / scale
        if name == "model.norm.weight":
            return lambda values: values * last - np.float32(1)
        return (lambda values: values - np.float32(1)) if "layernorm" in name else None

    changes = {name: change(name) for name in made}
    return {
        name: tensor if (how := changes[name]) is None else mapped(tensor, how)
        for name, tensor in made.items()
    }


def mlp_width(tensors: Mapping[str, Tensor]) -> int:
    """Hidden size of the feed-forward layers."""
    return tensors["blocks.0.mlp.down.weight"].shape[1]
