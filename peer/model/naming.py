"""Parameters of the bare model, independent of wrappers around it: their names and their values.

Peers that compile their model or distribute it over several processes exchange parameters with
peers that do neither: all of them use the names of the bare model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

_WRAPPINGS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
"""Parts that ``torch.compile`` and activation checkpointing add to the names of parameters."""


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside data parallel wrappers and ``torch.compile``."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """All parameters in model order, tied ones once, by their names in the bare model."""
    for name, parameter in unwrapped(model).named_parameters():
        yield bare_name(name), parameter


def saved_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that are saved with the model, tied ones once, by their names in the bare model."""
    bare = unwrapped(model)
    saved = bare.state_dict(keep_vars=True)
    for name, buffer in bare.named_buffers():
        if name in saved:
            yield bare_name(name), buffer


def bare_name(name: str) -> str:
    """The name without the parts that wrappers inside the model have added."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPINGS)


def local_part(tensor: Any) -> Tensor:
    """The part of a tensor in this process: all of it, unless it is distributed (a DTensor).

    Writing to the part of a detached tensor changes the tensor.
    """
    # Importing the class to ask for it would take a second.
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part
