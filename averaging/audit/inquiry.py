"""One audit: the uploads of one piece are collected, merged again and compared.

The owner of an ``Inquiry`` fetches what it asks for and says what came. When all is here, ``proof``
is given to ``averaging.audit.proofs.check``, which merges: an audit and everybody who is shown its
result run the same code on the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import blake3
import msgspec

from averaging.audit.claims import Claim, authors, digest_of_pieces, hash_of
from averaging.audit.proofs import FalseMerge, Proof
from averaging.messages import Commit
from averaging.numbers.arrays import Buffer
from dht.identity import PeerId


class Inquiry:
    """The audit of one piece of one slice, as one peer merged it."""

    __slots__ = ("_commit", "_data", "_leaves", "_result", "claim", "head", "sources")

    def __init__(self, commit: Commit, head: FalseMerge, result: Buffer) -> None:
        """``head``: of a proof whose sources are not known yet. ``result``: the bytes that the
        claim is about: the merged slice with its maps, or a piece of a bundle."""
        self._commit = commit
        self._result = result
        self.head = head
        self.claim = head.claim
        self.sources: tuple[Claim, ...] = ()
        self._leaves: dict[int, bytes] = {}
        self._data: dict[int, Buffer] = {}

    def __repr__(self) -> str:
        return f"Inquiry(slice={self.head.slice}, {len(self._data)} of {len(self.sources)} uploads)"

    @property
    def accused(self) -> PeerId:
        return authors(self._commit)[self.claim.by]

    def take_sources(self, sources: Sequence[Claim]) -> bool:
        """Take the claims that went in. ``False``: they are not those that the accused named."""
        if not sources or hash_of(sources) != self.claim.sources:
            return False
        self.sources = tuple(sources)
        return True

    def wanted(self) -> list[tuple[int, PeerId]]:
        """The sources whose bytes are missing, and the peers that sent them."""
        who = self._commit.members
        return [
            (source.by, who[source.by].peer)
            for source in self.sources
            if source.by not in self._data and source.by < len(who)
        ]

    def take_upload(self, by: int, leaves: bytes, data: Buffer) -> bool:
        """Take a piece of an upload. ``False``: it is not the one that went in."""
        source = next((each for each in self.sources if each.by == by), None)
        digests = [leaves[at : at + 32] for at in range(0, len(leaves), 32)]
        if source is None or digest_of_pieces(digests) != source.made:
            return False
        if self.head.piece >= len(digests):
            return False
        if blake3.blake3(data).digest() != digests[self.head.piece]:
            return False
        self._leaves[by], self._data[by] = leaves, data
        return True

    @property
    def is_complete(self) -> bool:
        return bool(self.sources) and not self.wanted()

    def proof(self) -> Proof:
        """The pieces to check: once all is here, or before for what the sources prove alone."""
        own = self.head.leaves  # of a bundle; none of a merged slice
        leaves = (*(self._leaves.get(source.by, b"") for source in self.sources), *own)
        head = msgspec.structs.replace(self.head, sources=self.sources, leaves=leaves)
        if not self.is_complete:
            return Proof(head)
        data = [*(self._data[source.by] for source in self.sources), self._result]
        return Proof(head, b"".join(bytes(each) for each in data))
