"""Encryption of the direct lane: sealed frames, and the tickets that carry their keys.

Each frame is encrypted with AES-256-GCM, with its header as associated data. Each direction of each
connection has a random key that is used for nothing else, so a counter serves as a nonce that never
repeats. A frame that was changed, repeated, left out or reordered does not open.

A ticket holds the keys of one connection with one peer, whose identity libp2p has verified; the
keys travel over libp2p (``dht.libp2p.lane.lane``). A ticket is named by a number, which need not be
secret: it is of no use without the keys.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Annotated

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from dht.bounded_mapping import BoundedMapping, by_age
from dht.identity import PeerId

NUMBER_BYTES = 16
"""Size of a ticket's number."""

KEY_BYTES = 32
Number = Annotated[bytes, msgspec.Meta(min_length=NUMBER_BYTES, max_length=NUMBER_BYTES)]
Key = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]

TAG_BYTES = 16
"""Length that sealing adds to a content."""

SEALED_MAX_BYTES = 1 << 40
"""Limit of bytes under one key: with 2^36 blocks, an attacker can tell them from random data with
probability 2^-57."""


class BadSeal(Exception):
    """A frame was not sealed by the other side, or is not the next one."""


class Seal:
    """Cipher state of one direction of a connection, at either end."""

    __slots__ = ("_cipher", "_count", "sealed_bytes")

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"key has {len(key)} bytes; a key has {KEY_BYTES}")
        self._cipher = AESGCM(key)
        self._count = 0
        self.sealed_bytes = 0
        """Number of content bytes sealed or opened so far."""

    @property
    def worn(self) -> bool:
        """Say whether the limit of bytes under this key is reached."""
        return self.sealed_bytes >= SEALED_MAX_BYTES

    def close(self, header: bytes, content: bytes) -> bytes:
        """Seal the next frame."""
        return self._cipher.encrypt(self._nonce(len(content)), content, header)

    def close_into(self, header: bytes, content: bytes | memoryview, target: memoryview) -> None:
        """Seal the next frame into ``target``, which is ``TAG_BYTES`` longer than the content."""
        self._cipher.encrypt_into(self._nonce(len(content)), content, header, target)

    def open_into(self, header: bytes, sealed: memoryview, target: memoryview) -> None:
        """Open the next frame. Raises ``BadSeal``; ``target`` must not be used then."""
        try:
            self._cipher.decrypt_into(self._nonce(len(target)), sealed, header, target)
        except InvalidTag:
            raise BadSeal from None

    def _nonce(self, size: int) -> bytes:
        nonce = self._count.to_bytes(12, "big")
        self._count += 1
        self.sealed_bytes += size
        return nonce


@dataclass(frozen=True, slots=True)
class Seals:
    """Cipher states of both directions, as seen from one end."""

    mine: Seal
    theirs: Seal

    @property
    def worn(self) -> bool:
        return self.mine.worn or self.theirs.worn


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """The keys for one connection, and the number that names them: an answer over libp2p, of which
    nobody else learns the keys."""

    number: Number
    dialler_key: Key
    """Key for the frames of the dialling side."""

    listener_key: Key
    """Key for the frames of the listening side."""

    def __repr__(self) -> str:
        return f"Ticket({self.number.hex()})"

    @classmethod
    def new(cls) -> Ticket:
        return cls(*map(secrets.token_bytes, (NUMBER_BYTES, KEY_BYTES, KEY_BYTES)))

    def seals(self, *, dialled: bool) -> Seals:
        """Fresh cipher states for the end that dialled, or for the other end."""
        diallers, listeners = Seal(self.dialler_key), Seal(self.listener_key)
        return Seals(diallers, listeners) if dialled else Seals(listeners, diallers)


class Tickets:
    """The tickets that can still be used. When full, the peer with the most loses its oldest.

    Times are those of the caller's clock.
    """

    def __init__(self, *, life_s: float, tickets_max: int) -> None:
        self._life_s = life_s
        self._issued = BoundedMapping[bytes, tuple[PeerId, Ticket, float]](
            "lane tickets", tickets_max, worth=by_age, author=lambda _, issued: issued[0]
        )
        """Tickets by number, each with its peer and the time at which it ends."""

    def issue(self, peer: PeerId, *, now: float) -> Ticket:
        """A new ticket for a peer, which can be used from now on."""
        ticket = Ticket.new()
        self._issued[ticket.number] = peer, ticket, now + self._life_s
        return ticket

    def redeem(self, number: bytes, *, now: float) -> tuple[PeerId, Ticket] | None:
        """Use up the ticket of this number, and return it with its peer; ``None`` if there is
        none."""
        peer, ticket, ends_at = self._issued.pop(number, (None, None, 0.0))
        return (peer, ticket) if now < ends_at else None
