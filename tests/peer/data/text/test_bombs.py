"""Small files of strangers that unfold to more than a machine has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from peer.data.files import check_files_there, open_files
from peer.data.text.formats import DataFile, items, piece_count
from peer.data.text.workers import Workers
from peer.errors import DataUnavailable
from peer.run_file.sections import FilesData, FileSource, RunFile
from tests.peer.data.file_corpus import ANNA, LENGTH, limit_workers, run_of

MIB = 1 << 20

pyarrow = pytest.importorskip("pyarrow", reason="the extra 'hf' is not installed")
parquet = pytest.importorskip("pyarrow.parquet")


def repeated(text: str, count: int) -> Any:
    return pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0] * count, pyarrow.int32()), pyarrow.array([text])
    )


def of_text(folder: Path) -> FilesData:
    """A dictionary of one text, and one run of 200 000 equal indices."""
    table = pyarrow.table({"text": repeated("ab " * 333_333, 200_000)})
    write(folder, table, store_schema=False)
    return recipe_of()


def of_one_batch(folder: Path) -> FilesData:
    """The rows that are decoded at once are more than the whole limit on memory."""
    write(folder, pyarrow.table({"text": repeated("ab " * 6_000_000, 1000)}), store_schema=False)
    return recipe_of()


def of_prefixes(folder: Path) -> FilesData:
    """Each text is said to begin with all of the one before it."""
    table = pyarrow.table({"text": ["a" * 100_000] * 3000})
    write(folder, table, use_dictionary=False, column_encoding="DELTA_BYTE_ARRAY")
    return recipe_of()


def of_completions(folder: Path) -> FilesData:
    """Columns that say themselves that they are dictionaries."""
    text = repeated("ab " * 333_333, 50_000)
    write(folder, pyarrow.table({"prompt": text, "completion": text}), store_schema=True)
    return recipe_of(form="completion")


def of_chats(folder: Path) -> FilesData:
    """Lists of tables of texts."""
    contents = repeated("ab " * 333_333, 50_000)
    roles = pyarrow.array(["assistant"] * 50_000)
    messages = pyarrow.StructArray.from_arrays([roles, contents], ["role", "content"])
    offsets = pyarrow.array(range(0, 50_001, 5), pyarrow.int32())
    chats = pyarrow.ListArray.from_arrays(offsets, messages)
    write(folder, pyarrow.table({"messages": chats}), store_schema=False)
    return recipe_of(form="chat")


def of_empty_messages(folder: Path) -> FilesData:
    """A list of a billion nothings."""
    counts = pyarrow.array([0, *[30_000_000] * 1], pyarrow.int32())
    lists = pyarrow.ListArray.from_arrays(counts, pyarrow.nulls(30_000_000, pyarrow.int8()))
    write(folder, pyarrow.table({"messages": lists}), store_schema=False)
    return recipe_of(form="chat")


BOMBS = [
    of_text,
    pytest.param(of_one_batch, marks=pytest.mark.slow),
    pytest.param(of_prefixes, marks=pytest.mark.slow),
    pytest.param(of_completions, marks=pytest.mark.slow),
    pytest.param(of_chats, marks=pytest.mark.slow),
    of_empty_messages,
]
"""The slow ones are repetitions as the first one is, in other places."""


def write(folder: Path, table: Any, **how: Any) -> None:
    path = folder / "b.parquet"
    parquet.write_table(table, path, compression="zstd", row_group_size=len(table), **how)
    assert path.stat().st_size < MIB


def recipe_of(**more: Any) -> FilesData:
    return FilesData(sources=[FileSource(files=["b.parquet"])], sequence_length=LENGTH, **more)


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_small_file_that_unfolds_is_refused_before_joining(
    bomb: Callable[[Path], FilesData], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """761 bytes were a piece of 200 GB of text, in the process of the trainer itself."""
    limit_workers(monkeypatch, "MEMORY_MAX_BYTES", 512 * MIB)  # of 4 GB, which takes its time
    recipe = bomb(tmp_path)
    run = RunFile(data=recipe)
    before = psutil.Process().memory_info().rss
    said = r"b\.parquet, row groups 0 to 0: .*(more than 64 MiB of text in one piece|message)"
    with pytest.raises(DataUnavailable, match=said):
        check_files_there(run, recipe, tmp_path, cache_dir=tmp_path / "cache")
    workers = Workers(1)
    try:
        with pytest.raises(DataUnavailable, match=said):
            open_files(
                run,
                recipe,
                ANNA,
                cache_dir=tmp_path / "cache",
                data_dir=tmp_path,
                workers=workers,
            )
    finally:
        workers.close()
    assert psutil.Process().memory_info().rss < before + 200 * MIB


def test_many_small_files_are_no_larger_piece_together(tmp_path: Path) -> None:
    """They are tokenized together, as small files."""
    for number in range(6):
        table = pyarrow.table({"text": repeated("ab " * 333_333, 30)})
        parquet.write_table(table, tmp_path / f"{number}.parquet", store_schema=False)
    run = run_of(FileSource(files=["*.parquet"]))
    assert isinstance(run.data, FilesData)
    workers = Workers(1)
    try:
        with pytest.raises(DataUnavailable, match=r"2\.parquet, row groups 0 to 0: more than 64"):
            open_files(
                run,
                run.data,
                ANNA,
                cache_dir=tmp_path / "cache",
                data_dir=tmp_path,
                workers=workers,
            )
    finally:
        workers.close()


def test_a_large_row_group_is_several_pieces(tmp_path: Path) -> None:
    """Programs write a million rows into one by default."""
    documents = [f"{number:04}" + "ab" * 40_000 for number in range(1500)]
    parquet.write_table(pyarrow.table({"text": documents}), tmp_path / "a.parquet")
    file = DataFile(str(tmp_path / "a.parquet"), "a.parquet")
    assert parquet.ParquetFile(file.path).num_row_groups == 1
    sizes = [[len(item.text) for item in items(file, n)] for n in range(piece_count(file))]
    assert len(sizes) == 4
    assert sum(map(len, sizes)) == 1500
    assert max(map(sum, sizes)) < 32 * MIB
    found = [item.text for number in range(4) for item in items(file, number)]
    assert found == documents
