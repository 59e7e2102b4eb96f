"""States that the run's owner has attested, and the states that a rollback makes of them.

The owner signs version and lineage, which bind a state's history and merged map, and a digest of
its numbers. So a reader knows from the manifest alone, before any piece is fetched, whether a state
is the attested one.

A rollback gives the same numbers a link of their own in the chain: the **root**. It is one version
later, and its lineage names the directive that ordered it. Every history after the rollback grows
out of the root, and none of those that came after the attested state before does, so one look into
a chain tells them apart, as long as the chain reaches back so far.
"""

from __future__ import annotations

import blake3

from averaging.history.chain import Chain
from averaging.history.lineage import Lineage, after_rollback, bound
from averaging.history.manifest import Pieces, as_bytes
from averaging.history.state import FragmentState
from averaging.messages import Link


def numbers_digest(state: FragmentState) -> bytes:
    """Digest of theta and momentum. It reads every byte: work for a thread."""
    pieces = Pieces(state.theta.size)
    theta, momentum = as_bytes(state.theta), as_bytes(state.momentum)
    return digest_of_pieces(
        b"".join(
            blake3.blake3(pieces.view(index, theta, momentum)).digest()
            for index in range(pieces.count)
        )
    )


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
    lineage = bound(history, state.merged.digest())
    version = state.version + 1
    return FragmentState(
        state.fragment,
        version,
        lineage,
        state.chain.extended(Link(version, lineage, state.merged.tokens)),
        state.theta,
        state.momentum,
        state.merged,
        history,
    )
