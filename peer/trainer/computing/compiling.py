"""Compiled code of a loss: of the built-in model block by block, of other models as a whole.

Blocks are alike, so one compilation serves them all. On an H100 that takes 16 s instead of 32 for
124 million parameters and 14 s instead of 52 for a billion. Both models also train 5 to 7% faster
than by code of the whole model, for whose backward pass the compiler keeps other activations. The
part behind the blocks is compiled as one.

Each size of a micro-batch gets code of its own. Code for all sizes is slower, and compilers fail to
make it of some models (torch 2.11 of the built-in one, on CUDA).

The compiler of torch is imported when something compiles. ``torch.optim`` asks ``torch._dynamo`` at
each step of an optimizer to leave the step alone. The first such question imports the compiler: 1.9
s of processor time and 70 MB, as much again as torch itself, for a trainer that compiles nothing.
``defer_compiler`` puts an object in the compiler's place that answers these questions, and gives
way to the compiler when it is asked for more. The effect is on the whole process. Therefore only
commands call this, not ``peer.join``, which runs in programs of others.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from types import ModuleType
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


_NAME = "torch._dynamo"
_MARK = "__dynamo_disable"
"""The attribute in which torch keeps the answer for a function."""


class _Deferred(ModuleType):
    """Stands for the compiler until something else than the questions below is asked of it."""

    def __init__(self) -> None:
        super().__init__(_NAME)
        self.__spec__ = spec = find_spec(_NAME)
        self.__file__ = None if spec is None else spec.origin
        self._left_alone: list[Callable[..., Any]] = []

    def graph_break(self, *args: Any, **options: Any) -> None:
        """Nothing is traced, so there is nothing to interrupt."""

    def disable(self, function: Any = None, *args: Any, **options: Any) -> Any:
        """Without a compiler the function is never traced."""
        if function is None:
            return self._compiler().disable(function, *args, **options)
        self._left_alone.append(function)
        return function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":
            # ``inspect`` and ``warnings`` ask all modules for such names. To import the compiler
            # then, in the middle of another import of torch, fails: each needs the other.
            raise AttributeError(name)
        return getattr(self._compiler(), name)

    def _compiler(self) -> ModuleType:
        if sys.modules.get(_NAME) is self:
            del sys.modules[_NAME]
            for function in self._left_alone:  # the compiler is asked again
                vars(function).pop(_MARK, None)
        return importlib.import_module(_NAME)


def defer_compiler() -> None:
    """Put off the import of torch's compiler, unless it is imported already."""
    if _NAME not in sys.modules:
        sys.modules[_NAME] = _Deferred()
