"""The compiler of torch, imported when something compiles.

``torch.optim`` asks ``torch._dynamo`` at each step of an optimizer to leave the step alone. The
first such question imports the compiler: 1.9 s of processor time and 70 MB, as much again as torch
itself, for a trainer that compiles nothing. ``defer_compiler`` puts an object in the compiler's
place that answers these questions, and gives way to the compiler when it is asked for more.

The effect is on the whole process. Therefore only commands call this, not ``peer.join``, which runs
in programs of others.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import Any

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
