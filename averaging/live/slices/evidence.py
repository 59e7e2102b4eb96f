"""The claims that one peer makes and hears in one round, for those who audit it.

``averaging.history.claims`` says what they are. The bytes that they are about are in ``Parts``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from averaging.errors import BadPayload
from averaging.history.claims import Claim, Subject, claim, is_signed
from averaging.messages import Commit
from averaging.numbers.chunks import Cutting, root_of
from averaging.round.interface.effects import Enter
from dht.identity import PeerId


@dataclass(frozen=True, slots=True, eq=False)
class Uploads:
    """Evidence of one peer on a round: the bytes that it has sent, and the claims about them."""

    round: bytes
    commit: Commit
    cutting: Cutting
    evidence: Evidence
    own: Mapping[int, memoryview]
    """Uploads by slice, as far as they are complete."""
    alone: Mapping[int, memoryview]
    """A delegate's own contribution by slice."""
    shown: Counter[PeerId]
    """Bytes that were shown to each peer."""

    @property
    def size(self) -> int:
        return sum(len(data) for data in (*self.own.values(), *self.alone.values()))

    def of(self, index: int, *, alone: bool) -> tuple[memoryview, Claim, list[bytes]] | None:
        """A slice of the upload with its claim and the digests of its pieces. ``alone``: of a
        delegate, what it has put into the bundle itself."""
        evidence = self.evidence
        if alone and self.alone:
            data, said, leaves = self.alone, evidence.alone, evidence.alone_leaves
        else:
            data, said, leaves = self.own, evidence.own, evidence.own_leaves
        if index not in data or index not in said:
            return None
        return data[index], said[index], leaves.get(index, [])


class Evidence:
    """The claims of one round at one peer, by slice."""

    def __init__(
        self,
        enter: Enter,
        me: PeerId,
        *,
        sign: Callable[[bytes], bytes],
        verify: Callable[[PeerId, bytes, bytes], bool],
    ) -> None:
        self._commit = enter.commit
        self._round = enter.round
        self._me = me
        self._sign = sign
        self._verify = verify
        self.alone: dict[int, Claim] = {}
        """The own contribution of a delegate, before it is merged with those of its riders."""
        self.alone_leaves: dict[int, list[bytes]] = {}
        self.own: dict[int, Claim] = {}
        """The upload of this peer: its contribution, or the bundle of its site."""
        self.own_leaves: dict[int, list[bytes]] = {}
        """Digests of the pieces of the upload."""
        self.sources_of_own: dict[int, tuple[Claim, ...]] = {}
        """The claims that go into the bundle; of one with riders alone."""
        self.merged: dict[int, Claim] = {}
        """The claims of those who merged the slices."""
        self.merged_leaves: dict[int, list[bytes]] = {}
        """Digests of the pieces of slices that others merged, then of the maps ahead of one."""
        self.sources: dict[int, tuple[Claim, ...]] = {}
        """The claims that went into the slices that this peer merged."""

    def subject(self, index: int, *, merged: bool) -> Subject:
        return Subject(self._round, index, merged)

    def is_signed(self, index: int, said: Claim, *, merged: bool) -> bool:
        return is_signed(self.subject(index, merged=merged), self._commit, said, self._verify)

    def check(self, index: int, said: Claim, *, merged: bool) -> None:
        """Raise ``BadPayload`` unless its author has signed a claim."""
        if not self.is_signed(index, said, merged=merged):
            raise BadPayload("slice", "nobody has signed what it is said to be made of")

    def claim_own(self, index: int, riders: Sequence[int]) -> Claim:
        """Return the claim about the upload of a slice, all pieces of which are made."""
        if index not in self.own:
            made = root_of(self.own_leaves.get(index, ()))
            sources = self.sources_of_own.get(index, ())
            self.own[index] = self._claim(index, [self._entry, *riders], made, sources)
        return self.own[index]

    def claim_alone(self, index: int) -> Claim:
        """Return the claim about a delegate's own contribution to a bundle."""
        if index not in self.alone:
            made = root_of(self.alone_leaves.get(index, ()))
            self.alone[index] = self._claim(index, [self._entry], made)
        return self.alone[index]

    def claim_merged(
        self, index: int, members: Sequence[int], made: bytes, sources: Sequence[Claim]
    ) -> None:
        """Sign what this peer has merged."""
        self.sources[index] = tuple(sources)
        self.merged[index] = self._claim(index, members, made, sources, merged=True)

    @property
    def _entry(self) -> int:
        entry = self._commit.index(self._me)
        assert entry is not None, "only members upload"
        return entry

    def _claim(
        self,
        index: int,
        members: Sequence[int],
        made: bytes,
        sources: Sequence[Claim] = (),
        *,
        merged: bool = False,
    ) -> Claim:
        about = self.subject(index, merged=merged), self._commit, self._me
        return claim(*about, members, made, sources=sources, sign=self._sign)
