"""The outcomes of rounds that are over at one peer, and of those that it will never enter.

The part of ``averaging.round.machine`` that keeps a peer's word about rounds that it does not keep
any more, or has never known: should such a commit still come, it is declined.
"""

from __future__ import annotations

from averaging.messages import Head
from dht.bounded_mapping import BoundedMapping

OUTCOMES_MAX = 64


class Outcomes:
    """Rounds that are over here, the oldest forgotten first."""

    __slots__ = ("_heads", "_not_entered")

    def __init__(self) -> None:
        self._heads = BoundedMapping[bytes, Head | None](OUTCOMES_MAX)
        """The head after each round; ``None``: not finished by this incarnation, and never."""
        self._not_entered = BoundedMapping[bytes, bool](OUTCOMES_MAX)
        """Rounds that this incarnation has never entered and never will; ``True``: their rosters
        name it, so that it is known to have accepted no seal."""

    def __repr__(self) -> str:
        return f"Outcomes({len(self)} rounds)"

    def __len__(self) -> int:
        return len(self._heads)

    def __contains__(self, round_id: bytes) -> bool:
        return round_id in self._heads

    def head(self, round_id: bytes) -> Head | None:
        """The head of this peer after a round; ``None``: it has not finished it."""
        return self._heads.get(round_id)

    def finish(self, round_id: bytes, head: Head) -> None:
        self._heads[round_id] = head

    def forget(self, round_id: bytes, head: Head | None) -> None:
        """A round is kept no longer. ``head``: this peer's after it, if it has finished it."""
        if round_id not in self._heads:
            self._heads[round_id] = head

    def keep_out(self, round_id: bytes) -> None:
        """Never enter a round of which only the name is known."""
        if round_id not in self._heads:
            self._heads[round_id] = None
            self._not_entered[round_id] = False

    def decline(self, round_id: bytes, *, names_this_machine: bool) -> bool:
        """Never enter a round whose commit does not hold. Returns whether the peer is absent.

        It is if it has never been in the round: only the machine that a roster names can have been,
        and a vow keeps it out.
        """
        entered = round_id in self._heads and round_id not in self._not_entered
        absent = names_this_machine and not entered
        if absent:
            self._heads[round_id] = None
            self._not_entered[round_id] = True
        return absent

    def is_absent(self, round_id: bytes) -> bool:
        """True if the roster of a round names this peer, which has never been in it."""
        return self._not_entered.get(round_id, False)
