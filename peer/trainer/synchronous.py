"""Synchronous runs (tau = 0): the trainer waits at its safe point for the rounds that are due."""

from __future__ import annotations

import time
from collections.abc import Callable

from peer.bridge.agent_process import AgentProcess
from peer.bridge.messages import Due
from peer.run_file.sections import RunFile
from peer.trainer.learner import Learner
from peer.trainer.news import News

ASK_AFTER_S = 0.25
ASK_AGAIN_S = 2.0
"""A trainer whose round does not begin asks its agent for it, again and again."""


class SynchronousRounds:
    """The rounds that a trainer has to wait for, fragment after fragment."""

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
        return self._news.report.synchronous

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
