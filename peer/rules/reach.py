"""Conclusions from the other peers: who can be dialled, and which releases they run. Pure.

Rounds need a peer that the others can dial: it leads them, and takes their uploads. If all peers
are behind routers, nothing is merged, and nothing else tells why. The releases that peers state are
shown to people; only protocol numbers decide anything.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from dht.identity import PeerId
from dht.protocol import NEWEST, RELEASE, UPGRADE
from dht.records import PeerRecord

UNTESTED_AFTER_S = 5.0
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


News: TypeAlias = Literal["untested", "nobody_reduces"]


@dataclass(slots=True)
class Reach:
    """Decides when to say so: once each time that it becomes true and stays so."""

    _state: News | None = None
    _since: float = 0.0
    _was_said: bool = False

    def look(
        self, own: bool | None, *, connected: bool, learners: int, reachable: int, now: float
    ) -> News | None:
        """Return the news that the owner should hear now, if any.

        ``own``: whether this peer can be dialled, ``None`` if that is not known. ``connected``: it
        knows a peer that can arrange the test. ``learners``, ``reachable``: number of other live
        peers that train or are about to, and that can be dialled.
        """
        state: News | None = None
        if own is None and connected:
            state = "untested"
        elif own is False and learners and not reachable:
            state = "nobody_reduces"
        if state != self._state:
            self._state, self._since, self._was_said = state, now, False
        patience_s = UNTESTED_AFTER_S if state == "untested" else STUCK_AFTER_S
        if state is None or self._was_said or now - self._since < patience_s:
            return None
        self._was_said = True
        return state


Newness: TypeAlias = tuple[int, tuple[int, ...]]
"""Newest protocol number, and the numbers of the release."""

_NUMBER = re.compile(r"[0-9]{1,9}")


def newness(protocol: int, release: str) -> Newness:
    """A key that is greater for a later release."""
    return protocol, tuple(int(number) for number in _NUMBER.findall(release)[:4])


def outdated(
    others: Sequence[PeerRecord], *, protocol: int = NEWEST, release: str = RELEASE
) -> str | None:
    """A sentence with the command if most of these peers run a later release; else ``None``."""
    ours = newness(protocol, release)
    newer = [each for each in others if newness(each.protocol[1], each.release) > ours]
    if 2 * len(newer) <= len(others) + 1:
        return None
    said = _most_frequent(each.release for each in newer)
    number = max(each.protocol[1] for each in newer)
    theirs = f"release {said}" if said and said != release else f"protocol {number}"
    mine = release if said and said != release else str(protocol)
    return (
        f"{len(newer)} of {len(others)} other peers run {theirs}, this one {mine}: upgrade it "
        f"with {UPGRADE} and start it again, as the release after theirs may refuse it"
    )


def _most_frequent(releases: Iterable[str]) -> str:
    ((release, _),) = Counter(sorted(releases)).most_common(1)
    return release
