"""The electors: the peers whose votes, lead, signatures and states count for one peer.

``Electors`` is the answer where nobody is guarded against, as among people who invited each other:
all peers count, whatever they have done. ``averaging.guard`` puts another one in its place, for
which newcomers work first and peers with too many strikes count no more. The round asks the same
questions of either, and what it does with the answers is the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from averaging.messages import Commit
from averaging.rules.reputation import Reputation
from dht.identity import PeerId

SEEN_MAX: Final = 4096
"""Peers whose work is remembered; the one that is worth the least is forgotten first."""

SLACK: Final = 0.5
"""Share of what a peer asks for itself that it accepts of a voter, or leader, that another names.
"""


@dataclass(frozen=True, slots=True)
class RequiredWork:
    """Work that is enough at this moment, given the live peers."""

    rounds: float
    seconds: float
    tokens: float = 0.0
    """Tokens in the state that this peer began with which are enough; 0: none are."""
    pardons: bool = False
    """Strikes do not count: too many peers have them."""

    def progress(self, rounds: int, seconds: float) -> float:
        """Return how much of it this is; 1 or more: enough."""
        by_rounds = rounds / self.rounds if self.rounds > 0 else math.inf
        by_time = seconds / self.seconds if self.seconds > 0 else math.inf
        return min(by_rounds, by_time)


class Electors:
    """All peers count. All fragments of a peer share one. Times are on its own clock."""

    def __init__(self, reputation: Reputation | None = None) -> None:
        self.reputation = reputation or Reputation()

    def worth(self, peer: PeerId) -> float:
        """How much a peer's work counts where there is no place for what is known of all."""
        return 0.0

    def counts_all_at(self, now: float) -> bool:
        """True if all peers count now: then nobody need be looked at."""
        return True

    def required_work(self, live: Iterable[PeerId], now: float) -> RequiredWork:
        """The work that a peer must have done to count while these are live."""
        return RequiredWork(0.0, 0.0)

    def progress(self, peer: PeerId, required: RequiredWork, now: float) -> float:
        """How much of the required work a peer has done; 1 or more: it counts."""
        return math.inf

    def objection(
        self, commit: Commit, required: RequiredWork, now: float, *, me: PeerId
    ) -> str | None:
        """The reason not to enter a round with these voters; ``None`` if there is none."""
        return None

    def saw_merged(
        self,
        contributors: Iterable[PeerId],
        live: Iterable[PeerId],
        now: float,
        *,
        met: Iterable[PeerId] = (),
    ) -> None:
        """A round with the work of these peers was merged while those were live. ``met``: all that
        this peer has met and that have not said goodbye."""

    def took_state(self, versions: int, tokens: Mapping[PeerId, int]) -> None:
        """This peer took a state that is so many versions on, with so many tokens of each peer."""
