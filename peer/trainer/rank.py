"""One process of a learner: the part of a training loop's interface that every rank has.

``peer.trainer.session.Run`` is the process with the agent, ``peer.island.follower.Follower`` any
other one. Each has its parts only after its block was entered.
"""

from __future__ import annotations

import abc
import atexit
import math
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
import torch
from blake3 import blake3

from dht.identity import PeerId, RunId
from peer import signals
from peer.bridge.messages import Fields
from peer.data.batches.sequences import Data, Sequences
from peer.data.feed import Feed
from peer.errors import ExitCode, LeftEarly, LoopWarning, explained
from peer.run_file.schedule import Rates
from peer.run_file.sections import RunFile
from peer.storage.inner_saves import InnerSaves
from peer.storage.inner_state import Optimizers
from peer.trainer.arguments import (
    bare,
    checked_loss,
    checked_model,
    checked_optimizers,
    token_count,
)
from peer.trainer.channel import Agreed
from peer.trainer.computing.device_facts import DeviceUse, Skips
from peer.trainer.loop_checks import LoopChecks, Mistake, warn_unless_entered
from peer.trainer.parameters import statistics_of
from peer.trainer.settings import JoinSettings, settings_from

if TYPE_CHECKING:
    from peer.trainer.lead import Lead


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The arguments of ``join``. Nothing is open yet."""

    where: str | Path | RunFile
    model: torch.nn.Module
    optimizers: tuple[torch.optim.Optimizer, ...]
    auto: bool
    settings: JoinSettings
    ranks: Lead | None = None
    """The other processes of this learner."""


LINK_VARIABLE = "SHOAL_LINK"
"""Variable with the run of a program that names none: launchers set variables, and programs that
split their arguments at `=` break a link."""


def plan_of(
    run: str | Path | RunFile | None,
    *,
    model: torch.nn.Module,
    optimizer: Optimizers | None,
    auto: bool,
    settings: JoinSettings | None,
    own: Mapping[str, Any],
) -> Plan:
    """The arguments of ``join``, checked. Raises ``TypeError`` or ``ValueError``."""
    chosen, model = settings_from(settings, own), checked_model(model)
    where = run if run is not None else os.environ.get(LINK_VARIABLE)
    if where is None:
        raise TypeError(
            "the run is missing: pass a run file, an https address or a shoal:// link, or set "
            f"{LINK_VARIABLE} to one"
        )
    return Plan(
        where=where,
        model=model,
        optimizers=checked_optimizers(optimizer, model, auto=auto),
        auto=auto,
        settings=chosen,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankParts:
    """Parts that every process of a learner needs to train in a run."""

    run_file: RunFile
    peer_id: PeerId
    directory: Path
    feed: Feed
    rates: Rates
    inner: InnerSaves


class Rank(abc.ABC):
    """One process of a learner, used as a context manager, or closed by ``close``.

    Whether the run is over, and how far it is, is what all processes have agreed upon.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._open = ExitStack()
        self._entered_by: int | None = None
        """The process that is in the block; ``None`` before and after it."""
        self._terminated = False
        self._was_entered = warn_unless_entered(plan.optimizers)
        """Function to call when the block is entered."""
        self._checks: LoopChecks | None = None
        self._agreed = Agreed()
        self._measure: Callable[[], tuple[float, int]] | None = None
        self._loss_of: Callable[[Sequences], float] | None = None
        self._leaving: Callable[[], bool] = lambda: False
        self._resting: Callable[[], None] = lambda: None
        self._device_use: Callable[[], DeviceUse] | None = None
        self._step_tokens = 0
        self._skips = Skips()
        self._scaler: torch.amp.GradScaler | None = None

    def __enter__(self) -> Self:
        if self._entered_by is None:  # ``peer.open`` has entered it otherwise
            self._open.enter_context(signals.terminations(self._heard_termination))
            self._enter()
            self._entered_by = os.getpid()
            atexit.register(self._forgotten)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._entered_by is not None:
            self._entered_by = None
            atexit.unregister(self._forgotten)
            self._leave(kind)

    def close(self) -> None:
        """Leave the run like the end of its block, for programs without ``with``."""
        self.__exit__(None)

    def _forgotten(self) -> None:
        """Leave the run at the end of the program."""
        if self._entered_by != os.getpid():
            return  # forked meanwhile
        failed: BaseException | None = getattr(sys, "last_value", None)
        if failed is None and not self._terminated:
            warnings.warn(
                explained(
                    "the program ends without run.close(), which is called now: call it after the "
                    "loop, and save the model after it",
                    "loop-mistake",
                ),
                LoopWarning,
                stacklevel=1,
            )
        self.__exit__(None if failed is None else type(failed))

    def _heard_termination(self) -> None:
        self._terminated = True
        if self._may_end_anywhere:
            raise SystemExit(128 + signal.SIGTERM)

    @property
    def _may_end_anywhere(self) -> bool:
        """True if no other process of this learner waits for this one."""
        return False

    @abc.abstractmethod
    def _enter(self) -> None:
        """Open the parts of the run."""

    @abc.abstractmethod
    def _leave(self, kind: type[BaseException] | None) -> None:
        """Leave the run, because of an error of this kind if it is given."""

    @property
    @abc.abstractmethod
    def _parts(self) -> RankParts: ...

    @property
    def recipe_data(self) -> Data:
        """This process's stream of the run's data recipe, and the held-out part.

        Raises ``LeftEarly`` if it is to leave before they can be read.
        """
        recipe = self._parts.feed.recipe
        if recipe is None:
            code = ExitCode.DONE if self.over else ExitCode.INTERRUPTED
            raise LeftEarly(self.run_file.name, "it was reading the data", code)
        return recipe

    @abc.abstractmethod
    def _safe_point(self) -> None:
        """Exchange what is asked for, after each optimizer step."""

    @property
    def over(self) -> bool:
        """True if the run, or this peer's part in it, has ended: stop the loop."""
        return self._agreed.over

    @property
    def finished(self) -> bool:
        """True if the run itself reached its end."""
        return self._agreed.finished

    @property
    def peers(self) -> int:
        """Number of live peers of the run, this one included."""
        return self._agreed.peers

    @property
    def global_tokens(self) -> int:
        """Number of tokens that the whole run has trained on, as far as this peer knows.

        It includes this peer's own tokens that are not merged yet: the learning rate follows it.
        """
        return self._agreed.global_tokens

    def _begin_steps(self) -> None:
        """Restore the inner state, and make the optimizer's step a safe point."""
        parts, plan = self._parts, self._plan
        self._was_entered()
        self._checks = LoopChecks(
            plan.model,
            plan.optimizers,
            auto=plan.auto,
            cycle=parts.run_file.outer.steps_per_cycle,
            tell=self._found_mistake,
            statistics=statistics_of(plan.model, parts.run_file.outer.buffers),
        )
        self._checks.watch_optimizers(self._open)
        self._checks.watch_rates(self._open, parts.rates, lambda: self.global_tokens)
        parts.inner.scaler = self._scaler
        if (restored := parts.inner.restore()) is not None:
            parts.feed.restore_position(restored.data)
        if plan.auto:
            hook = plan.optimizers[-1].register_step_post_hook(self._after_step)
            self._open.callback(hook.remove)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, keywords: Any) -> None:
        tokens, self._step_tokens = self._step_tokens, 0
        for counted in self._skips.note(optimizer, tokens):
            self._step_tokens = counted
            self._safe_point()

    def _found_mistake(self, mistake: Mistake, text: str) -> None:
        """Have a mistake of the loop, which is told as a warning anyway, in the agent's log."""
        return  # only one process has an agent

    @abc.abstractmethod
    def restore(self) -> None:
        """Set the model to the run's newest parameters, after some were no longer finite.

        Own work that is not merged is given up; moments of the optimizer and running statistics
        that are not finite begin anew. It waits for rounds that use what was offered. Of several
        processes that are one learner each calls it, after the same step.
        """

    @abc.abstractmethod
    def adopt_final(self) -> None:
        """Set the model to the final parameters of a run that is over (``finished``).

        They are the same bits at all peers that ended the run together; frozen parameters stay,
        and buffers, unless the run merges them (``outer.buffers``). Leaving the block does it, too,
        unless ``final="own"``. Of several processes that are one learner each calls it, after the
        same step. Raises ``RuntimeError`` if the run is not over.
        """

    def log(
        self,
        *,
        loss: torch.Tensor | float | None = None,
        tokens: torch.Tensor | float | None = None,
    ) -> None:
        """Report a batch, before the step that it belongs to. Tokens of several batches add up.

        ``loss``: a number or a tensor with one value, on any device. ``tokens``: a whole number of
        any type that is on the host.
        """
        if tokens is not None:
            self._step_tokens += token_count(tokens)
        if loss is not None:
            self._take_loss(checked_loss(loss))
        if self._checks is not None:
            self._checks.logged()

    def on(self, event: str, handler: Callable[[Fields], None]) -> None:
        """Call ``handler(fields)`` at the safe point after each ``event``; ``"*"`` for all.

        Events are, among others: link, phase, adopted, round, round_missed, peer_joined, peer_left,
        peer_lost, agent_died, measured, over. With ``"*"`` the fields have the event's name as
        ``event``. Of several processes that are one learner rank 0 alone has events.
        """
        return  # only one process has an agent

    def keep_scaler(self, scaler: torch.amp.GradScaler) -> None:
        """Save the scale with the optimizer's state, to go on with it after a restart.

        To be called before the block is entered. A new scaler begins at 65536 and skips steps until
        it has found its scale.
        """
        self._scaler = scaler

    def record(self, event: Fields) -> None:
        """Have an event of the loop in the event log, if it belongs there.

        It is written by the agent, hence not before the block was entered, nor after it was left.
        """
        return  # only one process has an agent

    def _take_loss(self, loss: torch.Tensor | float) -> None:
        """Take note of a loss that was logged: that of the process with the agent is shown."""
        return

    def step(self, *, tokens: torch.Tensor | float | None = None) -> None:
        """The safe point, for ``auto=False``: call it after each optimizer step."""
        if tokens is not None:
            self._step_tokens += token_count(tokens)
        self._safe_point()

    def seed(self, seed: int) -> int:
        """Seed ``random``, numpy and torch for this peer, so that peers draw different batches.

        The same ``seed`` gives the same numbers again at this peer. Returns the seed that was set,
        for generators of the program's own.
        """
        mixed = blake3(f"{seed} {self._parts.peer_id}".encode()).digest(length=4)
        own = int.from_bytes(mixed, "little")  # numpy takes 32 bits
        random.seed(own)
        np.random.seed(own)
        torch.manual_seed(own)
        return own

    def data(
        self,
        dataset: Iterable[Any] | None = None,
        *,
        batch_size: int | None = None,
        device: torch.device | None = None,
    ) -> Any:
        """Batches of this process's own shard, until the run is over.

        Without a dataset: the run's data recipe, as a tensor of tokens with
        ``sequence_length + 1`` columns, copied to ``device`` while the one before is used. With one
        that has a length: its items, in this process's own order. With a ``DataLoader`` that
        shuffles: its batches, again and again, in orders that are this peer's own whatever seed the
        program sets. With any other iterable: its items, again and again, and those of an iterator,
        such as a generator, once.
        """
        return self._parts.feed.batches(dataset, batch_size, device)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the data where ``state`` was taken. Parameters and counts are the run's."""
        self._parts.feed.resume(state)

    def schedule(self, optimizer: torch.optim.Optimizer, *, peak: float | None = None) -> None:
        """Let the run's schedule set the learning rate, from the run's global tokens.

        Groups keep the proportions among the rates they were made with. ``peak``: the first group's
        rate at the top of the schedule; unset: the run's ``inner.learning_rate``.
        """
        self._parts.rates.follow(bare(optimizer), peak=peak)
        self.set_rates()

    def set_rates(self) -> None:
        """Set the scheduled rates again, after something else has changed them."""
        agreed = self._agreed.rate
        self._parts.rates.set(self.global_tokens, rate=None if math.isnan(agreed) else agreed)

    def measure_with(self, measure: Callable[[], tuple[float, int]]) -> None:
        """Set the function that measures the held-out loss.

        It returns the mean loss and the number of sequences, which is 0 if it could not measure,
        and is called at a safe point when it is this peer's turn; training waits meanwhile. One
        that takes long calls ``offer`` now and then. Of several processes that are one learner each
        calls its own at the same safe point, so that they may compute together; the result of rank
        0 is published.
        """
        self._measure = measure

    def offer(self) -> None:
        """Copy out what is asked for, in the middle of a measurement: parameters stay as they are.

        A round waits for no learner that takes much longer than usual. Of several processes that
        are one learner none can do this alone.
        """
        return

    def check_with(self, loss: Callable[[Sequences], float]) -> None:
        """Set the function that measures the mean loss of token sequences of the run's recipe.

        Needed for spot checks of other peers' contributions, where the run asks for them
        (``policy.spot_checks``): it is called at a safe point, with other parameters than the
        learner's own. A learner of several processes makes none.
        """
        self._loss_of = loss

    def leave_when(self, asked: Callable[[], bool]) -> None:
        """Set a function that says whether this peer is to leave; it is called now and then.

        For loops that look only between steps whether they are to end: once it returns true, a
        synchronous learner waits for no peer. If it does so while the block is being entered,
        entering raises ``LeftEarly``. Of several processes that are one learner rank 0 asks, and
        all leave at the same safe point.
        """
        self._leaving = asked

    def while_resting(self, tell: Callable[[], None]) -> None:
        """Set a function that is called many times a second while training rests, between steps."""
        self._resting = tell

    def watch_device(self, use: Callable[[], DeviceUse]) -> None:
        """Set a function that reads the state of the device, for ``status``."""
        self._device_use = use

    @property
    def run_file(self) -> RunFile:
        return self._parts.run_file

    @property
    def run_id(self) -> RunId:
        return self._parts.run_file.run_id

    @property
    def peer_id(self) -> PeerId:
        return self._parts.peer_id

    @property
    def device(self) -> torch.device:
        """The device of the model's first parameter."""
        return next(self._plan.model.parameters()).device

    @property
    def directory(self) -> Path:
        """The folder of this peer in this run."""
        return self._parts.directory


Parts = TypeVar("Parts", bound=RankParts)


def entered(parts: Parts | None) -> Parts:
    """The parts of a process whose block was entered."""
    if parts is None:
        raise RuntimeError("the run is joined when its block is entered; enter it first")
    return parts


def check_finished(finished: bool) -> None:
    """Raise ``RuntimeError`` if there are no final parameters yet."""
    if not finished:
        raise RuntimeError(
            "the run is not over, so it has no final parameters; call adopt_final() only if "
            "run.finished"
        )
