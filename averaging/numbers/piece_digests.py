"""The digest of a slice: the root of a hash tree over its pieces (``averaging.numbers.chunks``).

So one piece of an upload, or of a merged slice, can be shown without the others: with a hash for
each level of the tree anybody can tell whether it belongs to a digest that was signed. A proof of a
false merge is as large for a model of any size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import blake3

from averaging.numbers.arrays import Buffer

DIGEST_BYTES: Final = 32
LEVELS_MAX: Final = 20
"""Enough for a million pieces."""

_NODE: Final = "shoal 2026-11 pieces of a slice"


def digest_of(piece: Buffer) -> bytes:
    return blake3.blake3(piece).digest()


def digests_of(data: memoryview, places: Iterable[slice]) -> list[bytes]:
    """Return the digests of these pieces."""
    return [digest_of(data[place]) for place in places]


def root_of(pieces: Sequence[bytes]) -> bytes:
    """Return the digest of a slice, given those of its pieces in their order."""
    level = list(pieces) or [digest_of(b"")]
    while len(level) > 1:
        level = _above(level)
    return level[0]


def path_to(index: int, pieces: Sequence[bytes]) -> bytes:
    """Return the digests that lead from a piece to the root, one after the other."""
    path, level = b"", list(pieces)
    while len(level) > 1:
        if (index ^ 1) < len(level):
            path += level[index ^ 1]
        level, index = _above(level), index // 2
    return path


def leads_to(root: bytes, path: bytes, piece: Buffer, *, index: int, count: int) -> bool:
    """True if these are the bytes of piece ``index`` of the ``count`` of a slice."""
    node, at = digest_of(piece), 0
    while count > 1:
        if (index ^ 1) < count:
            beside = path[at : at + DIGEST_BYTES]
            node = _node(beside, node) if index % 2 else _node(node, beside)
            at += DIGEST_BYTES
        count, index = (count + 1) // 2, index // 2
    return node == root and at == len(path)


def _above(level: Sequence[bytes]) -> list[bytes]:
    return [
        _node(level[at], level[at + 1]) if at + 1 < len(level) else level[at]
        for at in range(0, len(level), 2)
    ]


def _node(left: bytes, right: bytes) -> bytes:
    return blake3.blake3(left + right, derive_key_context=_NODE).digest()
