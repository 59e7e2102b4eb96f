"""Keys of simulated peers: a signature is a hash, which anybody could make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import blake3

from dht.identity import PUBLIC_KEY_BYTES, PeerId, Signer, peer_id_of

NUMBER_BYTES = 4


class CheapKey:
    """The key of the peer with this number. Whoever knows a peer id can sign for it.

    A real signature takes 50 us, and each peer that checks it first 100 more: a third of the
    processor time of a small swarm. Peer ids sort by number.
    """

    def __init__(self, number: int) -> None:
        made_up = number.to_bytes(NUMBER_BYTES, "big") + bytes(PUBLIC_KEY_BYTES - NUMBER_BYTES)
        self.peer_id: PeerId = peer_id_of(made_up)

    def __repr__(self) -> str:
        return f"CheapKey({self.peer_id})"

    def sign(self, message: bytes) -> bytes:
        return cheap_signature(self.peer_id, message)


def cheap_signature(peer: PeerId, message: bytes) -> bytes:
    return blake3.blake3(peer.encode() + b"/" + message).digest(length=64)


def verify_cheaply(peer: PeerId, message: bytes, signature: bytes) -> bool:
    return cheap_signature(peer, message) == signature


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a swarm."""

    of: Callable[[int], Signer] = CheapKey
    """The key of the peer with this number."""
    verify: Callable[[PeerId, bytes, bytes], bool] = verify_cheaply
