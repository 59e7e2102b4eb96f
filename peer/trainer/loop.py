"""The loop of ``shoal start`` and ``shoal join``: it trains a run's own recipes until its end.

It uses ``peer.join`` as any other loop does. Screen, links, questions and exit codes are in
``peer.cli`` and ``peer.views``.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from peer import signals
from peer.model.recipes import (
    build_model,
    build_optimizer,
    clip_gradients,
    held_out_loss,
    next_token_loss,
)
from peer.model.weights import load_weights
from peer.run_file.sections import RunFile
from peer.trainer.observed_run import Fields, Outcome
from peer.trainer.session import Run, join
from peer.trainer.settings import JoinSettings

Device = str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """Settings of training on this machine that are not part of the run."""

    device: Device = "auto"
    threads: int | None = None
    """Number of torch threads on the CPU; unset: torch's own choice."""
    steps_max: int | None = None
    """Number of steps after which to leave; unset: stay until the run is over."""
    weights: Path | None = None
    """First weights of a founder instead of the recipe's: a safetensors file, or the folder of a
    transformers checkpoint. A peer that joins gets the parameters of the run."""


class Stop:
    """A request to leave: the first signal lets training end, a second one kills the process."""

    def __init__(self, heard: Callable[[], None] = lambda: None) -> None:
        """``heard`` is called in the handler of the first signal."""
        self._asked = threading.Event()
        self._heard = heard

    def __bool__(self) -> bool:
        return self._asked.is_set()

    def ask(self) -> None:
        self._asked.set()

    @contextmanager
    def on_signals(self) -> Iterator[Stop]:
        """Take the first signal as the request; after it Ctrl-C and SIGTERM kill."""
        earlier = {number: signal.getsignal(number) for number in signals.asking()}

        def asked(number: int, frame: FrameType | None) -> None:
            self.ask()
            for each in earlier:
                insists = each in signals.INSISTING
                signal.signal(each, signal.SIG_DFL if insists else signal.SIG_IGN)
            self._heard()

        for number in earlier:
            signal.signal(number, asked)
        try:
            yield self
        finally:
            for number, handler in earlier.items():
                signal.signal(number, handler)


def choose_device(wanted: Device) -> torch.device:
    """The device that was asked for; ``auto``: the fastest one. Raises ``ValueError``."""
    if wanted != "auto":
        try:
            device = torch.device(wanted)
            torch.empty(1, device=device)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"device {wanted!r} cannot be used here: {reason}") from error
        return device
    if torch.cuda.is_available():
        return torch.device("cuda")
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")


def prepare_torch(settings: TrainerSettings) -> torch.device:
    """Apply the settings to torch before its first use. Raises ``ValueError``."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    return choose_device(settings.device)


def train(
    run_file: RunFile,
    *,
    own: JoinSettings,
    settings: TrainerSettings,
    stop: Stop,
    on_event: Callable[[Fields], None] = lambda fields: None,
    on_step: Callable[[Run], None] = lambda run: None,
) -> Outcome:
    """Train until the run is over, ``stop`` is asked for, or ``steps_max`` steps are done."""
    device = prepare_torch(settings)
    model = build_model(run_file)
    if settings.weights is not None:
        load_weights(model, settings.weights)
    model = model.to(device)
    optimizer = build_optimizer(run_file, model)
    loss_value: float | None = None
    steps = 0

    run = join(run_file, model=model, optimizer=optimizer, settings=own)
    run.on("*", on_event)  # before entering, for the events on the way into the run
    run.leave_when(stop.__bool__)
    with run:
        run.schedule(optimizer)
        held_out = run.recipe_data.held_out
        run.measure_with(lambda: (held_out_loss(model, held_out), len(held_out)))
        for tokens in run.data():
            batch = tokens.to(device, non_blocking=True)
            loss = next_token_loss(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            clip_gradients(run_file, model)
            run.log(loss=loss, tokens=batch[:, 1:].numel())
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            on_step(run)
            if stop or steps == settings.steps_max:
                break
        loss_value = float(loss.detach()) if steps else None
    return Outcome(
        finished=run.finished,
        stopped=bool(stop),
        lost=run.lost,
        steps=run.stats.steps,
        tokens=run.stats.tokens,
        global_tokens=run.merged_tokens,
        loss=loss_value,
        held_out_loss=run.held_out_loss,
        stats=run.stats,
        directory=run.directory,
    )
