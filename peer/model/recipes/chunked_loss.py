"""``next_token_loss`` without ever holding all logits, often the largest tensor of a step.

It needs the model's last hidden states and its output head: ``hidden`` and ``logits`` of the
built-in model, backbone and ``get_output_embeddings()`` of a model of transformers. Some of the
latter change their logits after the head; ``can_chunk`` compares, and such a model keeps its own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

LOGITS_AT_ONCE = 1 << 24
"""Logits that exist at once: 64 MB in fp32."""

COMPARED_TOKENS = 8

COMPARED_TIMES = 1000.0
"""Factor by which logits are compared enlarged: a cap leaves those of a new model as they are, and
bounds them when it has learnt."""


IGNORED = -100
"""The target of a token that is not predicted, by the convention of torch."""


def inputs_and_targets(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens to read and those to predict; negative ones are complements and not predicted."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    return torch.where(inputs < 0, ~inputs, inputs), torch.where(targets < 0, IGNORED, targets)


def loss_in_chunks(model: nn.Module, tokens: Tensor) -> Tensor:
    """The loss of ``next_token_loss``; each chunk's logits are computed twice.

    ``torch.nn.functional.linear_cross_entropy`` of torch 2.13 does the same for a plain linear
    head; it is not used because it ends the compiled graph, and earlier releases lack it.
    """
    inputs, targets = inputs_and_targets(tokens)
    return loss_of_hidden(model, _hidden(model, inputs), targets)


def loss_of_hidden(model: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    """The loss of hidden states, of which the head computes the logits."""
    hidden, targets = hidden.flatten(0, 1), targets.flatten()
    rows = max(1, LOGITS_AT_ONCE // len(_head(model).weight))

    def chunk_loss(part: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(_logits(model, part).float(), wanted, reduction="sum")

    parts = zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True)
    losses = [checkpoint(chunk_loss, *part, use_reentrant=False) for part in parts]
    return torch.stack(losses).sum() / (targets != IGNORED).sum()


def can_chunk(model: nn.Module) -> bool:
    """Return whether hidden states and head give the logits of the model.

    For a model of transformers a few tokens are compared, without dropout.
    """
    if _has_parts(model):
        return True
    backbone = getattr(model, "base_model", model)
    if backbone is model or not isinstance(_head(model), nn.Linear):
        return False
    device = next(model.parameters()).device
    tokens = torch.arange(COMPARED_TOKENS, device=device)[None] % len(_head(model).weight)
    training = [module for module in model.modules() if module.training]
    model.eval()
    enlarging = _head(model).register_forward_hook(lambda _, given, made: COMPARED_TIMES * made)
    try:
        with torch.no_grad():
            chunked, whole = _logits(model, _hidden(model, tokens)), model(tokens).logits
    except (AttributeError, TypeError, IndexError, RuntimeError):
        return False  # a backbone of another kind
    finally:
        enlarging.remove()
        for module in training:
            module.training = True
    return chunked.shape == whole.shape and torch.allclose(
        chunked, whole, rtol=1e-4, atol=1e-5 * COMPARED_TIMES
    )


def _has_parts(model: Any) -> bool:
    return all(callable(getattr(model, part, None)) for part in ("hidden", "logits"))


def _head(model: Any) -> Any:
    find_head = getattr(model, "get_output_embeddings", None)
    return find_head() if callable(find_head) else None


def _hidden(model: Any, tokens: Tensor) -> Tensor:
    hidden: Tensor = (
        model.hidden(tokens)
        if _has_parts(model)
        else model.base_model(input_ids=tokens, use_cache=False)[0]
    )
    return hidden


def _logits(model: Any, hidden: Tensor) -> Tensor:
    logits: Tensor = model.logits(hidden) if _has_parts(model) else _head(model)(hidden)
    return logits
