"""Files as one peer's stream over weighted sources, whatever the recipe.

A source is read bundle by bundle, each bundle piece by piece, in an order of this peer's own at
both levels, and the windows of some pieces at a time in an order of their own; each pass over a
source reads all of it once. Which source a sequence is from follows from its number. So a position
is a few numbers per source.

Several pieces are read together because files of a folder differ: from pieces read one by one, a
batch is of one subject, and each peer trains on another one for thousands of steps. Peers then
drift apart, and merges keep little of what they learn (results-few-members.md in docs/research).
Files of the hub are read piece by piece: their rows come in no order, and each piece is fetched by
itself.
"""

from __future__ import annotations

import itertools
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from dht.identity import PeerId, RunId
from peer.data.batches.sequences import (
    Data,
    Order,
    Sequences,
    Shuffled,
    evenly_spaced,
    step_of,
)
from peer.data.finding import Located, files_of, text_files
from peer.data.hub import hub_host, hub_tokenizer_file
from peer.data.pieces import Bundle, Pieces, Preparation
from peer.data.text.downloads import Downloads, KnownHashes, TellOf, checked_hash
from peer.data.text.formats import (
    PIECE_BYTES,
    DataFile,
    check_beginning,
    unreadable,
    unusable,
)
from peer.data.text.token_cache import TokenCache
from peer.data.text.tokenizing import ByteTokenizer, TokenizerFacts
from peer.data.text.workers import Job, Workers
from peer.installed import check_installed
from peer.run_file.places import (
    TEXT_FORMATS,
    Place,
    base_of,
    place_of,
)
from peer.run_file.sections import (
    FilesData,
    FileSource,
    HfData,
    PythonStdlibData,
    RunFile,
    TextData,
    vocabulary,
)

PIECES_TOGETHER = 8
"""Pieces whose windows are read in one order."""

HASHED_EARLY_BYTES = 1 << 30
"""Size of the local files whose hashes are checked before anything starts, which takes one or two
seconds. A larger file would take minutes: its hash is checked when training comes to it, ahead of
its use, and a wrong one ends training then."""

LOOKED_INTO_FILES = 256
"""Number of local files whose beginning is read before anything starts."""


def open_files(
    run: RunFile,
    recipe: FilesData,
    peer_id: PeerId,
    *,
    cache_dir: Path,
    data_dir: Path,
    tell: TellOf = lambda place, done, whole: None,
    downloads: Downloads | None = None,
    workers: Workers | None = None,
) -> Data:
    """Open the files of a run for a peer; ``recipe`` has the settings. Raises ``DataUnavailable``.

    ``downloads`` and ``workers`` are for tests.
    """
    downloads = downloads or Downloads(cache_dir / "downloads", tell=tell)
    if isinstance(run.data, TextData | PythonStdlibData):
        places: list[list[Located]] = [list(text_files(run.data, data_dir))]
    else:
        places = [list(files_of(source, data_dir, downloads)) for source in recipe.sources]
    on_hub = any(place.is_on_hub for located in places for place, _ in located)
    workers = workers or Workers(hub=hub_host("a dataset") if on_hub else None)
    tokenizer, job = _tokenizer(recipe, data_dir, cache_dir, downloads, workers)
    if _reads_text(places):
        _check_vocabulary(run, recipe, tokenizer)
    preparation = Preparation(
        tokenizer=tokenizer,
        job=msgspec.structs.replace(
            job, sequence_length=recipe.sequence_length, cache=str(cache_dir / "tokens")
        ),
        by_name=isinstance(run.data, PythonStdlibData),
        form=recipe.examples,
        vocabulary=vocabulary(run.model),
        cache=TokenCache(cache_dir / "tokens"),
        downloads=downloads,
        workers=workers,
    )

    def pieces_with(share: float) -> list[Pieces]:
        job = msgspec.structs.replace(preparation.job, held_out=share)
        return [
            Pieces(source, list(_bundles(located)), replace(preparation, job=job))
            for source, located in zip(recipe.sources, places, strict=True)
        ]

    sources = pieces_with(recipe.held_out)
    weights = [source.weight for source in recipe.sources]
    length = recipe.sequence_length
    held_out = _held_out(sources, weights, run.evaluation.sequences, length)
    if held_out is None:
        # A small text may have no part below the share: the one of lowest rank is held out.
        lowest = min(source.lowest_rank() for source in sources)
        sources = pieces_with(max(recipe.held_out, float(np.nextafter(lowest, 1.0))))
        held_out = _held_out(sources, weights, run.evaluation.sequences, length)
    if held_out is None:
        raise unusable(
            f"the held-out part has no sequence of {length} tokens; raise data.held_out, add data "
            "or shorten data.sequence_length"
        )
    reader = _Reader(run.run_id, peer_id, length)
    stream = Mixture(
        [SourceStream(source, reader, number) for number, source in enumerate(sources)],
        weights,
        reader.order(1, "mixture"),
    )
    described = (
        f"{sum(map(len, places))} files in {len(sources)} sources, "
        f"{len(held_out)} held-out sequences"
    )
    return Data(stream, held_out, described)


def _reads_text(places: Sequence[Sequence[Located]]) -> bool:
    return any(place.suffix in TEXT_FORMATS for located in places for place, _ in located)


def _check_vocabulary(run: RunFile, recipe: FilesData, tokenizer: TokenizerFacts) -> None:
    size = vocabulary(run.model)
    if size is not None and tokenizer.vocabulary > size:
        raise unusable(
            f"the tokenizer {recipe.tokenizer!r} has {tokenizer.vocabulary} tokens, the model has "
            f"{size}: {_remedy(run)}"
        )


def _remedy(run: RunFile) -> str:
    if (base := base_of(run.model)) is not None:
        return f"use the tokenizer of its base, {base.text}"
    return "set model.vocabulary to at least the tokenizer's"


def check_files_there(run: RunFile, recipe: FilesData, data_dir: Path, *, cache_dir: Path) -> None:
    """Check packages, the tokenizer and local files, as far as that takes a few seconds.

    Downloads are checked when they arrive. Raises ``DataUnavailable`` or ``ExtraMissing``.
    """
    workers = Workers(1)
    try:
        _check_files(run, recipe, data_dir, cache_dir, workers)
    finally:
        workers.close()


def _check_files(
    run: RunFile, recipe: FilesData, data_dir: Path, cache_dir: Path, workers: Workers
) -> None:
    if recipe.tokenizer != "bytes":
        check_installed("tokenizers", f"the tokenizer {recipe.tokenizer!r}")
    places = [list(files_of(source, data_dir, downloads=None)) for source in recipe.sources]
    for place, _ in itertools.chain(*places):
        if place.suffix == ".parquet":
            check_installed("pyarrow", f"the file {place}")
    try:
        _check_hashes(itertools.chain(*places), KnownHashes(cache_dir / "hashes"))
        for source, located in zip(recipe.sources, places, strict=True):
            _check_form(run, recipe, source, located, workers)
    except OSError as error:
        raise unreadable(error) from error
    place = place_of(recipe.tokenizer)
    if place.sha256 is not None and not place.is_url:
        path = _local_tokenizer(place, data_dir)
        assert recipe.end_token is not None  # a run file without it is refused
        if _reads_text(places):
            job = Job(tokenizer=str(path), end_token=recipe.end_token)
            _check_vocabulary(run, recipe, workers.do(job))


def _check_hashes(places: Iterable[Located], hashes: KnownHashes) -> None:
    """Check the hashes of local files, up to ``HASHED_EARLY_BYTES``."""
    left = HASHED_EARLY_BYTES
    for bundle in _bundles(places):  # the hash of a bundle is remembered until it is opened
        if bundle.paths is None or not any(place.sha256 for place in bundle.places):
            continue
        size = sum(path.stat().st_size for path in bundle.paths)
        if size <= left:
            left -= size
            hashes.of(list(zip(bundle.paths, bundle.places, strict=True)))


def _check_form(
    run: RunFile,
    recipe: FilesData,
    source: FileSource,
    places: Sequence[Located],
    workers: Workers,
) -> None:
    """Check the form of each local file of a source, and what the first ones begin with.

    Of parquet files the first one's first piece is read, in a process with limits.
    """
    looked_into = max(1, LOOKED_INTO_FILES // len(recipe.sources))
    unfolded = False
    for place, path in places:
        if path is None:
            continue
        file = DataFile(
            str(path), place.name, source.text_field, source.dtype, form=recipe.examples
        )
        has_pieces = workers.pieces_of(file) > 0
        if has_pieces and not unfolded and file.suffix == ".parquet":
            workers.do(Job(files=(file,)))
            unfolded = True
        if looked_into:
            looked_into -= 1
            check_beginning(file, vocabulary=vocabulary(run.model))


def hosts_of(recipe: FilesData) -> tuple[str, ...]:
    """The hosts that files are downloaded from, sorted."""
    names = [recipe.tokenizer, *(text for source in recipe.sources for text in source.files)]
    places = [place_of(name) for name in names]
    hosts = {urllib.parse.urlsplit(place.name).hostname for place in places if place.is_url}
    return tuple(sorted(host for host in hosts if host))


def data_words(run: RunFile) -> str:
    """The recipe, and what it reads as far as that has a name everywhere."""
    data = run.data
    if isinstance(data, HfData):
        return f"{data.dataset} at {data.revision}"
    if isinstance(data, FilesData) and (hosts := hosts_of(data)):
        return f"files from {', '.join(hosts)}"
    return str(data.__struct_config__.tag)


def _bundles(places: Iterable[Located]) -> Iterator[Bundle]:
    """Small local files of text of one format together, any other file alone."""
    small: list[tuple[Place, Path]] = []
    size = 0

    def whole() -> Bundle:
        return Bundle(tuple(place for place, _ in small), tuple(path for _, path in small))

    for place, path in places:
        if path is None:
            yield Bundle((place,), None)
            continue
        file_size = path.stat().st_size
        is_small = place.suffix in TEXT_FORMATS and file_size < PIECE_BYTES
        if not is_small:
            yield Bundle((place,), (path,))
            continue
        if small and (size + file_size > PIECE_BYTES or small[0][0].suffix != place.suffix):
            yield whole()
            small, size = [], 0
        small.append((place, path))
        size += file_size
    if small:
        yield whole()


def _tokenizer(
    recipe: FilesData, data_dir: Path, cache_dir: Path, downloads: Downloads, workers: Workers
) -> tuple[TokenizerFacts, Job]:
    """The tokenizer, and a job that has nothing but it."""
    if recipe.tokenizer == "bytes":
        return ByteTokenizer().facts, Job()
    path, end_token = tokenizer_file(
        recipe, data_dir=data_dir, cache_dir=cache_dir, downloads=downloads
    )
    job = Job(tokenizer=str(path), end_token=end_token)
    return workers.do(job), job


def tokenizer_file(
    recipe: FilesData, *, data_dir: Path, cache_dir: Path, downloads: Downloads | None = None
) -> tuple[Path, str]:
    """The ``tokenizer.json`` of a recipe that is not of bytes, and the token that ends a document.

    Raises ``DataUnavailable`` or ``ExtraMissing``.
    """
    place, end_token = place_of(recipe.tokenizer), recipe.end_token
    if place.sha256 is None:
        path, own_end = hub_tokenizer_file(recipe.tokenizer, cache_dir / "tokenizers")
        return path, end_token or own_end
    assert end_token is not None  # a run file without it is refused
    if place.is_url:
        return (downloads or Downloads(cache_dir / "downloads")).fetch(place), end_token
    return _local_tokenizer(place, data_dir), end_token


def _local_tokenizer(place: Place, data_dir: Path) -> Path:
    path = data_dir / place.name
    try:
        checked_hash([(path, place)])
    except OSError as error:
        raise unusable(
            f"the tokenizer {path}: {error.strerror}; put it there or pass its folder with --data"
        ) from error
    return path


# --- reading them -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Reader:
    """The reader of a stream, from which its order follows."""

    run_id: RunId
    peer_id: PeerId
    sequence_length: int

    def order(self, count: int, *purpose: int | str) -> Order:
        return Order(count, run_id=self.run_id, peer_id=self.named(*purpose))

    def named(self, *purpose: int | str) -> PeerId:
        return PeerId("/".join(map(str, (self.peer_id, *purpose))))


class SourceStream:
    """One peer's endless stream over one source."""

    def __init__(self, pieces: Pieces, reader: _Reader, number: int) -> None:
        self._pieces = pieces
        self._reader = reader
        self._number = number
        self._order = reader.order(pieces.bundles, number)
        self._visit = 0
        """Number of bundles before that of the first piece being read."""
        self._place = 0
        """Number of pieces of its bundle before it."""
        self._window = 0
        """Number of sequences read of the pieces that are read together."""
        self._shuffled: Shuffled | None = None
        self._next = 0, 0
        """Visit and place of the first piece after them."""

    def next(self, sequences: int) -> Sequences:
        parts: list[Sequences] = []
        while sequences:
            shuffled = self._current()
            number = min(sequences, shuffled.count - self._window)
            if number > 0:
                parts.append(shuffled.at(self._window, number))
                self._window += number
                sequences -= number
            if self._window >= shuffled.count:
                self._shuffled, self._window = None, 0
                self._visit, self._place = self._next
        return np.concatenate(parts)

    def state(self) -> dict[str, int]:
        return {"visit": self._visit, "place": self._place, "window": self._window}

    def restore_position(self, state: Mapping[str, int]) -> None:
        visit, place, window = state["visit"], state["place"], state["window"]
        if min(visit, place, window) < 0:
            raise ValueError(
                f"{dict(state)} is not a position of a source; no number in it may be negative"
            )
        self._visit, self._place, self._window, self._shuffled = visit, place, window, None

    def _current(self) -> Shuffled:
        """The pieces at the position, or the next ones that are long enough for a sequence."""
        length, empty_visits = self._reader.sequence_length, 0
        while self._shuffled is None:
            together = self._together()
            tokens = [self._pieces.get(bundle, piece).train for bundle, piece in together]
            shuffled = Shuffled(
                np.concatenate(tokens or [np.empty(0, np.uint8)]),
                sequence_length=length,
                in_examples=self._pieces.in_examples,
                run_id=self._reader.run_id,
                peer_id=self._reader.named(self._number, self._visit, self._place),
            )
            if shuffled.count:
                self._shuffled = shuffled
                self._expect()
                break
            empty_visits += max(1, self._next[0] - self._visit)
            if empty_visits > 2 * self._pieces.bundles:
                raise unusable(
                    f"source {self._number} of data.sources has no text or tokens for a "
                    f"sequence of {length}: add data, or shorten data.sequence_length"
                )
            (self._visit, self._place), self._window = self._next, 0
        return self._shuffled

    def _together(self) -> list[tuple[int, int]]:
        """Bundle and number of the pieces from the position on that are read together: none is of
        the next pass over the source."""
        visit, place = self._visit, self._place
        pass_end = (visit // self._pieces.bundles + 1) * self._pieces.bundles
        ranges: list[tuple[int, int]] = []
        while visit < pass_end and len(ranges) < PIECES_TOGETHER:
            bundle = self._bundle(visit)
            if ranges and self._pieces.is_on_hub(bundle):
                break
            count = self._pieces.count(bundle)
            if place >= count:
                visit, place = visit + 1, 0
                continue
            ranges.append((bundle, self._piece(visit, place, count)))
            place += 1
            if self._pieces.is_on_hub(bundle):
                break
        self._next = visit, place
        for bundle, piece in ranges[1:]:
            self._pieces.expect(bundle, piece)
        return ranges

    def _expect(self) -> None:
        """Have the following pieces prepared, as far as their bundles are open."""
        visit, place = self._next
        following = self._pieces.ahead
        known = self._pieces.known_count(self._bundle(visit))
        while following:
            if known is None:
                return
            if place < known:
                self._pieces.expect(self._bundle(visit), self._piece(visit, place, known))
                place += 1
                following -= 1
            else:
                visit, place = visit + 1, 0
                known = self._pieces.known_count(self._bundle(visit))
                if known == 0:
                    following -= 1

    def _bundle(self, visit: int) -> int:
        return int(self._order.at(visit, 1)[0])

    def _piece(self, visit: int, place: int, count: int) -> int:
        return int(self._reader.order(count, self._number, visit).at(place, 1)[0])


class Mixture:
    """Several sources as one ``TokenStream``; each sequence is from a source drawn by weight."""

    def __init__(
        self, sources: Sequence[SourceStream], weights: Sequence[float], order: Order
    ) -> None:
        self._sources = sources
        self._order = order
        self._ends = np.cumsum(weights) / np.sum(weights)
        self._sequence = 0

    def next(self, sequences: int) -> Sequences:
        chosen = self._chosen(sequences)
        batch: Sequences | None = None
        for number, source in enumerate(self._sources):
            rows = np.flatnonzero(chosen == number)
            if rows.size:
                part = source.next(rows.size)
                if batch is None:
                    batch = np.empty((sequences, part.shape[1]), np.int64)
                batch[rows] = part
        assert batch is not None
        self._sequence += sequences
        return batch

    def _chosen(self, sequences: int) -> NDArray[np.intp]:
        shares = self._order.shares(self._sequence, sequences)
        return np.minimum(np.searchsorted(self._ends, shares, side="right"), len(self._sources) - 1)

    def state(self) -> dict[str, int]:
        return {
            "sequence": self._sequence,
            **{
                f"{number}/{name}": at
                for number, source in enumerate(self._sources)
                for name, at in source.state().items()
            },
        }

    def restore_position(self, state: Mapping[str, int]) -> None:
        if state["sequence"] < 0:
            raise ValueError(f"sequence is {state['sequence']}; it must be at least 0")
        for number, source in enumerate(self._sources):
            source.restore_position(
                {n: state[f"{number}/{n}"] for n in ("visit", "place", "window")}
            )
        self._sequence = state["sequence"]


def _held_out(
    sources: Sequence[Pieces], weights: Sequence[float], sequences: int, length: int
) -> Sequences | None:
    """The first held-out sequences of each source, by weight: the same at every peer.

    ``None``: there are none.
    """
    parts = []
    for source, weight in zip(sources, weights, strict=True):
        wanted = max(1, round(sequences * weight / sum(weights)))
        step = step_of(length, in_examples=source.in_examples)
        tokens = _held_out_tokens(source, (wanted - 1) * step + length + 1)
        if tokens.size > length:
            spread = evenly_spaced(
                tokens, wanted, sequence_length=length, in_examples=source.in_examples
            )
            parts.append(spread)
    return np.concatenate(parts)[:sequences] if parts else None


def _held_out_tokens(pieces: Pieces, wanted: int) -> NDArray[np.int64]:
    parts: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
    for bundle in range(pieces.bundles):
        count = pieces.count(bundle)
        for piece in range(count):
            for following in range(piece + 1, min(count, piece + pieces.ahead)):
                pieces.expect(bundle, following)
            parts.append(pieces.get(bundle, piece).held_out.astype(np.int64))
            wanted -= parts[-1].size
            if wanted <= 0:
                return np.concatenate(parts)
    return np.concatenate(parts)
