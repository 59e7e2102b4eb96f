"""Changes of phase of round machines: those that are seen, and those that their docstring lists."""

from __future__ import annotations

import re
from typing import ClassVar

from averaging.messages import Message
from averaging.round import machine
from averaging.round.interface.inputs import Input
from averaging.round.interface.phase import Phase
from averaging.round.machine import FragmentRounds
from dht.identity import PeerId

Entry = tuple[str, str, str]
"""A phase, an input, and the next phase. A message stands for ``Received``."""

ROUND_ENDED = "RoundEnded"
"""The name of an input that ended a round, for a second change of phase by it."""


def entries(text: str) -> set[Entry]:
    """The entries of a table: lines of phase, arrow, next phase and inputs."""
    found = set()
    for row in re.finditer(r"^    ([A-Z]+) +-> ([A-Z]+) +(\w.*)$", text, re.M):
        before, after, inputs = row.groups()
        found |= {(before.lower(), given, after.lower()) for given in inputs.split()}
    return found


TABLE = entries(machine.__doc__ or "")


class Observed(FragmentRounds):
    """A machine that records its changes of phase."""

    __slots__ = ("_given", "_phase")

    seen: ClassVar[set[Entry]] = set()
    _given: str

    @property
    def phase(self) -> Phase:
        return self._phase

    @phase.setter
    def phase(self, phase: Phase) -> None:
        before = getattr(self, "_phase", phase)
        self._phase = phase
        if phase is not before:
            self.seen.add((str(before), self._given, str(phase)))
            if before is Phase.ENTERED:
                self._given = ROUND_ENDED

    def _handle(self, given: Input, now: float) -> None:
        self._given = type(given).__name__
        super()._handle(given, now)

    def _receive(self, sender: PeerId, message: Message, now: float) -> None:
        self._given = type(message).__name__
        super()._receive(sender, message, now)
