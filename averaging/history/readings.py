"""A learner's place in its data before one of its steps, for another peer to read the same.

The order of a learner's data follows from its key, and its place in that order is a few integers,
which only the learner knows: it goes back when a trainer is restarted. So its author says where it
was. It cannot say anything it likes for a poisoned contribution: no place in its own order is one
where the reverse of training lowers the loss, and few are where noise does.

The digest tells whether both peers read the same sequences there. They may not, where a run's data
is what each machine has, such as the standard library of its Python.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Struct

from averaging.messages import Digest, unpacked

READING_MAX_BYTES = 64 << 10
SEQUENCES_MAX = 32
"""Sequences of a batch that a reading tells of: the first ones, however large the batch is."""

Place: TypeAlias = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[int, Meta(ge=0, le=1 << 48)]],
    Meta(max_length=1024),
]


class Reading(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The batch of one step."""

    position: Place
    """Place in the learner's order before the batch, as its stream of tokens names it."""
    sequences: Annotated[int, Meta(ge=1, le=SEQUENCES_MAX)]
    """Sequences of the batch that another peer reads, its first ones."""
    digest: Digest
    """Digest of these sequences."""


_decoder: msgspec.msgpack.Decoder[Reading | None] = msgspec.msgpack.Decoder(Reading | None)


def encode_reading(reading: Reading | None) -> bytes:
    return msgspec.msgpack.encode(reading)


def decode_reading(data: bytes) -> Reading | None:
    """Decode what an author says that it has read. Raises ``BadMessage``, whatever the bytes are.

    ``None``: it cannot tell, or its data is not the run's.
    """
    return unpacked(data, _decoder, "a reading", max_bytes=READING_MAX_BYTES)
