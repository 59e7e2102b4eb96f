"""A peer without a daemon: one machine holds a thousand, and a host cannot tell it from others.

It has one TCP connection with libp2p's real handshake (multistream-select, Noise XX, yamux), which
carries unary calls with the daemon's framing. It answers the host's identify requests and pings,
and refuses all other calls. It implements no more than measurements need: messages fit into the
first window of a stream, and every error ends the connection.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import secrets
from collections.abc import Coroutine, Iterator
from hashlib import sha256

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from dht.identity import Identity, PeerId, peer_id_of, verify
from dht.libp2p.hivemind_patches import p2pd_pb2

KEY_BYTES = 32
FRAME_MAX_BYTES = 65_535
NOISE_NAME = b"Noise_XX_25519_ChaChaPoly_SHA256"
SIGNED_PREFIX = b"noise-libp2p-static-key:"
PUBLIC_KEY_HEADER = b"\x08\x01\x12\x20"
"""Protobuf header of an Ed25519 key with 32 bytes."""

MULTISTREAM = "/multistream/1.0.0"
IDENTIFY = "/ipfs/id/1.0.0"
REFUSED = "na"

DATA, WINDOW, PING, GO_AWAY = range(4)
SYN, ACK, FIN, RST = 1, 2, 4, 8


class LightPeerError(Exception):
    """The connection is over, or the other side does not speak as expected."""


# Noise (https://noiseprotocol.org/noise.html, section 5), in the flavour of libp2p.


class _Cipher:
    def __init__(self, key: bytes) -> None:
        self._aead = ChaCha20Poly1305(key)
        self._used = itertools.count()

    def _nonce(self) -> bytes:
        return bytes(4) + next(self._used).to_bytes(8, "little")

    def encrypt(self, data: bytes, associated: bytes = b"") -> bytes:
        return self._aead.encrypt(self._nonce(), data, associated)

    def decrypt(self, data: bytes, associated: bytes = b"") -> bytes:
        return self._aead.decrypt(self._nonce(), data, associated)


class _Handshake:
    """The running hash and keys of an initiator."""

    def __init__(self) -> None:
        self.hash = self._chain = NOISE_NAME
        self._cipher: _Cipher | None = None
        self.mix(b"")  # no prologue

    def mix(self, data: bytes) -> None:
        self.hash = sha256(self.hash + data).digest()

    def agree(self, mine: X25519PrivateKey, theirs: bytes) -> None:
        shared = mine.exchange(X25519PublicKey.from_public_bytes(theirs))
        self._chain, key = self._derive(shared)
        self._cipher = _Cipher(key)

    def seal(self, data: bytes) -> bytes:
        sealed = data if self._cipher is None else self._cipher.encrypt(data, self.hash)
        self.mix(sealed)
        return sealed

    def open(self, sealed: bytes) -> bytes:
        assert self._cipher is not None, "all that a responder sends but its first key is sealed"
        data = self._cipher.decrypt(sealed, self.hash)
        self.mix(sealed)
        return data

    def split(self) -> tuple[_Cipher, _Cipher]:
        """The ciphers for sending and for receiving."""
        sending, receiving = self._derive(b"")
        return _Cipher(sending), _Cipher(receiving)

    def _derive(self, data: bytes) -> tuple[bytes, bytes]:
        secret = hmac.digest(self._chain, data, "sha256")
        first = hmac.digest(secret, b"\x01", "sha256")
        return first, hmac.digest(secret, first + b"\x02", "sha256")


# The messages inside of the encryption.


def _varint(number: int) -> bytes:
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _delimited(data: bytes) -> bytes:
    return _varint(len(data)) + data


def _line(text: str) -> bytes:
    return _delimited(text.encode() + b"\n")


def _fields(*fields: tuple[int, bytes]) -> bytes:
    """A protobuf message of byte fields."""
    return b"".join(_varint(number << 3 | 2) + _delimited(data) for number, data in fields)


def _field_of(data: bytes, number: int) -> bytes:
    """The one field with this number of a protobuf message of byte fields."""
    at = 0
    while at < len(data):
        tag, size, start = data[at], data[at + 1], at + 2
        if size >= 0x80:
            size, start = size & 0x7F | data[at + 2] << 7, at + 3
        if tag == number << 3 | 2:
            return data[start : start + size]
        at = start + size
    raise LightPeerError(f"a message without field {number}")


class _Stream:
    """One stream of a connection: bytes in, bytes out."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.incoming = asyncio.StreamReader()

    async def message(self) -> bytes:
        """Receive a message that is preceded by its size."""
        size = shift = 0
        while True:
            (byte,) = await self.incoming.readexactly(1)
            size |= (byte & 0x7F) << shift
            if byte < 0x80:
                return await self.incoming.readexactly(size)
            shift += 7

    async def line(self) -> str:
        return (await self.message()).decode().removesuffix("\n")


class LightPeer:
    """One connection to a host, opened by ``open`` and ended by ``close``."""

    def __init__(
        self, identity: Identity, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.identity = identity
        self._reader = reader
        self._writer = writer
        self._streams: dict[int, _Stream] = {}
        self._numbers: Iterator[int] = itertools.count(1, 2)
        self._sending: _Cipher
        self._receiving: _Cipher
        self._plain = bytearray()
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(
        cls, identity: Identity, host: PeerId, port: int, *, source: str, timeout_s: float
    ) -> LightPeer:
        """Connect to a host on this machine, from a loopback address of its own.

        Raises ``OSError``, ``TimeoutError`` or ``LightPeerError``.
        """
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, local_addr=(source, 0)
            )
            self = cls(identity, reader, writer)
            try:
                writer.write(_line(MULTISTREAM) + _line("/noise"))
                await self._expect(reader, MULTISTREAM, "/noise")
                await self._shake_hands(host)
                self._send(_line(MULTISTREAM) + _line("/yamux/1.0.0"))
                for expected in (MULTISTREAM, "/yamux/1.0.0"):
                    size = (await self._read(1))[0]
                    if (got := (await self._read(size)).decode().strip()) != expected:
                        raise LightPeerError(f"{got!r} where {expected!r} was expected")
            except BaseException:
                writer.close()
                raise
        self._start(self._receive())
        return self

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._writer.close()

    async def call(self, protocol: str, request: bytes, *, timeout_s: float) -> bytes:
        """A unary call, as the daemon frames it. Raises ``LightPeerError`` or ``TimeoutError``."""
        message = p2pd_pb2.PersistentConnectionRequest(callId=secrets.token_bytes(16))
        message.callUnary.peer = b""  # the other daemon fills in the caller
        message.callUnary.proto = protocol
        message.callUnary.data = request
        stream = _Stream(next(self._numbers))
        self._streams[stream.number] = stream
        return await self._exchange(stream, protocol, message.SerializeToString(), timeout_s)

    # Inside.

    async def _exchange(
        self, stream: _Stream, protocol: str, message: bytes, timeout_s: float
    ) -> bytes:
        said = _line(MULTISTREAM) + _line(protocol) + _delimited(message)
        try:
            async with asyncio.timeout(timeout_s):
                self._frame(DATA, SYN, stream.number, said)
                await self._writer.drain()
                for expected in (MULTISTREAM, protocol):
                    if (got := await stream.line()) != expected:
                        raise LightPeerError(f"{got!r} where {expected!r} was expected")
                answer = p2pd_pb2.PersistentConnectionRequest()
                answer.ParseFromString(await stream.message())
        except (asyncio.IncompleteReadError, OSError) as error:
            raise LightPeerError(f"the connection broke: {error}") from error
        finally:
            self._streams.pop(stream.number, None)
        self._frame(DATA, FIN, stream.number)
        if answer.unaryResponse.HasField("error"):
            raise LightPeerError(f"refused: {answer.unaryResponse.error.decode()}")
        return bytes(answer.unaryResponse.response)

    def _start(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @staticmethod
    async def _expect(reader: asyncio.StreamReader, *lines: str) -> None:
        for expected in lines:
            (size,) = await reader.readexactly(1)
            got = (await reader.readexactly(size)).decode().strip()
            if got != expected:
                raise LightPeerError(f"{got!r} where {expected!r} was expected")

    async def _shake_hands(self, host: PeerId) -> None:
        state, once, lasting = (
            _Handshake(),
            X25519PrivateKey.generate(),
            X25519PrivateKey.generate(),
        )
        own_key = once.public_key().public_bytes_raw()
        state.mix(own_key)
        self._write_frame(own_key + state.seal(b""))

        said = await self._read_frame()
        their_key = said[:KEY_BYTES]
        state.mix(their_key)
        state.agree(once, their_key)
        sealed_key_end = 2 * KEY_BYTES + 16
        their_lasting = state.open(said[KEY_BYTES:sealed_key_end])
        state.agree(once, their_lasting)
        proof = state.open(said[sealed_key_end:])
        public = _field_of(proof, 1).removeprefix(PUBLIC_KEY_HEADER)
        if peer_id_of(public) != host:
            raise LightPeerError(f"{peer_id_of(public)} answers where {host} was expected")
        if not verify(host, SIGNED_PREFIX + their_lasting, _field_of(proof, 2)):
            raise LightPeerError("the host's proof of its identity does not hold")

        lasting_key = lasting.public_key().public_bytes_raw()
        sealed = state.seal(lasting_key)
        state.agree(lasting, their_key)
        proof = _fields(
            (1, PUBLIC_KEY_HEADER + self.identity.public_key),
            (2, self.identity.sign(SIGNED_PREFIX + lasting_key)),
        )
        self._write_frame(sealed + state.seal(proof))
        self._sending, self._receiving = state.split()

    def _write_frame(self, data: bytes) -> None:
        self._writer.write(len(data).to_bytes(2, "big") + data)

    async def _read_frame(self) -> bytes:
        size = int.from_bytes(await self._reader.readexactly(2), "big")
        return await self._reader.readexactly(size)

    def _send(self, data: bytes) -> None:
        step = FRAME_MAX_BYTES - 16  # the seal
        for start in range(0, len(data), step):
            self._write_frame(self._sending.encrypt(data[start : start + step]))

    async def _read(self, size: int) -> bytes:
        while len(self._plain) < size:
            self._plain += self._receiving.decrypt(await self._read_frame())
        taken = bytes(self._plain[:size])
        del self._plain[:size]
        return taken

    # Yamux (https://github.com/hashicorp/yamux/blob/master/spec.md).

    def _frame(self, kind: int, flags: int, stream: int, data: bytes = b"", size: int = 0) -> None:
        header = bytes((0, kind)) + flags.to_bytes(2, "big") + stream.to_bytes(4, "big")
        self._send(header + (len(data) or size).to_bytes(4, "big") + data)

    async def _receive(self) -> None:
        try:
            while True:
                header = await self._read(12)
                kind, flags = header[1], int.from_bytes(header[2:4], "big")
                number, size = (int.from_bytes(header[i : i + 4], "big") for i in (4, 8))
                data = await self._read(size) if kind == DATA else b""
                self._take(kind, flags, number, size, data)
        except (asyncio.IncompleteReadError, OSError):
            for stream in self._streams.values():
                stream.incoming.feed_eof()

    def _take(self, kind: int, flags: int, number: int, size: int, data: bytes) -> None:
        if kind == PING and flags & SYN:
            self._frame(PING, ACK, 0, size=size)
        if kind not in (DATA, WINDOW):
            return
        if flags & SYN:
            stream = self._streams[number] = _Stream(number)
            self._frame(WINDOW, ACK, number)
            self._start(self._serve(stream))
        known = self._streams.get(number)
        if known is None:
            return
        if data:
            known.incoming.feed_data(data)
        if flags & (FIN | RST):
            known.incoming.feed_eof()

    async def _serve(self, stream: _Stream) -> None:
        """Answer identify requests, and refuse all other streams."""
        try:
            if await stream.line() != MULTISTREAM:
                return
            protocol = await stream.line()
            if protocol == IDENTIFY:
                about = _fields(
                    (1, PUBLIC_KEY_HEADER + self.identity.public_key),
                    (5, b"ipfs/0.1.0"),
                    (6, b"shoal light peer"),
                )
                said = _line(MULTISTREAM) + _line(protocol) + _delimited(about)
                self._frame(DATA, FIN, stream.number, said)
            else:
                self._frame(DATA, 0, stream.number, _line(MULTISTREAM) + _line(REFUSED))
                self._frame(DATA, FIN, stream.number)
        except asyncio.IncompleteReadError:
            return  # the host has closed the stream
        finally:
            self._streams.pop(stream.number, None)
