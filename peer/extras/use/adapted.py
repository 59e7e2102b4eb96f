"""Adapters in a folder of peft, on the base that they were trained on.

A folder that ``shoal export --to peft`` has written has the run file, which names the base with the
hashes of its files. Only safetensors are read.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from peer.extras.bases.adapter import WEIGHTS, name_in_file
from peer.extras.bases.lora import check_peft
from peer.extras.export.parameters import in_fp32
from peer.extras.use.ready import (
    ExportUnusable,
    ReadyModel,
    made_ready,
)
from peer.model.naming import named_parameters
from peer.model.recipes import build_model
from peer.run_file.sections import RunFile


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
