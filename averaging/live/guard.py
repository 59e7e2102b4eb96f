"""The door of the guard: what a peer asks of its defences against members that lie, and tells them.

``Guard`` is the one that guards against nothing: nobody is convicted or refused, every state is
taken, and all peers count. Runs among people who know each other are understood with it alone, and
whole swarms run with it in tests. ``averaging.guard.door`` makes the real one; nothing in this
package imports it.

Four say what may be done: ``electors`` (who votes, leads and serves), ``gate`` (which states are
taken), ``lie_of`` and ``refuses``; the others are told what was seen. Defences that
are part of the arithmetic, such as robust merge rules and bounds of norms, are none of it
(``averaging.numbers``, ``averaging.rules.usual_norms``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import ClassVar, Protocol

from averaging.history.chain import Chain
from averaging.history.claims import Claim
from averaging.history.standing import Standing
from averaging.history.state import FragmentState
from averaging.live.slices.parts import Parts
from averaging.messages import Message
from averaging.numbers.arrays import Float32s
from averaging.rules.electors import Electors
from averaging.rules.reputation import Reputation
from dht.identity import PeerId


class Gate:
    """Takes all states that others have made."""

    measures: ClassVar[bool] = False
    """True if the loss is measured before a state is taken that this peer has not merged step by
    step."""

    def refuses(self, fragment: int, chain: Chain) -> str | None:
        """The reason to take no state with this history; ``None``: there is none."""
        return None

    def refuses_any(self, fragment: int) -> bool:
        """True if some history of the fragment is refused."""
        return False

    async def before_jump(self, before: FragmentState, after: Standing) -> None:
        """A fragment is about to go over to a state of others. Returns within a bounded time."""


class Guard:
    """No guard."""

    def __init__(self, electors: Electors, gate: Gate | None = None) -> None:
        self.electors = electors
        self.gate = gate or Gate()
        self.counters: Counter[str] = Counter()

    async def start(self) -> None:
        """The peer begins."""

    # What may be done

    @property
    def convicted(self) -> Collection[PeerId]:
        """The peers that are proved to have lied. Nothing of them counts."""
        return ()

    def lie_of(self, peer: PeerId) -> str | None:
        """The deed that a peer is convicted of; ``None``: it is not convicted."""
        return None

    def refuses(self, peer: PeerId) -> str | None:
        """The reason to merge nothing of a peer, as a reducer or as a coordinator."""
        return None

    # What was seen

    def saw(self, peer: PeerId, message: Message) -> bool:
        """A message has come, and is not acted on yet. ``True``: it was for the guard alone."""
        return False

    def saw_commit(self, encoded: bytes, signature: bytes) -> None:
        """A commit has come by a stream."""

    def saw_claim(self, encoded: bytes, index: int, said: Claim, merged: bool) -> None:
        """A signed claim about a slice of the round of this commit has come."""

    def finished(
        self, parts: Parts, lineage: bytes, seal: Iterable[int], theta: Float32s, step: int | None
    ) -> None:
        """This peer has finished a round. ``theta``: before it. ``step``: of the own learner, if a
        contribution of the others can be judged by it."""

    def forgot(self, round_id: bytes, parts: Parts | None) -> None:
        """Nobody needs anything of a round any more, but those who audit it."""


class HasReputation(Protocol):
    reputation: Reputation


def unguarded(averager: HasReputation) -> Guard:
    """Make the guard that guards against nothing."""
    return Guard(Electors(averager.reputation))
