"""Taking part in a training run.

``import peer`` costs nothing: torch is imported with the first use of what needs it, so that
agents and commands that need none of it stay small.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peer.errors import PeerError
    from peer.joining.find import read_run
    from peer.model.recipes import (
        build_model,
        build_optimizer,
        clip_gradients,
        held_out_loss,
        next_token_loss,
    )
    from peer.model.weights import load_weights, save_weights
    from peer.run_file.sections import RunFile
    from peer.trainer.session import JoinSettings, Run, RunUnreachable, Stats, join

__all__ = [
    "JoinSettings",
    "LeftEarly",
    "PeerError",
    "Run",
    "RunFile",
    "RunUnreachable",
    "Stats",
    "build_model",
    "build_optimizer",
    "clip_gradients",
    "held_out_loss",
    "join",
    "load_weights",
    "next_token_loss",
    "read_run",
    "save_weights",
]

_HOMES = {
    "JoinSettings": "peer.trainer.session",
    "LeftEarly": "peer.errors",
    "PeerError": "peer.errors",
    "Run": "peer.trainer.session",
    "RunFile": "peer.run_file.sections",
    "RunUnreachable": "peer.trainer.session",
    "Stats": "peer.trainer.session",
    "build_model": "peer.model.recipes",
    "build_optimizer": "peer.model.recipes",
    "clip_gradients": "peer.model.recipes",
    "held_out_loss": "peer.model.recipes",
    "join": "peer.trainer.session",
    "load_weights": "peer.model.weights",
    "next_token_loss": "peer.model.recipes",
    "read_run": "peer.joining.find",
    "save_weights": "peer.model.weights",
}


_INTEGRATIONS = ("hf", "island", "lightning")
"""Modules that import more than a plain loop needs, with their first use."""


def __getattr__(name: str) -> Any:
    if name in _INTEGRATIONS:
        return importlib.import_module(f"peer.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'peer' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
