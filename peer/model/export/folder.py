"""An export as a folder that transformers loads as it is, and as one safetensors file.

Both are complete or absent: everything is written beside its place and moved there at the end.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from peer.errors import NotWritten, PeerError
from peer.model.export.architecture import (
    TORCH_NAMES,
    Dtype,
    architecture_of,
    config_of,
    converted,
    mlp_width,
)
from peer.model.export.card import card
from peer.model.export.facts import Facts
from peer.model.export.loading import filled
from peer.model.export.tensors import in_bf16
from peer.model.export.tokenizer import TokenizerFiles
from peer.model.recipes.hf import build_hf
from peer.run_file.sections import CustomModel, GptModel, HfModel, RunFile
from peer.storage.outer_state import OuterState, export_metadata, named_tensors
from peer.storage.tensor_file import write_safetensors

RUN_FILE = "shoal_run.json"
"""The run file in canonical form, whose blake3 digest is the run's id."""

WEIGHTS = "model.safetensors"


class OwnModel(PeerError):
    """The model of a run is a program's own."""

    exit_code = 2

    def __init__(self, run: str) -> None:
        super().__init__(run)
        self.run = run

    def __str__(self) -> str:
        return (
            f"the model of run {self.run!r} is 'custom': transformers does not know it; "
            "`--to safetensors` writes its parameters, for peer.load_weights"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """The contents of an export."""

    outer: OuterState
    facts: Facts = field(default_factory=Facts)
    tokenizer: TokenizerFiles | None = None
    dtype: Dtype = "fp32"


def check_exportable(run: RunFile) -> None:
    """Raise ``OwnModel`` or ``NoCounterpart`` if no folder can be written of this run."""
    if isinstance(run.model, CustomModel):
        raise OwnModel(run.name)
    if isinstance(run.model, GptModel):
        architecture_of(run.model)


def write_folder(export: Export, out: Path) -> None:
    """Write the folder, which must not exist or be empty. Raises what ``check_exportable`` does.

    Raises ``NotWritten`` and leaves nothing under the name if something cannot be written.
    """
    check_exportable(export.outer.run)
    check_free(out)
    temporary = out.with_name(f".{out.name}.{secrets.token_hex(8)}")
    try:
        temporary.mkdir()
        kind = _write_model(export, temporary)
        for name, content in _other_files(export, kind).items():
            (temporary / name).write_bytes(content)
        for path in (*temporary.iterdir(), temporary):
            _flush(path)
        temporary.rename(out)
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


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_model(export: Export, folder: Path) -> str:
    """Write configuration and weights; returns the name of the architecture's class."""
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
    (folder / "config.json").write_bytes(_json(config))
    generation = {"bos_token_id": None, "eos_token_id": end, "pad_token_id": end}
    (folder / "generation_config.json").write_bytes(_json({**generation, "do_sample": True}))
    with (folder / WEIGHTS).open("xb") as file:
        write_safetensors(file, made, metadata=export_metadata(export.outer))
    return architecture_of(run.model).class_name


def _write_hf(export: Export, recipe: HfModel, folder: Path) -> str:
    model: Any = build_hf(recipe, random_seed=export.outer.run.random_seed)
    filled(model, export.outer)
    model.to(getattr(torch, TORCH_NAMES[export.dtype]))
    if export.tokenizer is not None:
        for config in (model.config, model.generation_config):
            config.eos_token_id = export.tokenizer.end
    model.save_pretrained(folder)
    return type(model).__name__


def _other_files(export: Export, kind: str) -> Mapping[str, bytes]:
    tokenizer = export.tokenizer
    text = card(
        export.outer,
        export.facts,
        tokenizer=None if tokenizer is None else tokenizer.name,
        dtype=export.dtype,
        kind=kind,
    )
    return {
        **({} if tokenizer is None else tokenizer.files),
        "README.md": text.encode(),
        RUN_FILE: export.outer.run.canonical(),
    }


def _json(content: Any) -> bytes:
    return json.dumps(content, indent=2).encode() + b"\n"
