"""How long a peer that leaves its run stays: for its pending work, and for others that leave too.

**Peers that leave at the same time**, as at the end of an evening, wait for one another for a few
seconds (``who_leaves_too``): else the first would go with older versions than the last, and five
peers would keep three models. ``peer.rules.ending`` says when a peer leaves, and what it does then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from peer.status import PeerStatus


@dataclass(frozen=True, slots=True)
class Departure:
    """Why a peer leaves its run, and how long it may take."""

    reason: str
    exit_code: int
    finished: bool
    """The run itself is over."""
    timeout_s: float
    """Time for rounds under way to finish; 0: it goes at once."""
    patience_s: float = 0.0
    """Longest time to stay beyond that where pending work needs it to be merged, and another peer
    to take it over."""
    rests: bool = False
    """It only goes off line to rest, and comes back."""

    def patience_left_s(self, spent_s: float) -> float:
        """Patience that is left after so long a stay; a trainer waits no longer than that."""
        return max(0.0, self.patience_s - max(0.0, spent_s - self.timeout_s))


PATIENCE_S: Final = 300.0
PATIENCE_MIN_S: Final = 5.0
PATIENCE_MAX_S: Final = 86_400.0

LAST_WORDS_S: Final = 10.0
"""Time for an agent to save and end, of a patience that is at least three times as long."""


def check_patience(seconds: float) -> None:
    """Raise ``ValueError`` unless a peer can leave in so long a time."""
    if not PATIENCE_MIN_S <= seconds <= PATIENCE_MAX_S:
        raise ValueError(
            f"the patience is {seconds:g} s; it is the longest time that leaving may take, from "
            f"{PATIENCE_MIN_S:g} to {PATIENCE_MAX_S:g} seconds"
        )


@dataclass(frozen=True, slots=True)
class Stay:
    """How long a peer that leaves stays to hand over."""

    timeout_s: float
    patience_s: float
    """Longest time beyond that, where a slow line needs it."""
    last_words_s: float
    """Time to save and end after both."""

    @property
    def longest_s(self) -> float:
        return self.timeout_s + self.patience_s + self.last_words_s


def stay(patience_s: float, *, drain_s: float) -> Stay:
    """Divide the time that leaving may take. First work is offered, last of all it is saved."""
    last_words_s = min(LAST_WORDS_S, patience_s / 3)
    timeout_s = min(drain_s, patience_s - last_words_s)
    return Stay(timeout_s, patience_s - last_words_s - timeout_s, last_words_s)


def who_leaves_too(
    mine: Sequence[int], others: Iterable[PeerStatus], *, model: str = ""
) -> list[str]:
    """Names of the peers for which one that leaves stays, where nobody trains on, with reasons.

    Peers that leave together end as a run does: with one model, which has the work of all. Each
    stays while another has work that is not merged, or stands elsewhere. Where others train on,
    they have the newest versions, and nobody stays for those that leave.
    """
    known = [other for other in others if other.versions]
    if any(other.role == "learner" and other.phase != "leaving" for other in known):
        return []
    waiting = []
    for other in known:
        name = other.name or other.peer
        if other.phase == "leaving" and other.fates.get("pending", 0) > 0:
            waiting.append(f"{name}: has work that is not merged")
        elif other.versions != tuple(mine):
            waiting.append(f"{name}: at {list(other.versions)}")
        elif other.model and model and other.model != model:
            waiting.append(f"{name}: at these versions with other parameters")
    return waiting


def lacks(theirs: Sequence[int], mine: Sequence[int]) -> bool:
    """True if a peer at these versions does not have all that this one has."""
    return len(theirs) != len(mine) or any(t < m for t, m in zip(theirs, mine, strict=True))


SLACK: Final = 3.0
WAY_BACK: Final = 1.25
"""Time for the bytes of both directions, relative to those of one. They pass at the same time but
for the last of them: two homes at 20 s per fragment handed four over in 91 s."""

UNKNOWN_BYTES_S: Final = 625_000.0
"""Speed that a line counts as that was not measured (5 Mbit/s)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastOffers:
    """Pending work of a peer that leaves, and the line that has to carry it.

    On a fast line it is merged in seconds. On a slow one it takes as long as the bytes do, and the
    peer stays for up to ``SLACK`` times that: a line carries other traffic, and a round may fail.
    """

    encoded_bytes: int
    bytes_per_s: float
    """Speed of its line in the slower direction; 0: not known."""
    company_s: float = 0.0
    """Time that the others may need until they have steps of their own for a round."""

    @property
    def expected_s(self) -> float:
        """Time that it takes."""
        speed = self.bytes_per_s or UNKNOWN_BYTES_S
        return self.company_s + WAY_BACK * self.encoded_bytes / speed

    def patience_s(self, *, least_s: float, most_s: float) -> float:
        """Time to stay for it at most."""
        return max(least_s, min(most_s, SLACK * self.expected_s))
