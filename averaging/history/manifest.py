"""The manifest of a fragment's state: its history, and the digests of the pieces of its numbers.

A state is two vectors whose sizes both sides know from the layout, cut into pieces. Two peers with
the same lineage hold the same bits, so their manifests are equal, but for older links of history. A
newcomer reads the manifests of several sources before it fetches pieces, and trusts the one that
most of them sent.

The run's owner **attests** a state: it signs version and lineage, which bind a state's history and
merged map, and a digest of its numbers. So a reader knows from the manifest alone, before any piece
is fetched, whether a state is the attested one. A rollback gives the same numbers a link of their
own in the chain: the **root**. It is one version later, and its lineage names the directive that
ordered it. Every history after the rollback grows out of the root, and none of those that came
after the attested state before does, so one look into a chain tells them apart, as long as the
chain reaches back so far.
"""

from __future__ import annotations

from typing import Annotated

import blake3
import msgspec
from msgspec import Meta, Struct

from averaging.history.chain import CHAIN_MAX_LINKS, Chain
from averaging.history.lineage import Lineage, after_rollback, bound
from averaging.history.merged_map import MARKS_MAX, Mark, MergedMap
from averaging.history.standing import Standing, extended
from averaging.history.state import PIECE_DIGEST_BYTES, FragmentState, Pieces
from averaging.messages import BadMessage, Count, Digest, Link, Peer, unpacked

MANIFEST_MAX_BYTES = 16 << 20
"""Enough for 10 000 links of history, a hundred thousand pieces (50 GB) and ``MARKS_MAX`` peers."""


class Manifest(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A state without its numbers."""

    fragment: Annotated[int, Meta(ge=0, lt=2**16)]
    version: Count
    lineage: Digest
    links: Annotated[tuple[Link, ...], Meta(max_length=CHAIN_MAX_LINKS)]
    marks: Annotated[tuple[tuple[Peer, Count, Count, Count], ...], Meta(max_length=MARKS_MAX)]
    history: Digest
    """The lineage is this and the merged map (``averaging.history.lineage.bound``)."""
    digests: bytes
    """The blake3 digest of each piece of theta, then of each piece of momentum."""

    @property
    def tip(self) -> Link:
        """The newest link, which other peers sign."""
        return self.links[-1]

    def merged(self) -> MergedMap:
        return MergedMap({peer: Mark(*numbers) for peer, *numbers in self.marks})

    def standing(self) -> Standing:
        chain = Chain(self.links)
        return Standing(self.version, self.lineage, chain, self.merged(), self.history)

    def identity(self) -> bytes:
        """Return a digest that is equal for equal states.

        After several groups have met, peers with the same state know different older links: those
        of their own way to it. So only the newest link counts.
        """
        tip = msgspec.structs.replace(self, links=self.links[-1:])
        return blake3.blake3(_encoder.encode(tip)).digest()

    def piece_digest(self, index: int) -> bytes:
        return self.digests[index * PIECE_DIGEST_BYTES : (index + 1) * PIECE_DIGEST_BYTES]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Manifest)


def describe(state: FragmentState) -> bytes:
    """Return the encoded manifest of a state. It reads every byte: work for a thread."""
    manifest = Manifest(
        state.fragment,
        state.version,
        state.lineage,
        tuple(state.chain),
        tuple(
            (peer, mark.incarnation, mark.step, mark.tokens)
            for peer, mark in sorted(state.merged.items())
        ),
        state.history,
        state.piece_digests(),
    )
    return _encoder.encode(manifest)


def identity_of(data: bytes) -> bytes:
    """The identity of a manifest that ``describe`` has encoded."""
    return _decoder.decode(data).identity()


def read_manifest(data: bytes, *, fragment: int, pieces: Pieces) -> Manifest:
    """Decode a manifest and check that it has these pieces. Raises ``BadMessage``."""
    manifest = unpacked(data, _decoder, "a manifest")
    if manifest.fragment != fragment:
        raise BadMessage(
            f"a manifest of fragment {manifest.fragment}; the request was for fragment {fragment}"
        )
    expected = pieces.count * PIECE_DIGEST_BYTES
    if len(manifest.digests) != expected:
        raise BadMessage(f"{len(manifest.digests)} bytes of piece digests; the run has {expected}")
    places = [(link.version, link.lineage) for link in manifest.links]
    if places[-1:] != [(manifest.version, manifest.lineage)]:
        raise BadMessage("the chain does not end in the state's own version and lineage")
    is_double = len(places) > 1 and places[-2][0] == manifest.version
    if is_double or places != sorted(set(places)):
        raise BadMessage("its chain is not in order, or does not end with its only newest version")
    if bound(manifest.history, manifest.merged().digest()) != manifest.lineage:
        raise BadMessage("its merged map is not the one that its lineage binds")
    return manifest


# States that the run's owner has attested


def numbers_digest(state: FragmentState) -> bytes:
    """Digest of theta and momentum. It reads every byte: work for a thread."""
    return digest_of_pieces(state.piece_digests())


def digest_of_pieces(digests: bytes) -> bytes:
    """``numbers_digest`` from the digests of all pieces, as a manifest lists them."""
    return blake3.blake3(digests).digest()


def root_lineage(lineage: Lineage, merged: bytes, number: int) -> Lineage:
    """Lineage of the state that directive ``number`` makes of an attested one.

    ``merged``: digest of the attested state's merged map.
    """
    return bound(after_rollback(lineage, number), merged)


def grew_from(chain: Chain, version: int, lineage: Lineage) -> bool | None:
    """True if a state with this chain is a root, or came after it, and false if it did not.

    ``None``: the chain has dropped the links of that time, and tells nothing.
    """
    if chain.find(version, lineage) is not None:
        return True
    return False if chain.reaches(version) else None


def rolled_back(state: FragmentState, number: int) -> FragmentState:
    """The first state after the rollback that directive ``number`` orders to ``state``."""
    history = after_rollback(state.lineage, number)
    root = extended(Standing.of(state), state.version + 1, history, state.merged)
    return root.state(state.fragment, state.theta, state.momentum)
