"""Encryption of the direct lane: sealed frames, and the tickets that carry their keys.

Each frame is encrypted with AES-256-GCM, with its header as associated data. Each direction of each
connection has a random key that is used for nothing else, so a counter serves as a nonce that never
repeats. A frame that was changed, repeated, left out or reordered does not open.

A ticket holds the keys of one connection with one peer, whose identity libp2p has verified; the
keys travel over libp2p (``dht.libp2p.lane``). A ticket is named by a number, which need not be
secret: it is of no use without the keys.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from dht.identity import PeerId

NUMBER_BYTES = 16
"""Size of a ticket's number."""

KEY_BYTES = 32
TAG_BYTES = 16
"""So much longer is what is sealed."""

SEALED_MAX_BYTES = 1 << 40
"""No more under one key: 2^36 blocks leave an attacker odds of 2^-57 to tell them from noise."""


class BadSeal(Exception):
    """A frame is not what the other side sealed, or not the next one."""


class Seal:
    """One direction, at either end."""

    __slots__ = ("_cipher", "_count", "_sealed_bytes")

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key of {len(key)} bytes; it has {KEY_BYTES}")
        self._cipher = AESGCM(key)
        self._count = 0
        self._sealed_bytes = 0

    def __repr__(self) -> str:
        return f"Seal({self._count} frames, {self._sealed_bytes} bytes)"

    @property
    def sealed_bytes(self) -> int:
        """Of contents, so far."""
        return self._sealed_bytes

    @property
    def worn(self) -> bool:
        """Whether another key should be used from here on."""
        return self._sealed_bytes >= SEALED_MAX_BYTES

    def close(self, header: bytes, content: bytes) -> bytes:
        """Seal the next frame."""
        return self._cipher.encrypt(self._nonce(len(content)), content, header)

    def close_into(self, header: bytes, content: bytes | memoryview, target: memoryview) -> None:
        """``close`` without new memory: ``target`` is ``TAG_BYTES`` longer than the content."""
        self._cipher.encrypt_into(self._nonce(len(content)), content, header, target)

    def open_into(self, header: bytes, sealed: memoryview, target: memoryview) -> None:
        """Open the next frame. Raises ``BadSeal``; what is in ``target`` then is worth nothing."""
        try:
            self._cipher.decrypt_into(self._nonce(len(target)), sealed, header, target)
        except InvalidTag:
            raise BadSeal from None

    def _nonce(self, size: int) -> bytes:
        nonce = self._count.to_bytes(12, "big")
        self._count += 1
        self._sealed_bytes += size
        return nonce


@dataclass(frozen=True, slots=True)
class Seals:
    """Both directions, as seen from one end."""

    mine: Seal
    theirs: Seal

    @property
    def worn(self) -> bool:
        return self.mine.worn or self.theirs.worn


@dataclass(frozen=True, slots=True)
class Ticket:
    """For one connection with ``peer``."""

    peer: PeerId
    dialler_key: bytes = field(repr=False)
    listener_key: bytes = field(repr=False)

    def seals(self, *, dialled: bool) -> Seals:
        """Of the end that dialled, or of the other."""
        diallers, listeners = Seal(self.dialler_key), Seal(self.listener_key)
        return Seals(diallers, listeners) if dialled else Seals(listeners, diallers)


@dataclass(frozen=True, slots=True)
class _Issued:
    ticket: Ticket
    ends_at: float


class Tickets:
    """Those that are good. Bounded: the oldest give way. Times are those of the caller's clock."""

    __slots__ = ("_issued", "life_s", "per_peer_max", "tickets_max")

    def __init__(self, *, life_s: float, per_peer_max: int, tickets_max: int) -> None:
        if life_s <= 0 or not 0 < per_peer_max <= tickets_max:
            raise ValueError(
                f"life_s is {life_s}, per_peer_max is {per_peer_max} and tickets_max is "
                f"{tickets_max}; 0 < life, 0 < per peer <= all"
            )
        self.life_s = life_s
        self.per_peer_max = per_peer_max
        self.tickets_max = tickets_max
        self._issued: OrderedDict[bytes, _Issued] = OrderedDict()

    def __repr__(self) -> str:
        return f"Tickets({len(self._issued)} of {self.tickets_max})"

    def issue(self, number: bytes, ticket: Ticket, *, now: float) -> None:
        """From now on ``number`` names it."""
        if len(number) != NUMBER_BYTES:
            raise ValueError(f"a number of {len(number)} bytes; it has {NUMBER_BYTES}")
        while self._issued and next(iter(self._issued.values())).ends_at <= now:
            self._issued.popitem(last=False)
        own = [n for n, issued in self._issued.items() if issued.ticket.peer == ticket.peer]
        if len(own) >= self.per_peer_max:
            del self._issued[own[0]]
        elif len(self._issued) >= self.tickets_max:
            self._issued.popitem(last=False)
        self._issued[number] = _Issued(ticket, now + self.life_s)

    def redeem(self, number: bytes, *, now: float) -> Ticket | None:
        """The ticket of this number, which is used up by that; ``None`` if there is none."""
        issued = self._issued.pop(number, None)
        return issued.ticket if issued is not None and now < issued.ends_at else None
