"""The adapters of a run as a folder of peft, which the base is not needed for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peer.errors import Unusable
from peer.extras.bases.lora import ADAPTER, check_peft, peft_config
from peer.extras.export.folder import Export, json_bytes, write_whole
from peer.extras.export.parameters import in_bf16
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
