"""Low-rank adapters of the package peft in a model whose other parameters are frozen.

Peers exchange the parameters that are trained, hence the adapters alone. Their first values are
the same bits on every machine: the first matrix is drawn like those of the built-in model, the
second one is zero, so that the model begins as its base.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from peer.errors import Fault, PeerError, RunFileError
from peer.installed import check_installed
from peer.model.weights import draw
from peer.run_file.sections import Lora

ADAPTER = "default"
"""The name that peft gives to the adapters, which is a part of the names of their parameters."""

_DOWN, _UP = f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight"

ON_CPU_SINCE = 0, 50
"""Version of bitsandbytes that is known to compute without a CUDA device."""

SHOWN_MAX = 12
"""Number of layers that an error lists."""


class QuantizerMissing(PeerError):
    """This machine cannot hold a base in 4 or 8 bits."""

    exit_code = 4
    base_dtype: str
    reason: str
    message = (
        "the run holds its base in {base_dtype} (model.lora.base_dtype), for which "
        "{reason}: pip install 'shoal[quantized]', or ask for a run with "
        "base_dtype = 'bf16'"
    )


def check_peft() -> None:
    """Raise ``ExtraMissing`` without the package."""
    check_installed("peft", "a run with adapters, [model.lora],")


def check_quantizer(lora: Lora) -> None:
    """Raise ``QuantizerMissing`` if the base cannot be held in its type here."""
    if lora.base_dtype in ("bf16", "fp32"):
        return
    if importlib.util.find_spec("bitsandbytes") is None:
        raise QuantizerMissing(lora.base_dtype, "the package 'bitsandbytes' is not installed")
    installed = version("bitsandbytes")
    if not torch.cuda.is_available() and tuple(map(int, installed.split(".")[:2])) < ON_CPU_SINCE:
        raise QuantizerMissing(
            lora.base_dtype, f"bitsandbytes {installed} needs a CUDA device, and there is none"
        )


def quantization(lora: Lora) -> Any:
    """The configuration of bitsandbytes for the type of the base."""
    import transformers

    if lora.base_dtype == "int8":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_use_double_quant=True,
    )


def with_adapters(model: nn.Module, lora: Lora, *, random_seed: int) -> nn.Module:
    """The model with adapters in place of the targets, and everything else frozen.

    Raises ``ExtraMissing``, or ``RunFileError`` for a target that matches nothing.
    """
    check_peft()
    import peft

    _check_targets(model, lora)
    device = next(model.parameters()).device
    with torch.device(device if device.type == "meta" else "cpu"):
        adapted: nn.Module = peft.inject_adapter_in_model(peft_config(lora), model, ADAPTER)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()  # peft takes the type of the base
    if device.type != "meta":
        _draw(adapted, random_seed)
    return adapted


def peft_config(lora: Lora) -> Any:
    """The configuration of the adapters, as peft writes it."""
    import peft

    return peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=list(lora.targets),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )


def usual_targets(model: nn.Module) -> list[str]:
    """Names of all linear layers but the output head."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    names = (name for name, layer in _linear_layers(model) if layer is not head)
    return list(dict.fromkeys(name.rpartition(".")[2] for name in names))


def frozen_bytes(model: nn.Module, lora: Lora) -> int:
    """Memory of the frozen base in its type, by calculation.

    bitsandbytes holds the weights of linear layers but the output head in few bits, with a scale
    for each 64 of them (arXiv 2305.14314: 0.127 bits for a parameter) or each row.
    """
    if lora.base_dtype in ("fp32", "bf16"):
        size = 4 if lora.base_dtype == "fp32" else 2
        return sum(size * p.numel() for p in model.parameters() if not p.requires_grad)
    few = 1.0 if lora.base_dtype == "int8" else (4 + 0.127) / 8
    head = getattr(model, "get_output_embeddings", lambda: None)()
    adapted = (getattr(layer, "base_layer", layer) for layer in model.modules())
    in_few = {id(layer.weight) for layer in adapted if isinstance(layer, nn.Linear)}
    in_few -= {id(p) for p in head.parameters()} if isinstance(head, nn.Module) else set()
    return round(
        sum(
            (few if id(p) in in_few else 2) * p.numel()
            for p in model.parameters()
            if not p.requires_grad
        )
    )


def merged(model: nn.Module) -> nn.Module:
    """The model with the adapters added to the weights that they adapt, and without adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, layer in list(model.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            layer.merge(safe_merge=True)  # raises for values that are not finite
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, layer.get_base_layer())
    del model.peft_config
    return model.requires_grad_(True)


def _draw(model: nn.Module, random_seed: int) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(_DOWN):
                # The spread of peft's own first values, which are uniform.
                std = 1 / math.sqrt(3 * parameter.shape[1])
                drawn = draw(tuple(parameter.shape), std, random_seed=random_seed, name=name)
                parameter.copy_(drawn)
            elif name.endswith(_UP):
                parameter.zero_()


def _check_targets(model: nn.Module, lora: Lora) -> None:
    layers = list(_linear_layers(model))
    for target in lora.targets:
        if any(name == target or name.endswith(f".{target}") for name, _ in layers):
            continue
        known = list(dict.fromkeys(name.rpartition(".")[2] for name, _ in layers))
        others = dict(model.named_modules())
        what = "no layer"
        if any(name == target or name.endswith(f".{target}") for name in others):
            what = "no linear layer"
        problem = (
            f"model.lora.targets has {target!r}, which is the name of {what} of the model; its "
            f"linear layers are {', '.join(known[:SHOWN_MAX])}"
        )
        raise RunFileError("run file", [Fault("model.lora.targets", problem)])


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Layers that peft adapts with two matrices. GPT-2 has linear layers of its own kind."""
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) or re.fullmatch("Conv1D", type(layer).__name__):
            yield name, layer
