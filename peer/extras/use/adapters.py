"""The adapters of a run as a folder of peft: written without the base, and read onto the base.

A folder that ``shoal export --to peft`` has written has the run file, which names the base with the
hashes of its files. Only safetensors are read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from peer.errors import Unusable
from peer.extras.bases.lora import ADAPTER, check_peft, peft_config
from peer.extras.export.folder import Export, json_bytes, write_whole
from peer.extras.export.parameters import in_bf16, in_fp32
from peer.extras.use.ready import (
    ExportUnusable,
    ReadyModel,
    made_ready,
)
from peer.model.naming import named_parameters
from peer.model.recipes import build_model
from peer.run_file.places import base_of
from peer.run_file.sections import HfModel, RunFile
from peer.storage.outer_state import export_metadata, named_tensors
from peer.storage.tensor_file import write_safetensors

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def check(run: RunFile) -> None:
    """Raise ``Unusable`` or ``ExtraMissing``."""
    if not isinstance(run.model, HfModel) or run.model.lora is None:
        raise Unusable(
            f"run {run.name!r} trains no adapters but a whole model; `--to hf` writes a folder "
            "that transformers loads",
            section="no-adapters",
        )
    check_peft()


def write(export: Export, out: Path) -> None:
    """Write the folder, which must not exist or be empty; it is complete or absent.

    Raises ``NotWritten``, and what ``check`` raises.
    """
    run = export.outer.run
    check(run)

    def fill(folder: Path) -> tuple[str, int]:
        tensors = named_tensors(export.outer.layout, export.outer.states)
        named = {name_in_file(name): tensor for name, tensor in tensors.items()}
        if export.dtype == "bf16":
            named = {name: in_bf16(tensor) for name, tensor in named.items()}
        with (folder / WEIGHTS).open("xb") as file:
            write_safetensors(file, named, metadata=export_metadata(export.outer))
        (folder / CONFIG).write_bytes(json_bytes(config_of(run)))
        return "LoRA", export.outer.layout.size

    write_whole(export, out, fill)


def name_in_file(name: str) -> str:
    """The name of a parameter as peft saves it: without that of the adapter, which may change."""
    kept = ".".join(part for part in name.split(".") if part != ADAPTER)
    return f"base_model.model.{kept}"


def config_of(run: RunFile) -> dict[str, Any]:
    """The content of ``adapter_config.json``."""
    assert isinstance(run.model, HfModel)
    assert run.model.lora is not None
    base = base_of(run.model)
    assert base is not None
    config = peft_config(run.model.lora)
    name, commit = base.hub or (base.source, None)
    config.base_model_name_or_path, config.revision = name, commit
    config.inference_mode = True
    plain = config.to_dict().items()
    return {key: sorted(value) if isinstance(value, set) else value for key, value in plain}


def adapted_in(
    folder: Path, run: RunFile, base: Path | None, *, data_dir: Path | None
) -> ReadyModel:
    """The base with the adapters in a folder.

    ``run`` is the run whose file is in the folder, ``base`` the weights that the run names. Raises
    ``ExportUnusable``, ``ExtraMissing`` or ``DataUnavailable``.
    """
    check_peft()
    if not (folder / WEIGHTS).is_file():
        raise ExportUnusable(str(folder), f"it has no {WEIGHTS}; other formats are not read")
    return made_ready(_filled(folder, run, base), folder, run, data_dir=data_dir)


def _filled(folder: Path, run: RunFile, base: Path | None) -> nn.Module:
    model = build_model(in_fp32(run), draw=False, base=base)
    try:
        tensors = load_file(folder / WEIGHTS)
        with torch.no_grad():
            for name, parameter in named_parameters(model):
                if parameter.requires_grad:
                    parameter.copy_(tensors[name_in_file(name)].view(parameter.shape))
    except KeyError as error:
        raise ExportUnusable(str(folder), f"{WEIGHTS} has no {error}") from error
    except (OSError, SafetensorError, RuntimeError, TypeError) as error:
        reason = " ".join(f"{WEIGHTS}: {error}".split())[:300]
        raise ExportUnusable(str(folder), reason) from error
    return model.eval()
