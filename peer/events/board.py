"""Recent losses, rounds and events, for the page. Bounded.

It takes every event of the log (``note``) and a sample of the training once a second (``sample``).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from peer.events.names import Names
from peer.events.table import Audience, audience_of, in_story

EVENTS_MAX = 2000
ROUNDS_MAX = 200
SHOWN_MAX = 100
"""Largest number of events in one answer."""

POINTS_MAX = 600
"""Points of the loss curve. Beyond it, every second one is dropped and the interval doubled."""


class Board:
    """The recent history of one peer."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self._events: deque[dict[str, Any]] = deque(maxlen=EVENTS_MAX)
        self._rounds: deque[dict[str, Any]] = deque(maxlen=ROUNDS_MAX)
        self._losses: list[tuple[int, float]] = []
        """Tokens and the mean loss of the samples at them: between merges the count stands still,
        and one point for each sample made the curve a stair."""
        self._samples = 0
        """Samples in the last point."""
        self._held_out: deque[tuple[int, float]] = deque(maxlen=POINTS_MAX)
        self._tokens = 0
        self._every = 1
        self._skipped = 0

    def note(self, event: Mapping[str, Any]) -> None:
        """Take note of an event, as it was written to the log."""
        kind, name, peer = event["event"], event.get("name"), event.get("peer")
        if isinstance(name, str) and isinstance(peer, str):
            self.names.learn(peer, name)
        if kind == "measured":
            self._held_out.append((event["tokens"], float(event["loss"])))
        if not audience_of(kind) & Audience.PEER:
            return
        text = in_story(event, self.names)
        self._events.append({"at": event["at"], "event": kind, "text": text})
        if kind == "round":
            self._rounds.append(
                {
                    "at": event["at"],
                    "seconds": event["seconds"],
                    "fragment": event["fragment"],
                    "version": event["version"],
                    "outcome": event["outcome"],
                    "mine": bool(event.get("contributed")),
                    "members": [self.names(peer) for peer in event["members"]],
                    "contributors": [self.names(peer) for peer in event["contributors"]],
                    "left_out": {
                        self.names(peer): self.names.within(why)
                        for peer, why in event["left_out"].items()
                    },
                    "text": text,
                }
            )

    def sample(self, *, tokens: int, loss: float | None) -> None:
        """Take a sample of the training; called at even intervals."""
        if not tokens and self._tokens:
            return  # the states to which the run was taken back are still to be fetched
        if tokens < self._tokens:  # the run was taken back, and these points with it
            self._losses, self._samples = [p for p in self._losses if p[0] <= tokens], 1
            while self._held_out and self._held_out[-1][0] > tokens:
                self._held_out.pop()
        self._tokens = tokens
        self._skipped += 1
        if loss is None or not math.isfinite(loss):
            return
        if self._losses and self._losses[-1][0] == tokens:
            self._samples += 1
            mean = self._losses[-1][1]
            self._losses[-1] = tokens, mean + (loss - mean) / self._samples
            return
        if self._skipped < self._every:
            return
        self._skipped, self._samples = 0, 1
        self._losses.append((tokens, loss))
        if len(self._losses) > POINTS_MAX:
            del self._losses[-2::-2]  # the newest stays
            self._every *= 2

    def plain(self) -> dict[str, Any]:
        """The content as JSON has it."""
        return {
            "losses": [list(point) for point in self._losses],
            "held_out": [list(point) for point in self._held_out],
            "rounds": list(self._rounds),
            "events": self.search(""),
        }

    def search(self, wanted: str) -> list[dict[str, Any]]:
        """The newest events in which ``wanted`` occurs, newest first."""
        wanted = wanted.lower()
        matching = []
        for event in reversed(self._events):
            text = f"{event['event']} {event['text']}".lower()
            if wanted in text:
                matching.append(event)
                if len(matching) == SHOWN_MAX:
                    break
        return matching
