"""Values that a program gives to ``peer.join`` and ``run.log``, checked at once."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from peer.errors import LoopWarning, explained
from peer.model.naming import named_parameters
from peer.quantities import listed
from peer.trainer.parameters import is_whole, trained_parameters

POST_HOOKS = "_optimizer_step_post_hooks"
"""Attribute of every optimizer whose steps torch announces."""


# --- what a run is joined with ----------------------------------------------------------------


def checked_model(model: Any) -> torch.nn.Module:
    """The model that ``join`` was given. Raises ``TypeError``."""
    if isinstance(model, torch.nn.Module):
        return model
    remedy = "pass the torch.nn.Module that the loop trains"
    if isinstance(model, list | tuple | dict):
        remedy = "put its networks into one module, such as torch.nn.ModuleDict({'a': a, 'b': b})"
    elif isinstance(model, type):
        remedy = f"pass an instance, such as {model.__name__}(...)"
    raise TypeError(f"model is {_named(model)}, which peer.join does not take: {remedy}")


def checked_optimizers(
    optimizer: Any, model: torch.nn.Module, *, auto: bool
) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers that ``join`` was given, without wrappers.

    None of them, if the loop calls ``run.step`` itself. Raises ``TypeError`` or ``ValueError``.
    """
    if optimizer is None and not auto:
        return ()
    given = optimizer if isinstance(optimizer, Sequence) else (optimizer,)
    optimizers = tuple(bare(one) for one in given)
    for chosen in optimizers:
        if isinstance(chosen, torch.optim.Optimizer) and hasattr(chosen, POST_HOOKS):
            continue
        remedy = "pass the torch.optim.Optimizer that trains the model, or a list of several"
        if isinstance(chosen, type):
            remedy = f"pass an instance, such as {chosen.__name__}(model.parameters())"
        elif chosen is None:
            remedy += "; a loop that steps by hand passes auto=False and calls run.step(tokens=...)"
        raise TypeError(f"optimizer is {_named(chosen)}, which peer.join does not take: {remedy}")
    if not optimizers and auto:
        raise ValueError("optimizer is an empty list; pass the optimizers that train the model")
    groups = [group["params"] for chosen in optimizers for group in chosen.param_groups]
    held = {id(p) for parameters in groups for p in parameters}
    trained = trained_parameters(model)
    left = [name for name, p in trained.items() if id(p) not in held]
    if not left or not optimizers:
        return optimizers
    if len(left) == len(trained):
        raise ValueError(
            "the optimizer given to peer.join holds no trained parameter of the model: make it "
            "from model.parameters() when the model is complete"
        )
    text = (
        f"the optimizer given to peer.join lacks {listed(left, most=4)}, which the run exchanges: "
        "pass all optimizers as a list, or set requires_grad = False on parameters that are not "
        "trained"
    )
    warnings.warn(explained(text, "loop-mistake"), LoopWarning, stacklevel=4)
    return optimizers


def _named(value: Any) -> str:
    return (
        "None"
        if value is None
        else (
            f"the class {value.__name__}"
            if isinstance(value, type)
            else f"a {type(value).__name__}"
        )
    )


def check_is_whole(model: torch.nn.Module) -> None:
    """Raise ``TypeError`` if other processes hold parts of the model's parameters."""
    parted = [name for name, p in named_parameters(model) if not is_whole(p)]
    if parted:
        raise TypeError(
            f"this process has only a part of {listed(parted, most=4)}: with a model that is "
            "distributed over several processes call peer.island.join in each of them"
        )


def bare(optimizer: Any) -> Any:
    """The optimizer whose steps torch announces, inside a wrapper such as that of accelerate."""
    while not hasattr(optimizer, POST_HOOKS):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer):
            break
        optimizer = inner
    return optimizer


# --- what a loop logs -------------------------------------------------------------------------


def token_count(tokens: Any) -> int:
    """The number of tokens that ``run.log`` was given. Raises ``TypeError`` or ``ValueError``."""
    if isinstance(tokens, torch.Tensor):
        if tokens.device.type != "cpu":
            raise TypeError(
                f"tokens is a tensor on {tokens.device}, and to read it would wait for the device; "
                "pass a number of the host, such as batch.numel()"
            )
        if tokens.numel() != 1:
            raise ValueError(f"tokens has the shape {tuple(tokens.shape)}; it is one number")
        tokens = tokens.item()
    elif hasattr(tokens, "item") and not isinstance(tokens, int | float):
        tokens = tokens.item()  # of numpy
    if isinstance(tokens, bool) or not isinstance(tokens, int | float):
        raise TypeError(f"tokens is {tokens!r}; it is a number, such as batch.numel()")
    if not math.isfinite(tokens) or tokens != int(tokens) or tokens < 0:
        raise ValueError(f"tokens is {tokens}; a batch has none or a whole number of them")
    return int(tokens)


def checked_loss(loss: Any) -> torch.Tensor | float:
    """The loss that ``run.log`` was given. Raises ``TypeError`` or ``ValueError``."""
    if isinstance(loss, torch.Tensor):
        if loss.numel() != 1:
            raise ValueError(
                f"loss has the shape {tuple(loss.shape)}; pass one number, such as loss.mean()"
            )
        if loss.is_complex():
            raise TypeError(f"loss is {loss.dtype}; it is a real number")
        return loss
    refused = f"loss is {loss!r}; it is a number or a tensor with one value"
    if isinstance(loss, str):
        raise TypeError(refused)
    try:
        return float(loss)
    except (TypeError, ValueError) as error:
        raise TypeError(refused) from error
