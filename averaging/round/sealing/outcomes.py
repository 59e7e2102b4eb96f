"""The outcomes of rounds that are over at one peer, and of those that it will never enter.

The part of ``averaging.round.machine`` that keeps a peer's word about rounds that it does not keep
any more, or has never known: should such a commit still come, it is declined.
"""

from __future__ import annotations

from collections.abc import Callable

from averaging.messages import Head
from dht.bounded_mapping import BoundedMapping, by_age
from dht.identity import PeerId

OUTCOMES_MAX = 64
VOWS_MAX = 16
"""Rounds that one other peer may name and that this one never enters, the last ones."""
ASKERS_MAX = 1024


class Outcomes:
    """Rounds that are over here, the oldest forgotten first.

    Rounds of which others have asked are kept beside them: a peer that asks of many, which need not
    exist, makes this one forget nothing of its own rounds, nor a vow to anybody else.
    """

    __slots__ = ("_heads", "_not_entered", "_vowed")

    def __init__(self, worth: Callable[[PeerId, object], float]) -> None:
        """``worth``: how much the work of a peer that asks counts here."""
        self._heads = BoundedMapping[bytes, Head | None](
            "outcomes of rounds", OUTCOMES_MAX, worth=by_age
        )
        """The head after each round; ``None``: not finished by this incarnation, and never."""
        self._not_entered = BoundedMapping[bytes, None](
            "rounds not entered", OUTCOMES_MAX, worth=by_age
        )
        """Rounds that this incarnation has never entered and never will, though their rosters name
        it: it is known to have accepted no seal."""
        self._vowed = BoundedMapping[PeerId, BoundedMapping[bytes, None]](
            "vows", ASKERS_MAX, worth=worth
        )
        """Rounds never to be entered of which only the name is known, by the peer that asked."""

    def __len__(self) -> int:
        return len(self._heads) + sum(map(len, self._vowed.values()))

    def __contains__(self, round_id: bytes) -> bool:
        return round_id in self._heads or any(round_id in vows for vows in self._vowed.values())

    def head(self, round_id: bytes) -> Head | None:
        """The head of this peer after a round; ``None``: it has not finished it."""
        return self._heads.get(round_id)

    def finish(self, round_id: bytes, head: Head) -> None:
        self._heads[round_id] = head

    def forget(self, round_id: bytes, head: Head | None) -> None:
        """A round is kept no longer. ``head``: this peer's after it, if it has finished it."""
        if round_id not in self._heads:
            self._heads[round_id] = head

    def keep_out(self, round_id: bytes, asker: PeerId) -> None:
        """Never enter a round of which only the name is known, as a peer has asked about it."""
        if round_id not in self._heads:
            self._vowed.setdefault(asker, BoundedMapping("vows to a peer", VOWS_MAX, worth=by_age))[
                round_id
            ] = None

    def decline(self, round_id: bytes, *, names_this_machine: bool) -> bool:
        """Never enter a round whose commit does not hold. Returns whether the peer is absent.

        It is if it has never been in the round: only the machine that a roster names can have been,
        and a vow keeps it out.
        """
        entered = round_id in self._heads and round_id not in self._not_entered
        absent = names_this_machine and not entered
        if absent:
            self._heads[round_id] = None
            self._not_entered[round_id] = None
        return absent

    def is_absent(self, round_id: bytes) -> bool:
        """True if the roster of a round names this peer, which has never been in it."""
        return round_id in self._not_entered
