"""A digest by which peers notice that their programs train on the same batches.

It is of what the model is given in its first forward pass of training. A compiled model runs no
hook, and of several networks that are trained together none may be called as a whole: then it is of
the random seed, which a program that draws its batches by a generator of its own does not use.
"""

from __future__ import annotations

from typing import Any

import torch
from blake3 import blake3
from torch.utils._pytree import tree_leaves

from peer.bridge.messages import BATCH, SEED

VALUES_MAX = 1 << 16
"""Values of each tensor that are read: a batch of images has hundreds of megabytes."""


class FirstBatch:
    """Looks at the first batch that a model trains on from now on."""

    def __init__(self, model: torch.nn.Module, run_id: str) -> None:
        self._run_id = run_id
        self._batch = ""
        self._hook = model.register_forward_pre_hook(self._look, with_kwargs=True)

    def close(self) -> None:
        self._hook.remove()

    @property
    def digest(self) -> str:
        """It is equal at peers that draw the same."""
        # A program that sets no seed has one that the system has drawn.
        return self._batch or self._digest(SEED, f"{torch.initial_seed()}".encode())

    def _look(self, model: torch.nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        # First, so that a compiler leaves all of this out, and the graph stays whole.
        if torch.compiler.is_compiling() or self._batch or not model.training:
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        tensors = [each for each in tree_leaves((given, named)) if isinstance(each, torch.Tensor)]
        try:
            parts = [_content(each) for each in tensors]
        except RuntimeError:  # within torch.func, or on no device: it has no values
            return
        if parts:
            self._batch = self._digest(BATCH, *parts)

    def _digest(self, kind: str, *parts: bytes) -> str:
        hasher = blake3(self._run_id.encode())
        for part in parts:
            hasher.update(part)
        return f"{kind} {hasher.hexdigest(length=8)}"


def _content(tensor: torch.Tensor) -> bytes:
    values = tensor.detach().reshape(-1)[:VALUES_MAX].cpu().contiguous()
    return (
        f"{tensor.dtype} {list(tensor.shape)} ".encode()
        + values.view(torch.uint8).numpy().tobytes()
    )
