"""Identity of a peer: an Ed25519 key, and the libp2p peer id that contains its public half.

A peer id is the base58 text of an identity multihash over the protobuf of the public key, so the
id suffices to check a signature. The key file is libp2p's own ``PrivateKey`` protobuf, which the
daemon reads as well. This module does not use the network.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from functools import lru_cache
from pathlib import Path
from typing import NewType, Protocol

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from dht.errors import KeyFileError
from dht.whole_files import sync_folder

PeerId = NewType("PeerId", str)
"""A libp2p peer id in base58, such as ``12D3KooW...``. It embeds the peer's public key."""

RunId = NewType("RunId", str)
"""The hex digest of a run file's immutable part."""

PUBLIC_KEY_BYTES = 32
SIGNATURE_BYTES = 64
REMEMBERED_MAX_BYTES = 1024
"""Maximum size of a message whose valid signature is remembered."""

_SEED_BYTES = 32

# Protobuf by hand: field 1 (varint) is the key type, 1 for Ed25519; field 2 (bytes) is the key.
# https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md
_PRIVATE_HEADER = b"\x08\x01\x12\x40"
_PUBLIC_HEADER = b"\x08\x01\x12\x20"
# Multihash: code 0 ("identity", the digest is the content itself), then the length.
_MULTIHASH_HEADER = bytes([0x00, len(_PUBLIC_HEADER) + PUBLIC_KEY_BYTES])
PEER_ID_BYTES = len(_MULTIHASH_HEADER) + len(_PUBLIC_HEADER) + PUBLIC_KEY_BYTES
_PEER_ID_TEXT_MAX = 64
_BASE58 = base58.BITCOIN_ALPHABET.decode()
_KEY_FILE_BYTES = len(_PRIVATE_HEADER) + _SEED_BYTES + PUBLIC_KEY_BYTES


class Signer(Protocol):
    """The part of an identity that signs; a simulation may have signatures that cost less."""

    @property
    def peer_id(self) -> PeerId: ...

    def sign(self, message: bytes) -> bytes: ...


class Identity:
    """A peer's private key. It leaves this process only for its own key file."""

    __slots__ = ("_private", "peer_id", "public_key")

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.public_key: bytes = private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        self.peer_id: PeerId = peer_id_of(self.public_key)

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"

    def sign(self, message: bytes) -> bytes:
        """A 64-byte signature that ``verify`` accepts only for this message and this peer id."""
        return self._private.sign(message)

    def to_bytes(self) -> bytes:
        """The content of the key file, libp2p's ``PrivateKey`` protobuf. Secret."""
        seed = self._private.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())
        return _PRIVATE_HEADER + seed + self.public_key

    @classmethod
    def generate(cls) -> Identity:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, seed: bytes) -> Identity:
        """The identity of a 32-byte seed, always the same: for tests and simulations."""
        if len(seed) != _SEED_BYTES:
            raise ValueError(f"seed has {len(seed)} bytes; an Ed25519 seed has {_SEED_BYTES}")
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    @classmethod
    def from_bytes(cls, data: bytes) -> Identity:
        """Read what ``to_bytes`` wrote. Raises ``ValueError`` which says what is wrong."""
        if len(data) != _KEY_FILE_BYTES:
            raise ValueError(f"it has {len(data)} bytes instead of {_KEY_FILE_BYTES}")
        if not data.startswith(_PRIVATE_HEADER):
            raise ValueError("it does not begin like a libp2p Ed25519 private key")
        body = data[len(_PRIVATE_HEADER) :]
        identity = cls.from_seed(body[:_SEED_BYTES])
        if identity.public_key != body[_SEED_BYTES:]:
            raise ValueError("its public half does not belong to its private half")
        return identity

    @classmethod
    def load(cls, path: Path) -> Identity:
        """Read a key file. Raises ``KeyFileError``; never changes the file."""
        try:
            # Check the opened file and not the name, which may change in between.
            with path.open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                data = file.read(_KEY_FILE_BYTES + 1)
        except OSError as error:
            raise KeyFileError(str(path), error.strerror or str(error), "unreadable") from error
        if os.name == "posix" and mode & 0o077:
            raise KeyFileError(str(path), f"its mode is {mode & 0o777:04o}", "exposed")
        try:
            return cls.from_bytes(data)
        except ValueError as error:
            raise KeyFileError(str(path), str(error), "damaged") from None

    @classmethod
    def load_or_create(cls, path: Path | str) -> Identity:
        """The identity kept at ``path``; a new one is written there if there is no file yet.

        The file appears whole or not at all, with mode 0600. When two processes
        create it at the same moment, both return the identity of the one file.
        Raises ``KeyFileError`` for a file that others can read, that is damaged
        or cannot be read: it is left as it is.
        """
        path = Path(path)
        if os.path.lexists(path):  # a dangling link is an error, not a free name
            return cls.load(path)
        identity = cls.generate()
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(identity.to_bytes())
                    file.flush()
                    os.fsync(file.fileno())
                try:
                    os.link(temporary, path)  # unlike rename, it never replaces a file
                except FileExistsError:  # another process was faster: use its key
                    return cls.load(path)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    temporary.unlink()
            sync_folder(path.parent)
        except OSError as error:
            raise KeyFileError(str(path), error.strerror or str(error), "unwritable") from error
        return identity


def peer_id_of(public_key: bytes) -> PeerId:
    """The peer id that embeds this Ed25519 public key."""
    if len(public_key) != PUBLIC_KEY_BYTES:
        raise ValueError(
            f"public key has {len(public_key)} bytes; an Ed25519 key has {PUBLIC_KEY_BYTES}"
        )
    return PeerId(base58_encode(_MULTIHASH_HEADER + _PUBLIC_HEADER + bytes(public_key)))


@lru_cache(maxsize=4096)
def public_key_of(peer_id: PeerId) -> bytes:
    """The Ed25519 public key inside a peer id. Raises ``ValueError`` for any other text."""
    if len(peer_id) > _PEER_ID_TEXT_MAX:
        raise ValueError(f"peer id has {len(peer_id)} characters; none has over 52")
    decoded = _base58_decode(peer_id)
    header = _MULTIHASH_HEADER + _PUBLIC_HEADER
    if len(decoded) != PEER_ID_BYTES or not decoded.startswith(header):
        raise ValueError(f"peer id {peer_id!r} is not that of an Ed25519 key (12D3KooW...)")
    return decoded[len(header) :]


def parse_peer_id(text: str) -> PeerId:
    """Check a peer id that came from outside. Raises ``ValueError``."""
    peer_id = PeerId(text)
    public_key_of(peer_id)
    return peer_id


def verify(peer_id: PeerId, message: bytes, signature: bytes) -> bool:
    """Check a signature by the key inside a peer id.

    Valid signatures of short messages are remembered. A vote or a claim arrives several times: by
    itself, in the certificate of a seal, and in answers to those who ask.
    """
    check = _check if len(message) <= REMEMBERED_MAX_BYTES else _check.__wrapped__
    try:
        check(peer_id, bytes(message), bytes(signature))
    except (ValueError, InvalidSignature):  # ValueError: no such id, or no point on the curve
        return False
    return True


@lru_cache(maxsize=4096)
def _check(peer_id: PeerId, message: bytes, signature: bytes) -> None:
    """Raise an error for an invalid signature. An error is not remembered."""
    _key_of(peer_id).verify(signature, message)


@lru_cache(maxsize=4096)
def _key_of(peer_id: PeerId) -> Ed25519PublicKey:
    return Ed25519PublicKey.from_public_bytes(public_key_of(peer_id))


@lru_cache(maxsize=16_384)
def base58_encode(data: bytes) -> str:
    """The text of a peer id. It takes 20 us to write, and each reply to a look-up names twenty."""
    return base58.b58encode(data).decode()


def _base58_decode(text: str) -> bytes:
    for position, character in enumerate(text, start=1):
        # The package passes over spaces at the end: one peer would have several ids.
        if character not in _BASE58:
            raise ValueError(
                f"peer id has {character!r} at position {position}, which base58 does not use"
            )
    return base58.b58decode(text)
