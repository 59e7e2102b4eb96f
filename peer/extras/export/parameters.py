"""The parameters of a run in a model of torch, and cut and cast without a copy in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from peer.model.naming import named_parameters
from peer.model.recipes import build_model
from peer.run_file.sections import HfModel, RunFile
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
    return Tensor("BF16", tensor.shape, _Mapped(tensor.pieces, rounded_to_bf16))


def rounded_to_bf16(values: Array) -> Array:
    """The upper halves of fp32 values, rounded to nearest, ties to even, as torch does."""
    bits = np.ascontiguousarray(values, "<f4").view(np.uint32)
    upper = (bits >> np.uint32(16)).astype(np.uint16)
    # A carry out of the mantissa goes into the exponent, which is the next larger number.
    rest, odd = bits & np.uint32(0xFFFF), upper & 1
    up = (rest > 0x8000) | ((rest == 0x8000) & (odd == 1))
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(nan, np.uint16(0x7FC0), upper + up.astype(np.uint16))


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
