"""The history of a fragment, as short as it can be while two peers can still compare theirs.

A **lineage** is a hash over everything that made a state, so equal lineages mean equal bits. A
``Chain`` lists the versions behind a state; it tells *behind* (their chain holds my lineage) from
*apart* (it does not). A ``MergedMap`` says up to which step of each peer its work is contained.
Nothing here decides what to do about it: see ``averaging.history.standing`` and
``averaging.round.machine``.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, takewhile
from operator import attrgetter
from struct import iter_unpack
from typing import NamedTuple, Protocol, TypeAlias

import blake3
import numpy as np
from numpy.typing import NDArray

from dht.identity import PeerId

Lineage: TypeAlias = bytes
"""32 bytes of blake3."""

LINEAGE_BYTES = 32
CHAIN_MAX_LINKS = 10_000
BLOCK_LINKS = 64
"""Links of a chain's block before the next one is begun; those of one version are never parted."""

_ORIGIN = "shoal 2026-11 lineage origin"
_MERGE = "shoal 2026-11 lineage of a round"
_FOLD = "shoal 2026-11 lineage of a fold"
_SEAL = "shoal 2026-11 seal"
_MAP = "shoal 2026-11 merged map"


def origin(layout_hash: bytes, fragment: int, theta: bytes) -> Lineage:
    """The lineage of a founder's first state. ``theta``: a digest of its parameters' bytes."""
    return _digest(_ORIGIN, [layout_hash, _number(fragment), theta])


def after_round(
    parents: Sequence[Lineage], commit: bytes, seal: bytes, slices: Sequence[bytes]
) -> Lineage:
    """blake3(parent lineages || commit || seal || slice digests), each list with its length.

    ``commit`` is the round's digest, ``seal`` that of ``seal_digest``, ``slices`` those of the
    merged slices in their order.
    """
    if not parents:
        raise ValueError("a round has at least one parent")
    return _digest(
        _MERGE, [_number(len(parents)), *parents, commit, seal, _number(len(slices)), *slices]
    )


def after_fold(parent: Lineage, peer: PeerId, incarnation: int, mark: int) -> Lineage:
    """The lineage after ``peer``, alone, made its own parameters the state."""
    return _digest(_FOLD, [parent, peer.encode(), _number(incarnation), _number(mark)])


def seal_digest(contributors: Sequence[int]) -> bytes:
    """The digest of a seal: roster indices of the contributors, ascending."""
    return _digest(_SEAL, [_number(index) for index in contributors])


def _number(value: int) -> bytes:
    return value.to_bytes(8, "little")


def _digest(domain: str, parts: Iterable[bytes]) -> bytes:
    whole = b"".join(_number(len(part)) + part for part in parts)
    return blake3.blake3(whole, derive_key_context=domain).digest()


# Chains


class ChainLink(NamedTuple):
    """One version: after it, ``tokens`` of all peers were merged."""

    version: int
    lineage: Lineage
    tokens: int


class AnyLink(Protocol):
    """A link, from a chain or out of a message."""

    @property
    def version(self) -> int: ...

    @property
    def lineage(self) -> Lineage: ...

    @property
    def tokens(self) -> int: ...


class _Links:
    """Links by (version, lineage), growing at the end: 48 bytes each."""

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
        """Append a range of another's."""
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
        """Where its links are among those from ``start`` up to ``end``."""
        first = bisect_left(self.versions, version, start, end)
        return first, bisect_right(self.versions, version, first, end)

    def among(self, first: int, last: int) -> list[Lineage]:
        """The lineages of the links from ``first`` up to ``last``."""
        data = self.lineages[first * LINEAGE_BYTES : last * LINEAGE_BYTES]
        return [lineage for (lineage,) in iter_unpack(f"{LINEAGE_BYTES}s", data)]

    def place(self, lineage: Lineage, first: int, last: int) -> int | None:
        """Which of the links from ``first`` up to ``last`` it is."""
        end = last * LINEAGE_BYTES
        at = self.lineages.find(lineage, first * LINEAGE_BYTES, end)
        while at % LINEAGE_BYTES and at >= 0:  # the end of one and the start of the next
            at = self.lineages.find(lineage, at + 1, end)
        return at // LINEAGE_BYTES if at >= 0 else None

    def missing(self, links: Iterable[AnyLink], first: int, last: int) -> dict[Lineage, AnyLink]:
        """Those of these links that are not among mine from ``first`` up to ``last``."""
        start, end, find = first * LINEAGE_BYTES, last * LINEAGE_BYTES, self.lineages.find
        missing = {}
        for link in links:
            at = find(link.lineage, start, end)
            if at < 0 or (at % LINEAGE_BYTES and self.place(link.lineage, first, last) is None):
                missing[link.lineage] = link
        return missing

    def united(self, new: Iterable[AnyLink], start: int, end: int) -> list[_Links]:
        """These from ``start`` up to ``end`` and new ones, cut where they have become many."""
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
    """The versions behind a state, oldest first. Never changes; ``extended`` makes a longer one.

    A chain is a window on blocks that it shares with those it was made from: extending the newest
    costs nothing, and anything else a copy of the blocks that change, which are the last. After a
    mix it holds links of several lineages; then there may be more than one of a version, all of
    them in one block.
    """

    __slots__ = ("_blocks", "_end", "_length", "_start")

    def __init__(self, links: Iterable[ChainLink] = ()) -> None:
        storage = _Links()
        ordered = sorted({(link.version, link.lineage): link for link in links}.items())
        for _, link in ordered[-CHAIN_MAX_LINKS:]:
            if len(link.lineage) != LINEAGE_BYTES:
                raise ValueError(f"a lineage has {LINEAGE_BYTES} bytes, not {len(link.lineage)}")
            storage.append(ChainLink(*link))
        self._blocks: tuple[_Links, ...] = (storage,)
        self._start = 0
        """In the first block."""
        self._end = self._length = len(storage)
        """In the last block, and in all of them."""

    @classmethod
    def _window(cls, blocks: Sequence[_Links], start: int, end: int, length: int) -> Chain:
        """The newest 10 000 of these, which are ``length``."""
        first = 0
        start += max(0, length - CHAIN_MAX_LINKS)
        while first < len(blocks) - 1 and start >= len(blocks[first]):
            start -= len(blocks[first])
            first += 1
        chain = cls.__new__(cls)
        chain._blocks, chain._start, chain._end = tuple(blocks[first:]), start, end
        chain._length = min(length, CHAIN_MAX_LINKS)
        return chain

    def extended(self, link: ChainLink) -> Chain:
        """This chain and one newer link. The oldest falls off beyond 10 000."""
        if len(link.lineage) != LINEAGE_BYTES:
            raise ValueError(f"a lineage has {LINEAGE_BYTES} bytes, not {len(link.lineage)}")
        if len(self) and link.version <= self.tip.version:
            raise ValueError(f"version {link.version} does not come after {self.tip.version}")
        *before, last = self._blocks
        if self._end != len(last):  # another took this place
            last = last.copied(self._end)
        if len(last) >= BLOCK_LINKS:
            before.append(last)
            last = _Links()
        last.append(link)
        return self._window([*before, last], self._start, len(last), self._length + 1)

    def united(self, other: Iterable[AnyLink]) -> Chain:
        """All links of both, as after a mix."""
        # A swarm of sixty groups adds sixty links with every version, most of them known.
        new: dict[int, dict[Lineage, AnyLink]] = {}
        for version, links in groupby(other, key=_version):
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
        """Without the newest link."""
        *before, last = self._blocks
        if before and self._end == 1:
            # What comes after it here is not to grow into those that go on with the tip.
            last = before.pop()
            last = last.copied(len(last))
            end = len(last)
        else:
            end = max(0 if before else self._start, self._end - 1)
        return self._window([*before, last], self._start, end, max(0, self._length - 1))

    def _block(self, number: int) -> tuple[_Links, int, int]:
        """A block, and from where up to where it is mine."""
        block = self._blocks[number]
        start = self._start if number == 0 else 0
        return block, start, self._end if number == len(self._blocks) - 1 else len(block)

    def _block_of(self, version: int) -> int:
        """In which block the links of a version are, or would be."""
        number = len(self._blocks) - 1
        while number and self._blocks[number].versions[0] > version:
            number -= 1
        return number

    def _range(self, version: int) -> tuple[int, _Links, int, int]:
        """The number of the block with the links of a version, and where they are in it."""
        number = self._block_of(version)
        block, start, end = self._block(number)
        return number, block, *block.range(version, start, end)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[ChainLink]:
        for number in range(len(self._blocks)):
            block, start, end = self._block(number)
            for index in range(start, end):
                yield block.link(index)

    def __reversed__(self) -> Iterator[ChainLink]:
        for number in reversed(range(len(self._blocks))):
            block, start, end = self._block(number)
            for index in reversed(range(start, end)):
                yield block.link(index)

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
        """The newest link. An empty chain has none (``IndexError``)."""
        if not len(self):
            raise IndexError("an empty chain has no tip")
        return self._blocks[-1].link(self._end - 1)

    def find(self, version: int, lineage: Lineage) -> ChainLink | None:
        """The link of this state, if it is an ancestor (or the tip): the test for *behind*."""
        _, block, first, last = self._range(version)
        place = block.place(lineage, first, last)
        return block.link(place) if place is not None else None

    def common_ancestor(self, other: Iterable[AnyLink]) -> ChainLink | None:
        """The newest link that both have. ``other`` may be a thinned-out chain."""
        for link in sorted(other, key=_version_and_lineage, reverse=True):
            found = self.find(link.version, link.lineage)
            if found is not None:
                return found
        return None

    def since(self, version: int) -> tuple[ChainLink, ...]:
        """Links newer than ``version``, oldest first."""
        newer = takewhile(lambda link: link.version > version, reversed(self))
        return tuple(newer)[::-1]

    def thinned(self, count: int) -> tuple[ChainLink, ...]:
        """At most ``count`` links, newest first: each of the latest, then ever further apart.

        The oldest is always among them, so that two long histories of one run meet somewhere.
        """
        if count < 2 or len(self) <= count:
            return tuple(reversed(self))[: max(0, count)]
        close = count // 2
        steps = count - close
        reach = len(self) - 1
        backs = list(range(close))
        # Widths grow by a constant factor, in whole numbers so that all machines agree.
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
        for back in backs:
            while back - passed >= end - start:
                passed += end - start
                number -= 1
                block, start, end = self._block(number)
            found.append(block.link(end - 1 - (back - passed)))
        return tuple(found)


# What is merged


@dataclass(frozen=True, slots=True, order=True)
class Mark:
    """Up to which step of a peer's life its work is contained.

    ``tokens`` counts all of that peer's that were ever merged, across its incarnations.
    """

    incarnation: int
    step: int
    tokens: int


class _Names:
    """Whom a map has marks of, in order: one object for equal names, told apart at a glance."""

    __slots__ = ("_form", "_places", "column", "names")

    def __init__(self, names: tuple[PeerId, ...]) -> None:
        self.names = names
        self.column = {peer: column for column, peer in enumerate(names)}
        form = bytearray()
        places = []
        for name in (peer.encode() for peer in names):
            form += _number(len(name)) + name
            for _ in range(3):
                form += _number(8)
                places.append(len(form))
                form += _number(0)
        self._form = bytes(form)
        """Each name and each number with its length before it, as ``_digest`` would have them: the
        numbers are still to be filled in ..."""
        self._places = np.array(places, np.intp)
        """... here."""

    def digest(self, numbers: _Numbers) -> bytes:
        filled = bytearray(self._form)
        if self.names:
            # A number beginning at every byte, to write at those where one belongs.
            anywhere = np.ndarray((len(filled) - 7,), "<u8", filled, strides=(1,))
            anywhere[self._places] = numbers.T.reshape(-1)
        return blake3.blake3(filled, derive_key_context=_MAP).digest()


@lru_cache(maxsize=64)
def _named(names: tuple[PeerId, ...]) -> _Names:
    return _Names(names)


_Numbers: TypeAlias = NDArray[np.uint64]
"""A column for each name: incarnation, step, tokens."""


class MergedMap(Mapping[PeerId, Mark]):
    """peer -> ``Mark``. Never changes. Two maps unite entry by entry to the maximum,
    so that nothing is counted twice after a fork.

    Columns of numbers: in a swarm of a thousand sixteen maps of a thousand marks are united, and
    digested, in every round of every group.
    """

    __slots__ = ("_digested", "_names", "_numbers", "tokens")

    def __init__(self, marks: Mapping[PeerId, Mark] | None = None) -> None:
        ordered = sorted((marks or {}).items())
        self._names = _named(tuple(peer for peer, _ in ordered))
        self._numbers: _Numbers = np.zeros((3, len(ordered)), np.uint64)
        for column, (_, mark) in enumerate(ordered):
            self._numbers[:, column] = mark.incarnation, mark.step, mark.tokens
        self.tokens = sum(mark.tokens for _, mark in ordered)
        """All tokens of all peers: the run's global count."""
        self._digested: bytes | None = None

    @classmethod
    def _of(cls, names: _Names, numbers: _Numbers) -> MergedMap:
        merged = cls.__new__(cls)
        merged._names, merged._numbers, merged._digested = names, numbers, None
        merged.tokens = sum(numbers[2].tolist())
        return merged

    def __getitem__(self, peer: PeerId) -> Mark:
        return Mark(*self._numbers[:, self._names.column[peer]].tolist())

    def __iter__(self) -> Iterator[PeerId]:
        return iter(self._names.names)

    def __len__(self) -> int:
        return len(self._names.names)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MergedMap):
            return super().__eq__(other)
        same_names = self._names is other._names or self._names.names == other._names.names
        return same_names and np.array_equal(self._numbers, other._numbers)

    def __hash__(self) -> int:
        return hash(frozenset(self.items()))

    def __repr__(self) -> str:
        return f"MergedMap({len(self)} peers, {self.tokens} tokens)"

    def covers(self, peer: PeerId, incarnation: int, step: int) -> bool:
        """Whether work of this incarnation up to ``step`` is contained.

        A later incarnation's entry says nothing about an earlier one's last work: then it is not.
        """
        mark = self.get(peer)
        return mark is not None and mark.incarnation == incarnation and mark.step >= step

    def with_work(self, peer: PeerId, incarnation: int, step: int, tokens: int) -> MergedMap:
        """The map after a round merged ``tokens`` more of ``peer``, up to ``step``."""
        return self.with_works([(peer, incarnation, step, tokens)])

    def with_works(self, works: Iterable[tuple[PeerId, int, int, int]]) -> MergedMap:
        """``with_work`` for several at once: peer, incarnation, step, tokens."""
        works = list(works)
        names = self._names_with([peer for peer, _, _, _ in works])
        numbers = self._columns(names)
        for peer, incarnation, step, tokens in works:
            column = names.column[peer]
            total = int(numbers[2, column]) + tokens
            numbers[:, column] = incarnation, step, total
        return self._of(names, numbers)

    def united(self, *others: Mapping[PeerId, Mark]) -> MergedMap:
        """The later mark and the larger token count of each peer."""
        maps = [other if isinstance(other, MergedMap) else MergedMap(other) for other in others]
        names = self._names
        if any(other._names is not names for other in maps):
            names = self._names_with({peer for other in maps for peer in other._names.names})
        columns = [m._numbers if m._names is names else m._columns(names) for m in (self, *maps)]
        every = np.stack(columns)
        if (every[:, 0] == every[0, 0]).all():  # nobody has been restarted
            return self._of(names, every.max(axis=0))
        numbers = columns[0].copy()
        for theirs in columns[1:]:
            _unite(numbers, theirs)
        return self._of(names, numbers)

    def _names_with(self, peers: Iterable[PeerId]) -> _Names:
        new = {peer for peer in peers if peer not in self._names.column}
        return _named(tuple(sorted(new.union(self._names.names)))) if new else self._names

    def _columns(self, names: _Names) -> _Numbers:
        """A copy for these names, which are all of mine and perhaps others: zeros is nothing."""
        if names is self._names:
            return self._numbers.copy()
        numbers = np.zeros((3, len(names.names)), np.uint64)
        numbers[:, [names.column[peer] for peer in self._names.names]] = self._numbers
        return numbers

    def digest(self) -> bytes:
        if self._digested is None:
            self._digested = self._names.digest(self._numbers)
        return self._digested


def _unite(mine: _Numbers, theirs: _Numbers) -> None:
    """The later (incarnation, step) and the larger token count, in place."""
    np.maximum(mine[2], theirs[2], out=mine[2])
    later = theirs[0] > mine[0]
    later |= (theirs[0] == mine[0]) & (theirs[1] > mine[1])
    np.copyto(mine[:2], theirs[:2], where=later)
