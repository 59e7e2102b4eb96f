"""Conclusions from the other peers of a run, which each peer draws by itself.

**Who can be dialled.** Rounds need a peer that the others can dial: it leads them, and takes their
uploads. If all peers are behind routers, nothing is merged, and nothing else tells why.

**Two histories of a run that was founded twice.** Founders with equal first weights, which the run
file's seed gives, begin one history, and nothing here is for them. States that grew from other
first weights are never averaged. A founding is named by the versions 0 of all fragments; its weight
is the number of tokens merged since. The peers of the lighter one go over, each by itself: the rule
is the same at all of them.

**Who measures the held-out loss**: the peer with the smallest hash of (run, version, peer), without
a message. Peers that see different members may both measure, which costs a little time and does no
harm.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import blake3
import numpy as np

from dht.identity import PeerId, RunId
from peer.status import HeldOut, PeerStatus

STUCK_AFTER_S = 30.0
"""Time for the newest peer to be tested, before its verdict counts."""


HUBS_MAX = 24
"""Number of peers that everybody meets, where all are behind routers. In a larger run the number of
connections would grow with its square; so these lead and reduce for the others."""


def hubs(peers: Iterable[PeerId]) -> frozenset[PeerId]:
    """The peers that everybody meets: the same for all that know the same peers."""
    return frozenset(sorted(peers)[:HUBS_MAX])


def to_meet(
    own: bool | None, members: Mapping[PeerId, bool | None], *, me: PeerId
) -> frozenset[PeerId]:
    """The peers to open direct connections with, as nobody here can be dialled; else none.

    ``members``: the other live members, and whether they can be dialled as far as is known. One
    that can is enough for all: it leads and reduces, and nobody else has to be met.
    """
    if own is not False or any(members.values()):
        return frozenset()
    return hubs((me, *members)) - {me}


UNTESTED = (
    "asking another peer to test whether others can connect to this one, which may then lead rounds"
)
"""No other peer has tried yet whether this one can be dialled."""


def nobody_reduces(peers: int) -> str:
    """The learners can all only dial out, and this one has no direct connection with any.

    The others may have some with each other, and merge.
    """
    return (
        f"{peers} peers are here, all of them behind routers, and this one has a direct "
        "connection with no other: nobody can reduce for it, or send it the state; forward a "
        "TCP port to one of them (options --listen and --announce), run `shoal keep` on a "
        "machine that others can dial, or have the bootstrap peer started with --relay-bulk"
    )


@dataclass(slots=True)
class Reach:
    """Decides when to say that nobody reduces: once each time that it becomes true and stays so."""

    _since: float | None = None
    _was_said: bool = False

    def look(self, own: bool | None, *, learners: int, reachable: int, now: float) -> bool:
        """True if the owner should hear it now.

        ``own``: whether this peer can be dialled, ``None`` if that is not known. ``learners``,
        ``reachable``: number of other live peers that train or are about to, and that can be
        dialled.
        """
        if own is not False or not learners or reachable:
            self._since, self._was_said = None, False
            return False
        if self._since is None:
            self._since = now
        if self._was_said or now - self._since < STUCK_AFTER_S:
            return False
        self._was_said = True
        return True


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


def agree(answers: Sequence[PeerStatus], asked: int) -> bool:
    """True if more than half of those asked stand on one founding, whatever the rest may answer."""
    named = Counter(answer.founding for answer in answers if answer.versions)
    return 2 * max(named.values(), default=0) > asked


@dataclass(slots=True)
class HeldOutLoss:
    """The held-out loss of a run, as known to one peer."""

    run: RunId
    me: PeerId
    every_versions: int
    newest: HeldOut | None = None
    _asked: int = -1

    def is_my_turn(self, version: int, able: Iterable[PeerId]) -> bool:
        """``True`` if this peer, and none of ``able``, is to measure at this version.

        Asked of every version that this peer makes, in a round or alone.
        """
        if version % self.every_versions or version <= self._asked:
            return False

        def rank(peer: PeerId) -> bytes:
            return blake3.blake3(f"{self.run}/{version}/{peer}".encode()).digest()

        if min([self.me, *able], key=rank) != self.me:
            return False
        self._asked = version
        return True

    def heard(self, measured: HeldOut) -> bool:
        """Take note of a measurement. Returns whether it is newer than the known one.

        By its tokens: the heavier of two histories may have the smaller versions.
        """
        if not math.isfinite(measured.loss):
            return False  # a status with such a loss would be refused by every reader
        if self.newest is not None and measured.tokens <= self.newest.tokens:
            return False
        self.newest = measured
        return True
