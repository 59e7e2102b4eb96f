"""The choice between two histories of a run that was founded twice.

Each founding has first weights of its own, so their states are never averaged. A founding is named
by the versions 0 of all fragments; its weight is the number of tokens merged since. The peers of
the lighter one go over, each by itself: the rule is the same at all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from peer.status import Status


@dataclass(frozen=True, slots=True, order=True)
class Founding:
    """One founding as a peer stands on it. A larger one is the heavier one."""

    tokens: int
    name: str
    """Empty if it is not known."""

    def gives_way_to(self, other: Founding) -> bool:
        """True if the other history is another one, and goes on."""
        return bool(self.name and other.name) and self.name != other.name and self < other


def founding_of(answer: Status) -> Founding:
    return Founding(answer.global_tokens, answer.founding)


def heaviest(answers: Iterable[Status]) -> str:
    """The name of the founding that a newcomer follows; empty if no answer names one."""
    known = [founding_of(answer) for answer in answers if answer.versions and answer.founding]
    return max(known, default=Founding(0, "")).name
