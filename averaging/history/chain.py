"""The versions behind a state, in a form that two peers can compare.

A peer whose lineage is in another's chain is *behind*; a peer whose lineage is not in it is
*apart*. ``averaging.history.standing`` judges by this, and ``averaging.round.machine`` acts on it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, takewhile
from operator import attrgetter
from struct import iter_unpack
from typing import NamedTuple, Protocol

from averaging.history.lineage import LINEAGE_BYTES, Lineage

CHAIN_MAX_LINKS = 10_000
"""Links that a chain keeps at most; older ones are dropped, except for the founder's version 0, by
which foundings of a run are told apart."""

BLOCK_LINKS = 64
"""Links in a block of a chain before the next block begins. Links of one version share a block."""


class ChainLink(NamedTuple):
    """One version of a fragment, and the tokens of all peers that were merged up to it."""

    version: int
    lineage: Lineage
    tokens: int


class AnyLink(Protocol):
    """A link of a chain or of a message."""

    @property
    def version(self) -> int: ...

    @property
    def lineage(self) -> Lineage: ...

    @property
    def tokens(self) -> int: ...


class _Links:
    """A growing table of links, sorted by (version, lineage): 48 bytes per link."""

    __slots__ = ("lineages", "tokens", "versions")

    def __init__(self) -> None:
        self.versions = array("q")
        self.tokens = array("q")
        self.lineages = bytearray()

    def __len__(self) -> int:
        return len(self.versions)

    def append(self, link: AnyLink) -> None:
        self.versions.append(link.version)
        self.tokens.append(link.tokens)
        self.lineages += link.lineage

    def take(self, other: _Links, start: int, end: int) -> None:
        """Append a range of another table."""
        if start < end:
            self.versions += other.versions[start:end]
            self.tokens += other.tokens[start:end]
            self.lineages += other.lineages[start * LINEAGE_BYTES : end * LINEAGE_BYTES]

    def copied(self, end: int) -> _Links:
        copy = _Links()
        copy.take(self, 0, end)
        return copy

    def lineage(self, index: int) -> Lineage:
        at = index * LINEAGE_BYTES
        return bytes(self.lineages[at : at + LINEAGE_BYTES])

    def link(self, index: int) -> ChainLink:
        return ChainLink(self.versions[index], self.lineage(index), self.tokens[index])

    def range(self, version: int, start: int, end: int) -> tuple[int, int]:
        """Return the range of a version's links among those from ``start`` up to ``end``."""
        first = bisect_left(self.versions, version, start, end)
        return first, bisect_right(self.versions, version, first, end)

    def among(self, first: int, last: int) -> list[Lineage]:
        """Return the lineages of the links from ``first`` up to ``last``."""
        data = self.lineages[first * LINEAGE_BYTES : last * LINEAGE_BYTES]
        return [lineage for (lineage,) in iter_unpack(f"{LINEAGE_BYTES}s", data)]

    def place(self, lineage: Lineage, first: int, last: int) -> int | None:
        """Return the index of a lineage among the links from ``first`` up to ``last``."""
        end = last * LINEAGE_BYTES
        at = self.lineages.find(lineage, first * LINEAGE_BYTES, end)
        while at % LINEAGE_BYTES and at >= 0:  # a match across two lineages
            at = self.lineages.find(lineage, at + 1, end)
        return at // LINEAGE_BYTES if at >= 0 else None

    def missing(self, links: Iterable[AnyLink], first: int, last: int) -> dict[Lineage, AnyLink]:
        """Return those of ``links`` that this table lacks between ``first`` and ``last``."""
        start, end, find = first * LINEAGE_BYTES, last * LINEAGE_BYTES, self.lineages.find
        missing = {}
        for link in links:
            at = find(link.lineage, start, end)
            if at < 0 or (at % LINEAGE_BYTES and self.place(link.lineage, first, last) is None):
                missing[link.lineage] = link
        return missing

    def united(self, new: Iterable[AnyLink], start: int, end: int) -> list[_Links]:
        """Return the links from ``start`` up to ``end`` and ``new`` ones, split into blocks."""
        made, at = [_Links()], start
        for version, links in groupby(sorted(new, key=_version), key=_version):
            first, last = self.range(version, at, end)
            made[-1].take(self, at, first)
            if len(made[-1]) >= BLOCK_LINKS:
                made.append(_Links())
            tokens = dict(zip(self.among(first, last), self.tokens[first:last], strict=True))
            tokens |= {link.lineage: link.tokens for link in links}
            lineages = sorted(tokens)
            made[-1].versions.extend([version] * len(lineages))
            made[-1].tokens.extend([tokens[lineage] for lineage in lineages])
            made[-1].lineages += b"".join(lineages)
            at = last
        made[-1].take(self, at, end)
        return made


_version = attrgetter("version")

_version_and_lineage = attrgetter("version", "lineage")


class Chain:
    """The versions behind a state, oldest first. Immutable; ``extended`` returns a longer chain.

    A chain is its root, and a window on blocks that it shares with the chains it was made from.
    Extending the newest chain copies nothing; any other change copies the blocks that differ, which
    are the last ones. After a meld a chain holds links of several lineages. Links of one version
    are all in one block.
    """

    __slots__ = ("_blocks", "_end", "_kept_root", "_length", "_start")

    def __init__(self, links: Iterable[ChainLink] = ()) -> None:
        storage = _Links()
        ordered = sorted({(link.version, link.lineage): link for link in links}.items())
        for _, link in ordered:
            if len(link.lineage) != LINEAGE_BYTES:
                raise ValueError(f"a lineage has {LINEAGE_BYTES} bytes, not {len(link.lineage)}")
            storage.append(ChainLink(*link))
        self._kept_root: ChainLink | None = None
        """The root, once the window has passed it."""
        self._see([storage], 0, len(storage), len(storage))

    def _window(self, blocks: Sequence[_Links], start: int, end: int, length: int) -> Chain:
        """Return a chain with this one's kept root and the newest of these ``length`` links."""
        chain = Chain.__new__(Chain)
        chain._kept_root = self._kept_root
        chain._see(blocks, start, end, length)
        return chain

    def _see(self, blocks: Sequence[_Links], start: int, end: int, length: int) -> None:
        """Set the window to the newest links that there is room for beside the root."""
        first = 0
        if length + (self._kept_root is not None) > CHAIN_MAX_LINKS:
            oldest = blocks[0].link(start)
            if self._kept_root is None and oldest.version == 0:
                self._kept_root = oldest
            room = CHAIN_MAX_LINKS - (self._kept_root is not None)
            start += length - room
            length = room
        while first < len(blocks) - 1 and start >= len(blocks[first]):
            start -= len(blocks[first])
            first += 1
        self._blocks: tuple[_Links, ...] = tuple(blocks[first:])
        self._start = start
        """Index of the first link in the first block."""
        self._end = end
        """End of the window in the last block."""
        self._length = length
        """Number of links in the window."""

    def extended(self, link: ChainLink) -> Chain:
        """Return this chain with a newer link. Beyond ``CHAIN_MAX_LINKS`` an old one is dropped."""
        if len(link.lineage) != LINEAGE_BYTES:
            raise ValueError(f"a lineage has {LINEAGE_BYTES} bytes, not {len(link.lineage)}")
        if len(self) and link.version <= self.tip.version:
            raise ValueError(f"version {link.version} does not come after {self.tip.version}")
        *before, last = self._blocks
        if self._end != len(last):  # another chain has appended to the shared block
            last = last.copied(self._end)
        if len(last) >= BLOCK_LINKS:
            before.append(last)
            last = _Links()
        last.append(link)
        return self._window([*before, last], self._start, len(last), self._length + 1)

    def united(self, other: Iterable[AnyLink]) -> Chain:
        """Return a chain with all links of both, as after a meld."""
        # In a swarm of sixty groups each version adds sixty links, most of which are known.
        new: dict[int, dict[Lineage, AnyLink]] = {}
        root = self._kept_root
        unknown = (link for link in other if root is None or link.lineage != root.lineage)
        for version, links in groupby(unknown, key=_version):
            number, block, first, last = self._range(version)
            if missing := block.missing(links, first, last):
                new.setdefault(number, {}).update(missing)
        if not new:
            return self
        first = min(new)
        blocks = list(self._blocks[:first])
        for number, block in enumerate(self._blocks[first:], start=first):
            if number in new:
                blocks += block.united(new[number].values(), *self._block(number)[1:])
            else:
                blocks.append(block)
        last = len(self._blocks) - 1
        start = 0 if 0 in new else self._start
        end = len(blocks[-1]) if last in new else self._end
        return self._window(blocks, start, end, self._length + sum(map(len, new.values())))

    def before_tip(self) -> Chain:
        """Return this chain without its newest link."""
        *before, last = self._blocks
        if before and self._end == 1:
            # A copy, because chains that kept the tip share the block and may extend it.
            last = before.pop()
            last = last.copied(len(last))
            end = len(last)
        else:
            end = max(0 if before else self._start, self._end - 1)
        return self._window([*before, last], self._start, end, max(0, self._length - 1))

    def _block(self, number: int) -> tuple[_Links, int, int]:
        """Return a block and the range of it that belongs to this chain."""
        block = self._blocks[number]
        start = self._start if number == 0 else 0
        return block, start, self._end if number == len(self._blocks) - 1 else len(block)

    def _block_of(self, version: int) -> int:
        """Return the number of the block that holds, or would hold, the links of a version."""
        number = len(self._blocks) - 1
        while number and self._blocks[number].versions[0] > version:
            number -= 1
        return number

    def _range(self, version: int) -> tuple[int, _Links, int, int]:
        """Return the number of a version's block, the block, and the range of its links in it."""
        number = self._block_of(version)
        block, start, end = self._block(number)
        return number, block, *block.range(version, start, end)

    def __len__(self) -> int:
        return self._length + (self._kept_root is not None)

    def __iter__(self) -> Iterator[ChainLink]:
        if self._kept_root is not None:
            yield self._kept_root
        for number in range(len(self._blocks)):
            block, start, end = self._block(number)
            for index in range(start, end):
                yield block.link(index)

    def __reversed__(self) -> Iterator[ChainLink]:
        for number in reversed(range(len(self._blocks))):
            block, start, end = self._block(number)
            for index in reversed(range(start, end)):
                yield block.link(index)
        if self._kept_root is not None:
            yield self._kept_root

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chain) and list(self) == list(other)

    def __hash__(self) -> int:
        return hash((len(self), self.tip if len(self) else None))

    def __repr__(self) -> str:
        if not len(self):
            return "Chain(empty)"
        tip = self.tip
        return f"Chain({len(self)} links up to {tip.version} {tip.lineage.hex()[:8]})"

    @property
    def tip(self) -> ChainLink:
        """The newest link. Raises ``IndexError`` if the chain is empty."""
        if not len(self):
            raise IndexError("an empty chain has no tip")
        return self._blocks[-1].link(self._end - 1)

    @property
    def root(self) -> ChainLink | None:
        """The founder's version 0; ``None`` in a chain that was made without it."""
        oldest = next(iter(self), None)
        return oldest if oldest is not None and oldest.version == 0 else None

    def find(self, version: int, lineage: Lineage) -> ChainLink | None:
        """Return the link of a state if it is in this chain. This is the test for *behind*."""
        root = self._kept_root
        if root is not None and (version, lineage) == (root.version, root.lineage):
            return root
        _, block, first, last = self._range(version)
        place = block.place(lineage, first, last)
        return block.link(place) if place is not None else None

    def reaches(self, version: int) -> bool:
        """Return whether this chain still has all its links of a version and of later ones."""
        if len(self) < CHAIN_MAX_LINKS:
            return True
        oldest = next((link.version for link in self if link.version), version)
        return oldest < version

    def common_ancestor(self, other: Iterable[AnyLink]) -> ChainLink | None:
        """Return the newest link that both chains have. ``other`` may be a thinned-out chain."""
        for link in sorted(other, key=_version_and_lineage, reverse=True):
            found = self.find(link.version, link.lineage)
            if found is not None:
                return found
        return None

    def since(self, version: int) -> tuple[ChainLink, ...]:
        """Return the links newer than ``version``, oldest first."""
        newer = takewhile(lambda link: link.version > version, reversed(self))
        return tuple(newer)[::-1]

    def thinned(self, count: int) -> tuple[ChainLink, ...]:
        """Return at most ``count`` links, newest first: the latest ones, then ever further apart.

        The oldest link is always among them, so that two long histories of one run have a link in
        common.
        """
        if count < 2 or len(self) <= count:
            return tuple(reversed(self))[: max(0, count)]
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
        found = []
        number, passed = len(self._blocks) - 1, 0
        block, start, end = self._block(number)
        if self._kept_root is not None:
            backs.pop()
        for back in backs:
            while back - passed >= end - start:
                passed += end - start
                number -= 1
                block, start, end = self._block(number)
            found.append(block.link(end - 1 - (back - passed)))
        if self._kept_root is not None:
            found.append(self._kept_root)
        return tuple(found)
