"""The file formats of the recipe ``files``, read in pieces.

A piece is about as much as a worker tokenizes in a second or two: a range of bytes of a text file,
some row groups of a parquet file, a range of tokens of a shard. The pieces of a file follow from
its content alone. A damaged file is an error that names the file, the place in it and the remedy.
"""

from __future__ import annotations

import io
import json
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path
from tokenize import TokenError
from typing import Any, BinaryIO, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from peer.errors import DataUnavailable, one_line
from peer.installed import hub_errors, needed
from peer.run_file.forms import ExampleForm
from peer.run_file.places import HUB_FILE, TEXT_FORMATS, TOKEN_FORMATS

PIECE_BYTES = 1 << 22
PIECE_TOKENS = 1 << 20

CHUNK_BYTES = 1 << 14
"""A .txt file is held out in chunks of this size, because one file may be the whole corpus."""

ROWS_MAX_BYTES = 1 << 25
"""A piece of a row group that says to have more has some of its rows."""

PARTS_MAX = 1 << 12
"""Pieces of one row group. What a file says about its own size may be anything."""

TEXT_MAX_BYTES = 1 << 26
"""Text of a piece. A valid parquet file of a kilobyte may unfold to terabytes."""

BATCH_ROWS = 64

LINE_MAX_BYTES = TEXT_MAX_BYTES - PIECE_BYTES

RANGE_BYTES = 1 << 22
"""A file of the hub is asked for at least so many bytes at a time."""

BEGINNING_CHARACTERS = 1 << 20
"""Part of a text file that is read to see whether it is one."""

AGAIN = "copy, download or write it again"


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file on this machine or on the hub. Plain values, for a worker process."""

    location: str
    """A path, or ``hf://`` and the name of a file of the hub at a commit."""
    name: str
    """Name in the run file, for messages."""
    text_field: str = "text"
    dtype: str = "uint16"
    form: ExampleForm | None = None
    """The form of examples; ``None``: text."""
    format: str | None = None
    """The format, such as '.txt'; ``None``: as the name ends."""
    by_name: bool = False
    """A text file is held out as a whole, by its name, so that no version of it is trained on."""

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.text_field,) if self.form is None else self.form.columns

    @property
    def is_on_hub(self) -> bool:
        return self.location.startswith(HUB_FILE)

    @property
    def path(self) -> Path:
        return Path(self.location)

    @property
    def size_bytes(self) -> int:
        if self.is_on_hub:
            with _told_of(self.location):
                return int(_hub().info(self.location)["size"])
        return self.path.stat().st_size

    def open(self) -> BinaryIO:
        """The content. Of a file of the hub, the ranges that are read are downloaded."""
        if self.is_on_hub:
            return cast(BinaryIO, io.BufferedReader(_HubFile(self.location), RANGE_BYTES))
        return self.path.open("rb")

    @property
    def suffix(self) -> str:
        return self.format or Path(self.name).suffix.lower()

    @property
    def is_tokens(self) -> bool:
        return self.suffix in TOKEN_FORMATS


@dataclass(frozen=True, slots=True)
class Item:
    """The smallest unit of text that is held out: a document, or a part of a text file."""

    text: str
    is_end: bool
    """True if a document ends here."""
    name: str | None = None
    """The bytes that decide whether it is held out; ``None``: its text."""

    @property
    def key(self) -> bytes:
        return (self.text if self.name is None else self.name).encode()


class Unreached(DataUnavailable):
    """A part of a file of the hub did not come; it may when it is asked for again."""


class _HubFile(io.RawIOBase):
    """A file of the hub, of which the ranges that are read are downloaded."""

    def __init__(self, location: str) -> None:
        self._location = location
        with _told_of(location):
            # Without a cache: its reader has a buffer.
            self._opened = _hub().open(location, "rb", cache_type="none")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._opened.seek(offset, whence))

    def readinto(self, buffer: Any) -> int:
        with _told_of(self._location):
            content = self._opened.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)


@contextmanager
def _told_of(location: str) -> Iterator[None]:
    try:
        yield
    except hub_errors() as error:
        raise Unreached("hf", f"{location}: {one_line(error)}") from error


@cache
def _hub() -> Any:
    return needed("huggingface_hub", "a dataset of the hub").HfFileSystem()


def piece_count(file: DataFile) -> int:
    """Number of pieces; 0 for a file without text. Raises ``DataUnavailable``."""
    if file.form is not None and file.suffix not in (".jsonl", ".parquet"):
        raise unusable(
            f"{file.name} has no columns; data.form = {file.form.kind!r} reads .jsonl and .parquet"
        )
    if file.is_tokens:
        return -(-_shard(file).size // PIECE_TOKENS)
    if file.suffix == ".parquet":
        return len(_row_groups(file, _parquet(file)))
    if file.suffix in TEXT_FORMATS:
        return -(-file.size_bytes // PIECE_BYTES)
    known = ", ".join((*TEXT_FORMATS, *TOKEN_FORMATS))
    raise unusable(f"{file.name} has none of the formats {known}; name such files, or a folder")


def items(file: DataFile, piece: int) -> Iterator[Item]:
    """The text of one piece. Raises ``DataUnavailable``."""
    if file.suffix == ".parquet":
        return _parquet_items(file, piece)
    return _jsonl_items(file, piece) if file.suffix == ".jsonl" else _txt_items(file, piece)


def text_of_piece(files: Sequence[DataFile], piece: int) -> Iterator[Item]:
    """The text of one piece of a file, or of several small files. Raises ``DataUnavailable``."""
    left = TEXT_MAX_BYTES
    for file in files:
        for number in (piece,) if len(files) == 1 else range(piece_count(file)):
            for item in items(file, number):
                left -= len(item.text)
                if left < 0:
                    raise too_much_text(file, number)
                yield item


def check_beginning(file: DataFile, *, vocabulary: int | None) -> None:
    """Check what a file begins with, in some milliseconds. Raises ``DataUnavailable``.

    The text of a parquet file is left out: a process with limits reads it.
    """
    if file.is_tokens:
        shard_piece(file, 0, vocabulary=vocabulary)
    elif file.suffix != ".parquet":
        left = BEGINNING_CHARACTERS
        for item in items(file, 0):
            left -= len(item.text)
            if left <= 0:
                break


@dataclass(frozen=True, slots=True)
class _Shard:
    """Type and place of the tokens in the file of a shard."""

    dtype: np.dtype[Any]
    offset: int
    size: int


def shard_piece(file: DataFile, piece: int, *, vocabulary: int | None) -> NDArray[Any]:
    """The tokens of one piece of a shard, in memory. Raises ``DataUnavailable``.

    They are read and not mapped: the file is the user's, and a map of a file that becomes shorter
    would end the process.
    """
    shard, start = _shard(file), piece * PIECE_TOKENS
    count = min(PIECE_TOKENS, shard.size - start)
    offset = shard.offset + start * shard.dtype.itemsize
    tokens = np.fromfile(file.path, shard.dtype, count, offset=offset)
    if tokens.size < count:
        raise unusable(f"{file.name} became shorter while it was read; {AGAIN}")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or (vocabulary is not None and high >= vocabulary):
        wrong = low if low < 0 else high
        index = start + int(np.argmax(tokens == wrong))
        raise unusable(
            f"{file.name} has the token {wrong} at index {index}; the model has the tokens 0 to "
            f"{'...' if vocabulary is None else vocabulary - 1}: set model.vocabulary to that of "
            "the shard's tokenizer, and dtype in [[data.sources]] to the type of its tokens"
        )
    return tokens


def _shard(file: DataFile) -> _Shard:
    if file.suffix == ".npy":
        shard = _npy(file)
    else:
        dtype = np.dtype(file.dtype).newbyteorder("<")
        size, rest = divmod(file.path.stat().st_size, dtype.itemsize)
        if rest:
            raise unusable(
                f"{file.name} has {size * dtype.itemsize + rest} bytes, which is no whole number "
                f"of {file.dtype} tokens; {AGAIN}, or correct dtype in its [[data.sources]]"
            )
        shard = _Shard(dtype, 0, size)
    if not shard.size:
        raise unusable(f"{file.name} has no tokens; {AGAIN}, or remove it from data.sources")
    return shard


def _npy(file: DataFile) -> _Shard:
    try:
        # Opening a map checks the size of the file; nothing is read through it.
        tokens = np.lib.format.open_memmap(file.path, mode="r")
    except (ValueError, EOFError, OverflowError, TypeError, TokenError) as error:
        reason = one_line(error)
        raise unusable(f"{file.name} is no whole .npy file: {reason}; {AGAIN}") from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "ui":
        raise unusable(
            f"{file.name} has shape {tokens.shape} of {tokens.dtype}; "
            "a shard is one row of whole numbers: write it with numpy.save(tokens.ravel())"
        )
    return _Shard(tokens.dtype, tokens.offset, tokens.size)


def unusable(reason: str) -> DataUnavailable:
    """The error of files that cannot be used, with the reason."""
    return DataUnavailable("files", reason)


def unreadable(error: OSError) -> DataUnavailable:
    """The error of a file that the system cannot read or write."""
    return unusable(f"{error.filename}: {error.strerror}")


def _txt_items(file: DataFile, piece: int) -> Iterator[Item]:
    size = file.size_bytes
    with file.open() as opened:
        stop = _character_start(opened, min(size, (piece + 1) * PIECE_BYTES))
        at = _character_start(opened, piece * PIECE_BYTES)
        while at < stop:
            after = min(stop, _character_start(opened, at + CHUNK_BYTES))
            opened.seek(at)
            chunk = opened.read(after - at)
            try:
                text = chunk.decode()
            except UnicodeDecodeError as error:
                raise unusable(
                    f"{file.name}: byte {at + error.start} is not UTF-8; convert the file, such as "
                    f"with iconv --to-code=UTF-8"
                ) from error
            at = after
            yield Item(text, is_end=at == size, name=file.name if file.by_name else None)


def _character_start(opened: Any, at: int) -> int:
    """The first byte from ``at`` on that begins a character of UTF-8."""
    if at == 0:
        return 0
    opened.seek(at)
    following = opened.read(3)
    return at + next((n for n, byte in enumerate(following) if byte & 0xC0 != 0x80), len(following))


class _Refused(Exception):
    """A line of a .jsonl file is unusable, with the reason."""


def _jsonl_items(file: DataFile, piece: int) -> Iterator[Item]:
    """The documents of the lines that begin in this piece."""
    start, stop = piece * PIECE_BYTES, (piece + 1) * PIECE_BYTES
    with file.open() as opened:
        if start:  # continue after the line that begins before this piece
            opened.seek(start - 1)
            _line(opened)
        elif opened.read(len(BOM_UTF8)) != BOM_UTF8:  # which programs of Windows write
            opened.seek(0)
        at = opened.tell()
        while at < stop and (line := _line(opened)):
            if line.strip():
                try:
                    yield Item(_text_of(line, file), is_end=True)
                except _Refused as refused:
                    number = _newlines_before(file, at) + 1
                    raise unusable(f"{file.name}, line {number}: {refused}") from None
            at += len(line)


def _line(opened: Any) -> bytes:
    line: bytes = opened.readline(LINE_MAX_BYTES)
    if len(line) == LINE_MAX_BYTES and not line.endswith(b"\n"):
        # Its piece refuses it with its number; the next piece only has to get past it.
        while (more := opened.readline(LINE_MAX_BYTES)) and not more.endswith(b"\n"):
            pass
    return line


def _text_of(line: bytes, file: DataFile) -> str:
    if len(line) == LINE_MAX_BYTES:
        raise _Refused(f"is longer than {LINE_MAX_BYTES >> 20} MiB; divide the document")
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if (half := _lone_surrogate(line)) is not None:
            raise _Refused(
                f"contains half of a character ({half}, a lone surrogate); write its text with "
                "whole characters, or remove the line"
            ) from None
        raise _Refused(f"is not JSON ({error}); remove the line or {AGAIN}") from None
    has = f"the fields {', '.join(map(str, row))}" if isinstance(row, dict) else "no fields"
    if file.form is not None:
        for column in file.columns:
            if not isinstance(row, dict) or column not in row:
                raise _Refused(
                    f"has no field {column!r}, but {has[:300]}; set data.columns, or remove the "
                    "line"
                )
        return _example(file.form, [row[column] for column in file.columns])
    field = file.text_field
    text = row.get(field) if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise _Refused(
            f"has no text in the field {field!r}, but {has[:300]}; set text_field in its "
            "[[data.sources]], or remove the line"
        )
    return text


def _lone_surrogate(line: bytes) -> str | None:
    """The first lone surrogate of a line that is JSON otherwise, as an escape sequence.

    Programs in Python and JavaScript write and read them; other readers of JSON refuse them.
    """
    try:
        json.dumps(json.loads(line), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return f"\\u{ord(error.object[error.start]):04x}"
    except (ValueError, RecursionError):
        pass
    return None


def _example(form: ExampleForm, values: list[Any]) -> str:
    if (fault := form.fault(values)) is not None:
        raise _Refused(fault)
    return text_of(values)


def text_of(values: Sequence[Any]) -> str:
    """The columns of an example as one text, for the caches and hashes of texts."""
    return msgspec.json.encode(values).decode()


def _newlines_before(file: DataFile, at: int) -> int:
    count = 0
    with file.open() as opened:
        while at and (part := opened.read(min(at, 1 << 20))):
            count += part.count(b"\n")
            at -= len(part)
    return count


def _parquet(file: DataFile) -> Any:
    needed("pyarrow.parquet", f"the file {file.name}")
    import pyarrow.parquet

    try:
        read = _parquet_on_hub if file.is_on_hub else pyarrow.parquet.ParquetFile
        opened = read(file.location)
    except (pyarrow.ArrowException, OSError) as error:
        raise unusable(
            f"{file.name} is no whole parquet file: {one_line(error)}; {AGAIN}"
        ) from error
    names = opened.schema_arrow.names  # one may be there twice, and is none then
    if file.form is not None:
        if missing := [column for column in file.columns if names.count(column) != 1]:
            raise unusable(
                f"{file.name} has no column {missing[0]!r}; its columns are "
                f"{', '.join(names)[:300]}: set data.columns"
            )
        return opened
    is_one = names.count(file.text_field) == 1
    kind = opened.schema_arrow.field(file.text_field).type if is_one else None
    if kind is None or not (
        pyarrow.types.is_string(kind)
        or pyarrow.types.is_large_string(kind)
        or pyarrow.types.is_string_view(kind)
    ):
        raise unusable(
            f"{file.name} has no text in the column {file.text_field!r}; its columns are "
            f"{', '.join(names)[:300]}: set text_field in its [[data.sources]]"
        )
    return opened


@lru_cache(maxsize=4)
def _parquet_on_hub(location: str) -> Any:
    """Kept open, as what a file says about itself at its end has as many bytes as a piece.

    A large row group is read in parts: most of its pieces need some of it.
    """
    import pyarrow.parquet

    reader = io.BufferedReader(_HubFile(location), RANGE_BYTES)
    return pyarrow.parquet.ParquetFile(reader, buffer_size=RANGE_BYTES)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of a piece of a parquet file, counted from the first one of these row groups."""

    groups: range
    start: int
    stop: int

    def __str__(self) -> str:
        return f"row groups {self.groups.start} to {self.groups.stop - 1}"


def _row_groups(file: DataFile, opened: Any) -> list[_Rows]:
    """The row groups of each piece. Of a large one, a piece has some of the rows."""
    metadata = opened.metadata
    pieces: list[_Rows] = []
    first, size, rows = 0, 0, 0
    for group in range(metadata.num_row_groups):
        columns = metadata.row_group(group)
        size += sum(
            column.total_uncompressed_size
            for column in map(columns.column, range(columns.num_columns))
            if column.path_in_schema.partition(".")[0] in file.columns
        )
        rows += columns.num_rows
        if size >= PIECE_BYTES or group == metadata.num_row_groups - 1:
            groups = range(first, group + 1)
            parts = max(1, min(-(-size // ROWS_MAX_BYTES), rows, PARTS_MAX))
            ends = [rows * number // parts for number in range(parts + 1)]
            pieces += (_Rows(groups, *part) for part in pairwise(ends))
            first, size, rows = group + 1, 0, 0
    return pieces


def _parquet_items(file: DataFile, piece: int) -> Iterator[Item]:
    import pyarrow

    opened = _parquet(file)
    rows, at = _row_groups(file, opened)[piece], 0
    try:
        for batch in opened.iter_batches(
            batch_size=BATCH_ROWS, row_groups=list(rows.groups), columns=list(file.columns)
        ):
            if at >= rows.stop:
                break
            first, at = at, at + batch.num_rows
            batch = batch.slice(max(0, rows.start - first), rows.stop - max(first, rows.start))
            if batch.nbytes > TEXT_MAX_BYTES:
                raise too_much_text(file, piece)
            if file.form is None:
                for text in batch.column(0).to_pylist():
                    if text is not None:
                        yield Item(text, is_end=True)
                continue
            for row in batch.to_pylist():
                yield Item(
                    _example(file.form, [row[column] for column in file.columns]), is_end=True
                )
    except _Refused as refused:
        raise unusable(f"{file.name}, {rows}: a row {refused}") from None
    except MemoryError:  # of Arrow, too
        raise too_much_text(file, piece) from None
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise unusable(
            f"{file.name}, {rows}: {one_line(error)}; the file is damaged: {AGAIN}"
        ) from error


def too_much_text(file: DataFile, piece: int) -> DataUnavailable:
    """The error of a piece that unfolds to more text than a piece may have."""
    where, remedy = file.name, "divide its documents"
    if file.suffix == ".parquet":
        where += f", {_row_groups(file, _parquet(file))[piece]}"
        remedy = "ask its author, or write it again with more and smaller row groups"
    return unusable(
        f"{where}: more than {TEXT_MAX_BYTES >> 20} MiB of text in one piece, far more than the "
        f"file says: {remedy}"
    )
