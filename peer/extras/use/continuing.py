"""Continues tokens with a model.

Each token is computed from kept keys and values of those before it. When the context is full, the
newest half of it is read anew: positions begin at 0 again, and older tokens are forgotten.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from peer.errors import Failure
from peer.model.recipes.gpt import Gpt, Past

TOP_P = 0.95
"""Tokens are drawn among the most likely ones that together have this probability."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Settings for drawing tokens."""

    temperature: float = 0.8
    """0 takes the most likely token."""
    tokens_max: int = 200
    seed: int = 0


Reader: TypeAlias = Callable[[Tensor], Tensor]
"""Reads tokens, of the shape (1, tokens), which follow those read before; the next one's logits."""


class TransformersReader:
    """Reads with a model of transformers. One that keeps no keys and values reads all again."""

    def __init__(self, model: nn.Module) -> None:
        # Its advice is for those who program with it, and stood before the text.
        logging.getLogger("transformers").setLevel(logging.ERROR)
        self._model = model
        self._past: Any = None
        self._read = torch.empty(1, 0, dtype=torch.int64)

    def read(self, tokens: Tensor) -> Tensor:
        self._read = torch.cat((self._read, tokens), dim=1)
        new = self._read if self._past is None else tokens
        kept = {} if self._past is None else {"past_key_values": self._past}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            output = self._model(new, use_cache=True, **kept)
        self._past = getattr(output, "past_key_values", None)
        logits: Tensor = output.logits[0, -1]
        return logits


def reader_of(model: nn.Module) -> Reader:
    """A reader that has read nothing yet."""
    if not isinstance(model, Gpt):
        return TransformersReader(model).read
    gpt, pasts = model, [Past(model.shape.context) for _ in model.blocks]
    return lambda tokens: gpt.continued(tokens, pasts)[0]


def continued(
    model: nn.Module,
    tokens: Sequence[int],
    sampling: Sampling,
    *,
    context: int,
    ends: Collection[int] = (),
) -> Iterator[int]:
    """Draw the next tokens until one of ``ends``, which is left out.

    ``tokens`` has at least one. The same seed gives the same tokens on the same machine. Raises
    ``PeerError``.
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    known = list(tokens)
    read, unread = reader_of(model), known[-context:]
    length = 0
    for _ in range(sampling.tokens_max):
        if length + len(unread) > context:
            read, length = reader_of(model), 0
            unread = known[-max(1, context // 2) :]
        with torch.inference_mode():
            logits = read(torch.tensor([unread]))
        length += len(unread)
        token = drawn(logits, sampling, generator)
        if token in ends:
            return
        yield token
        known.append(token)
        unread = [token]


def drawn(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    most = logits.max()
    if not most.isfinite():
        raise Failure(
            "the model computes values that are not finite: its training has diverged, or its "
            "file is damaged",
            section="not-finite",
        )
    if sampling.temperature == 0:
        return int(logits.argmax())
    shares = torch.softmax((logits - most).double() / sampling.temperature, dim=0)
    ordered, numbers = shares.sort(descending=True, stable=True)
    before = ordered.cumsum(0) - ordered
    before[0] = -1  # the most likely one always counts
    kept = ordered * (before < TOP_P)
    return int(numbers[torch.multinomial(kept, 1, generator=generator)])
