"""The checkpoint of a small run in the folder of a peer, for tests of what is made of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from averaging.history.merged_map import Mark, MergedMap
from averaging.history.state import FragmentState, Pieces
from dht.identity import Identity
from peer.bridge.settings import default_name
from peer.model.naming import named_parameters
from peer.model.recipes import build_model
from peer.run_file.sections import GptModel, HfModel, PythonStdlibData, RunFile
from peer.storage.checkpoint import CheckpointFolder
from peer.storage.home import OUTER
from peer.storage.outer_state import OuterState, load_outer, outer_content
from peer.trainer.parameters import model_layout

ANNA, BORIS, CLARA = (Identity.from_seed(bytes([n]) * 32).peer_id for n in (1, 2, 3))

RUN = RunFile(
    name="small",
    description="A run of <b>tests</b>.",
    licence="apache-2.0",
    homepage="https://example.org/small",
    model=GptModel(layers=2, width=32, heads=2, context=32),
    data=PythonStdlibData(sequence_length=32),
)

LLAMA = HfModel(
    config={
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 256,
        "max_position_embeddings": 64,
    }
)


def trained_model(run: RunFile) -> nn.Module:
    """The run's model with parameters that no recipe draws."""
    model = build_model(run)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in named_parameters(model):
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.eval()


def save_run(folder: Path, run: RunFile = RUN, model: nn.Module | None = None) -> OuterState:
    """Write a checkpoint with the parameters of a model, to which three peers have added work."""
    model = trained_model(run) if model is None else model
    values = {name: p.detach().numpy().reshape(-1) for name, p in named_parameters(model)}
    layout = model_layout(model, run.outer.fragments)
    merged = MergedMap({p: Mark(1, 8, 1000) for p in (ANNA, BORIS, CLARA)})
    states = []
    for fragment in layout.fragments:
        theta = np.empty(fragment.size, np.float32)
        for unit in fragment.units:
            theta[unit.values] = values[unit.tensor][unit.start : unit.end]
        momentum = Pieces.of(fragment, run.outer.momentum).momentum
        state = FragmentState.founded(layout.hash, fragment.index, theta, momentum)
        states.append(replace(state, merged=merged))
    content = outer_content(run=run, layout=layout, states=states)
    CheckpointFolder(folder / OUTER).save(*content)
    events = [
        {"at": 1.0e9, "event": "log", "peer": ANNA, "name": "anna"},
        {"at": 1.0e9, "event": "peer_joined", "peer": BORIS, "name": default_name(BORIS)},
        {"at": 1.0e9, "event": "peer_joined", "peer": CLARA, "name": "cla_ra"},
        {"at": 1.0e9, "event": "peer_joined", "peer": "12D3stranger", "name": "guest"},
        {"at": 1.1e9, "event": "measured", "version": 1, "tokens": 1100, "loss": 5.5, "peer": ANNA},
        {
            "at": 1.2e9,
            "event": "measured",
            "version": 3,
            "tokens": 3100,
            "loss": 2.25,
            "peer": BORIS,
        },
    ]
    lines = "".join(json.dumps(event) + "\n" for event in events)
    (folder / "events.jsonl").write_text(lines + '{"at": 1', encoding="utf-8")
    outer = load_outer(CheckpointFolder(folder / OUTER))
    assert outer is not None
    return outer
