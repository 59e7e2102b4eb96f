"""A contribution that may be merged where I cannot see it: asking until somebody tells.

The part of ``averaging.round.machine`` for after a round that ended in doubt. It belongs to one
``FragmentRounds``. It ends with a standing whose ``merged`` tells, with a void round, with a
majority that has forsworn the round, or after ``doubt_s``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from averaging import messages as said
from averaging.history.standing import Standing
from averaging.messages import Commit, Message
from averaging.round.effects import Presume, Settle
from averaging.round.phase import Phase
from dht.identity import PeerId

if TYPE_CHECKING:
    from averaging.round.machine import FragmentRounds


@dataclass(slots=True)
class Doubt:
    """What is not known, and when to ask and to stop asking."""

    round: bytes
    commit: Commit
    mark: int
    ends_at: float
    ask_at: float
    wait_s: float
    forsworn: set[PeerId]
    dealt: bool
    """The round was one of several groups' (or may be): who finished it did so on a lineage of its
    own. However few peers I see by now."""


class Doubting:
    """One peer as somebody who does not know whether its work is merged. Joins nothing then."""

    __slots__ = ("_peer", "doubt")

    def __init__(self, peer: FragmentRounds) -> None:
        self._peer = peer
        self.doubt: Doubt | None = None

    def __repr__(self) -> str:
        about = self.doubt.round.hex()[:8] if self.doubt is not None else None
        return f"Doubting({about})"

    def is_about(self, round_id: bytes) -> bool:
        return self.doubt is not None and self.doubt.round == round_id

    def begin(self, round_id: bytes, commit: Commit, mark: int, now: float, *, dealt: bool) -> None:
        policy = self._peer.policy
        self.doubt = Doubt(
            round=round_id,
            commit=commit,
            mark=mark,
            ends_at=now + policy.doubt_s,
            ask_at=now + policy.resend_s,
            wait_s=policy.resend_s,
            forsworn={self._peer.me},
            dealt=dealt,
        )

    def next_at(self) -> float | None:
        return None if self.doubt is None else min(self.doubt.ask_at, self.doubt.ends_at)

    def told(self, standing: Standing) -> None:
        """I stand elsewhere now, and what is merged there tells."""
        if self.doubt is not None:
            covered = standing.merged.covers(self._peer.me, self._peer.incarnation, self.doubt.mark)
            self._peer.event("doubt_told", merged=covered)
            self.doubt = None

    def tick(self, now: float) -> None:
        doubt = self.doubt
        if doubt is None:
            return
        if now >= doubt.ends_at:
            reason = "nobody could tell in time"
            if self._is_dealt(doubt, now):
                self._presume(reason)
            else:
                self.settle(reason)
            return
        if now >= doubt.ask_at:
            doubt.wait_s = min(30.0, 2 * doubt.wait_s)
            doubt.ask_at = now + doubt.wait_s
            for entry in doubt.commit.members:
                if entry.peer not in doubt.forsworn:
                    self._peer.say(entry.peer, said.Ask(self._peer.fragment, doubt.round))

    def heard(self, sender: PeerId, message: Message, now: float) -> None:
        """A message about the round in doubt."""
        doubt = self.doubt
        assert doubt is not None
        if doubt.commit.index(sender) is None:
            return
        match message:
            case said.Finished():
                self._peer.catching.compare(sender, message.head, now)
                catching = self._peer.phase is Phase.CATCHING
                if self.doubt is doubt and not catching and self._is_dealt(doubt, now):
                    self._presume(f"{sender} has finished it, on a lineage of its own")
            case said.Void():
                self.void("the round is void", now, forsworn=message.forsworn)
            case said.Forsworn():
                if message.head is not None:
                    self._peer.catching.compare(sender, message.head, now)
                if self._peer.phase is Phase.CATCHING or self.doubt is None:
                    return
                dealt = self._is_dealt(doubt, now)
                if dealt and message.head and message.head.version >= doubt.commit.version:
                    return  # a former life of it may have finished
                doubt.forsworn.add(sender)
                if len(doubt.forsworn) == len(doubt.commit.members):
                    self.settle("everybody has forsworn the round")
                elif len(doubt.forsworn) >= doubt.commit.majority:
                    self.void("a majority has forsworn the round", now, forsworn=True)
            case _:
                return

    def presumed(self, now: float) -> int | None:
        """Up to which own step work in doubt counts as merged, whatever a new state says of it.

        In a swarm of several groups the state that I fetch is one of many: that it lacks my work
        does not mean that none of the others has it, and sooner or later they are all mixed.
        """
        if self.doubt is None or not self._is_dealt(self.doubt, now):
            return None
        return self.doubt.mark

    def _is_dealt(self, doubt: Doubt, now: float) -> bool:
        return doubt.dealt or self._peer.around.is_dealt(now)

    def _presume(self, reason: str) -> None:
        assert self.doubt is not None
        self._peer.event("presumed", reason=reason)
        self._peer.emit(Presume(self.doubt.round, self.doubt.mark, reason))
        self.doubt = None

    def void(self, reason: str, now: float, *, forsworn: bool) -> None:
        """A majority will never finish the round; nobody has, unless it was sealed before.

        In one group that would be a fork, to be mixed or rebased like any other. In several, who
        has finished goes on beside me: the rest of the roster has a moment to tell.
        """
        doubt = self.doubt
        assert doubt is not None
        if not forsworn or not self._is_dealt(doubt, now):
            self.settle(reason)
        elif now + self._peer.policy.margin_s < doubt.ends_at:
            doubt.ends_at = now + self._peer.policy.margin_s
            doubt.ask_at = now

    def settle(self, reason: str) -> None:
        assert self.doubt is not None
        self._peer.event("settled", reason=reason)
        self._peer.emit(Settle(self.doubt.round, reason))
        self.doubt = None
