"""The files of the published model that a run begins from, on this machine and verified.

They come from the hub, from an https address or from the data folder, and are never removed: a
download of many files would otherwise lose the first of them to the last. ``base_folder`` puts
them together as transformers reads them. Nothing but the tensors in them is read: the model's
configuration is in the run file, and weights in formats that can run code are refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.request import OpenerDirector

from blake3 import blake3
from safetensors import SafetensorError, safe_open

from dht.whole_files import new_folder
from peer.data.hub import hub_address, hub_host
from peer.data.text.downloads import Downloads, Host, KnownHashes
from peer.errors import DataUnavailable, PeerError, one_line
from peer.run_file.places import BaseModel, Place, base_of
from peer.run_file.sections import RunFile
from peer.storage.home import data_cache

MODELS = "models"
"""Folder of downloaded weights, in the cache of data."""

FILE_MAX_BYTES = 1 << 40

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""Names under which transformers looks for weights."""

GENERATION = "generation_config.json"


class BaseUnavailable(PeerError):
    """The published model that a run begins from is not to be had here."""

    exit_code = 2
    source: str
    reason: str
    message = "the base model {source} cannot be used: {reason}"


Progress = Callable[[str, float], None]
"""Gets the name of a file, and the share of it that has arrived."""


def base_folder(
    run: RunFile,
    *,
    cache_dir: Path,
    data_dir: Path,
    tell: Progress = lambda name, share: None,
    downloads: Downloads | None = None,
) -> Path | None:
    """A folder with the verified weights of the run's base; ``None`` if the run has no base.

    ``downloads`` is for tests. Raises ``BaseUnavailable`` or ``ExtraMissing``.
    """
    base = base_of(run.model)
    if base is None:
        return None
    hashes = KnownHashes(cache_dir / "hashes")
    try:
        if base.hub is None and not base.is_url:
            paths = [_local(base, file, data_dir, hashes) for file in base.files]
        else:
            made = downloads or model_downloads(cache_dir, _host(base))
            paths = [_remote(base, file, made, hashes, tell) for file in base.files]
        return _together(base, paths, cache_dir / "bases")
    except DataUnavailable as error:
        raise BaseUnavailable(base.text, error.reason) from error
    except OSError as error:
        raise BaseUnavailable(base.text, one_line(error)) from error


def fetch_base(run: RunFile, data_dir: str | Path | None = None) -> Path | None:
    """The verified weights of the run's base, for ``build_model(run, base=...)``.

    ``data_dir``: the folder that a base in a folder is in; by default the current one. ``None`` if
    the run has no base. Raises ``BaseUnavailable`` or ``ExtraMissing``.
    """
    return base_folder(run, cache_dir=data_cache(), data_dir=Path(data_dir or "."))


def missing_files(run: RunFile, *, cache_dir: Path) -> tuple[Place, ...]:
    """The files of the run's base that are still to be downloaded."""
    base = base_of(run.model)
    if base is None or not (base.hub or base.is_url):
        return ()
    folder = cache_dir / MODELS
    return tuple(f for f in base.files if f.sha256 and not (folder / f.sha256).exists())


def missing_bytes(
    run: RunFile, *, cache_dir: Path, downloads: Downloads | None = None
) -> int | None:
    """The size of the files of the run's base that are still to be downloaded, in whole.

    ``None`` if a server does not tell it. ``downloads`` is for tests.
    """
    base = base_of(run.model)
    missing = missing_files(run, cache_dir=cache_dir)
    if base is None or not missing:
        return 0
    made = downloads or model_downloads(cache_dir, _host(base))
    sizes = [made.size_bytes(_address(base, file)) for file in missing]
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def model_downloads(
    cache_dir: Path, host: Host | None = None, *, opener: OpenerDirector | None = None
) -> Downloads:
    """The downloads of weights. ``opener`` is for tests."""
    return Downloads(
        cache_dir / MODELS,
        file_bytes_max=FILE_MAX_BYTES,
        folder_bytes_max=None,
        host=host,
        opener=opener,
    )


def _host(base: BaseModel) -> Host | None:
    return None if base.hub is None else hub_host(base.hub[0])


def _local(base: BaseModel, file: Place, data_dir: Path, hashes: KnownHashes) -> Path:
    place = base.place(file)
    path = data_dir / place.name
    if not path.is_file():
        raise DataUnavailable(
            "files",
            f"there is no {path}; put the folder there, pass the folder that it is in with --data, "
            "or, if it is on the hub, write its commit into the run file: 'owner/name@COMMIT'",
        )
    hashes.of([(path, place)])
    return path


def _remote(
    base: BaseModel, file: Place, downloads: Downloads, hashes: KnownHashes, tell: Progress
) -> Path:
    path, _ = downloads.fetch_checked(
        _address(base, file),
        hashes,
        tell=lambda done, whole: tell(file.name, done / max(1, whole)),
    )
    return path


def _address(base: BaseModel, file: Place) -> Place:
    if base.hub is None:
        return base.place(file)
    return Place(hub_address(*base.hub, file.name), file.sha256)


def _together(base: BaseModel, paths: Sequence[Path], folder: Path) -> Path:
    """A folder with links to the files, and the list of their tensors, as transformers wants it."""
    names = [SINGLE] if len(paths) == 1 else [file.name for file in base.files]
    places = {name: str(path.resolve()) for name, path in zip(names, paths, strict=True)}
    made = folder / blake3(json.dumps(places).encode()).hexdigest()[:32]
    if made.is_dir():
        return made
    with new_folder(made) as temporary:
        for name, place in places.items():
            (temporary / name).symlink_to(place)
        # transformers 5 fails without one; how a published model is sampled from is not used.
        (temporary / GENERATION).write_text("{}")
        tensors = {tensor: name for name in names for tensor in tensors_in(temporary / name)}
        if len(names) > 1:
            total = sum(path.stat().st_size for path in paths)
            index = {"metadata": {"total_size": total}, "weight_map": tensors}
            (temporary / INDEX).write_text(json.dumps(index))
    return made


def tensors_in(path: Path) -> Sequence[str]:
    """The names of a file's tensors. Raises ``DataUnavailable`` for a damaged file."""
    try:
        with safe_open(os.fspath(path), "np") as file:
            return list(file.keys())
    except SafetensorError as error:
        raise DataUnavailable(
            "files", f"{path.name} is damaged ({one_line(error)}); save or fetch it again"
        ) from error
