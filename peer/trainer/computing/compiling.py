"""Compiled code of a loss: of the built-in model block by block, of other models as a whole.

Blocks are alike, so one compilation serves them all. On an H100 that takes 16 s instead of 32 for
124 million parameters and 14 s instead of 52 for a billion. Both models also train 5 to 7% faster
than by code of the whole model, for whose backward pass the compiler keeps other activations. The
part behind the blocks is compiled as one.

Each size of a micro-batch gets code of its own. Code for all sizes is slower, and compilers fail to
make it of some models (torch 2.11 of the built-in one, on CUDA).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from peer.model.recipes import loss_of_logits, next_token_loss
from peer.model.recipes.chunked_loss import inputs_and_targets, loss_in_chunks, loss_of_hidden
from peer.model.recipes.gpt import Gpt, call_block

Loss: TypeAlias = Callable[[nn.Module, Tensor], Tensor]
Backend: TypeAlias = str | Callable[..., Any]
"""A compiler, as ``torch.compile`` names it."""

LossOfResidual: TypeAlias = Callable[[Gpt, Tensor, Tensor], Tensor]


BLOCKS_S, WHOLE_S = 16.0, 50.0
"""Time that a compiler takes on an H100 of the built-in model of any size, and of a large other
one, with micro-batches of one size."""


def usual_compile_s(model: nn.Module) -> float:
    """Time that a compiler takes where none was measured."""
    return BLOCKS_S if isinstance(model, Gpt) else WHOLE_S


def compiled(loss: Loss, model: nn.Module, backend: Backend) -> Loss:
    """The loss by compiled code, which is made in its first calls.

    Importing a compiler may fail there, too.
    """
    if not (isinstance(model, Gpt) and loss in _BEHIND_BLOCKS):
        return cast(Loss, _code(loss, backend))
    code_of_block = _code(call_block, backend)
    code_behind = _code(_BEHIND_BLOCKS[loss], backend)

    def by_blocks(model: nn.Module, tokens: Tensor) -> Tensor:
        inputs, targets = inputs_and_targets(tokens)
        gpt = cast(Gpt, model)
        return code_behind(gpt, gpt.residual(inputs, call=code_of_block), targets)

    return by_blocks


def _code(function: Callable[..., Tensor], backend: Backend) -> Callable[..., Tensor]:
    @cache
    def made() -> Callable[..., Tensor]:
        return torch.compile(function, dynamic=False, backend=backend)

    def call(*arguments: Any) -> Tensor:
        return made()(*arguments)

    return call


def _all_at_once(model: Gpt, residual: Tensor, targets: Tensor) -> Tensor:
    return loss_of_logits(model.logits(model.norm(residual)), targets)


def _in_chunks(model: Gpt, residual: Tensor, targets: Tensor) -> Tensor:
    return loss_of_hidden(model, model.norm(residual), targets)


_BEHIND_BLOCKS: Mapping[Loss, LossOfResidual] = {
    next_token_loss: _all_at_once,
    loss_in_chunks: _in_chunks,
}
"""The part of a loss that comes behind the blocks."""
