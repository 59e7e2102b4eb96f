"""The history of a fragment, as short as it can be while two peers can still compare theirs.

A **lineage** is a hash over everything that made a state, so equal lineages mean equal bits. A
``Chain`` lists the versions behind a state; it tells *behind* (their chain holds my lineage) from
*apart* (it does not). A ``MergedMap`` says up to which step of each peer its work is contained.
Nothing here decides what to do about it: see ``averaging.standing`` and ``averaging.round``.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import blake3

from dht.identity import PeerId

Lineage: TypeAlias = bytes
"""32 bytes of blake3."""

LINEAGE_BYTES = 32
CHAIN_MAX_LINKS = 10_000

_ORIGIN = "shoal 2026-11 lineage origin"
_MERGE = "shoal 2026-11 lineage of a round"
_FOLD = "shoal 2026-11 lineage of a fold"
_SEAL = "shoal 2026-11 seal"
_MAP = "shoal 2026-11 merged map"

_MARK = struct.Struct("<6Q").pack
"""Three numbers, each with its length before it, as ``_digest`` would have them."""


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

    def lineage(self, index: int) -> Lineage:
        at = index * LINEAGE_BYTES
        return bytes(self.lineages[at : at + LINEAGE_BYTES])


class Chain:
    """The versions behind a state, oldest first. Never changes; ``extended`` makes a longer one.

    A chain is a window on storage that it shares with those it was extended from, so that
    extending the newest costs nothing, and an older one a copy. After a mix
    it holds links of several lineages; then there may be more than one of a version.
    """

    __slots__ = ("_end", "_links", "_start")

    def __init__(self, links: Iterable[ChainLink] = ()) -> None:
        storage = _Links()
        ordered = sorted({(link.version, link.lineage): link for link in links}.items())
        for _, link in ordered[-CHAIN_MAX_LINKS:]:
            if len(link.lineage) != LINEAGE_BYTES:
                raise ValueError(f"a lineage has {LINEAGE_BYTES} bytes, not {len(link.lineage)}")
            storage.append(ChainLink(*link))
        self._links = storage
        self._start = 0
        self._end = len(storage.versions)

    @classmethod
    def _window(cls, links: _Links, start: int, end: int) -> Chain:
        chain = cls.__new__(cls)
        chain._links, chain._start, chain._end = links, start, end
        return chain

    def extended(self, link: ChainLink) -> Chain:
        """This chain and one newer link. The oldest falls off beyond 10 000."""
        if len(link.lineage) != LINEAGE_BYTES:
            raise ValueError(f"a lineage has {LINEAGE_BYTES} bytes, not {len(link.lineage)}")
        if len(self) and link.version <= self.tip.version:
            raise ValueError(f"version {link.version} does not come after {self.tip.version}")
        links, start = self._links, self._start
        if self._end != len(links.versions) or start > CHAIN_MAX_LINKS:
            links, start = self._copied(), 0  # another took this place, or half of it is unused
        links.append(link)
        end = len(links.versions)
        return self._window(links, max(start, end - CHAIN_MAX_LINKS), end)

    def united(self, other: Iterable[AnyLink]) -> Chain:
        """All links of both, as after a mix."""
        # By place: a swarm of sixty groups adds sixty links with every version, most of them known.
        new: dict[tuple[int, Lineage], tuple[int, AnyLink]] = {}
        for link in other:
            place, known = self._place(link.version, link.lineage)
            if not known:
                new[link.version, link.lineage] = place, link
        if not new:
            return self
        links, at = _Links(), self._start
        for _, (place, link) in sorted(new.items()):
            links.take(self._links, at, place)
            links.append(link)
            at = place
        links.take(self._links, at, self._end)
        end = len(links.versions)
        return self._window(links, max(0, end - CHAIN_MAX_LINKS), end)

    def before_tip(self) -> Chain:
        """Without the newest link."""
        return self._window(self._links, self._start, max(self._start, self._end - 1))

    def _copied(self) -> _Links:
        copy = _Links()
        copy.take(self._links, self._start, self._end)
        return copy

    def __len__(self) -> int:
        return self._end - self._start

    def __iter__(self) -> Iterator[ChainLink]:
        return (self._at(index) for index in range(self._start, self._end))

    def __reversed__(self) -> Iterator[ChainLink]:
        return (self._at(index) for index in range(self._end - 1, self._start - 1, -1))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chain) and list(self) == list(other)

    def __hash__(self) -> int:
        return hash((len(self), self.tip if len(self) else None))

    def __repr__(self) -> str:
        if not len(self):
            return "Chain(empty)"
        tip = self.tip
        return f"Chain({len(self)} links up to {tip.version} {tip.lineage.hex()[:8]})"

    def _at(self, index: int) -> ChainLink:
        links = self._links
        return ChainLink(links.versions[index], links.lineage(index), links.tokens[index])

    @property
    def tip(self) -> ChainLink:
        """The newest link. An empty chain has none (``IndexError``)."""
        if not len(self):
            raise IndexError("an empty chain has no tip")
        return self._at(self._end - 1)

    def find(self, version: int, lineage: Lineage) -> ChainLink | None:
        """The link of this state, if it is an ancestor (or the tip): the test for *behind*."""
        place, known = self._place(version, lineage)
        return self._at(place) if known else None

    def _place(self, version: int, lineage: Lineage) -> tuple[int, bool]:
        """Where this link is, or would be: links are in order of version, then of lineage."""
        links = self._links
        first = bisect_left(links.versions, version, self._start, self._end)
        last = bisect_right(links.versions, version, first, self._end)
        while first < last:
            middle = (first + last) // 2
            there = links.lineage(middle)
            if there == lineage:
                return middle, True
            if there < lineage:
                first = middle + 1
            else:
                last = middle
        return first, False

    def common_ancestor(self, other: Iterable[ChainLink]) -> ChainLink | None:
        """The newest link that both have. ``other`` may be a thinned-out chain."""
        for link in sorted(other, key=lambda link: (link.version, link.lineage), reverse=True):
            found = self.find(link.version, link.lineage)
            if found is not None:
                return found
        return None

    def since(self, version: int) -> tuple[ChainLink, ...]:
        """Links newer than ``version``, oldest first."""
        first = bisect_right(self._links.versions, version, self._start, self._end)
        return tuple(self._at(index) for index in range(first, self._end))

    def thinned(self, count: int) -> tuple[ChainLink, ...]:
        """At most ``count`` links, newest first: each of the latest, then ever further apart.

        The oldest is always among them, so that two long histories of one run meet somewhere.
        """
        if count < 2 or len(self) <= count:
            return tuple(self)[::-1][: max(0, count)]
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
        return tuple(self._at(self._end - 1 - back) for back in backs)


# What is merged


@dataclass(frozen=True, slots=True, order=True)
class Mark:
    """Up to which step of a peer's life its work is contained.

    ``tokens`` counts all of that peer's that were ever merged, across its incarnations.
    """

    incarnation: int
    step: int
    tokens: int


class MergedMap(Mapping[PeerId, Mark]):
    """peer -> ``Mark``. Never changes. Two maps unite entry by entry to the maximum,
    so that nothing is counted twice after a fork."""

    __slots__ = ("_digested", "_marks", "tokens")

    def __init__(self, marks: Mapping[PeerId, Mark] | None = None) -> None:
        self._marks = dict(marks or {})
        self.tokens = sum(mark.tokens for mark in self._marks.values())
        """All tokens of all peers: the run's global count."""
        self._digested: bytes | None = None

    def __getitem__(self, peer: PeerId) -> Mark:
        return self._marks[peer]

    def __iter__(self) -> Iterator[PeerId]:
        return iter(self._marks)

    def __len__(self) -> int:
        return len(self._marks)

    def __hash__(self) -> int:
        return hash(frozenset(self._marks.items()))

    def __repr__(self) -> str:
        return f"MergedMap({len(self)} peers, {self.tokens} tokens)"

    def covers(self, peer: PeerId, incarnation: int, step: int) -> bool:
        """Whether work of this incarnation up to ``step`` is contained.

        A later incarnation's entry says nothing about an earlier one's last work: then it is not.
        """
        mark = self._marks.get(peer)
        return mark is not None and mark.incarnation == incarnation and mark.step >= step

    def with_work(self, peer: PeerId, incarnation: int, step: int, tokens: int) -> MergedMap:
        """The map after a round merged ``tokens`` more of ``peer``, up to ``step``."""
        return self.with_works([(peer, incarnation, step, tokens)])

    def with_works(self, works: Iterable[tuple[PeerId, int, int, int]]) -> MergedMap:
        """``with_work`` for several at once: peer, incarnation, step, tokens."""
        after = MergedMap()
        after._marks.update(self._marks)
        after.tokens = self.tokens
        for peer, incarnation, step, tokens in works:
            before = self._marks.get(peer)
            total = tokens + (before.tokens if before else 0)
            after._marks[peer] = Mark(incarnation, step, total)
            after.tokens += tokens
        return after

    def united(self, *others: Mapping[PeerId, Mark]) -> MergedMap:
        """The later mark and the larger token count of each peer."""
        after = MergedMap()
        marks, tokens = after._marks, self.tokens
        marks.update(self._marks)
        for other in others:
            for peer, theirs in (other._marks if isinstance(other, MergedMap) else other).items():
                mine = marks.get(peer)
                if mine is theirs:
                    continue
                if mine is None:
                    marks[peer] = theirs
                    tokens += theirs.tokens
                elif (
                    mine.step < theirs.step
                    or mine.incarnation != theirs.incarnation
                    or mine.tokens < theirs.tokens
                ):  # else mine covers theirs, which is so a million times in a large swarm
                    later = marks[peer] = _later(mine, theirs)
                    tokens += later.tokens - mine.tokens
        after.tokens = tokens
        return after

    def digest(self) -> bytes:
        if self._digested is None:
            parts = []
            for peer in sorted(self._marks):
                mark = self._marks[peer]
                name = peer.encode()
                parts.append(_number(len(name)) + name)
                parts.append(_MARK(8, mark.incarnation, 8, mark.step, 8, mark.tokens))
            data = b"".join(parts)
            self._digested = blake3.blake3(data, derive_key_context=_MAP).digest()
        return self._digested


def _later(mine: Mark, theirs: Mark) -> Mark:
    """One of the two if it will do: maps that have a mark in common are united in no time."""
    first, second = (mine.incarnation, mine.step), (theirs.incarnation, theirs.step)
    if first >= second and mine.tokens >= theirs.tokens:
        return mine
    if second >= first and theirs.tokens >= mine.tokens:
        return theirs
    return Mark(*max(first, second), tokens=max(mine.tokens, theirs.tokens))
