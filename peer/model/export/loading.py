"""The parameters of a run in a model of torch."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
from torch import nn

from peer.model.naming import named_parameters
from peer.model.recipes import build_model
from peer.storage.outer_state import OuterState, named_tensors

M = TypeVar("M", bound=nn.Module)


def model_of(outer: OuterState) -> nn.Module:
    """The run's own model with these parameters. Raises what ``build_model`` raises."""
    return filled(build_model(outer.run), outer).eval()


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
