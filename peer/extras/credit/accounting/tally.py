"""The tally: how many tokens each peer has contributed, and under which name it wants to be shown.

**Tokens** are those of the peer's own states. A merged map counts each seal once per lineage: a
round adds its contributors' tokens to the map of the state that it makes, a meld takes the maximum
of its parents' maps, and a rebase leaves the map of the lighter side behind, together with the work
that is lost with it. The total of a peer is the largest of its counts in the maps of all fragments,
which is the run's own count. So all peers with the same states have the same totals, nobody is
believed about them, and they do not travel.

**Statements** are the peers' own words on their names, of one run, the newest of each peer, by a
sequence number that the peer itself chooses. A name is shown because its peer has signed that it
may be; a peer that has signed none is shown by the end of its id. They go from peer to peer:
uniting them is commutative, associative and idempotent, so gossip in any order, repeated or with
losses, ends in the same statements everywhere. Those of peers without merged tokens are not kept:
strangers cannot fill the tally.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Struct

from averaging.history.merged_map import Mark, MergedMap
from averaging.messages import Count, Peer, Signature
from dht.identity import Identity, PeerId, RunId, verify
from dht.records import NAME_LENGTH_MAX, name_problem
from peer.contributors import PER_MILLE, Contributor
from peer.quantities import count_text, rounded_shares

Verify: TypeAlias = Callable[[PeerId, bytes, bytes], bool]


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


@dataclass(slots=True)
class Tally:
    """One peer's knowledge of the contributions to a run."""

    run: RunId
    totals: Mapping[PeerId, int] = field(default_factory=dict)
    """Tokens of each contributor."""
    statements: dict[PeerId, Statement] = field(default_factory=dict)
    check: Verify = verify

    def __repr__(self) -> str:
        tokens = sum(self.totals.values())
        return f"Tally({self.run[:8]}, {len(self.totals)} peers, {tokens} tokens)"

    @property
    def largest(self) -> list[PeerId]:
        """All contributors, the largest first."""
        return sorted(self.totals, key=lambda peer: (-self.totals[peer], peer))

    def copied(self) -> Tally:
        """A copy, to be read in a thread while this one changes."""
        return replace(self, statements=dict(self.statements))

    def count(self, maps: Iterable[Mapping[PeerId, Mark]]) -> None:
        """Take the totals of these merged maps, and drop the names of others."""
        self.totals = totals_of(maps)
        self.statements = {p: said for p, said in self.statements.items() if p in self.totals}

    def unite(self, statements: Iterable[Statement]) -> bool:
        """Take the statements that are new and signed. Returns whether any was."""
        taken = [self._take(each) for each in statements]
        return any(taken)

    def _take(self, said: Statement) -> bool:
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
        return self._take(stated(identity, self.run, sequence, name))


def totals_of(maps: Iterable[Mapping[PeerId, Mark]]) -> Mapping[PeerId, int]:
    """The largest count of each peer in any map: the run's own count (``merged_of``)."""
    united = MergedMap().united(*maps)
    return {peer: mark.tokens for peer, mark in sorted(united.items()) if mark.tokens > 0}


# --- rows for people ----------------------------------------------------------------------------


def contributors(tally: Tally) -> list[Contributor]:
    """All contributors, the largest first."""
    peers = tally.largest
    shares = rounded_shares([tally.totals[peer] for peer in peers], whole=PER_MILLE)
    return [
        Contributor(peer, _name(tally, peer), tally.totals[peer], share)
        for peer, share in zip(peers, shares, strict=True)
    ]


def _name(tally: Tally, peer: PeerId) -> str:
    said = tally.statements.get(peer)
    return "" if said is None else said.name


def lines(rows: list[Contributor]) -> list[str]:
    """A table for terminals."""
    if not rows:
        return ["nothing is merged yet"]
    made = [f"{'contributor':32} {'tokens':>9} {'share':>7}"]
    made += [f"{row.shown[:32]:32} {count_text(row.tokens):>9} {row.share:>7}" for row in rows]
    return made
