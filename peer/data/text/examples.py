"""Examples as tokens, of which only the answers are predicted.

A token that is read and not predicted is written as its complement, a negative number: sequences
of tokens carry with them what the loss is of (``peer.model.recipes.next_token_loss``). A sequence
holds whole examples and is filled up with such tokens, so that no answer is without its question.
An example longer than a sequence is cut at its end; one whose answer is then left out is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from peer.data.batches.order import is_held_out
from peer.data.text.formats import Item
from peer.data.text.token_cache import PieceTokens
from peer.data.text.tokenizing import Tokenizer
from peer.run_file.forms import Form

Tokens = NDArray[np.int32]


def example_tokens(form: Form, text: str, tokenizer: Tokenizer) -> Tokens:
    """The tokens of an example that ``formats.text_of`` has written."""
    turns = list(form.turns(msgspec.json.decode(text)))
    starts = [len(turn.context) for turn in turns]
    encoded = tokenizer.encode_from([turn.text for turn in turns], starts)
    parts: list[Tokens] = [np.empty(0, np.int32)]
    end = np.array([tokenizer.end], np.int32)
    for tokens, known in encoded:
        tokens = tokens.astype(np.int32)
        parts += [~tokens[:known], tokens[known:], end]
    return np.concatenate(parts)


def sequences_of(
    items: Iterable[Item], tokenizer: Tokenizer, form: Form, *, held_out: float, size: int
) -> PieceTokens:
    """The sequences of a piece of examples, apart for training and as held-out part.

    They are kept as unsigned numbers, as all tokens are; ``signed`` reads them.
    """
    parts: dict[bool, list[Tokens]] = {False: [], True: []}
    for item in items:
        part = parts[is_held_out(item.key, held_out)]
        part.append(example_tokens(form, item.text, tokenizer))
    rows = (packed(parts[held], size, end=tokenizer.end) for held in (False, True))
    return PieceTokens(*(each.view(np.uint32) for each in rows))


def signed(tokens: PieceTokens) -> PieceTokens:
    """The sequences that ``sequences_of`` has made."""
    return PieceTokens(*(each.view("<i4") for each in (tokens.train, tokens.held_out)))


def packed(examples: Iterable[Tokens], size: int, *, end: int) -> Tokens:
    """Sequences of ``size`` tokens with whole examples, one after the other in one array."""
    rows: list[Tokens] = [np.empty(0, np.int32)]
    room = 0
    for example in examples:
        example = example[:size]
        if not predicted(example):
            continue
        if example.size > room:
            rows.append(filling(room, end))
            room = size
        rows.append(example)
        room -= example.size
    return np.concatenate([*rows, filling(room, end)])


def filling(count: int, end: int) -> Tokens:
    return np.full(count, ~end, np.int32)


def predicted(tokens: NDArray[Any]) -> int:
    """Number of tokens after the first that are predicted."""
    return int((tokens[1:] >= 0).sum())
