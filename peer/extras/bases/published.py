"""A published model as the author of a run names it: its files with their hashes, its settings.

The hub tells the hash of every file of weights, so nothing large is downloaded from there. Files at
an https address are downloaded to hash them. Weights in formats that can run code are refused.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import OpenerDirector

from peer.data.text.downloads import Downloads, Tell, file_sha256
from peer.errors import DataUnavailable, one_line
from peer.extras.bases.base_models import (
    INDEX,
    SINGLE,
    BaseUnavailable,
    Progress,
    model_downloads,
    tensors_in,
)
from peer.installed import hub_errors, needed
from peer.run_file.hf_config import published_settings
from peer.run_file.places import WEIGHTS_FORMAT, pinned
from peer.run_file.sections import OWNED_HUB_NAME

CONFIG, TOKENIZER, TOKENIZER_CONFIG = "config.json", "tokenizer.json", "tokenizer_config.json"

SMALL_MAX_BYTES = 1 << 24
"""Upper bound on a file of settings."""

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


def published(
    named: str,
    *,
    cache_dir: Path,
    tell: Progress = lambda name, share: None,
    opener: OpenerDirector | None = None,
) -> Published:
    """The model ``owner/name``, with or without ``@`` and a commit; an https address; a folder.

    ``opener`` is for tests. Raises ``BaseUnavailable`` or ``ExtraMissing``.
    """
    try:
        if named.lower().startswith("https://"):
            return _at_address(named, cache_dir, tell, opener)
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
            "it is no folder here; a model on the hub is named 'owner/name', and an address begins "
            "with https://",
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


def _at_address(
    named: str, cache_dir: Path, tell: Progress, opener: OpenerDirector | None
) -> Published:
    source = named if named.endswith("/") else f"{named}/"
    downloads = model_downloads(cache_dir, opener=opener)
    with tempfile.TemporaryDirectory() as folder:
        small = Downloads(Path(folder), file_bytes_max=SMALL_MAX_BYTES, opener=opener)

        def read(file: str) -> bytes:
            return small.fetch_new(source + file)[0].read_bytes()

        settings = _settings(read, named)
        try:
            weights: Sequence[str] = _weights([INDEX], read, named)
        except DataUnavailable:  # it has no list of several files
            weights = [SINGLE]
    hashes = {}
    for file in weights:
        path, place = downloads.fetch_new(source + file, tell=_of_file(tell, file))
        tensors_in(path)
        assert place.sha256 is not None
        hashes[file] = place.sha256
    return Published(
        source=source,
        files=tuple(pinned(file, hashes[file]) for file in weights),
        tokenizer=None,
        **settings,
    )


def _of_file(tell: Progress, file: str) -> Tell:
    return lambda done, whole: tell(file, done / max(1, whole))


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
