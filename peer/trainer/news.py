"""News from the agent: its latest messages, and events that wait for the next safe point."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from peer.bridge.messages import Fields, FromAgent, Happened, Measure, Over, Phase, Report, Try
from peer.status import FIGURES, Training

EVENTS_MAX = 1000
"""Number of events that are kept for the next safe point; beyond it the oldest are dropped."""

COUNTED_BY_AGENT = tuple(
    name
    for name, figure in FIGURES.items()
    if figure.counts and name not in ("global_tokens", *Training.__struct_fields__)
)
"""Figures that a new agent counts from 0."""


class News:
    """The agent's latest messages. Filled on the line's thread, read on the trainer's."""

    def __init__(self) -> None:
        self.report = Report()
        self._earlier_agents = dict.fromkeys(COUNTED_BY_AGENT, 0)
        """Counts of the agents before the present one."""
        self.phase: Phase | None = None
        self.over: Over | None = None
        """The last message of an agent that has ended for good."""
        self.exported: Path | None = None
        """File with the run's final parameters."""
        self._to_measure: dict[bool, Measure] = {}
        """The latest request of the loss gate (true), and the latest other one."""
        self._to_try: Try | None = None
        self._handlers: dict[str, list[Callable[[Fields], None]]] = {}
        self._events: deque[tuple[str, Fields]] = deque(maxlen=EVENTS_MAX)

    @property
    def is_alone(self) -> bool:
        """True if there is nobody to merge with: no other peer is there that trains."""
        return self.report.status.peers == 1 or not self.report.others_train

    def hear(self, message: FromAgent) -> None:
        """Note a message. It must not block: it runs on the line's thread."""
        if isinstance(message, Report):
            self.report = self._grown(message)
        elif isinstance(message, Phase):
            self.phase = message
            self.add("phase", {"name": message.name, "text": message.text, "done": message.done})
        elif isinstance(message, Happened):
            if message.name == "exported":
                self.exported = Path(str(message.fields["path"]))
            self.add(message.name, message.fields)
        elif isinstance(message, Measure):
            self._to_measure[message.gate > 0] = message
        elif isinstance(message, Try):
            self._to_try = message
        elif isinstance(message, Over):
            self.over = message
            self.add("over", {"reason": message.reason, "finished": message.finished})

    def _grown(self, report: Report) -> Report:
        """``report`` with counters that never run backwards, whatever becomes of agents and forks.

        A new agent counts from 0. Tokens fall where the lighter side of a fork is given up: the
        learning rate that follows them does not. It does where the run's owner takes the run back.
        """
        status, last = report.status, self.report
        merged, scheduled = status.global_tokens, report.scheduled_tokens
        if report.gone_back <= last.gone_back:
            merged = max(merged, last.status.global_tokens)
            scheduled = max(scheduled, last.scheduled_tokens)
        counted = {name: n + getattr(status, name) for name, n in self._earlier_agents.items()}
        status = msgspec.structs.replace(status, **counted, global_tokens=merged)
        return msgspec.structs.replace(report, status=status, scheduled_tokens=scheduled)

    def agent_died(self, code: int, restart_in_s: float) -> None:
        status = self.report.status
        self._earlier_agents = {name: getattr(status, name) for name in COUNTED_BY_AGENT}
        self.add("agent_died", {"exit_code": code, "restart_in_s": restart_in_s})

    def add(self, event: str, fields: Fields) -> None:
        """Queue an event for the next ``deliver``."""
        self._events.append((event, fields))

    def on(self, event: str, handler: Callable[[Fields], None]) -> None:
        """See ``Run.on``."""
        self._handlers.setdefault(event, []).append(handler)

    def deliver(self) -> None:
        """Call the handlers of all queued events, on the trainer's thread."""
        while self._events:
            name, fields = self._events.popleft()
            for handler in self._handlers.get(name, ()):
                handler(fields)
            for handler in self._handlers.get("*", ()):
                handler({"event": name, **fields})

    def take_measure(self) -> Measure | None:
        """The agent's latest request to measure the held-out loss, once; the gate's first."""
        return self._to_measure.pop(True, None) or self._to_measure.pop(False, None)

    def take_try(self) -> Try | None:
        """The agent's latest request to try a contribution, once."""
        asked, self._to_try = self._to_try, None
        return asked

    @property
    def finished(self) -> bool:
        """True if the run itself reached its end."""
        return self.over is not None and self.over.finished
