"""An export as a folder that transformers loads as it is, and as one safetensors file.

Both are complete or absent: everything is written beside its place and moved there at the end.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from dht.whole_files import NO_FILE
from peer.errors import NotWritten, Unusable
from peer.extras.export.card import RunFacts, card
from peer.extras.export.parameters import (
    TORCH_NAMES,
    Dtype,
    architecture_of,
    config_of,
    converted,
    in_bf16,
    mlp_width,
    model_of,
)
from peer.extras.export.tokenizer import TokenizerFiles
from peer.installed import extra
from peer.quantities import count_text
from peer.run_file.sections import CustomModel, GptModel, HfModel, RunFile
from peer.storage.outer_state import OuterState, export_metadata, named_tensors
from peer.storage.tensor_file import write_safetensors

RUN_FILE = "shoal_run.json"
"""The run file in canonical form, whose blake3 digest is the run's id."""

WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """The contents of an export."""

    outer: OuterState
    facts: RunFacts = field(default_factory=RunFacts)
    tokenizer: TokenizerFiles | None = None
    dtype: Dtype = "fp32"
    base: Path | None = None
    """Folder with the weights below the run's adapters."""


def check_exportable(run: RunFile) -> None:
    """Raise ``Unusable`` if no folder can be written of this run."""
    if isinstance(run.model, CustomModel):
        raise Unusable(
            f"the model of run {run.name!r} is 'custom': transformers does not know it; "
            "`--to safetensors` writes its parameters, for peer.load_weights",
            section="own-model",
        )
    if isinstance(run.model, GptModel):
        architecture_of(run.model)


def write_folder(export: Export, out: Path) -> None:
    """Write the folder, which must not exist or be empty. Raises what ``check_exportable`` does.

    Raises ``NotWritten`` and leaves nothing under the name if something cannot be written.
    """
    check_exportable(export.outer.run)
    write_whole(export, out, lambda folder: write_model_files(export, folder))


def write_whole(export: Export, out: Path, fill: Callable[[Path], tuple[str, int]]) -> None:
    """Write a folder with what ``fill`` writes, tokenizer, model card and run file.

    ``fill`` returns the name of the architecture and the number of parameters. Raises
    ``NotWritten`` and leaves nothing under the name if something cannot be written.
    """
    check_free(out)
    with folder_beside(out) as temporary:
        kind, parameters = fill(temporary)
        for name, content in _other_files(export, kind, parameters).items():
            (temporary / name).write_bytes(content)
        for path in (*temporary.iterdir(), temporary):
            flush(path)
        temporary.rename(out)


@contextmanager
def folder_beside(out: Path) -> Iterator[Path]:
    """A folder in which to write what is then renamed to ``out``. Raises ``NotWritten``."""
    temporary = out.with_name(f".{out.name}.{secrets.token_hex(8)}")
    try:
        temporary.mkdir()
        yield temporary
    except OSError as error:
        raise NotWritten(str(out), error.strerror or str(error)) from error
    except SafetensorError as error:
        raise NotWritten(str(out), str(error)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_free(out: Path) -> None:
    """Raise ``NotWritten`` if something is there already, or the folder around it is not."""
    why = None
    if not out.absolute().parent.is_dir():
        why = "its folder does not exist"
    elif not out.name or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        why = "it exists"
    if why is not None:
        raise NotWritten(str(out), why)


def check_place(out: Path, *, replaces: bool) -> None:
    """Raise ``NotWritten`` where no file can be written, or something is that is not replaced."""
    why = None
    if out.is_dir():
        why = "it is a folder"
    elif out.exists() and not out.is_file():
        why = NO_FILE
    elif out.exists() and not replaces:
        why = "it exists, and --force replaces it"
    elif not out.absolute().parent.is_dir():
        why = "its folder does not exist"
    if why is not None:
        raise NotWritten(str(out), why)


def flush(path: Path) -> None:
    """Bring a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_model_files(export: Export, folder: Path) -> tuple[str, int]:
    """Write configuration and weights; returns the architecture's class and its parameters."""
    run = export.outer.run
    if isinstance(run.model, HfModel):
        return _write_hf(export, run.model, folder)
    assert isinstance(run.model, GptModel)
    tensors = named_tensors(export.outer.layout, export.outer.states)
    end = None if export.tokenizer is None else export.tokenizer.end
    config = config_of(run.model, mlp_width=mlp_width(tensors), dtype=export.dtype, end=end)
    made = converted(run.model, tensors, dtype=export.dtype)
    if export.dtype == "bf16":
        made = {name: in_bf16(tensor) for name, tensor in made.items()}
    (folder / "config.json").write_bytes(json_bytes(config))
    generation = {"bos_token_id": None, "eos_token_id": end, "pad_token_id": end}
    (folder / "generation_config.json").write_bytes(json_bytes({**generation, "do_sample": True}))
    with (folder / WEIGHTS).open("xb") as file:
        write_safetensors(file, made, metadata=export_metadata(export.outer))
    return architecture_of(run.model).class_name, export.outer.layout.size


def _write_hf(export: Export, recipe: HfModel, folder: Path) -> tuple[str, int]:
    assert recipe.lora is None or export.base is not None, "adapters of no base"
    model: Any = model_of(export.outer, export.base)
    if recipe.lora is not None:
        model = extra("bases.lora").merged(model)
    model.to(getattr(torch, TORCH_NAMES[export.dtype]))
    if export.tokenizer is not None:
        for config in (model.config, model.generation_config):
            config.eos_token_id = export.tokenizer.end
    model.save_pretrained(folder)
    return type(model).__name__, sum(p.numel() for p in model.parameters())


def _other_files(export: Export, kind: str, parameters: int) -> Mapping[str, bytes]:
    tokenizer = export.tokenizer
    text = card(
        export.outer,
        export.facts,
        tokenizer=None if tokenizer is None else tokenizer.name,
        dtype=export.dtype,
        kind=f"{kind}, {count_text(parameters)} parameters",
    )
    return {
        **({} if tokenizer is None else tokenizer.files),
        "README.md": text.encode(),
        RUN_FILE: export.outer.run.canonical(),
    }


def json_bytes(content: Any) -> bytes:
    return json.dumps(content, indent=2).encode() + b"\n"
