"""A callback with which a Lightning ``Trainer`` takes part in a run.

::

    shoal = peer.lightning.ShoalCallback("my.run.toml")
    lightning.Trainer(callbacks=[shoal], strategy="auto").fit(module, loader)

It is a callback and not a strategy, so that it works with any strategy that keeps whole parameters
or DTensors in each process: one device, ``ddp``, ``ModelParallelStrategy`` (FSDP2). All processes
of a Trainer together are one peer (``peer.island``). The run gives the first parameters, the
learning rate, and the end; ``max_steps`` and ``max_epochs`` also end this peer's part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from peer.bridge.messages import Fields
from peer.data.feed import order_for_peer
from peer.errors import ExtraMissing
from peer.island import Attendance
from peer.island.follower import Follower
from peer.run_file.sections import RunFile
from peer.trainer.own_loops import MeasureModel, in_evaluation
from peer.trainer.session import Run
from peer.trainer.settings import JoinSettings

try:
    from lightning.pytorch import Callback
except ImportError as missing:
    raise ExtraMissing("peer.lightning", missing.name or "lightning", "lightning") from missing


def tokens_of(batch: Any) -> int:
    """Number of tokens of a batch with ``input_ids``; number of samples of any other batch."""
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
    schedulers set. ``tokens(batch)``: the weight of a batch; every peer must use the same function.
    ``own_order``: read the training data in an order of this peer's own. ``held_out(module)``
    measures the held-out loss when it is this peer's turn, and returns the mean and the number of
    samples. ``on_event(fields)`` is called with every event (``run.on("*", ...)``). Further
    keywords are fields of ``peer.JoinSettings``.
    """

    def __init__(
        self,
        run: str | Path | RunFile | None = None,
        *,
        schedule: bool = True,
        tokens: Callable[[Any], int] = tokens_of,
        own_order: bool = True,
        held_out: MeasureModel | None = None,
        on_event: Callable[[Fields], None] | None = None,
        settings: JoinSettings | None = None,
        **own: Any,
    ) -> None:
        self._there = Attendance(run, on_event=on_event, settings=settings, own=own)
        self._schedule = schedule
        self._tokens = tokens
        self._own_order = own_order
        self._held_out = held_out

    def __repr__(self) -> str:
        return f"ShoalCallback({self._there})"

    @property
    def run(self) -> Run | Follower:
        """The result of ``peer.island.join``. There is none before training begins."""
        return self._there.run

    # --- what the Trainer calls -------------------------------------------------------------------

    def on_train_start(self, trainer: Any, pl_module: torch.nn.Module) -> None:
        optimizers = list(trainer.optimizers)
        run = self._there.begin(pl_module, optimizers)
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
        # The hook after the optimizer's step was the safe point.
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor):
            self.run.log(loss=loss)
        trainer.should_stop |= self.run.over
        if self.run.finished and self._there.holds_final:
            self.run.adopt_final()  # before the Trainer's last checkpoint

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._there.open.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._there.open.__exit__(type(exception), exception, exception.__traceback__)


def _loaders(loaders: Any) -> list[Any]:
    """All loaders in a nested collection, as the Trainer accepts it."""
    if isinstance(loaders, Mapping):
        return [loader for value in loaders.values() for loader in _loaders(value)]
    if isinstance(loaders, (list, tuple)):
        return [loader for value in loaders for loader in _loaders(value)]
    return [] if loaders is None else [loaders]
