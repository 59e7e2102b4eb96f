"""Dealing peers into groups: a function of names and versions alone.

Peers with the same view compute the same groups without a message. Views differ by up to a
heartbeat; a peer with another view is redirected by the round. Peers are dealt by the newest
closing that they heard of: a peer that missed a round would otherwise look for a group that nobody
else is in.

Groups are of uneven size: in one benchmark groups of even size held 6.2 contributors on average and
these 4.8. But they keep two small groups from meeting again and again, and a peer that only some
can see changes one group and not all groups behind it.

This module does not decide who takes part in a round, only who may meet.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import pairwise

import blake3

from averaging.rules.sites import name_shown
from dht.identity import PeerId


class Names(tuple[PeerId, ...]):
    """Names of peers, sorted, each once, with a cached hash.

    Results that are the same for all peers are computed once and cached by the names. In the
    simulator a thousand peers look them up, and a look-up must not cost a pass over all names.
    """

    _hash: int

    def __new__(cls, names: Iterable[PeerId]) -> Names:
        made = super().__new__(cls, sorted(set(names)))
        made._hash = tuple.__hash__(made)
        return made

    def __hash__(self) -> int:
        return self._hash

    def holds(self, peer: PeerId) -> bool:
        at = bisect_left(self, peer)
        return at < len(self) and self[at] == peer


def group_of(
    me: PeerId,
    peers: Iterable[PeerId],
    *,
    size: int,
    fragment: int,
    version: int,
    sites: Mapping[PeerId, str] | None = None,
) -> tuple[PeerId, ...]:
    """Return the peers that ``me`` may meet at this version, itself included, sorted.

    ``sites`` holds names of sites, or passes, of the peers that named one. Peers of a site stay
    together, as long as a group then has room for as many others.
    """
    everybody = peers if isinstance(peers, Names) else Names(peers)
    if not everybody.holds(me):
        everybody = _with(me, everybody)
    if len(everybody) <= size:
        return everybody
    if sites:
        units = _units(tuple((peer, sites.get(peer)) for peer in everybody), size // 2)
        # A unit is dealt by the name of its first peer; the largest unit limits units per group.
        firsts = tuple(sorted(unit[0] for unit in units))
        units_max = size // max(map(len, units))
        if len(firsts) <= units_max:
            return everybody
        dealt = deal(firsts, size=units_max, fragment=fragment, version=version)
        places = _places(_joined(dealt, units))
    else:
        places = _dealt_places(everybody, size, fragment, version)
    assert me in places, f"{me} was dealt into no group"
    return places[me]


@lru_cache(maxsize=1024)
def _with(me: PeerId, peers: Names) -> Names:
    return Names((me, *peers))


@lru_cache(maxsize=256)
def _units(
    labelled: tuple[tuple[PeerId, str | None], ...], size_max: int
) -> tuple[tuple[PeerId, ...], ...]:
    """Return peers of one site in parts of at most ``size_max``, and other peers alone."""
    together: dict[str, list[PeerId]] = {}
    units: list[tuple[PeerId, ...]] = []
    for peer, site in labelled:
        if site is None:
            units.append((peer,))
        else:
            together.setdefault(name_shown(site), []).append(peer)
    for _, members in sorted(together.items()):
        parts = -(-len(members) // max(1, size_max))
        ends = [len(members) * part // parts for part in range(parts + 1)]
        units += [tuple(members[a:b]) for a, b in pairwise(ends)]
    return tuple(units)


@lru_cache(maxsize=256)
def _joined(
    dealt: tuple[tuple[PeerId, ...], ...], units: tuple[tuple[PeerId, ...], ...]
) -> tuple[tuple[PeerId, ...], ...]:
    """Return groups of peers from groups of units, which are named by their first peers."""
    unit_of = {unit[0]: unit for unit in units}
    return tuple(tuple(sorted(p for first in group for p in unit_of[first])) for group in dealt)


@lru_cache(maxsize=256)
def _dealt_places(
    peers: Names, size: int, fragment: int, version: int
) -> dict[PeerId, tuple[PeerId, ...]]:
    return _places(deal(peers, size=size, fragment=fragment, version=version))


@lru_cache(maxsize=256)
def _places(dealt: tuple[tuple[PeerId, ...], ...]) -> dict[PeerId, tuple[PeerId, ...]]:
    return {peer: group for group in dealt for peer in group}


@lru_cache(maxsize=256)
def deal(
    peers: tuple[PeerId, ...], *, size: int, fragment: int, version: int
) -> tuple[tuple[PeerId, ...], ...]:
    """Return disjoint groups of at most ``size``, which is at least two.

    A group is an interval of hash values, halved until it is small enough, so a peer that only some
    can see usually changes its own group and no other.
    """
    prefix = f"deal/{fragment}/{version}/".encode()
    placed = sorted((hashed(prefix, peer), peer) for peer in peers)
    groups: list[tuple[PeerId, ...]] = []

    def halve(part: list[tuple[int, PeerId]], low: int, high: int) -> None:
        if len(part) <= size:
            groups.append(tuple(sorted(peer for _, peer in part)))
            return
        middle = (low + high) // 2
        cut = bisect_left(part, (middle, PeerId("")))
        if min(cut, len(part) - cut) < max(2, len(part) // 4):
            cut = len(part) // 2  # too uneven: cut at the median peer instead
            middle = part[cut][0]
        halve(part[:cut], low, middle)
        halve(part[cut:], middle, high)

    halve(placed, 0, 1 << 64)
    return tuple(sorted(groups))


def smallest_group(size: int) -> int:
    """Return the fewest peers that a group of at most ``size`` ever has."""
    return max(2, (size + 1) // 4)


def hashed(prefix: bytes, peer: PeerId) -> int:
    return int.from_bytes(blake3.blake3(prefix + peer.encode()).digest(length=8), "big")
