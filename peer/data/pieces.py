"""The pieces of a source: found, downloaded, tokenized and read, some ahead of their use."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
from blake3 import blake3

from dht.bounded_mapping import BoundedMapping, by_age
from peer.data.batches.prefetch import in_background
from peer.data.batches.sequences import is_held_out, rank
from peer.data.text.downloads import PAUSES_S, Downloads
from peer.data.text.formats import (
    DataFile,
    Unreached,
    shard_piece,
    text_of_piece,
    unreadable,
)
from peer.data.text.token_cache import PieceTokens, TokenCache
from peer.data.text.tokenizing import TokenizerFacts, signed
from peer.data.text.workers import Job, Workers, carry_out
from peer.errors import DataUnavailable
from peer.run_file.forms import ExampleForm
from peer.run_file.places import Place
from peer.run_file.sections import FileSource

logger = logging.getLogger(__name__)

T = TypeVar("T")

CACHE_VERSION = 2
"""Part of the name of every entry: a new one when the same files make other tokens."""

BLOCK_TOKENS = 1 << 12
"""A shard of tokens, which shows no documents, is held out in blocks of this size."""

KEPT_MAX = 32


@dataclass(frozen=True, slots=True)
class Bundle:
    """One file to read, or several small local ones."""

    places: tuple[Place, ...]
    paths: tuple[Path, ...] | None
    """Paths of local files; ``None`` for a download and a file of the hub."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A bundle that is on this machine."""

    files: tuple[DataFile, ...]
    identity: str
    """A hash of the content."""
    pieces: int

    @property
    def is_bytes(self) -> bool:
        """True for local text. As bytes it is read here, in less time than a process starts."""
        return self.files[0].suffix == ".txt" and not self.files[0].is_on_hub


@dataclass(frozen=True, slots=True)
class Preparation:
    """The means to turn files into tokens, which all sources of a run share."""

    tokenizer: TokenizerFacts
    job: Job
    """The job of a worker, but for the piece."""
    by_name: bool
    """Files of text are held out as a whole, by their names."""
    form: ExampleForm | None
    """The form of examples; ``None``: text."""
    vocabulary: int | None
    cache: TokenCache
    downloads: Downloads
    workers: Workers


class Pieces:
    """The pieces of one source. Each is prepared by a thread, and if need be by a worker process.

    All methods but ``expect`` and ``known_count`` wait. Errors are raised to those who ask.
    """

    def __init__(
        self, source: FileSource, bundles: Sequence[Bundle], preparation: Preparation
    ) -> None:
        self._source = source
        self._bundles = bundles
        self._preparation = preparation
        self._opening = BoundedMapping[int, Future[Opened]]("open bundles", KEPT_MAX, worth=by_age)
        self._making = BoundedMapping[tuple[int, int], Future[PieceTokens]](
            "pieces ahead", KEPT_MAX, worth=by_age
        )

    @property
    def bundles(self) -> int:
        return len(self._bundles)

    @property
    def in_examples(self) -> bool:
        """True if the pieces are sequences of whole examples."""
        return self._preparation.form is not None

    @property
    def ahead(self) -> int:
        """Number of pieces to expect ahead of the one in use."""
        return self._preparation.workers.count + 2

    def is_on_hub(self, bundle: int) -> bool:
        """True for a file of a dataset of the hub, which is fetched piece by piece."""
        return self._bundles[bundle].places[0].is_on_hub

    def count(self, bundle: int) -> int:
        """Number of pieces of a bundle."""
        return self._open(bundle).result().pieces

    def lowest_rank(self) -> float:
        """The rank of the part of local text that is held out before any other."""
        opened = [self._open(bundle).result() for bundle in range(self.bundles)]
        return min(
            (
                rank(item.key)
                for bundle in opened
                if bundle.is_bytes
                for piece in range(bundle.pieces)
                for item in text_of_piece(bundle.files, piece)
            ),
            default=1.0,
        )

    def known_count(self, bundle: int) -> int | None:
        """Number of pieces of a bundle, or ``None`` while it is being opened, which this begins."""
        opening = self._open(bundle)
        ready = opening.done() and opening.exception() is None
        return opening.result().pieces if ready else None

    def expect(self, bundle: int, piece: int) -> None:
        """Begin to prepare a piece of a bundle that is open."""
        self._make(bundle, piece)

    def get(self, bundle: int, piece: int) -> PieceTokens:
        making = self._make(bundle, piece)
        try:
            return making.result()
        finally:
            del self._making[bundle, piece]

    def _open(self, bundle: int) -> Future[Opened]:
        known = self._opening.get(bundle)
        if known is None or (known.done() and known.exception() is not None):
            known = in_background(lambda: self._opened(self._bundles[bundle]), name="open-file")
            self._opening[bundle] = known
        return known

    def _make(self, bundle: int, piece: int) -> Future[PieceTokens]:
        if (bundle, piece) not in self._making:
            opened = self._open(bundle).result()
            self._making[bundle, piece] = in_background(
                lambda: self._piece(self._bundles[bundle], opened, piece), name="make-piece"
            )
        return self._making[bundle, piece]

    def _opened(self, bundle: Bundle) -> Opened:
        locations, identity = self._located(bundle)
        files = tuple(
            DataFile(
                location=location,
                name=place.name,
                text_field=self._source.text_field,
                dtype=self._source.dtype,
                form=self._preparation.form,
                format=place.suffix,
                by_name=self._preparation.by_name,
            )
            for location, place in zip(locations, bundle.places, strict=True)
        )
        counts = [self._asked(partial(self._preparation.workers.pieces_of, file)) for file in files]
        return Opened(files, identity, counts[0] if len(counts) == 1 else min(1, sum(counts)))

    def _asked(self, ask: Callable[[], T]) -> T:
        """Have a worker process do something, again after pauses while the hub is not reached."""
        for pause_s in PAUSES_S:
            try:
                return ask()
            except Unreached as error:
                logger.warning("hub_unreached reason=%s again_in_s=%.0f", error.reason, pause_s)
                time.sleep(pause_s)
        return ask()

    def _located(self, bundle: Bundle) -> tuple[tuple[str, ...], str]:
        """The files of a bundle, downloaded unless they are here, and a hash of their content.

        The content of a file of the hub follows from its name, which has the commit.
        """
        downloads, place = self._preparation.downloads, bundle.places[0]
        try:
            if place.is_on_hub:
                return (place.name,), blake3(place.name.encode()).hexdigest()
            paths = bundle.paths or (downloads.fetch(place),)
            content = downloads.hashes.of(list(zip(paths, bundle.places, strict=True)))
            return tuple(map(str, paths)), content
        except OSError as error:
            raise unreadable(error) from error

    def _check_unchanged(self, bundle: Bundle, opened: Opened) -> None:
        """Raise ``DataUnavailable`` if the files are not those that were opened any more.

        A download that has made room for others since is fetched again.
        """
        if self._located(bundle)[1] != opened.identity:
            names = ", ".join(file.name for file in opened.files)[:200]
            raise DataUnavailable(
                "files", f"{names} was changed while it was read; start again to read it anew"
            )

    def _piece(self, bundle: Bundle, opened: Opened, piece: int) -> PieceTokens:
        preparation, job = self._preparation, self._preparation.job
        if opened.files[0].is_tokens:
            self._check_unchanged(bundle, opened)
            return self._shard_piece(opened, piece)
        parts = [CACHE_VERSION, opened.identity, len(opened.files), piece, self._source.text_field]
        parts += [opened.files[0].suffix, preparation.tokenizer.digest, job.held_out]
        if preparation.form is not None:
            parts += [preparation.form, job.sequence_length]
        if preparation.by_name:
            parts += [file.name for file in opened.files]
        key = blake3(repr(parts).encode()).hexdigest()
        tokens = preparation.cache.read(key)
        if tokens is None:
            self._check_unchanged(bundle, opened)
            job = msgspec.structs.replace(job, files=opened.files, piece=piece, key=key)
            is_simple = opened.is_bytes and job.tokenizer is None
            self._asked(partial(carry_out if is_simple else preparation.workers.do, job))
            tokens = preparation.cache.read(key)
        if tokens is None:
            raise DataUnavailable(
                "files",
                f"{preparation.cache.path(key)} cannot be read back after writing; check the disk",
            )
        return tokens if preparation.form is None else signed(tokens)

    def _shard_piece(self, opened: Opened, piece: int) -> PieceTokens:
        preparation = self._preparation
        try:
            tokens = shard_piece(opened.files[0], piece, vocabulary=preparation.vocabulary)
        except OSError as error:
            raise unreadable(error) from error
        blocks = [tokens[at : at + BLOCK_TOKENS] for at in range(0, tokens.size, BLOCK_TOKENS)]
        held = [
            is_held_out(f"{opened.identity}/{piece}/{number}".encode(), preparation.job.held_out)
            for number in range(len(blocks))
        ]
        nothing = tokens[:0]
        parts = (
            [block for block, is_held in zip(blocks, held, strict=True) if is_held is wanted]
            for wanted in (False, True)
        )
        return PieceTokens(*(np.concatenate([nothing, *part]) for part in parts))
