"""``peer.join``: take part in a run from an own training loop.

::

    with peer.join("my.run.toml", model=model, optimizer=optimizer) as run:
        for batch in run.data(dataset):
            loss = model(batch).loss
            loss.backward()
            run.log(loss=loss, tokens=batch.numel())
            optimizer.step()
            optimizer.zero_grad()

The loop stays the caller's. A hook after ``optimizer.step`` is the safe point at which fragments
are offered and adopted; parameters change nowhere else. Gradient accumulation needs nothing: a step
is an optimizer step. A step that a ``GradScaler`` skips does not count. Nobody hears of it where
the optimizer is not fused: its tokens then count with the next step.

``Run`` has a ``Plan``, and ``Parts`` from the moment at which its block is entered
(``peer.trainer.parts``). The network belongs to the agent process; if that dies, the loop goes on.
"""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from peer.bridge.messages import (
    Batches,
    Fields,
    Happened,
    Measured,
    Progress,
    Restore,
)
from peer.errors import LeftEarly, LoopWarning, RunLost, explained
from peer.events.sentences import worded
from peer.events.table import TABLE, Audience, audience_of, on_screen
from peer.rules.leaving import Stay, stay
from peer.run_file.reading import with_settings
from peer.run_file.sections import RunFile
from peer.status import PeerRow, PeerStatus, Training
from peer.storage.inner_state import Optimizers
from peer.trainer.arguments import check_is_whole
from peer.trainer.channel import Agreed
from peer.trainer.computing.device_facts import LateValue
from peer.trainer.loop_checks import FirstBatch, Mistake, restart_broken_moments
from peer.trainer.news import News
from peer.trainer.pacing import GivenBack
from peer.trainer.parts import Parts, arrive, open_parts
from peer.trainer.rank import Plan, Rank, check_finished, entered, plan_of
from peer.trainer.settings import JoinSettings, with_public_ports
from peer.trainer.trials import Trials

REST_LOOK_S = 0.02
STILL_HERE_S = 10.0
"""Time between two signs of life to the other processes of a learner while it rests."""

LOSSES_MAX = 64
TELL_PROGRESS_EVERY_S = 1.0

RESTORE_WITHIN_S = 30.0
"""Time, beyond that of a round, for the agent to hand over the run's parameters."""


def join(
    run: str | Path | RunFile | None = None,
    *,
    model: torch.nn.Module,
    optimizer: Optimizers | None,
    auto: bool = True,
    settings: JoinSettings | None = None,
    **own: Any,
) -> Run:
    """Take part in a run: a file, an ``https`` address or a ``shoal://`` link.

    Where the program names none, it is what the environment has as ``SHOAL_LINK``.

    ``auto``: exchange after each ``optimizer.step()``, of several optimizers after the last one's;
    otherwise call ``run.step(tokens=...)``, and ``optimizer`` may be ``None``. Further keywords are
    fields of ``JoinSettings``.
    Entering the block returns once this peer has the current parameters of the run; leaving it
    finishes the exchanges in flight and says goodbye.
    """
    plan = plan_of(run, model=model, optimizer=optimizer, auto=auto, settings=settings, own=own)
    check_is_whole(plan.model)
    return Run(plan)


def open(run: str | Path | RunFile | None = None, **how: Any) -> Run:  # noqa: A001
    """``join`` for a program without ``with``: the block is entered, and ``run.close()`` leaves it.

    It takes the arguments of ``join``. A run that is still open when the program ends is closed.
    """
    return join(run, **how).__enter__()


class Run(Rank):
    """This peer's part in a run. Made by ``join``, used as a context manager."""

    def __init__(self, plan: Plan) -> None:
        tell = (lambda text: None) if plan.settings.quiet else _print_line
        plan = replace(plan, settings=with_public_ports(plan.settings, tell=tell))
        super().__init__(plan)
        self._opened: Parts | None = None
        self._ranks = plan.ranks
        self._news = News()
        self._news.on("not_finite", self._heard_not_finite)
        self._news.on("same_batches", self._heard_same_batches)
        self._first_batch: FirstBatch | None = None
        self._batches_told_to: int | None = None
        """Number of the agent that knows what the program trains on."""
        self._losses: deque[LateValue] = deque(maxlen=LOSSES_MAX)
        self._reads_ahead = False
        self._trials: Trials | None = None
        """Trials of others' contributions, where the run asks for them."""
        self._tell_progress_at = 0.0
        self._merged_at: list[int] = []
        """The step of the last merge of each fragment."""
        self._amended: dict[str, int | float | str] = {}
        """Settings of the run that its owner has changed, as they were followed last."""
        if not plan.settings.quiet:
            for event in ("joins_here", "founded", "fetch_failed", "page", "link", "link_limited"):
                self.on(event, partial(_print, event))

    def __repr__(self) -> str:
        if self._opened is None:
            return f"Run({self._plan.where}, not entered)"
        return f"Run({self.run_file.name}, steps={self._opened.learner.steps}, peers={self.peers})"

    # --- getting in and out ---------------------------------------------------------------------

    @property
    def _parts(self) -> Parts:
        return entered(self._opened)

    @property
    def _may_end_anywhere(self) -> bool:
        return self._ranks is None

    def _enter(self) -> None:
        plan = self._plan
        assert self._opened is None, "a run is entered once"
        leaving = self._is_leaving
        try:
            self._opened = parts = open_parts(
                plan, self._news, self._open, over=lambda: self.over, leaving=leaving
            )
            if self._reads_ahead:
                parts.feed.begin_to_open()
            arrive(parts, plan.settings, self._news, leaving)
            cycle = parts.run_file.outer.steps_per_cycle
            self._merged_at = first_merges(parts.memory.fragments, cycle)
            self._news.deliver()
            self._open.callback(parts.inner.close)
            if parts.run_file.policy.spot_checks:
                self._trials = Trials(parts.feed, parts.learner, parts.agent.send)
            self._begin_steps()
            self._first_batch = FirstBatch(plan.model, parts.run_file.run_id)
            self._open.callback(self._first_batch.close)
            self._agree()
        except BaseException as error:
            if plan.ranks is not None:
                plan.ranks.end(f"{type(error).__name__}: {error}")
            self._open.close()
            raise

    def _leave(self, kind: type[BaseException] | None) -> None:
        # An error of the caller's is no reason to wait; Ctrl-C means: finish and go.
        calm = kind is None or issubclass(kind, KeyboardInterrupt | LeftEarly | SystemExit)
        if self._ranks is not None and kind is not None:
            # The other processes may be at any step of theirs.
            calm = False
            self._ranks.abandon()
        try:
            if calm:
                if self._checks is not None:
                    self._checks.left()
                settings = self._plan.settings
                self._drain(stay(settings.patience_s, drain_s=settings.drain_s))
                if self._news.finished and settings.final == "run":
                    self._set_to_final()
        finally:
            self._open.close()

    def cut_short(self) -> None:
        """This process is told to end at once: its pending work counts as left, not as a crash."""
        self._parts.progress.leaves()

    def _drain(self, time_left: Stay) -> None:
        """Let the agent finish, and adopt what it still brings."""
        if time_left.timeout_s <= 0:
            return
        parts = self._parts
        parts.agent.leave(time_left.timeout_s, patience_s=time_left.patience_s)
        # From here on nothing is trained: a second Ctrl-C leaves work behind, and is no crash.
        parts.progress.end()
        parts.inner.save(step=parts.learner.steps, position=parts.feed.state())
        deadline = time.monotonic() + time_left.longest_s
        has_ended = False
        while not has_ended and time.monotonic() < deadline:
            has_ended = parts.agent.join(0.005)
            parts.learner.exchange()  # once more after its end: it may have said its last meanwhile
            self._tell()
        parts.inner.finish()

    def adopt_final(self) -> None:
        check_finished(self.finished)
        self._set_to_final()
        self._agree()

    def _set_to_final(self) -> None:
        """Set the parameters to those that the agent has exported at the run's end."""
        problem = "this peer could not export them (see the event export_failed)"
        if self._news.exported is not None:
            try:
                with safe_open(self._news.exported, "pt") as file:
                    self._parts.learner.set_parameters(file.get_tensor)
                return
            except (OSError, SafetensorError) as error:
                problem = f"{self._news.exported}: {error}"
        warnings.warn(
            explained(
                "the model holds this peer's own parameters and not the run's final ones: "
                f"{problem}; `shoal export` fetches the final ones",
                "own-parameters",
            ),
            stacklevel=3,
        )

    def read_ahead(self) -> None:
        """Read the run's data recipe while the block is being entered, for loops that use it."""
        self._reads_ahead = True

    def _is_leaving(self) -> bool:
        # The processes of one learner leave together, at a safe point (``_agree``).
        return self._asked_to_leave() and (self._ranks is None or self._opened is None)

    def _asked_to_leave(self) -> bool:
        return self._terminated or self._leaving()

    # --- the loop -------------------------------------------------------------------------------

    def _take_loss(self, loss: torch.Tensor | float) -> None:
        # A loss on an accelerator is read when it has arrived on the host: this waits for nothing.
        self._losses.append(LateValue(loss))

    def _safe_point(self) -> None:
        parts, learner = self._parts, self._parts.learner
        tokens, self._step_tokens = self._step_tokens, 0
        if self._ranks is not None:
            tokens = self._ranks.total(tokens)
        assert self._checks is not None
        while self._losses and (value := self._losses[0].ready()) is not None:
            learner.loss = value
            self._losses.popleft()
            self._checks.check_loss(value)
        learner.step(tokens, on_count=self._count)
        if parts.synchronous is not None:
            parts.synchronous.wait()
        # Before the other processes continue: they wait here, where nothing has a deadline.
        parts.pacer.pause(self._news.report.limits)
        self._rest()
        wanted = self._news.take_measure()
        measure = None if wanted is None else self._measure
        self._agree(measure=measure is not None)
        self.set_rates()
        exchanged = self._tell()
        alone = self._news.is_alone and parts.agent.alive
        self._checks.stepped(tokens=tokens, exchanged=exchanged, alone=alone or self.over)
        if wanted is not None and (measure is not None or wanted.gate):
            loss, sequences = (0.0, 0) if measure is None else measure()
            if sequences or wanted.gate:
                parts.agent.send(Measured(asked=wanted, loss=loss, sequences=sequences))
        if self._batches_told_to != parts.agent.restarts and self._first_batch is not None:
            self._batches_told_to = parts.agent.restarts
            self._first_batch.close()
            parts.agent.send(Batches("" if parts.feed.draws_order else self._first_batch.digest))
        if self._trials is not None:
            self._try(self._trials, step=learner.steps)
        parts.inner.maybe_save(step=learner.steps, position=parts.feed.state)
        if time.monotonic() >= self._tell_progress_at:
            self._tell_progress_at = time.monotonic() + TELL_PROGRESS_EVERY_S
            training = self._training()
            if training.loss is not None and not math.isfinite(training.loss):
                training = msgspec.structs.replace(training, loss=None)
            parts.agent.send(Progress(training))

    def offer(self) -> None:
        if self._ranks is None:
            self._parts.learner.exchange(adopts=False)

    def _try(self, trials: Trials, *, step: int) -> None:
        """Tell what was read, and try a contribution of another peer if the agent asks for it."""
        loss_of = self._loss_of if self._ranks is None else None
        trials.note(step, judges=loss_of is not None)
        asked = self._news.take_try()
        if asked is not None:
            trials.begin(asked)
        trials.try_if_ready(loss_of)

    def _count(self) -> None:
        # Before a peer can hear of this step, so that it counts even after a kill -9.
        learner = self._parts.learner
        self._parts.progress.record(step=learner.steps, tokens=learner.tokens)

    def _rest(self) -> None:
        """Make no steps while the machine's owner wants none. Offers and adoptions continue."""
        rested = False
        held = GivenBack(self._plan.model, self._plan.optimizers)
        told_at = time.monotonic()
        while self.rest is not None and self._news.over is None and not self._asked_to_leave():
            rested = True
            if self._ranks is None and self._news.report.limits.free_gpu:
                held.give()
            else:
                held.take()
            if self._ranks is not None and time.monotonic() - told_at >= STILL_HERE_S:
                self._ranks.wait()
                told_at = time.monotonic()
            self._parts.learner.exchange()
            self._tell()
            self._resting()
            time.sleep(REST_LOOK_S)
        held.take()
        if rested:
            self._parts.pacer.forget()
            if self._checks is not None:
                self._checks.rested()

    def _amend(self) -> None:
        """Follow the amendments of the run's owner."""
        amended = self._news.report.amended
        if amended != self._amended:
            self._amended = amended
            self._parts.rates.run_now = with_settings(self._parts.run_file, amended)

    def _agree(self, *, measure: bool = False) -> None:
        """Give the other processes the news that hold for all of them from this safe point on."""
        self._amend()
        if self._ranks is not None:
            news = self._news
            self._agreed = Agreed(
                over=news.over is not None or self._asked_to_leave(),
                finished=news.finished,
                global_tokens=news.report.scheduled_tokens,
                rate=self._parts.rates.rate(news.report.scheduled_tokens),
                peers=self.peers,
                measure=measure,
            )
            self._ranks.go(self._agreed)

    def _tell(self) -> bool:
        """Tell what has happened. Returns whether a version was adopted."""
        learner = self._parts.learner
        adopted = learner.take_adopted()
        for fragment, version in adopted:
            if learner.steps:
                self._merged_at[fragment] = learner.steps
            self._news.add("adopted", {"fragment": fragment, "version": version})
        self._news.deliver()
        return bool(adopted)

    def _found_mistake(self, mistake: Mistake, text: str) -> None:
        fields: Fields = {"kind": mistake, "text": text}
        self._news.add("loop_mistake", fields)
        self.record({"event": "loop_mistake", **fields})

    def record(self, event: Fields) -> None:
        if self._opened is not None and audience_of(str(event["event"])) & Audience.LOG:
            fields = {key: value for key, value in event.items() if key != "event"}
            self._opened.agent.send(Happened(str(event["event"]), fields))

    def _heard_same_batches(self, fields: Fields) -> None:
        text = f"this peer {on_screen({'event': 'same_batches', **fields})}"
        warnings.warn(text, LoopWarning, stacklevel=2)

    def _heard_not_finite(self, fields: Fields) -> None:
        if self._checks is not None:
            self._checks.not_finite(f"parameters of fragment {fields['fragment']} are not finite")

    def restore(self) -> None:
        parts, learner = self._parts, self._parts.learner
        deadline = time.monotonic() + RESTORE_WITHIN_S + parts.run_file.rounds.round_deadline_s
        learner.overwritten.clear()
        parts.agent.send(Restore())
        while len(learner.overwritten) < parts.memory.fragments:
            learner.exchange()
            if self.over or time.monotonic() > deadline:
                raise TimeoutError(
                    "the run's parameters could not be had: "
                    + ("this peer's part in the run is over" if self.over else "no agent answers")
                )
            time.sleep(REST_LOOK_S)
        restart_broken_moments(self._plan.model, self._plan.optimizers)
        self._agree()

    def state_dict(self) -> dict[str, Any]:
        """This peer's place in the run, for a checkpoint of the caller's beside the model.

        Plain numbers and strings. The run saves its own state by itself.
        """
        return {
            "run_id": self.run_id,
            "steps": self._parts.learner.steps,
            "tokens": self._parts.learner.tokens,
            "global_tokens": self.global_tokens,
            "versions": list(self.versions),
            "data": self._parts.feed.state(),
        }

    def on(self, event: str, handler: Callable[[Fields], None]) -> None:
        self._news.on(event, handler)

    # --- properties -----------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """True if the run, or this peer's part in it, has ended: stop the loop."""
        return self._news.over is not None if self._ranks is None else self._agreed.over

    @property
    def finished(self) -> bool:
        """True if the run itself reached its end."""
        return self._news.finished

    @property
    def lost(self) -> RunLost | None:
        """The error that ended this peer's part; ``None`` if the run ended or it was to leave."""
        over = self._news.over
        if over is None or over.exit_code == 0:
            return None
        return RunLost(self.run_file.name, over.reason, over.exit_code)

    @property
    def link(self) -> str | None:
        """The link for others to join by; ``None`` while this peer has no address."""
        return self._news.report.status.link or None

    @property
    def global_tokens(self) -> int:
        return (
            self._news.report.scheduled_tokens
            if self._ranks is None
            else self._agreed.global_tokens
        )

    @property
    def versions(self) -> tuple[int, ...]:
        """The version of each fragment that the parameters are based on."""
        memory = self._parts.memory
        bases = [memory.base(fragment) for fragment in range(memory.fragments)]
        return tuple(0 if base is None else base.version for base in bases)

    @property
    def peers(self) -> int:
        """Number of live peers of the run, this one included."""
        return self._news.report.status.peers

    @property
    def loss(self) -> float | None:
        """The newest logged training loss of this peer that has arrived on the host."""
        return self._parts.learner.loss

    @property
    def held_out_loss(self) -> float | None:
        """The newest published held-out loss."""
        return self._news.report.status.held_out_loss

    @property
    def rows(self) -> tuple[PeerRow, ...]:
        """This peer and the largest contributors among the others, as of a second ago."""
        return self._news.report.rows

    @property
    def rest(self) -> str | None:
        """The reason why the machine's owner wants no steps for now."""
        return self._news.report.status.rest

    @property
    def status(self) -> PeerStatus:
        """All figures of this peer, those of its training as of now."""
        own = msgspec.structs.asdict(self._training())
        return msgspec.structs.replace(self._news.report.status, peer=self.peer_id, **own)

    def _training(self) -> Training:
        learner, use = self._parts.learner, self._device_use and self._device_use()
        training = msgspec.structs.replace(
            learner.training, agent_restarts=self._parts.agent.restarts
        )
        speed = training.tokens_per_s
        if speed is None:
            return training
        cycle = self.run_now.outer.steps_per_cycle
        steps = steps_to_merge(self._merged_at, cycle=cycle, steps=learner.steps)
        peak = use.peak_flops if use else None
        return msgspec.structs.replace(
            training,
            next_merge_s=None if self._news.is_alone else steps * learner.step_time_s,
            share_of_peak=speed * use.flops_per_token / peak if use and peak else None,
            device_bytes=use.memory_bytes if use else None,
            temperature_c=use.temperature_c if use else None,
            preparing=use.preparing if use else None,
        )

    @property
    def run_now(self) -> RunFile:
        """The run file with the amendments of its owner that this trainer follows."""
        return self._parts.rates.run_now


def steps_to_merge(merged_at: Sequence[int], *, cycle: int, steps: int) -> int:
    """Own steps until the next merge is expected; 0 if one is due.

    ``merged_at``: the step at which each fragment was last merged. Each is merged once per cycle.
    """
    return max(0, min(merged_at) + cycle - steps)


def first_merges(fragments: int, cycle: int) -> list[int]:
    """``merged_at`` of a peer that has just begun: its merges are spread over the first cycle."""
    return [-(index * cycle) // fragments for index in range(fragments)]


def _print(event: str, fields: Fields) -> None:
    record = {"event": event, **fields}
    _print_line(f"{on_screen(record) or worded(TABLE[event].sentence, record)}")


def _print_line(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
