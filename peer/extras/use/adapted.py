"""Adapters in a folder of peft, on the base that they were trained on.

A folder that ``shoal export --to peft`` has written has the run file, which names the base with the
hashes of its files. Other folders name a base in ``adapter_config.json``, which must be on this
machine already. Only safetensors are read.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from peer.errors import one_line
from peer.extras.bases.adapter import CONFIG, WEIGHTS, name_in_file
from peer.extras.bases.lora import check_peft
from peer.extras.export.parameters import in_fp32
from peer.extras.use.ready import (
    ExportUnusable,
    ReadyModel,
    made_ready,
    pretrained,
)
from peer.model.naming import named_parameters
from peer.model.recipes import build_model
from peer.run_file.sections import RunFile


def adapted_in(
    folder: Path, run: RunFile | None, base: Path | None, *, data_dir: Path | None
) -> ReadyModel:
    """The base with the adapters in a folder.

    ``run`` is the run whose file is in the folder, ``base`` the weights that the run names. Without
    a run the base is the one that the folder names. Raises ``ExportUnusable``, ``ExtraMissing`` or
    ``DataUnavailable``.
    """
    check_peft()
    if not (folder / WEIGHTS).is_file():
        raise ExportUnusable(str(folder), f"it has no {WEIGHTS}; other formats are not read")
    model = _of_peft(folder) if run is None else _of_run(folder, run, base)
    return made_ready(model, folder, run, data_dir=data_dir)


def _of_run(folder: Path, run: RunFile, base: Path | None) -> nn.Module:
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


def _of_peft(folder: Path) -> nn.Module:
    import peft

    try:
        config = json.loads((folder / CONFIG).read_bytes())
        named, revision = str(config["base_model_name_or_path"]), config.get("revision")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ExportUnusable(str(folder), f"{CONFIG} names no base: {error!r}") from error
    places = (Path(named), folder.parent / named)
    here = next((str(path) for path in places if path.is_dir()), named)
    try:
        model = pretrained(here, revision=revision)
    except ExportUnusable as error:
        why = (
            f"its base {named!r} is not on this machine or cannot be loaded ({error.reason}); put "
            "its folder beside this one, or fetch a model of the hub with `hf download`"
        )
        raise ExportUnusable(str(folder), why) from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft is behind transformers
            adapted: nn.Module = peft.PeftModel.from_pretrained(model, folder)
    except Exception as error:  # it raises errors of many kinds about damaged files
        raise ExportUnusable(str(folder), one_line(error)) from error
    return adapted.float().eval()
