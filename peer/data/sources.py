"""The data recipes of a run file, each read as files are:

- ``python_stdlib``: the sources of the standard library of the running interpreter,
  one byte per token. Peers with different versions of Python read slightly different
  files; a module is held out by its *name*, so no version of it is trained on. Tests,
  bundled packages and generated files are left out, as some distributions lack them.
- ``text``: files in the peer's data folder, whatever they are called, one byte per token.
- ``files``: files of text or tokens, local or downloaded, of several sources (``files``).
- ``hf``: the files of a dataset of the Hugging Face hub.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dht.identity import PeerId
from peer.data.batches.sequences import Data
from peer.data.files import check_files_there, open_files
from peer.data.finding import text_files
from peer.data.hub import check_hub, hub_files
from peer.data.text.downloads import TellOf
from peer.errors import DataUnavailable
from peer.run_file.sections import (
    CustomData,
    FilesData,
    FileSource,
    HfData,
    RunFile,
    TextData,
)


def open_data(
    run: RunFile,
    *,
    peer_id: PeerId,
    cache_dir: Path,
    data_dir: Path,
    tell: TellOf = lambda place, done, whole: None,
) -> Data:
    """Open the run's data for this peer. Raises ``DataUnavailable`` or ``ExtraMissing``.

    ``cache_dir``: folder for token files, which any number of processes may share.
    ``data_dir``: folder to which the names of the recipes ``text`` and ``files`` are relative.
    ``tell``: progress of downloads.
    """
    recipe = run.data
    if isinstance(recipe, CustomData):
        raise ValueError("the run's data is 'custom': pass it to run.data(dataset)")
    name = str(recipe.__struct_config__.tag)
    if isinstance(recipe, HfData):
        files, name = hub_files(recipe), f"hf: {recipe.dataset}"
    elif isinstance(recipe, FilesData):
        files = recipe
    else:
        files = FilesData(
            sources=[FileSource(files=[])],
            held_out=recipe.held_out,
            sequence_length=recipe.sequence_length,
        )
    opened = open_files(
        run,
        files,
        peer_id,
        cache_dir=cache_dir,
        data_dir=data_dir,
        tell=tell,
    )
    return replace(opened, description=f"{name}: {opened.description}")


def read_once(run: RunFile, *, cache_dir: Path, data_dir: Path) -> str:
    """Read one batch of the run's data recipe; returns a description of the data.

    Raises ``DataUnavailable`` or ``ExtraMissing``.
    """
    check_data(run, data_dir, cache_dir=cache_dir)
    opened = open_data(run, peer_id=PeerId("check"), cache_dir=cache_dir, data_dir=data_dir)
    opened.train.next(run.inner.batch_size)
    return opened.description


def check_cache(run: RunFile, cache_dir: Path) -> None:
    """Make the folder for what is made of the data. Raises ``DataUnavailable``."""
    if isinstance(run.data, CustomData):
        return
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataUnavailable(
            str(run.data.__struct_config__.tag),
            f"{cache_dir} cannot be made: {error.strerror}; make it writable for this user, or set "
            "XDG_DATA_HOME to the absolute path of a folder that is",
        ) from error


def check_data(run: RunFile, data_dir: Path, *, cache_dir: Path) -> None:
    """Check early that the data is there, as far as that shows without reading all of it.

    Raises ``DataUnavailable`` or ``ExtraMissing``.
    """
    recipe = run.data
    if isinstance(recipe, TextData):
        text_files(recipe, data_dir)
    elif isinstance(recipe, HfData):
        check_hub(recipe)
    elif isinstance(recipe, FilesData):
        check_files_there(run, recipe, data_dir, cache_dir=cache_dir)
