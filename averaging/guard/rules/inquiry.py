"""One audit: the uploads of one piece are collected, merged again and compared.

The owner of an ``Inquiry`` fetches what it asks for and says what came. When all is here, ``proof``
is given to ``averaging.guard.rules.proofs.check``, which merges: an audit and everybody who is
shown its result run the same code on the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from averaging.guard.rules.proofs import FalseMerge, Proof
from averaging.history.claims import Claim, authors, hash_of
from averaging.messages import Commit
from averaging.numbers.arrays import Buffer
from averaging.numbers.chunks import leads_to
from dht.identity import PeerId


class Inquiry:
    """The audit of one piece of one slice, as one peer merged it."""

    __slots__ = ("_commit", "_count", "_data", "_paths", "_result", "claim", "head", "sources")

    def __init__(self, commit: Commit, head: FalseMerge, result: Buffer, *, count: int) -> None:
        """``head``: of a proof whose sources are not known yet, with the path to ``result``, the
        piece of the merged slice or bundle. ``count``: number of pieces of an upload."""
        self._commit = commit
        self._result = result
        self.head = head
        self.claim = head.claim
        self.sources: tuple[Claim, ...] = ()
        self._count = count
        self._paths: dict[int, bytes] = {}
        self._data: dict[int, Buffer] = {}

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

    def take_upload(self, by: int, path: bytes, data: Buffer) -> bool:
        """Take a piece of an upload. ``False``: it is not the one that went in."""
        source = next((each for each in self.sources if each.by == by), None)
        piece, count = self.head.piece, self._count
        if source is None or not leads_to(source.made, path, data, index=piece, count=count):
            return False
        self._paths[by], self._data[by] = path, data
        return True

    @property
    def is_complete(self) -> bool:
        return bool(self.sources) and not self.wanted()

    def proof(self) -> Proof:
        """The pieces to check: once all is here, or before for what the sources prove alone."""
        of_sources = (self._paths.get(source.by, b"") for source in self.sources)
        paths = (*of_sources, self.head.paths[-1])
        head = msgspec.structs.replace(self.head, sources=self.sources, paths=paths)
        if not self.is_complete:
            return Proof(head)
        data = [*(self._data[source.by] for source in self.sources), self._result]
        return Proof(head, b"".join(bytes(each) for each in data))
