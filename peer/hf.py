"""A callback with which a transformers ``Trainer`` takes part in a run.

::

    with peer.hf.ShoalCallback("my.run.toml") as shoal:
        Trainer(model=model, args=args, train_dataset=dataset, callbacks=[shoal]).train()

The Trainer stays in charge of everything local: batches, precision, accumulation, clipping, logs,
checkpoints. The run gives the first parameters, the learning rate, and the end. Checkpoints that
the Trainer saves are whole and local: ``from_pretrained`` reads them. Only parameters with
``requires_grad`` are exchanged, so that an adapter (peft) is exchanged without its base model,
which must then be the same at every peer. A step's weight is the number of tokens that the model
was given, without padding (``attention_mask``); tokens without a label count.

Started by torchrun, all processes together are one peer (``peer.island``).

The Trainer's ``max_steps`` or epochs also end this peer's part; set them high to stay until the
run's end. Without the ``with``, an error in ``train()`` leaves the exchange running until the
program ends.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch.utils.data import IterableDataset

from peer.bridge.messages import Fields
from peer.data.feed import order_for_peer
from peer.errors import ExtraMissing, Unusable
from peer.island import Attendance
from peer.island.follower import Follower
from peer.model.naming import unwrapped
from peer.model.recipes import held_out_loss
from peer.model.recipes.chunked_loss import IGNORED
from peer.run_file.sections import RunFile
from peer.trainer.computing.device_facts import LateValue
from peer.trainer.own_loops import MeasureModel, in_evaluation, of_batches
from peer.trainer.session import Run
from peer.trainer.settings import JoinSettings

try:
    import accelerate  # noqa: F401 (without it there is no Trainer)
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as missing:
    raise ExtraMissing("peer.hf", missing.name or "transformers", "hf") from missing

logger = logging.getLogger(__name__)


class ShoalCallback(TrainerCallback):  # type: ignore[misc]
    """Joins a run when training begins, exchanges after each step, leaves when training ends.

    ``schedule``: the run sets the learning rate, from its global tokens; the Trainer's own
    schedule then has no effect. ``held_out``: the data for the held-out loss when it is this peer's
    turn to measure: batches (a ``DataLoader``), or a function of the model that returns the mean
    loss and the number of samples; unset: the held-out part of the run's data recipe if the Trainer
    trains on ``dataset()``. ``on_event(fields)`` is called with every event (``run.on("*", ...)``).
    Further keywords are fields of ``peer.JoinSettings``.
    """

    def __init__(
        self,
        run: str | Path | RunFile | None = None,
        *,
        schedule: bool = True,
        held_out: MeasureModel | Iterable[Mapping[str, torch.Tensor]] | None = None,
        on_event: Callable[[Fields], None] | None = None,
        settings: JoinSettings | None = None,
        **own: Any,
    ) -> None:
        self._there = Attendance(run, on_event=on_event, settings=settings, own=own)
        self._schedule = schedule
        self._held_out = held_out
        self._count: Callable[[TrainerState], int] = lambda state: 0
        """The tokens of this process in the step."""

    def __repr__(self) -> str:
        return f"ShoalCallback({self._there})"

    @property
    def run(self) -> Run | Follower:
        """The result of ``peer.island.join``. There is none before training begins."""
        return self._there.run

    def dataset(self) -> RunDataset:
        """The run's own data recipe, for ``Trainer(train_dataset=...)``."""
        return RunDataset(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._there.open.__exit__(*error)

    # --- what the Trainer calls -------------------------------------------------------------------

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: torch.nn.Module,
        optimizer: Any,
        lr_scheduler: Any,
        train_dataloader: Any,
        **rest: Any,
    ) -> None:
        _check(args)
        own = unwrapped(model)
        run = self._there.begin(own, optimizer)
        recipe = isinstance(getattr(train_dataloader, "dataset", None), RunDataset)
        self._count = self._token_counter(own, args, state, recipe=recipe)
        # The run's data goes on where it stopped. The Trainer would skip what it has read before.
        args.ignore_data_skip |= recipe
        at_once = args.per_device_eval_batch_size
        if (measure := self._measure(run, recipe=recipe, at_once=at_once)) is not None:
            run.measure_with(in_evaluation(own, measure))
        if not recipe:
            seed = args.data_seed or args.seed
            order_for_peer(train_dataloader, run_id=run.run_id, peer_id=run.peer_id, seed=seed)
        if self._schedule:
            run.schedule(optimizer)
            _show_rates(lr_scheduler, optimizer)
            logger.info(
                "the run's schedule sets the learning rate; lr_scheduler_type=%s has no effect",
                getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type),
            )
        # The run may have ended while this peer was away.
        control.should_training_stop |= run.over

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **rest: Any
    ) -> None:
        self.run.log(tokens=self._count(state))

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        optimizer: Any,
        lr_scheduler: Any,
        **rest: Any,
    ) -> None:
        # The hook after the optimizer's step was the safe point. Since then the Trainer's schedule
        # has set its own rates.
        if self._schedule:
            self.run.set_rates()
            _show_rates(lr_scheduler, optimizer)
        if self.run.over:
            self._stop(args, control)

    def _stop(self, args: TrainingArguments, control: TrainerControl) -> None:
        """End the training, with a last checkpoint of the Trainer if it makes any."""
        control.should_training_stop = True
        control.should_save |= str(getattr(args.save_strategy, "value", args.save_strategy)) != "no"
        if self.run.finished and self._there.holds_final:
            self.run.adopt_final()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        logs: dict[str, Any],
        **rest: Any,
    ) -> None:
        if self._there.joined is None:
            return
        if isinstance(logs.get("loss"), (int, float)):
            self.run.log(loss=float(logs["loss"]))
        figures = {"peers": self.run.peers, "global_tokens": self.run.global_tokens}
        for record in (logs, *state.log_history[-1:]):
            record.update(figures)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **rest: Any
    ) -> None:
        self._there.open.close()

    # --- held-out loss ----------------------------------------------------------------------------

    def _measure(self, run: Run | Follower, *, recipe: bool, at_once: int) -> MeasureModel | None:
        held_out = self._held_out
        if callable(held_out):
            return held_out
        if held_out is not None:
            return of_batches(held_out)
        if not recipe:
            return None
        return lambda model: (
            held_out_loss(model, run.recipe_data.held_out, at_once=at_once, meanwhile=run.offer),
            len(run.recipe_data.held_out),
        )

    # --- tokens -----------------------------------------------------------------------------------

    def _token_counter(
        self, model: torch.nn.Module, args: TrainingArguments, state: TrainerState, *, recipe: bool
    ) -> Callable[[TrainerState], int]:
        """A function that returns the number of tokens trained on since its last call."""
        if args.torch_compile:
            # A counting hook would be compiled with the model, again and again.
            args.include_num_input_tokens_seen = "all" if recipe else "non_padding"
            return _SeenByTrainer(state, args.world_size)
        counter = _SeenByModel(model)
        self._there.open.callback(counter.hook.remove)
        return counter


class RunDataset(IterableDataset[dict[str, torch.Tensor]]):
    """Sequences of this peer's own shard of the run's data recipe, until the run is over."""

    def __init__(self, callback: ShoalCallback) -> None:
        self._callback = callback

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for tokens in self._callback.run.data(batch_size=1):
            # transformers shifts the labels itself; the last token begins the next sequence.
            sequence = tokens[0, :-1]
            # Tokens that are read and not predicted are complements.
            yield {
                "input_ids": torch.where(sequence < 0, ~sequence, sequence),
                "labels": torch.where(sequence < 0, IGNORED, sequence),
            }


class _SeenByModel:
    """Counts the tokens that a model is given in training, without padding where there is a mask.

    It counts samples if the model takes no tokens.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._name = getattr(model, "main_input_name", "input_ids")
        self._seen = 0
        self._late: deque[LateValue] = deque()
        """Counts of masks, which may be on a device."""
        self._waits = True
        self.hook = model.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, model: torch.nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        main = named.get(self._name, args[0] if args else None)
        mask = named.get("attention_mask")
        if not model.training or not isinstance(main, torch.Tensor):
            return
        if main.is_floating_point():
            self._seen += len(main)
        elif isinstance(mask, torch.Tensor) and mask.shape == main.shape:
            self._late.append(LateValue(mask.count_nonzero()))
        else:
            self._seen += main.numel()

    def __call__(self, state: TrainerState) -> int:
        while self._late:
            # The first step would have no weight otherwise; later counts are part of the next step.
            count = self._late[0].wait() if self._waits else self._late[0].ready()
            if count is None:
                break
            self._seen += int(count)
            self._late.popleft()
        self._waits = False
        seen, self._seen = self._seen, 0
        return seen


class _SeenByTrainer:
    """Uses the Trainer's own count, which costs a synchronisation per batch."""

    def __init__(self, state: TrainerState, processes: int) -> None:
        self._before = int(state.num_input_tokens_seen)  # more than 0 after a restart
        self._processes = processes

    def __call__(self, state: TrainerState) -> int:
        total = int(state.num_input_tokens_seen)
        seen, self._before = total - self._before, total
        return seen // self._processes  # the count is over all; each process reports its part


def _check(args: TrainingArguments) -> None:
    if args.deepspeed or args.n_gpu > 1:
        several = "several GPUs in one process (start it with torchrun instead)"
        what = "DeepSpeed" if args.deepspeed else several
        raise Unusable(
            f"a Trainer with {what} cannot take part in a run; train without it",
            section="trainer-unsupported",
        )


def _show_rates(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    """Make the scheduler report the optimizer's rates: the Trainer logs what it reports."""
    inner = getattr(scheduler, "scheduler", scheduler)  # accelerate may wrap it
    if isinstance(inner, torch.optim.lr_scheduler.LRScheduler):
        inner._last_lr = [group["lr"] for group in optimizer.param_groups]
