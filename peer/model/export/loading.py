"""The parameters of a run in a model of torch."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import torch
from torch import nn

from peer.model.naming import named_parameters
from peer.model.recipes import build_model
from peer.run_file.sections import HfModel, RunFile
from peer.storage.outer_state import OuterState, named_tensors

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
