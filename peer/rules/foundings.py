"""The choice between two histories of a run that was founded twice.

Founders with equal first weights, which the run file's seed gives, begin one history, and nothing
here is for them. States that grew from other first weights are never averaged. A founding is named
by the versions 0 of all fragments; its weight is the number of tokens merged since. The peers of
the lighter one go over, each by itself: the rule is the same at all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dht.identity import PeerId
from peer.status import PeerStatus


@dataclass(frozen=True, slots=True, order=True)
class Founding:
    """One founding as a peer stands on it. A larger one is the heavier one."""

    tokens: int
    name: str
    """Empty if it is not known."""

    def gives_way_to(self, other: Founding) -> bool:
        """True if the other history is another one, and goes on."""
        return bool(self.name and other.name) and self.name != other.name and self < other


ASKED_FIRST = 8


def first_asked(live: Sequence[PeerId], rng: np.random.Generator) -> list[PeerId]:
    """The peers that a newcomer asks: the first of all, who may found the run, and some others.

    Keys that come first cost nothing, so the first ones alone may all be of one owner.
    """
    others = live[ASKED_FIRST:]
    drawn = rng.permutation(len(others))[:ASKED_FIRST]
    return [*live[:ASKED_FIRST], *(others[int(i)] for i in sorted(drawn))]


def may_found(me: PeerId, others: Mapping[PeerId, PeerStatus | None], *, waited: bool) -> bool:
    """True if this newcomer founds the run, where nobody is known to have its state.

    The first of several founds it; those that wait for the run's peers never do. ``others``: the
    learners in sight, with their answers. ``None``: it has not answered, and may have founded the
    run already, until ``waited`` says that there was time enough.
    """
    if not waited and any(each is None or each.phase == "founding" for each in others.values()):
        return False
    return all(me < peer for peer, each in others.items() if each and each.phase != "waiting")


def founding_of(answer: PeerStatus) -> Founding:
    return Founding(answer.global_tokens, answer.founding)


def heaviest(answers: Iterable[PeerStatus]) -> str:
    """The name of the founding that a newcomer follows; empty if no answer names one.

    The one that most peers stand on, and of several such the one with the most tokens: these are
    words, and one peer that overstates its tokens would keep every newcomer from the run's states.
    """
    known = [founding_of(answer) for answer in answers if answer.versions and answer.founding]
    named = Counter(each.name for each in known)
    return max(known, key=lambda each: (named[each.name], each), default=Founding(0, "")).name
