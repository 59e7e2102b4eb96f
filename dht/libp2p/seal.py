"""What keeps a connection of our own private and whole: each frame sealed, in its order.

AES-256-GCM over a frame's content, with its header as associated data. Each direction of each
connection has a key of its own, random and used for nothing else, so a counter is a nonce that
never comes twice. A frame that was changed, repeated, left out or put elsewhere does not open.
How both sides come by the keys is not this module's business (``dht.libp2p.lane``: over libp2p).
"""

from __future__ import annotations

from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

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
