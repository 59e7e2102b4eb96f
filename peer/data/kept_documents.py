"""Tokens of documents of a dataset of the hub, kept in the token cache block by block.

A pass over a file of the dataset that is in the cache downloads and tokenizes nothing, and neither
does resuming in the middle of one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from peer.data.text.token_cache import TokenCache
from peer.errors import DataUnavailable

logger = logging.getLogger(__name__)

BLOCK_DOCUMENTS = 256
"""Documents of a block: consecutive ones of a file. The last block of a file has fewer, or none."""

VERSION = 1


class KeptDocuments:
    """Blocks of one dataset at one commit, as one tokenizer encodes it."""

    def __init__(self, cache: TokenCache, *source: object) -> None:
        """``source``: everything that the tokens depend on."""
        self._cache = cache
        self._source = source
        self._told = False

    def read(self, file: int, block: int) -> list[NDArray[np.int64]] | None:
        """The tokens of each document, none for one that is held out; ``None`` if not kept."""
        found = self._cache.read(self._key(file, block))
        if found is None:
            return None
        # Kept as unsigned numbers; those that are not predicted are negative.
        tokens, lengths = found.train.view("<i4").astype(np.int64), found.held_out
        return np.split(tokens, np.cumsum(lengths)[:-1]) if lengths.size else []

    def write(self, file: int, block: int, documents: Sequence[NDArray[np.int64]]) -> None:
        tokens = np.concatenate([np.empty(0, np.int64), *documents]).astype(np.int32)
        tokens = tokens.view(np.uint32)
        lengths = np.array([each.size for each in documents], np.uint32)
        try:
            self._cache.write(self._key(file, block), tokens, lengths)
        except DataUnavailable as error:
            # The tokens are here: a full disk costs reading them again, and not this training.
            if not self._told:
                logger.warning("tokens_not_kept reason=%s", error.reason)
            self._told = True

    def _key(self, file: int, block: int) -> str:
        parts = ("documents", VERSION, BLOCK_DOCUMENTS, *self._source, file, block)
        return blake3(repr(parts).encode()).hexdigest()
