"""The names by which a run knows parameters, whatever a trainer has wrapped its model in.

A peer that compiles its model, or spreads it over several processes, has to meet one that does
neither: both see the names of the bare model.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

_WRAPPINGS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
"""What ``torch.compile`` and activation checkpointing put into the names of parameters."""


def unwrapped(model: nn.Module) -> nn.Module:
    """The caller's own module, out of data parallel wrappers and ``torch.compile``."""
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


def bare_name(name: str) -> str:
    """Without what wrappers inside the model have put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPINGS)
