"""The states that a peer keeps for the run's owner to attest, and the call that asks for them.

Every peer of a run with an owner keeps the same few versions of each fragment. The owner's command
asks all peers, and signs what most of them hold alike. A peer's answer is a claim: a state that it
does not have, or other bits, cannot be taken from it later, because the digest would not be that of
the others.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """Digest of the numbers (``averaging.history.attested``)."""

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


def chosen(told: Sequence[Sequence[Kept]], fragments: int) -> tuple[tuple[Kept, int], ...] | None:
    """The newest state of each fragment that most peers hold alike, with their number.

    ``told``: the answer of each peer that keeps states. ``None`` if there is a fragment without.
    """
    holders: dict[Kept, int] = {}
    for states in told:
        for kept in set(states):
            holders[kept] = holders.get(kept, 0) + 1
    found = []
    for fragment in range(fragments):
        able = [
            (kept.version, count, kept.digest, kept)
            for kept, count in holders.items()
            if kept.fragment == fragment and 2 * count > len(told)
        ]
        if not able:
            return None
        _, count, _, kept = max(able, key=lambda each: each[:3])
        found.append((kept, count))
    return tuple(found)
