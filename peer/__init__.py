"""Taking part in a training run.

``import peer`` costs nothing: torch is imported with the first use of what needs it, so that
agents and commands that need none of it stay small.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peer.errors import PeerError
    from peer.find import read_run
    from peer.recipes import (
        build_model,
        build_optimizer,
        clip_gradients,
        held_out_loss,
        next_token_loss,
    )
    from peer.run import JoinSettings, Run, RunUnreachable, Stats, join
    from peer.run_file import RunFile
    from peer.weights import load_weights, save_weights

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
    "JoinSettings": "peer.run",
    "LeftEarly": "peer.errors",
    "PeerError": "peer.errors",
    "Run": "peer.run",
    "RunFile": "peer.run_file",
    "RunUnreachable": "peer.run",
    "Stats": "peer.run",
    "build_model": "peer.recipes",
    "build_optimizer": "peer.recipes",
    "clip_gradients": "peer.recipes",
    "held_out_loss": "peer.recipes",
    "join": "peer.run",
    "load_weights": "peer.weights",
    "next_token_loss": "peer.recipes",
    "read_run": "peer.find",
    "save_weights": "peer.weights",
}


_INTEGRATIONS = ("hf", "island", "lightning")
"""Modules that import more than a plain loop needs, with their first use."""


def __getattr__(name: str) -> Any:
    if name in _INTEGRATIONS:
        return importlib.import_module(f"peer.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'peer' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
