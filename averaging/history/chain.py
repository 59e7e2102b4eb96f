"""The versions behind a state, in a form that two peers can compare.

A peer whose lineage is in another's chain is *behind*; a peer whose lineage is not in it is
*apart*. ``averaging.history.standing`` judges by this, and ``averaging.round.machine`` acts on it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from operator import attrgetter

from averaging.history.lineage import LINEAGE_BYTES, Lineage
from averaging.messages import Link

CHAIN_MAX_LINKS = 10_000
"""Links that a chain keeps at most; older ones are dropped, except for the founder's version 0, by
which foundings of a run are told apart."""


_place = attrgetter("version", "lineage")


class Chain:
    """The versions behind a state, oldest first. Immutable; ``extended`` returns a longer chain.

    It is a tuple in the order of (version, lineage): to copy 10 000 links takes 0.1 ms, once
    in a version. After a meld a chain holds links of several lineages.
    """

    __slots__ = ("_links",)

    def __init__(self, links: Iterable[Link] = ()) -> None:
        ordered = sorted({_place(link): link for link in links}.values())
        for link in ordered:
            _check(link.lineage)
        self._links = _newest(tuple(ordered))

    @classmethod
    def _of(cls, links: tuple[Link, ...]) -> Chain:
        """Return the chain of these links, which are in order."""
        chain = cls.__new__(cls)
        chain._links = _newest(links)
        return chain

    def extended(self, link: Link) -> Chain:
        """Return this chain with a newer link. Beyond ``CHAIN_MAX_LINKS`` an old one is dropped."""
        _check(link.lineage)
        if len(self) and link.version <= self.tip.version:
            raise ValueError(f"version {link.version} does not come after {self.tip.version}")
        return self._of((*self._links, link))

    def united(self, other: Iterable[Link]) -> Chain:
        """Return a chain with all links of both, as after a meld."""
        # In a swarm of sixty groups each version adds sixty links, most of which are known.
        new = {
            _place(link): link for link in other if self.find(link.version, link.lineage) is None
        }
        return self._of(tuple(sorted((*self._links, *new.values())))) if new else self

    def before_tip(self) -> Chain:
        """Return this chain without its newest link."""
        return self._of(self._links[:-1])

    def __len__(self) -> int:
        return len(self._links)

    def __iter__(self) -> Iterator[Link]:
        return iter(self._links)

    def __reversed__(self) -> Iterator[Link]:
        return reversed(self._links)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chain) and self._links == other._links

    def __hash__(self) -> int:
        return hash((len(self), self._links[-1:]))

    def __repr__(self) -> str:
        if not len(self):
            return "Chain(empty)"
        tip = self.tip
        return f"Chain({len(self)} links up to {tip.version} {tip.lineage.hex()[:8]})"

    @property
    def tip(self) -> Link:
        """The newest link. Raises ``IndexError`` if the chain is empty."""
        return self._links[-1]

    @property
    def root(self) -> Link | None:
        """The founder's version 0; ``None`` in a chain that was made without it."""
        return self._links[0] if self._links and self._links[0].version == 0 else None

    def find(self, version: int, lineage: Lineage) -> Link | None:
        """Return the link of a state if it is in this chain. This is the test for *behind*."""
        place = bisect_left(self._links, Link(version, lineage, 0))
        found = self._links[place] if place < len(self) else None
        return found if found is not None and _place(found) == (version, lineage) else None

    def reaches(self, version: int) -> bool:
        """Return whether this chain still has all its links of a version and of later ones."""
        if len(self) < CHAIN_MAX_LINKS:
            return True
        oldest = next((link.version for link in self if link.version), version)
        return oldest < version

    def common_ancestor(self, other: Iterable[Link]) -> Link | None:
        """Return the newest link that both chains have. ``other`` may be a thinned-out chain."""
        for link in sorted(other, key=_place, reverse=True):
            found = self.find(link.version, link.lineage)
            if found is not None:
                return found
        return None

    def since(self, version: int) -> tuple[Link, ...]:
        """Return the links newer than ``version``, oldest first."""
        return self._links[bisect_left(self._links, Link(version + 1, b"", 0)) :]

    def thinned(self, count: int) -> tuple[Link, ...]:
        """Return at most ``count`` links, newest first: the latest ones, then ever further apart.

        The oldest link is always among them, so that two long histories of one run have a link in
        common.
        """
        if count < 2 or len(self) <= count:
            return self._links[::-1][: max(0, count)]
        close = count // 2
        steps = count - close
        reach = len(self) - 1
        backs = list(range(close))
        # Gaps double, in whole numbers so that all machines agree.
        left = reach - (close - 1)
        weights = [1 << min(step, 40) for step in range(steps)]
        total = sum(weights)
        done = 0
        for step, weight in enumerate(weights, start=1):
            done += weight
            least = close - 1 + step
            backs.append(max(least, close - 1 + left * done // total))
        return tuple(self._links[reach - back] for back in backs)


def _check(lineage: Lineage) -> None:
    if len(lineage) != LINEAGE_BYTES:
        raise ValueError(f"a lineage has {LINEAGE_BYTES} bytes, not {len(lineage)}")


def _newest(links: tuple[Link, ...]) -> tuple[Link, ...]:
    """The links that there is room for, the founder's version among them."""
    if len(links) <= CHAIN_MAX_LINKS:
        return links
    root = links[:1] if links[0].version == 0 else ()
    return root + links[len(root) - CHAIN_MAX_LINKS :]
