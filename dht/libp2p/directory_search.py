"""The decisions of a search in the directory: which peers to ask, and which were found.

``hivemind_directory`` sends the requests. Places are hivemind's numbers; nothing of hivemind is
imported here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from dht.libp2p.directory_wire import place_of
from dht.membership.replicas import apart

BEAM = 8
"""Number of nearest peers that a search asks: the replicas, and a few in reserve."""

ASKED_MAX = 64
"""Limit of peers asked by a search: a hostile peer can invent nearer ones without end."""

ROOTS = 32
"""Number of known peers from which a search may begin. The nearest are asked, the others only in
place of peers that do not answer or are too many of one network."""


class Search:
    """One search.

    A search begins at the peers in the routing table. Each of them is the root of a path, to which
    the peers belong that were asked because of its answer. No path may ask more than its share of
    all requests, and peers that only one path names take less than half of the places that are
    asked first, as do peers that are connected from one network. So a hostile peer and those that
    it names cannot be all that a search finds, as long as another path finds honest peers.
    """

    def __init__(self, key_id: Any, roots: dict[Any, Any], seeds: dict[Any, Any]) -> None:
        """``seeds``: peers that are asked although they may be far from the key."""
        self.known = roots | seeds
        """Peers by place, without those that did not answer."""

        self._key_id = key_id
        self._seeds = seeds
        self._named_by: dict[Any, set[Any]] = {place: {place} for place in self.known}
        """Roots of the paths that named a place."""

        self._path: dict[Any, Any] = {}
        """Root of the path that asked a place."""

        self._asked: Counter[Any] = Counter()
        self._share = ASKED_MAX // min(BEAM, max(1, len(self.known)))
        self._answered: set[Any] = set()
        self._failed: set[Any] = set()
        self._networks: dict[Any, str | None] = {}
        """Networks of places, as far as they are known."""

        self._new = dict(self.known)
        self._best: list[Any] | None = None
        """Result of ``_nearest``; ``None`` when it has to be computed again."""

    def to_ask(self) -> list[Any]:
        """The places to ask now, each of which is returned once."""
        wanted = []
        while new := [place for place in self._candidates() if place not in self._path]:
            for place in new:
                path = min(self._named_by[place], key=lambda root: (self._asked[root], root))
                if self._asked[path] >= self._share:
                    self._drop(place)
                    continue
                self._asked[path] += 1
                self._path[place] = path
                wanted.append(place)
        return wanted

    def answered(self, place: Any, nearer: Mapping[Any, Any], *, own_place: Any) -> None:
        """Take the answer of a place: peers that it knows near the key."""
        self._answered.add(place)
        for other, peer in nearer.items():
            if other == own_place or other in self._failed:
                continue
            if other not in self.known:
                if other.to_bytes() != place_of(peer.to_bytes()):
                    continue  # nobody honest names it
                self.known[other] = self._new[other] = peer
            named_by = self._named_by.setdefault(other, set())
            named_by.add(self._path[place])
            if len(named_by) <= 2:  # it is new, or no path's own any more
                self._best = None

    def failed(self, place: Any) -> None:
        """Note that a place did not answer."""
        self._failed.add(place)
        self._drop(place)

    def _drop(self, place: Any) -> None:
        self.known.pop(place, None)
        self._best = None

    def is_over(self) -> bool:
        """Say whether the best places have all answered, and the seeds."""
        return self._answered.issuperset(self._candidates())

    def newly_known(self) -> dict[Any, Any]:
        """The peers by place that became known since this was last asked."""
        new, self._new = self._new, {}
        return new

    def is_located(self, places: Iterable[Any]) -> bool:
        """Say whether the networks of these places are known."""
        return self._networks.keys() >= set(places)

    def locate(self, networks: Mapping[Any, str | None]) -> None:
        """Note the networks of places, after which others may be the best."""
        self._networks |= networks
        self._best = None

    def found(self) -> dict[Any, Any]:
        asked = set(self._candidates())
        return {place: self.known[place] for place in self._nearest() if place in asked}

    def _candidates(self) -> list[Any]:
        """``BEAM`` places: the seeds, which take the places of the farthest, and the nearest."""
        seeds = [place for place in self._seeds if place in self.known]
        others = [place for place in self._nearest() if place not in self._seeds]
        return [*seeds, *others[: BEAM - len(seeds)]]

    def _nearest(self) -> list[Any]:
        """Up to ``BEAM`` known places, the nearest first, those of one path or network apart."""
        if self._best is None:
            order = sorted(self.known, key=self._key_id.xor_distance)
            self._best = apart(order, (self._only_path, self._networks.get), count=BEAM)
        return self._best

    def _only_path(self, place: Any) -> Any:
        """The root of the path that alone has named a place; ``None`` if several have."""
        named_by = self._named_by[place]
        return next(iter(named_by)) if len(named_by) == 1 else None
