"""Taking part in a training run: the public names, and the rooms behind them.

- ``trainer`` is the process of a training loop, ``agent`` the process beside it that talks to other
  peers, ``bridge`` what the two share. ``island``, ``hf`` and ``lightning``: other training loops.
- ``run_file`` declares a run; ``joining`` finds one; ``model``, ``data``: what is trained, on what.
- ``rules`` decides for one peer, ``guest`` keeps to the limits of the machine's owner, ``storage``
  has a peer's files.
- ``events`` are told in words; ``views`` show them and the figures of a peer.
- ``cli`` is the ``shoal`` command, with ``simulate`` (a swarm in virtual time) and ``demo``.
- ``extras`` is optional: ``credit`` counts who contributed what, ``compiled`` has faster codecs,
  ``site`` publishes exports and a page of the run, ``orders`` are the owner's, ``hosting`` is a
  bootstrap peer, ``doctor`` examines a machine, ``use`` continues texts and measures losses,
  ``bases`` are published models and adapters on them, ``export`` writes a model for other programs,
  ``explain`` tells stories from event logs, ``run_lists`` are lists of runs, ``experiments`` the
  commands of experiments.
- ``calls`` of peers of a run: ``status``, ``description``. ``contributors``: rows of who
  contributed what. ``errors``: all expected failures. ``installed``: optional parts, and documents
  that messages name. ``quantities``, ``signals``, ``processes``, ``https``: small parts that
  several rooms use.

Start reading at ``trainer.session`` (a training loop) or ``agent.agent`` (its agent).

Names are imported on first use. ``import peer`` therefore does not import torch, and agents and
commands that do not use it need less memory.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peer.errors import LeftEarly as LeftEarly
    from peer.errors import LoopWarning as LoopWarning
    from peer.errors import ModelMismatch as ModelMismatch
    from peer.errors import PeerError as PeerError
    from peer.errors import RunUnreachable as RunUnreachable
    from peer.extras.bases.base_models import fetch_base as fetch_base
    from peer.joining.link import read_run as read_run
    from peer.model.recipes import build_model as build_model
    from peer.model.recipes import build_optimizer as build_optimizer
    from peer.model.recipes import clip_gradients as clip_gradients
    from peer.model.recipes import held_out_loss as held_out_loss
    from peer.model.recipes import next_token_loss as next_token_loss
    from peer.model.weights import load_weights as load_weights
    from peer.model.weights import save_weights as save_weights
    from peer.run_file.sections import RunFile as RunFile
    from peer.status import PeerStatus as PeerStatus
    from peer.trainer.own_loops import autocast as autocast
    from peer.trainer.own_loops import describe as describe
    from peer.trainer.own_loops import micro_batches as micro_batches
    from peer.trainer.session import Run as Run
    from peer.trainer.session import join as join
    from peer.trainer.session import open as open  # noqa: A004
    from peer.trainer.settings import JoinSettings as JoinSettings

_HOMES = {
    "peer.errors": ("LeftEarly", "LoopWarning", "ModelMismatch", "PeerError", "RunUnreachable"),
    "peer.extras.bases.base_models": ("fetch_base",),
    "peer.joining.link": ("read_run",),
    "peer.model.recipes": (
        *("build_model", "build_optimizer", "clip_gradients", "held_out_loss", "next_token_loss"),
    ),
    "peer.model.weights": ("load_weights", "save_weights"),
    "peer.run_file.sections": ("RunFile",),
    "peer.status": ("PeerStatus",),
    "peer.trainer.own_loops": ("autocast", "describe", "micro_batches"),
    "peer.trainer.session": ("Run", "join", "open"),
    "peer.trainer.settings": ("JoinSettings",),
}
"""The module of each name."""

__all__ = [name for names in _HOMES.values() for name in names]

_INTEGRATIONS = ("hf", "island", "lightning")
"""Modules with further dependencies, also imported on first use."""


def __getattr__(name: str) -> Any:
    if name in _INTEGRATIONS:
        return importlib.import_module(f"peer.{name}")
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'peer' has no attribute {name!r}")
