"""The tally: what one peer knows of everybody's contributions, and how it is united with another's.

It has two parts, each a join-semilattice: uniting is commutative, associative and idempotent, so
gossip in any order, repeated or with losses, ends in the same tally everywhere.

**Maps.** For each fragment the heaviest certified version that is known, with its merged map. A
merged map already counts each seal once per lineage: a round adds its contributors' tokens to the
map of the state that it makes, a meld takes the maximum of its parents' maps, and a rebase
leaves the map of the lighter side behind, together with the work that is lost with it. So the tally
does not fold seals a second time. Records of seals, keyed by (lineage, version, peer), would be
70 bytes for each contribution: a run of 24 fragments and 16 peers makes 2.7 MB of them in a hundred
cycles, they can never be dropped, and those of a side that was given up would have to be found and
taken back. A map is 20 to 50 bytes for each peer and fragment, however many thousands of rounds
there were, and it comes with its own proof: a lineage binds the merged map of its state, and a link
is certified by the signatures of peers that have stood on it
(``averaging.round.opinions.certificates``), so nobody can add a token to it that no seal has
merged. The total of a peer is the largest of its counts in all maps, which is the run's own count
of tokens.

**Statements** are the peers' own words on their names, of one run, the newest of each peer, by a
sequence number that the peer itself chooses. A name is shown because its peer has signed that it
may be; a peer that has signed none is shown by the end of its id. Those of peers without merged
tokens are not kept: strangers cannot fill the tally.

A newcomer's or a liar's claims change nothing: an unproven map is not taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Struct

from averaging.history.lineage import bound
from averaging.history.merged_map import Mark, MergedMap
from averaging.history.parent_maps import ParentMap
from averaging.messages import Count, Link, Peer, Signature, Signatures
from dht.identity import Identity, PeerId, RunId, verify
from dht.records import NAME_LENGTH_MAX, name_problem
from peer.contributors import PER_MILLE, Contributor
from peer.quantities import count_text, rounded_shares

FRAGMENTS_MAX = 2**16

Rank: TypeAlias = tuple[int, int, bytes]
"""Tokens, version and lineage: a total order of the versions of a fragment."""

Verify: TypeAlias = Callable[[PeerId, bytes, bytes], bool]


@dataclass(frozen=True, slots=True)
class ProvenMap:
    """The merged map of one version of a fragment, with what proves it."""

    fragment: int
    link: Link
    map: ParentMap
    signatures: Signatures = ()
    """Signatures of peers that have stood on the link."""

    @property
    def merged(self) -> MergedMap:
        return self.map.merged

    @property
    def rank(self) -> Rank:
        """The heavier side of a fork wins, as it does in the run (``standing.relate``)."""
        return self.merged.tokens, self.link.version, self.link.lineage

    @property
    def is_bound(self) -> bool:
        """True if the map is the one that the lineage of the link binds."""
        return bound(self.map.history, self.merged.digest()) == self.link.lineage


Believes: TypeAlias = Callable[[ProvenMap], bool]
"""True if the link of a map is certified for this peer, or part of its own history."""


class Statement(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One peer's word on its name, signed."""

    peer: Peer
    sequence: Count
    name: Annotated[str, Meta(max_length=NAME_LENGTH_MAX)] = ""
    """Empty: it wants to be shown without a name."""
    signature: Signature = b""

    @property
    def rank(self) -> tuple[int, bytes]:
        """The order of one peer's statements; that of the bytes if it used a number twice."""
        return self.sequence, msgspec.msgpack.encode(self)

    def claim(self, run: RunId) -> bytes:
        """The bytes that the peer signs."""
        plain = (run, self.peer, self.sequence, self.name)
        return b"shoal credit statement 1 " + msgspec.msgpack.encode(plain)


def stated(identity: Identity, run: RunId, sequence: int, name: str) -> Statement:
    """Sign a statement."""
    own = Statement(identity.peer_id, sequence, name)
    return msgspec.structs.replace(own, signature=identity.sign(own.claim(run)))


@dataclass(frozen=True, slots=True)
class Part:
    """Some of what a peer knows, to be united with what another one knows."""

    maps: tuple[ProvenMap, ...] = ()
    statements: tuple[Statement, ...] = ()
    topic: bytes = b""
    """The topic of the run in which the maps were proven."""


@dataclass(slots=True)
class Tally:
    """One peer's knowledge of the contributions to a run of so many fragments."""

    run: RunId
    fragments: int
    maps: dict[int, ProvenMap] = field(default_factory=dict)
    statements: dict[PeerId, Statement] = field(default_factory=dict)
    topic: bytes = b""
    """The topic under which peers of the run sign links; empty until it is known."""
    check: Verify = verify
    _totals: Mapping[PeerId, int] | None = None

    def __repr__(self) -> str:
        tokens = sum(self.totals.values())
        return f"Tally({self.run[:8]}, {len(self.totals)} peers, {tokens} tokens)"

    @property
    def totals(self) -> Mapping[PeerId, int]:
        """Tokens of each contributor: the largest count of any fragment."""
        if self._totals is None:
            self._totals = totals_of(each.merged for each in self.maps.values())
        return self._totals

    @property
    def part(self) -> Part:
        """All of it."""
        maps = (self.maps[fragment] for fragment in sorted(self.maps))
        said = (self.statements[peer] for peer in sorted(self.statements))
        return Part(tuple(maps), tuple(said), self.topic)

    def copied(self) -> Tally:
        """A copy, to be read in a thread while this one changes."""
        return Tally(self.run, self.fragments, dict(self.maps), dict(self.statements), self.topic)

    def follow(self, topic: bytes) -> None:
        """Go by this topic. Where the run goes on under another one, no signature from before
        counts any more, and neither does any map: its work may be none of the run's now."""
        if self.topic not in (b"", topic):
            self.maps.clear()
            self._totals = None
        self.topic = topic

    def unite(self, part: Part, *, believes: Believes) -> bool:
        """Take what is new and proven. Returns whether anything was."""
        strange = part.topic and self.topic and part.topic != self.topic
        news = [self._take_map(each, believes) for each in part.maps if not strange]
        if any(news):
            self._totals = None
            # Of two sides of a fork the lighter may have had work of peers that the other has not.
            there = self.totals
            self.statements = {p: said for p, said in self.statements.items() if p in there}
        news += [self._take_statement(each) for each in part.statements]
        return any(news)

    def _take_map(self, proven: ProvenMap, believes: Believes) -> bool:
        known = self.maps.get(proven.fragment)
        if known is not None and proven.rank <= known.rank:
            return False
        if proven.fragment >= self.fragments or not proven.is_bound or not believes(proven):
            return False
        self.maps[proven.fragment] = proven
        return True

    def _take_statement(self, said: Statement) -> bool:
        peer = said.peer
        if peer not in self.totals:
            return False
        known = self.statements.get(peer)
        if known is not None and said.rank <= known.rank:
            return False
        if said.name and name_problem(said.name) is not None:
            return False
        if not self.check(peer, said.claim(self.run), said.signature):
            return False
        self.statements[peer] = said
        return True

    def state(self, identity: Identity, name: str, now: float) -> bool:
        """State this contributor's name, unless that is what it said last."""
        known = self.statements.get(identity.peer_id)
        if identity.peer_id not in self.totals or name == ("" if known is None else known.name):
            return False
        sequence = max(int(now), 0 if known is None else known.sequence + 1)
        return self._take_statement(stated(identity, self.run, sequence, name))


def totals_of(maps: Iterable[Mapping[PeerId, Mark]]) -> Mapping[PeerId, int]:
    """The largest count of each peer in any map: the run's own count (``merged_of``)."""
    united = MergedMap().united(*maps)
    return {peer: mark.tokens for peer, mark in sorted(united.items()) if mark.tokens > 0}


# --- a reader outside the run -------------------------------------------------------------------


def unproven(run: RunId) -> Tally:
    """An empty tally of somebody who only reads."""
    return Tally(run, FRAGMENTS_MAX)


def everything(proven: ProvenMap) -> bool:
    """Believe what ``confirmed`` has chosen."""
    return True


def confirmed(parts: Sequence[Part]) -> Part:
    """The tally of a reader outside the run, who has seen nobody work and can prove nothing.

    It asks several peers, and takes of each fragment the second heaviest map that they tell of: one
    of them alone can add no tokens. Where a single peer answers, its word is all there is.
    """
    by_fragment: dict[int, list[ProvenMap]] = {}
    for part in parts:
        for each in part.maps:
            by_fragment.setdefault(each.fragment, []).append(each)
    chosen = []
    for _, maps in sorted(by_fragment.items()):
        ranked = sorted(maps, key=lambda each: each.rank, reverse=True)
        chosen.append(ranked[min(1, len(ranked) - 1)])
    return Part(tuple(chosen), tuple(each for part in parts for each in part.statements))


# --- rows for people ----------------------------------------------------------------------------


def contributors(tally: Tally) -> list[Contributor]:
    """All contributors, the largest first."""
    rows = sorted(tally.totals.items(), key=lambda row: (-row[1], row[0]))
    shares = rounded_shares([tokens for _, tokens in rows], whole=PER_MILLE)
    return [
        Contributor(peer, _name(tally, peer), tokens, share)
        for (peer, tokens), share in zip(rows, shares, strict=True)
    ]


def _name(tally: Tally, peer: PeerId) -> str:
    said = tally.statements.get(peer)
    return "" if said is None else said.name


def lines(rows: Sequence[Contributor]) -> list[str]:
    """A table for terminals."""
    if not rows:
        return ["nothing is merged yet"]
    made = [f"{'contributor':32} {'tokens':>9} {'share':>7}"]
    made += [f"{row.shown[:32]:32} {count_text(row.tokens):>9} {row.share:>7}" for row in rows]
    return made
