"""Waits of a training loop between steps: the owner's limits, and rounds that are due.

While training rests, the memory of an accelerator may be given back. Parameters, buffers and the
state of the optimizers move to the memory of the machine, and back. The tensors stay the same
objects, so that compiled code and optimizers go on with them. Fragments that are merged meanwhile
are added to them where they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

import torch

from peer.bridge.agent_process import AgentProcess
from peer.bridge.messages import Due
from peer.rules.limits import Limits, pause_after_step_s
from peer.run_file.sections import RunFile
from peer.trainer.learner import Learner
from peer.trainer.news import News

SLEEP_MAX_S = 60.0
"""Longest pause after a step: a small share must not make a trainer look dead."""


class Pacer:
    """Keeps one training loop to what its settings and the machine's owner allow."""

    def __init__(self, *, pace_s: float, device: torch.device) -> None:
        """``pace_s``: the least time of a step. ``device``: where the model trains."""
        self._pace_s = pace_s
        self._accelerator = None if device.type == "cpu" else device
        self._paced_at: float | None = None
        self._worked_from: float | None = None
        """Time at which the step began, while only a share of the time may be used."""
        self._own_threads: int | None = None
        """The program's own number of torch threads, while the owner wants fewer."""

    def pause(self, limits: Limits) -> None:
        """Sleep after a step as long as the limits ask for."""
        if self._accelerator is None:
            # Elsewhere these threads have little to do, and compiled code is compiled anew for
            # another number of them, while training waits.
            self._limit_threads(limits.threads)
        share = limits.share(accelerated=self._accelerator is not None)
        if share < 1.0:
            if self._accelerator is not None:
                # Queued kernels would run on while this thread sleeps.
                torch.accelerator.synchronize(self._accelerator)
            if self._worked_from is not None:
                worked_s = time.monotonic() - self._worked_from
                time.sleep(min(SLEEP_MAX_S, pause_after_step_s(share, worked_s)))
            self._worked_from = time.monotonic()
        else:
            self._worked_from = None
        if self._pace_s <= 0:
            return
        now = time.monotonic()
        if self._paced_at is not None and (left := self._paced_at + self._pace_s - now) > 0:
            time.sleep(left)
            now += left
        self._paced_at = now

    def forget(self) -> None:
        """Count the next step from its own beginning: there was a rest."""
        self._paced_at = self._worked_from = None

    def _limit_threads(self, wanted: int | None) -> None:
        if wanted is not None:
            if self._own_threads is None:
                self._own_threads = torch.get_num_threads()
            if torch.get_num_threads() != (count := min(wanted, self._own_threads)):
                torch.set_num_threads(count)
        elif self._own_threads is not None:
            torch.set_num_threads(self._own_threads)
            self._own_threads = None


ASK_AFTER_S = 0.25
ASK_AGAIN_S = 2.0
"""A trainer whose round does not begin asks its agent for it, again and again."""


class SynchronousRounds:
    """The rounds that a trainer has to wait for, fragment after fragment.

    In a synchronous run (tau = 0) it waits for them at its safe point.
    """

    def __init__(
        self,
        run: RunFile,
        fragments: int,
        *,
        learner: Learner,
        agent: AgentProcess,
        news: News,
        leaving: Callable[[], bool],
    ) -> None:
        """``leaving``: whether this peer is to leave, and waits no longer."""
        cycle = run.outer.steps_per_cycle
        self._cycle = cycle
        self._deadline_s = run.rounds.round_deadline_s
        self._due = [max(1, cycle - (index * cycle) // fragments) for index in range(fragments)]
        self._merged = [0] * fragments
        """The own steps that the last versions had."""
        self._learner = learner
        self._agent = agent
        self._news = news
        self._leaving = leaving

    def wait(self) -> None:
        """Wait until every fragment that is due has been through a round."""
        has_company = self._has_company()
        self._agent.ring()
        for fragment in range(len(self._due)):
            self._count_from_merged(fragment)
            if self._learner.steps < self._due[fragment]:
                continue
            if has_company:
                self._settle(fragment)
            self._due[fragment] = self._learner.steps + self._cycle

    def _count_from_merged(self, fragment: int) -> None:
        """Count from the last round, wherever it came: another peer may have been due first.

        Two that counted from their own waits alone would each come to the other's rounds too, after
        a few steps, and make twice as many as they should.
        """
        merged = self._learner.merged_steps(fragment)
        if merged != self._merged[fragment]:
            self._merged[fragment] = merged
            self._due[fragment] = merged + self._cycle

    def _has_company(self) -> bool:
        """True if a round with another peer is possible."""
        report = self._news.report
        return report.status.phase == "ready" and report.others_train

    def _settle(self, fragment: int) -> None:
        ask_at = time.monotonic() + ASK_AFTER_S

        def pause(seconds: float) -> None:
            # The agent counts from the rounds that it hears of; only the trainer knows what is due.
            nonlocal ask_at
            if time.monotonic() >= ask_at:
                self._agent.send(Due(fragment))
                ask_at = time.monotonic() + ASK_AGAIN_S
            time.sleep(seconds)

        self._learner.wait_for_round(
            fragment,
            deadline=time.perf_counter() + self._deadline_s,
            pause=pause,
            possible=self._has_company,
            leaving=self._leaving,
        )


HOST = torch.device("cpu")


def is_away(tensor: torch.Tensor) -> bool:
    """``True`` if it is in the memory of an accelerator."""
    return tensor.device.type != HOST.type


class GivenBack:
    """Keeps a model and its optimizers off the accelerator, when asked to."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Iterable[torch.optim.Optimizer],
        *,
        release: Callable[[], None] = torch.cuda.empty_cache,
    ) -> None:
        """``release``: gives what is no longer used to other programs."""
        self._model = model
        self._optimizers = tuple(optimizers)
        self._release = release
        self._from: list[tuple[torch.Tensor, torch.device]] = []

    def give(self) -> None:
        """Move all that is on an accelerator to the host; nothing, if it is there already."""
        if self._from:
            return
        held = {id(tensor): tensor for tensor in self._tensors() if is_away(tensor)}
        self._from = [(tensor, tensor.device) for tensor in held.values()]
        for tensor, _ in self._from:
            tensor.data = tensor.data.to(HOST)
        if self._from:
            self._release()

    def take(self) -> None:
        """Move it back to where it was. Where other programs have taken the memory meanwhile this
        fails as training does without it, and the next call goes on."""
        while self._from:
            tensor, device = self._from[-1]
            tensor.data = tensor.data.to(device)
            self._from.pop()

    def _tensors(self) -> Iterator[torch.Tensor]:
        for parameter in self._model.parameters():
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
        yield from self._model.buffers()
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))
