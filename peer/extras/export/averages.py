"""The mean of the checkpoints in a peer's folder: often a better model than the newest one.

Every version has the noise of the steps that made it, and a mean over some of them has less. The
checkpoints of a peer lie some versions apart (``peer.agent.saver``), so nothing else is kept for
it: their mean has three quarters of what a vector of its own would gain, which every peer would
have to hold in memory (results-training.md in docs/research). A checkpoint counts if the newest
state of every fragment has grown out of its own: none does that was made before a rollback, or on
another side of the run. The mean is computed in fp32, the newest first, so equal checkpoints give
equal bits and an equal name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from averaging.history.state import FragmentState
from peer.errors import CheckpointDamaged, PeerError, one_line
from peer.extras.export.found_models import FoundModel
from peer.installed import extra
from peer.storage.checkpoint import CheckpointFolder, open_checkpoint
from peer.storage.home import data_cache
from peer.storage.outer_state import OuterState, read_place, read_theta


@dataclass(frozen=True, slots=True)
class Judged:
    """The newest parameters of a folder and their mean with earlier ones, and which is better."""

    better: OuterState
    """The mean, where they could not be measured."""
    newest_loss: float | None
    """Nats per token of the run's held-out data; ``None``: not measured."""
    average_loss: float | None
    text: str


def judged(model: FoundModel, folder: CheckpointFolder, *, quiet: bool) -> Judged:
    """Measure the newest parameters and the mean, if there is one."""
    newest = model.outer
    average = averaged(newest, folder)
    if average is None:
        text = (
            f"{folder.folder} has no earlier checkpoint that the newest one has grown out of, so "
            "there is no average: these are the newest parameters"
        )
        return Judged(newest, None, None, text)
    what = f"the average of {average.averaged} checkpoints"
    try:
        losses = [_loss(model, outer, quiet=quiet) for outer in (newest, average)]
    except PeerError as error:
        text = f"this is {what}; whether it is better was not measured: {one_line(error)}"
        return Judged(average, None, None, text)
    name, better = ("average", average) if losses[1] < losses[0] else ("newest version", newest)
    text = (
        f"held-out loss: newest version {losses[0]:.4f}, {what} {losses[1]:.4f} nats per token; "
        f"the {name} is better, so it is written"
    )
    return Judged(better, losses[0], losses[1], text)


def _loss(model: FoundModel, outer: OuterState, *, quiet: bool) -> float:
    base = model.base(quiet=quiet)
    ready = extra("use.ready").ready_of_run(outer, None, data_dir=model.data_dir, base=base)
    measured = extra("use.measuring").held_out_of_run(ready, cache_dir=data_cache())
    loss: float = measured.nats_per_token
    return loss


def averaged(outer: OuterState, folder: CheckpointFolder) -> OuterState | None:
    """The mean of a checkpoint and of those before it in its folder; ``None`` if none counts."""
    paths = [path for path in map(folder.path_of, folder.numbers()) if path != outer.path]
    with ExitStack() as files:  # what is open stays readable when its peer removes it
        opened = [_opened(path, outer, files) for path in reversed(paths)]
        before = [tensors for tensors in opened if tensors is not None]
        if not before:
            return None
        states = tuple(_mean(state, before) for state in outer.states)
    return replace(outer, states=states, averaged=1 + len(before))


def _opened(path: Path, outer: OuterState, files: ExitStack) -> Any:
    """The tensors of a checkpoint; ``None`` if it does not count."""
    with contextlib.suppress(CheckpointDamaged, FileNotFoundError):
        tensors = files.enter_context(open_checkpoint(path).tensors())
        if all(state.follows(*read_place(tensors, state.fragment)) for state in outer.states):
            return tensors
    return None


def _mean(newest: FragmentState, before: Sequence[Any]) -> FragmentState:
    index, total, lineages = newest.fragment, newest.theta.copy(), [newest.lineage]
    for tensors in before:
        total += read_theta(tensors, index)
        lineages.append(read_place(tensors, index)[1])
    total /= np.float32(len(lineages))
    name = blake3(b"".join(lineages), derive_key_context="shoal 2026-11 mean of checkpoints")
    return replace(newest, theta=total, lineage=name.digest())
