"""A run that trains adapters of a small published model, for tests."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from peer.extras.bases.base_models import base_folder, published
from peer.model.naming import named_parameters
from peer.model.recipes import build_model
from peer.run_file.sections import HfModel, Lora, PythonStdlibData, RunFile

LORA = Lora(rank=4, alpha=8.0, targets=["q_proj", "mlp.up_proj"], base_dtype="fp32")


def adapted_run(folder: Path, lora: Lora = LORA) -> RunFile:
    """``folder``: of the published model, whose parent is the data folder of the run."""
    found = published(str(folder))
    model = HfModel(
        config=found.config,
        config_unset=list(found.config_unset),
        base=found.source,
        base_files=list(found.files),
        lora=lora,
    )
    return RunFile(name="adapted", model=model, data=PythonStdlibData(sequence_length=32))


def adapted_model(run: RunFile, folder: Path, cache_dir: Path) -> nn.Module:
    """The model of the run, with adapters that no recipe draws."""
    base = base_folder(run, cache_dir=cache_dir, data_dir=folder.parent)
    model = build_model(run, base=base)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in named_parameters(model):
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.eval()
