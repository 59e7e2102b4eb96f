"""The loss of a model on text: in nats per token, and in bits per byte of the text.

Bits per byte compare models with different tokenizers. A token that ends a document costs bits and
has no bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dht.identity import PeerId
from peer.data.batches.sequences import Sequences
from peer.data.sources import open_data
from peer.errors import Unusable
from peer.extras.use.ready import ReadyModel
from peer.model.recipes import held_out_loss
from peer.run_file.sections import CustomData

AT_ONCE_MAX = 32
LOGITS_MAX = 1 << 26
"""Values in memory at once, unless a single sequence has more."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The mean loss over predicted tokens."""

    data: str
    nats_per_token: float
    tokens: int
    size_bytes: int | None
    """Bytes of the predicted text; ``None`` if the tokenizer is not known."""

    @property
    def bits_per_byte(self) -> float | None:
        if not self.size_bytes:
            return None
        return self.nats_per_token * self.tokens / math.log(2) / self.size_bytes


def held_out_of_run(ready: ReadyModel, *, cache_dir: Path) -> Loss:
    """The loss on the sequences on which the run's peers measure theirs.

    Raises ``Unusable``, and what ``open_data`` raises.
    """
    if ready.run is None or isinstance(ready.run.data, CustomData):
        why = "its data is 'custom'" if ready.run else "the folder does not say of which run it is"
        raise Unusable(
            f"{ready.name} has no held-out data of its own: {why}; pass --text FILE",
            section="no-held-out-data",
        )
    me = PeerId("eval")
    data = open_data(ready.run, peer_id=me, cache_dir=cache_dir, data_dir=ready.data_dir)
    sequences, codec = data.held_out, ready.codec
    return Loss(
        f"held-out data of the run, {data.description}",
        _mean(ready, sequences),
        int((sequences[:, 1:] >= 0).sum()),
        None
        if codec is None
        else sum(codec.size_bytes(each[each >= 0].tolist()) for each in sequences[:, 1:]),
    )


def on_text(ready: ReadyModel, path: Path) -> Loss:
    """The loss on every token of a text file, each predicted once, as after the end of a document.

    The text is cut into sequences as long as those of the run's training; a token sees those
    before it in its sequence. Raises ``Unusable``.
    """
    codec, text = ready.text, _read(path)
    tokens = codec.encode(text)
    start = [] if codec.end is None else [codec.end]
    stream = np.array([*start, *tokens], np.int64)
    count = stream.size - 1
    if count < 1:
        raise _unusable(path, "it has too little text")
    length = ready.context if ready.run is None else ready.run.data.sequence_length
    whole = count // length
    at = np.arange(whole)[:, None] * length + np.arange(length + 1)
    total = _mean(ready, stream[at]) * whole * length if whole else 0.0
    if rest := count - whole * length:
        total += _mean(ready, stream[None, whole * length :]) * rest
    unpredicted = 0 if start else codec.size_bytes(tokens[:1])
    return Loss(str(path), total / count, count, len(text.encode()) - unpredicted)


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode()  # with its ends of lines, as training reads them
    except OSError as error:
        raise _unusable(path, error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        raise _unusable(path, f"it is not text in UTF-8: {error}") from error


def _unusable(path: Path, reason: str) -> Unusable:
    return Unusable(f"cannot measure on {path}: {reason}", section="text-unusable")


def _mean(ready: ReadyModel, sequences: Sequences) -> float:
    model: Any = ready.model
    logits = model.get_output_embeddings().weight.shape[0] * (sequences.shape[1] - 1)
    at_once = min(AT_ONCE_MAX, max(1, LOGITS_MAX // logits))
    return held_out_loss(model, sequences, at_once=at_once)
