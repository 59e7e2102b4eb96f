"""The lineage of a state: a hash over everything that made it.

Equal lineages mean equal history, hence equal bits. The hash covers the lineages of the parents,
the commit, the seal and the merged bytes, and, apart from these, the merged map that follows from
them (``bound``): a peer that is shown a map and the rest of a lineage can tell whether the map
belongs to it. ``averaging.history.chain`` lists the lineages behind a state, and
``averaging.history.merged_map`` the work that it contains.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import blake3

from dht.identity import PeerId

Lineage: TypeAlias = bytes
"""A blake3 digest of 32 bytes."""

LINEAGE_BYTES = 32

_ORIGIN = "shoal 2026-11 lineage origin"

_MERGE = "shoal 2026-11 lineage of a round"

_FOLD = "shoal 2026-11 lineage of a fold"

_ROLLBACK = "shoal 2026-11 lineage of a rollback"

_STATE = "shoal 2026-11 lineage of a state"

_SEAL = "shoal 2026-11 seal"


def bound(history: bytes, merged: bytes) -> Lineage:
    """Return the lineage of a state, which binds its merged map (``merged``: the map's digest).

    ``history`` is what one of the functions below returns: everything else that made the state.
    """
    return _digest(_STATE, [history, merged])


def origin(layout_hash: bytes, fragment: int, theta: bytes) -> bytes:
    """Return the history of a founder's first state. ``theta`` is a digest of its parameters.

    Founders with equal parameters, as the seed of a run file gives them, begin one history: what
    each of them does until they meet is a fork of it like any other.
    """
    return _digest(_ORIGIN, [layout_hash, encoded_number(fragment), theta])


def after_round(
    parents: Sequence[Lineage], commit: bytes, seal: bytes, slices: Sequence[bytes]
) -> bytes:
    """Return blake3(parent lineages || commit || seal || slice digests), a state's history.

    ``commit`` is the round's digest, ``seal`` comes from ``seal_digest``, and ``slices`` are the
    digests of the merged slices in their order.
    """
    if not parents:
        raise ValueError("parents is empty; a round has at least one")
    return _digest(
        _MERGE,
        [
            encoded_number(len(parents)),
            *parents,
            commit,
            seal,
            encoded_number(len(slices)),
            *slices,
        ],
    )


def after_fold(parent: Lineage, peer: PeerId, incarnation: int, mark: int) -> bytes:
    """Return the history after ``peer``, while alone, made its own parameters the state."""
    return _digest(
        _FOLD, [parent, peer.encode(), encoded_number(incarnation), encoded_number(mark)]
    )


def after_rollback(parent: Lineage, directive: int) -> bytes:
    """Return the history after the owner's directive with this number took the run back there."""
    return _digest(_ROLLBACK, [parent, encoded_number(directive)])


def seal_digest(contributors: Sequence[int]) -> bytes:
    """Return the digest of a seal: roster indices of the contributors, ascending."""
    return _digest(_SEAL, [encoded_number(index) for index in contributors])


def encoded_number(value: int) -> bytes:
    """Return ``value`` in eight bytes, little-endian."""
    return value.to_bytes(8, "little")


def _digest(domain: str, parts: Iterable[bytes]) -> bytes:
    whole = b"".join(encoded_number(len(part)) + part for part in parts)
    return blake3.blake3(whole, derive_key_context=domain).digest()
