"""The loop of ``shoal start`` and ``shoal join``: it trains a run's own recipes until its end.

It uses ``peer.join`` as any other loop does. Screen, links, questions and exit codes are in
``peer.cli`` and ``peer.views``.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

import msgspec
import torch

from peer import signals
from peer.bridge.messages import Fields
from peer.errors import LoopWarning, RunLost
from peer.model.recipes import (
    build_model,
    build_optimizer,
)
from peer.model.weights import load_weights
from peer.run_file.sections import RunFile
from peer.status import PeerStatus
from peer.trainer.computing.choices import OwnerChoices, choose
from peer.trainer.computing.device_facts import choose_device, facts_of
from peer.trainer.computing.engine import Engine
from peer.trainer.rank import Rank
from peer.trainer.session import Run, join
from peer.trainer.settings import JoinSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """Settings of training on this machine that are not part of the run."""

    device: str = "auto"
    wishes: OwnerChoices = field(default_factory=OwnerChoices)
    """Precision, micro-batch and compilation, where not left to the trainer."""
    threads: int | None = None
    """Number of torch threads on the CPU; unset: torch's own choice."""
    steps_max: int | None = None
    """Number of steps after which to leave; unset: stay until the run is over."""
    founds: bool = True
    """False if this peer never founds the run: it draws no first weights, because it gets the
    parameters of the run before its first step."""
    weights: Path | None = None
    """First weights of a founder instead of the recipe's: a safetensors file, or the folder of a
    transformers checkpoint. A peer that joins gets the parameters of the run."""
    base: Path | None = None
    """Folder with the weights of the published model that the run begins from, where this peer
    needs them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a finished training loop."""

    finished: bool
    """True if the run reached its end; false if this peer left earlier."""
    stopped: bool
    """True if this peer was asked to leave."""
    lost: RunLost | None
    """The reason why it could not continue, if there was one."""
    status: PeerStatus
    directory: Path


class Stop:
    """A request to leave: the first signal lets training end, a second one kills the process."""

    def __init__(self, heard: Callable[[], None] = lambda: None) -> None:
        """``heard`` is called in the handler of the first signal."""
        self._asked = threading.Event()
        self._heard = heard
        self.insisted: Callable[[], None] = lambda: None
        """Function to call before a second signal ends the process, on a thread of its own."""

    def __bool__(self) -> bool:
        return self._asked.is_set()

    def ask(self) -> None:
        self._asked.set()

    @contextmanager
    def on_signals(self) -> Iterator[Stop]:
        """Take the first signal as the request; after it Ctrl-C and SIGTERM kill."""

        def asked(number: int, frame: FrameType | None) -> None:
            if not self:
                self.ask()
                self._heard()

        def insisted() -> None:
            self.insisted()

        with signals.handled(asked), signals.second_ends(insisted):
            yield self


def prepare_torch(settings: TrainerSettings) -> torch.device:
    """Apply the settings to torch before its first use. Raises ``ValueError``."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    device = choose_device(settings.device)
    if device.type == "cuda" and device.index is not None:
        # Otherwise some calls of torch would take half a gigabyte of the first device.
        torch.cuda.set_device(device)
    return device


def check_wishes(settings: TrainerSettings) -> None:
    """Raise ``ValueError`` if this machine lacks the device, or the device the precision."""
    choose(facts_of(choose_device(settings.device)), settings.wishes, batch_size=1)


def open_engine(
    run_file: RunFile, settings: TrainerSettings, *, made: Callable[..., Engine] = Engine
) -> Engine:
    """The run's model and optimizer on this machine's device. Raises ``ValueError``."""
    device = prepare_torch(settings)
    facts = facts_of(device)
    choices = choose(facts, settings.wishes, batch_size=run_file.inner.batch_size)
    model = build_model(run_file, draw=settings.founds, base=settings.base)
    if settings.weights is not None:
        load_weights(model, settings.weights)
    model = model.to(device)
    return made(run_file, model, build_optimizer(run_file, model), choices)


def train(
    run_file: RunFile,
    *,
    own: JoinSettings,
    settings: TrainerSettings,
    stop: Stop,
    on_event: Callable[[Fields], None] = lambda fields: None,
    on_step: Callable[[Run], None] = lambda run: None,
    engine: Engine | None = None,
) -> Outcome:
    """Train until the run is over, ``stop`` is asked for, or ``steps_max`` steps are done.

    ``on_step`` is called after each step, and while training rests (``Run.rest``). ``engine``: the
    engine, if it is open already (``open_engine``).
    """
    engine = engine or open_engine(run_file, settings)
    # Nobody reads the model afterwards: the final one is in the peer's folder.
    own = replace(own, final="own")
    run = join(run_file, model=engine.model, optimizer=engine.optimizer, auto=False, settings=own)
    run.read_ahead()
    outcome = make_steps(
        run, engine, stop=stop, steps_max=settings.steps_max, on_event=on_event, on_step=on_step
    )
    assert outcome is not None, "this process has the agent"
    return outcome


def make_steps(
    run: Rank,
    engine: Engine,
    *,
    stop: Stop,
    steps_max: int | None,
    on_event: Callable[[Fields], None] = lambda fields: None,
    on_step: Callable[[Run], None] = lambda run: None,
) -> Outcome | None:
    """Train in a run that is not entered yet. Only the process with the agent has an outcome.

    The loop ends when the batches do: the processes of an island all leave at one safe point.
    """
    loss: torch.Tensor | None = None
    steps = 0

    def tell() -> None:
        while engine.events:
            event = engine.events.popleft()
            on_event(event)
            run.record(event)

    def stepped() -> None:
        if isinstance(run, Run):
            on_step(run)

    run.on("*", on_event)  # before entering, for the events on the way into the run
    run.while_resting(stepped)
    run.leave_when(lambda: bool(stop) or (steps_max is not None and steps >= steps_max))
    with warnings.catch_warnings(), engine.tuning, ExitStack() as at_end:
        at_end.callback(tell)
        at_end.callback(engine.tuning.leaving)
        warnings.simplefilter("ignore", LoopWarning)  # the screen shows the event loop_mistake
        tell()
        # The processes of an island add scaled gradients up, and do not save at the same step.
        if engine.scaler is not None and engine.combine is None:
            run.keep_scaler(engine.scaler)
        with run:
            engine.make_states()  # not before: a restored state is not made twice
            run.schedule(engine.optimizer)
            run.watch_device(engine.use)
            held_out = run.recipe_data.held_out
            run.measure_with(lambda: engine.measured(held_out, run.offer))
            run.check_with(engine.held_out_loss)
            for batch in run.data(batch_size=engine.batch_size, device=engine.device):
                loss = engine.gradients(batch)
                tell()
                for _ in range(engine.apply()):
                    steps += 1
                    run.log(loss=loss)
                    run.step(tokens=batch[:, 1:].numel())
                    stepped()
    if not isinstance(run, Run):
        return None
    return Outcome(
        finished=run.finished,
        stopped=bool(stop),
        lost=run.lost,
        status=msgspec.structs.replace(run.status, loss=None if loss is None else float(loss)),
        directory=run.directory,
    )
