"""Compiling in a thread, while the engine trains with code that is there already."""

from __future__ import annotations

import copy
import threading
import time
from contextlib import nullcontext

import torch
from torch import nn

from peer.model.out_of_memory import is_out_of_memory
from peer.trainer.computing.choices import Choices
from peer.trainer.computing.engine import Engine, autocast, recompute_activations
from peer.trainer.computing.probing import random_tokens


class Compilation:
    """Code for one way to train, used as a context manager: leaving it waits for the thread.

    The code is made by passes of a twin of the model, whose gradients are its own. Other threads
    must not call compiled code meanwhile: torch refuses it. A compiler restores the random
    generators to where they were when it began, so a model with dropout may draw some masks twice.
    """

    def __init__(self, engine: Engine, choices: Choices) -> None:
        self._engine = engine
        self._choices = choices
        self._twin = twin(engine.model)
        if choices.lean != engine.choices.lean:
            recompute_activations(self._twin, choices.lean)
        self._error: Exception | None = None
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._work, name="compile")

    def __enter__(self) -> Compilation:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()

    def wait(self) -> bool:
        """Wait for the thread. Returns whether it was still at work."""
        was_alive = self._thread.is_alive()
        self._thread.join()
        return was_alive

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    @property
    def failure(self) -> str | None:
        """The reason why there is no code, in words."""
        error = self._error
        if error is None:
            return None
        return " ".join(f"{type(error).__name__}: {error}".split())[:200]

    def _work(self) -> None:
        device = self._engine.device
        try:
            # A new thread begins with the first device as its current one, and a compiler measures
            # its candidates on that.
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                for size in sorted(set(self._engine.sizes(self._choices)), reverse=True):
                    self._pass(size)
        except Exception as error:
            # A compiler raises errors of any type. One of the model itself reaches the loop, too.
            # If memory ran out, the code is there: it is what took the memory.
            self._error = None if is_out_of_memory(error) else error

    def _pass(self, size: int) -> None:
        engine, choices = self._engine, self._choices
        code = engine.code(choices)
        with autocast(engine.device, choices.precision):
            loss = code(self._twin, random_tokens(engine, size))
        torch.autograd.backward(loss)


def twin(model: nn.Module) -> nn.Module:
    """A module with gradients of its own, whose parameters and buffers have the same memory."""
    same: dict[int, object] = {id(buffer): buffer for buffer in model.buffers()}
    for parameter in model.parameters():
        same[id(parameter)] = nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
    return copy.deepcopy(model, same)
