"""A Lightning ``Trainer`` takes part in a run, by a callback.

::

    shoal = peer.lightning.ShoalCallback("my.run.toml")
    lightning.Trainer(callbacks=[shoal], strategy="auto").fit(module, loader)

It is a callback and not a strategy, so that it goes with any strategy that keeps whole parameters
or DTensors in each process: one device, ``ddp``, ``ModelParallelStrategy`` (FSDP2). All processes
of a Trainer together are one peer (``peer.island``). The run gives the parameters to begin with,
the learning rate, and the end; ``max_steps`` and ``max_epochs`` also end this peer's part.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from peer.data.sampling import order_for_peer
from peer.errors import ExtraMissing
from peer.island import Follower, join
from peer.run_file.sections import RunFile
from peer.trainer.measuring import Measure, in_evaluation
from peer.trainer.session import Fields, JoinSettings, Run, settings_from

try:
    from lightning.pytorch import Callback
except ImportError as missing:
    raise ExtraMissing("peer.lightning", missing.name or "lightning", "lightning") from missing

logger = logging.getLogger(__name__)


def tokens_of(batch: Any) -> int:
    """Tokens of a batch, where it has ``input_ids``; else its samples."""
    if isinstance(batch, torch.Tensor):
        return len(batch)
    if isinstance(batch, Mapping):
        tokens = batch.get("input_ids")
        if isinstance(tokens, torch.Tensor):
            return tokens.numel()
        return tokens_of(next(iter(batch.values()), ()))
    if isinstance(batch, Sequence) and batch and not isinstance(batch, str):
        return tokens_of(batch[0])
    raise ValueError(
        f"a batch of type {type(batch).__name__}: say how many tokens it has, "
        "by ShoalCallback(..., tokens=lambda batch: ...)"
    )


class ShoalCallback(Callback):  # type: ignore[misc]
    """Joins a run when training begins, exchanges after each step, leaves when training ends.

    ``schedule``: the run sets the learning rate, from its global tokens, whatever the module's
    schedulers say. ``tokens(batch)``: how much a batch counts; the same at every peer.
    ``own_order``: walk the training data in an order of this peer's own. ``held_out(module)``:
    measures the held-out loss when it is this peer's turn, and returns its mean and of how many
    samples. ``on_event(fields)`` hears what ``run.on("*", ...)`` tells. Further keywords are fields
    of ``peer.JoinSettings``.
    """

    def __init__(
        self,
        run: str | Path | RunFile,
        *,
        schedule: bool = True,
        tokens: Callable[[Any], int] = tokens_of,
        own_order: bool = True,
        held_out: Measure | None = None,
        on_event: Callable[[Fields], None] | None = None,
        settings: JoinSettings | None = None,
        **own: Any,
    ) -> None:
        settings_from(settings, own)  # a mistake is told now, not when training begins
        self._where = run
        self._schedule = schedule
        self._tokens = tokens
        self._own_order = own_order
        self._held_out = held_out
        self._on_event = on_event
        self._settings, self._own = settings, own
        self._open = ExitStack()
        self._run: Run | Follower | None = None

    def __repr__(self) -> str:
        return f"ShoalCallback({self._where if self._run is None else self._run!r})"

    @property
    def run(self) -> Run | Follower:
        """What ``peer.island.join`` gives. There is none before training begins."""
        if self._run is None:
            raise RuntimeError("the run is joined when training begins; there is none before")
        return self._run

    # --- what the Trainer calls -------------------------------------------------------------------

    def on_train_start(self, trainer: Any, pl_module: torch.nn.Module) -> None:
        optimizers = list(trainer.optimizers)
        run = join(
            self._where,
            model=pl_module,
            optimizer=optimizers,
            settings=self._settings,
            **self._own,
        )
        if self._on_event is not None:
            run.on("*", self._on_event)
        self._open.enter_context(run)
        self._run = run
        if self._schedule:
            for optimizer in optimizers:
                run.schedule(optimizer)
        if self._held_out is not None:
            run.measure_with(in_evaluation(pl_module, self._held_out))
        if self._own_order:
            for loader in _loaders(trainer.train_dataloader):
                order_for_peer(loader, run_id=run.run_id, peer_id=run.peer_id, seed=0)
        # The run may have ended while this peer was away.
        trainer.should_stop |= run.over

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self.run.log(tokens=self._tokens(batch))
        if self._schedule:
            self.run.set_rates()  # the module's own schedulers may have set others

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # The safe point was the hook behind the optimizer's step.
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor):
            self.run.log(loss=loss)
        trainer.should_stop |= self.run.over

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._open.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._open.__exit__(type(exception), exception, exception.__traceback__)


def _loaders(loaders: Any) -> list[Any]:
    """Every ``DataLoader`` in whatever collection the Trainer was given."""
    if isinstance(loaders, Mapping):
        return [each for value in loaders.values() for each in _loaders(value)]
    if isinstance(loaders, (list, tuple)):
        return [each for value in loaders for each in _loaders(value)]
    return [] if loaders is None else [loaders]
