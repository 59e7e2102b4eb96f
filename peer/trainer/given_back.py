"""Memory of an accelerator, given back while training rests.

Parameters, buffers and the state of the optimizers move to the memory of the machine, and back.
The tensors stay the same objects, so that compiled code and optimizers go on with them. Fragments
that are merged meanwhile are added to them where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

HOST = torch.device("cpu")


def is_away(tensor: torch.Tensor) -> bool:
    """``True`` if it is in the memory of an accelerator."""
    return tensor.device.type != HOST.type


class GivenBack:
    """Keeps a model and its optimizers off the accelerator, when asked to."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Iterable[torch.optim.Optimizer],
        *,
        release: Callable[[], None] = torch.cuda.empty_cache,
    ) -> None:
        """``release``: gives what is no longer used to other programs."""
        self._model = model
        self._optimizers = tuple(optimizers)
        self._release = release
        self._from: list[tuple[torch.Tensor, torch.device]] = []

    def give(self) -> None:
        """Move all that is on an accelerator to the host; nothing, if it is there already."""
        if self._from:
            return
        held = {id(tensor): tensor for tensor in self._tensors() if is_away(tensor)}
        self._from = [(tensor, tensor.device) for tensor in held.values()]
        for tensor, _ in self._from:
            tensor.data = tensor.data.to(HOST)
        if self._from:
            self._release()

    def take(self) -> None:
        """Move it back to where it was. Where other programs have taken the memory meanwhile this
        fails as training does without it, and the next call goes on."""
        while self._from:
            tensor, device = self._from[-1]
            tensor.data = tensor.data.to(device)
            self._from.pop()

    def _tensors(self) -> Iterator[torch.Tensor]:
        for parameter in self._model.parameters():
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
        yield from self._model.buffers()
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))
