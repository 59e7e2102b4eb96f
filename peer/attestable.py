"""The states that a peer keeps for the run's owner to attest, and the call that asks for them.

Every peer of a run with an owner keeps the same few versions of each fragment. The owner's command
asks all peers, and signs what most of them hold alike. A peer's answer is a claim: a state that it
does not have, or other bits, cannot be taken from it later, because the digest would not be that of
the others.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from averaging.history.lineage import bound
from averaging.messages import Count, Digest, Index
from peer.calls import Call

STATES_MAX = 256


class Kept(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One fragment's state at one version, without its numbers."""

    fragment: Index
    version: Count
    history: Digest
    merged: Digest
    """Digest of the merged map: lineage is ``bound(history, merged)``."""

    digest: Digest
    """Digest of the numbers (``averaging.history.manifest``)."""

    tokens: Count

    @property
    def lineage(self) -> bytes:
        return bound(self.history, self.merged)


CALL: Call[str, tuple[Kept, ...]] = Call(
    "/shoal/attestable/1",
    Annotated[tuple[Kept, ...], Meta(max_length=STATES_MAX)],
    "a list of kept states",
    48 << 10,
)
