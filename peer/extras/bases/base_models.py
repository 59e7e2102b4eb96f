"""The published model that a run begins from: as the run's author names it, and on this machine.

The hub tells the hash of every file of weights, so an author downloads nothing large from there.
Weights in formats that can run code are refused.

A peer gets the files from the hub or from the data folder, and verifies them. They are never
removed: a download of many files would otherwise lose the first of them to the last.
``base_folder`` puts them together as transformers reads them. Nothing but the tensors in them is
read: the model's configuration is in the run file.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3
from safetensors import SafetensorError, safe_open

from dht.whole_files import new_folder
from peer.data.hub import hub_address, hub_host
from peer.data.text.downloads import Downloads, KnownHashes, file_sha256
from peer.errors import DataUnavailable, PeerError, one_line
from peer.installed import hub_errors, needed
from peer.run_file.hf_config import published_settings
from peer.run_file.places import WEIGHTS_FORMAT, BaseModel, Place, base_of, pinned
from peer.run_file.sections import OWNED_HUB_NAME, RunFile
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
) -> Path | None:
    """A folder with the verified weights of the run's base; ``None`` if the run has no base.

    Raises ``BaseUnavailable`` or ``ExtraMissing``.
    """
    base = base_of(run.model)
    if base is None:
        return None
    try:
        if base.hub is None:
            hashes = KnownHashes(cache_dir / "hashes")
            paths = [_local(base, file, data_dir, hashes) for file in base.files]
        else:
            made = _downloads(cache_dir, base.hub[0])
            paths = [_remote(base.hub, file, made, tell) for file in base.files]
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
    if base is None or base.hub is None:
        return ()
    folder = cache_dir / MODELS
    return tuple(f for f in base.files if f.sha256 and not (folder / f.sha256).exists())


def missing_bytes(run: RunFile, *, cache_dir: Path) -> int | None:
    """The size of the files of the run's base that are still to be downloaded, in whole.

    ``None`` if the hub does not tell it.
    """
    base = base_of(run.model)
    missing = missing_files(run, cache_dir=cache_dir)
    if base is None or base.hub is None or not missing:
        return 0
    made = _downloads(cache_dir, base.hub[0])
    sizes = [made.size_bytes(_address(base.hub, file)) for file in missing]
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def _downloads(cache_dir: Path, name: str) -> Downloads:
    return Downloads(
        cache_dir / MODELS,
        file_bytes_max=FILE_MAX_BYTES,
        folder_bytes_max=None,
        host=hub_host(name),
    )


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


def _remote(hub: tuple[str, str], file: Place, downloads: Downloads, tell: Progress) -> Path:
    return downloads.fetch(
        _address(hub, file), tell=lambda done, whole: tell(file.name, done / max(1, whole))
    )


def _address(hub: tuple[str, str], file: Place) -> Place:
    return Place(hub_address(*hub, file.name), file.sha256)


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


CONFIG, TOKENIZER, TOKENIZER_CONFIG = "config.json", "tokenizer.json", "tokenizer_config.json"

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5")


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A published model, as a run file describes it."""

    source: str
    files: tuple[str, ...]
    """Names of its files of weights, with their hashes."""
    config: dict[str, Any]
    config_unset: tuple[str, ...]
    tokenizer: str | None
    """The model's tokenizer, for ``data.tokenizer``; ``None`` if it has none that can be named."""
    end_token: str | None = None


def published(named: str) -> Published:
    """The model ``owner/name``, with or without ``@`` and a commit; or one in a folder.

    Raises ``BaseUnavailable`` or ``ExtraMissing``.
    """
    try:
        if Path(named).is_dir():
            return _in_folder(named)
        return _on_hub(named)
    except DataUnavailable as error:
        raise BaseUnavailable(named, error.reason) from error
    except OSError as error:
        raise BaseUnavailable(named, one_line(error)) from error


def _on_hub(named: str) -> Published:
    huggingface_hub = needed("huggingface_hub", f"the model {named}")
    name, _, revision = named.partition("@")
    if re.fullmatch(OWNED_HUB_NAME, name) is None:
        raise BaseUnavailable(
            named,
            "it is no folder here; a model on the hub is named 'owner/name'",
        )
    try:
        info = huggingface_hub.HfApi().model_info(
            name, revision=revision or None, files_metadata=True
        )
        commit, siblings = str(info.sha), info.siblings or []

        def read(file: str) -> bytes:
            return Path(huggingface_hub.hf_hub_download(name, file, revision=commit)).read_bytes()

        there = [each.rfilename for each in siblings]
        hashes = {each.rfilename: each.lfs.sha256 for each in siblings if each.lfs is not None}
        for file in (weights := _weights(there, read, named)):
            if file not in hashes:  # too small for the store of large files
                hashes[file] = file_sha256(
                    Path(huggingface_hub.hf_hub_download(name, file, revision=commit))
                )
        settings = _settings(read, named)
    except hub_errors() as error:
        raise BaseUnavailable(
            named, f"{one_line(error)}; check the name and the connection to the hub"
        ) from error
    source = f"{name}@{commit}"
    has_tokenizer = any(file.startswith("tokenizer") for file in there)
    return Published(
        source=source,
        files=tuple(pinned(file, hashes[file]) for file in weights),
        tokenizer=source if has_tokenizer else None,
        **settings,
    )


def _in_folder(named: str) -> Published:
    folder = Path(named)

    def read(file: str) -> bytes:
        return (folder / file).read_bytes()

    there = sorted(path.name for path in folder.iterdir())
    weights = _weights(there, read, named)
    for file in weights:
        tensors_in(folder / file)
    settings = _settings(read, named)
    # In a run file a folder is relative to the data folder, which is usually that of the file.
    source = folder.name if folder.is_absolute() or ".." in folder.parts else folder.as_posix()
    tokenizer, end_token = None, None
    if TOKENIZER in there:
        tokenizer = pinned(f"{source}/{TOKENIZER}", file_sha256(folder / TOKENIZER))
        end_token = _end_token(read) if TOKENIZER_CONFIG in there else None
    return Published(
        source=source,
        files=tuple(pinned(file, file_sha256(folder / file)) for file in weights),
        tokenizer=tokenizer,
        end_token=end_token,
        **settings,
    )


def _weights(there: Collection[str], read: Callable[[str], bytes], named: str) -> list[str]:
    """The files of weights: those that an index lists, or the only one."""
    if INDEX in there:
        try:
            places = json.loads(read(INDEX))["weight_map"]
            return sorted({str(file) for file in places.values()})
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise BaseUnavailable(named, f"its {INDEX} cannot be read: {error}") from error
    if SINGLE in there:
        return [SINGLE]
    others = [file for file in there if file.endswith(_PICKLES)]
    if others:
        raise BaseUnavailable(
            named,
            f"it has no {WEIGHTS_FORMAT} files, but {', '.join(others[:3])}: loading these can run "
            "code; convert it with save_pretrained of transformers, or name a commit that has them",
        )
    raise BaseUnavailable(named, f"it has neither {SINGLE} nor {INDEX}")


def _settings(read: Callable[[str], bytes], named: str) -> dict[str, Any]:
    """The fields of ``Published`` that are the model's settings."""
    try:
        config = json.loads(read(CONFIG))
    except (ValueError, RecursionError, FileNotFoundError) as error:
        raise BaseUnavailable(named, f"its {CONFIG} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise BaseUnavailable(named, f"its {CONFIG} is no table")
    if "quantization_config" in config:
        raise BaseUnavailable(
            named, "its weights are quantized; name the model that it was made from"
        )
    known, unset = published_settings(config)
    return {"config": known, "config_unset": tuple(unset)}


def _end_token(read: Callable[[str], bytes]) -> str | None:
    try:
        token = json.loads(read(TOKENIZER_CONFIG)).get("eos_token")
    except (ValueError, RecursionError, AttributeError):
        return None
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None
