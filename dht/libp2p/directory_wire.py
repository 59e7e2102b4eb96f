"""Checks of the directory's messages, made before hivemind decodes them.

The libraries below the directory decode anything that a peer sends: hivemind's serializer calls
itself for each extension type inside another one until the stack is exhausted, and its handlers
accept lists of different lengths and times that are not numbers. Here every message is checked as a
whole: its size; then nesting and counts, in one pass over the bytes without recursion and without
allocating an announced length; then its structure. A message that hivemind itself would not write
raises ``MalformedMessage``.

The messages are those of hivemind's ``dht.proto``. This module imports nothing of hivemind.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec

from dht.identity import base58_encode
from dht.records import KEY_MAX_BYTES

MESSAGE_MAX_BYTES = 1 << 20
"""Limit of a message; a reply with all records of a full key has less than half of it."""

PING_MAX_BYTES = 4 << 10
KEYS_MAX = 16
"""Limit of keys in one request, as in hivemind's own search. Our peers ask for one."""

NEAREST_MAX = 64
"""Limit of peers named as nearer to a key. A bucket of the routing table has 20."""

PACKED_MAX_BYTES = MESSAGE_MAX_BYTES
SUBKEY_MAX_BYTES = 256
DEPTH_MAX = 6
"""Limit of values nested in one another; a dictionary with tuples as subkeys reaches it."""

ITEMS_MAX = 16_384
TUPLE_MAX = 16
PLACE_BYTES = 20
"""Size of a place in the directory, which is a number."""

TIME_MAX = 1e12
"""Limit of a time, in seconds since 1970. No clock shows more."""

TUPLE_CODE = 0x40
DICTIONARY_CODE = 0x50

_NOT_FOUND, _FOUND_REGULAR, _FOUND_DICTIONARY = range(3)

Subkey = str | bytes | int | None | tuple[str | bytes | int | None, ...]


class MalformedMessage(ValueError):
    """Bytes from another peer are not a message of the directory's protocol."""


@dataclass(frozen=True, slots=True)
class Dictionary:
    """The records under one key, as hivemind sends them: (subkey, value, expiration time)."""

    entries: tuple[tuple[Subkey, bytes, float], ...]
    latest_expiration_time: float


# Packed values


def read_packed(data: bytes) -> Any:
    """Decode bytes that ``MSGPackSerializer.dumps`` wrote.

    A dictionary of records becomes a ``Dictionary``. Raises ``MalformedMessage``.
    """
    check_packed(data)
    return _decoded(data, outermost=True)


def _decoded(data: bytes, *, outermost: bool) -> Any:
    """Decode checked bytes: at most one extension type is inside another one."""

    def extension(code: int, content: memoryview) -> Any:
        if code == TUPLE_CODE:
            return tuple(_decoded(bytes(content), outermost=False))
        assert outermost, "checked before"
        return _dictionary(_decoded(bytes(content), outermost=False))

    try:
        return msgspec.msgpack.decode(data, ext_hook=extension)
    except MalformedMessage:
        raise
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        raise MalformedMessage(f"a packed value: {error}") from error


def check_packed(data: bytes) -> None:
    """Refuse msgpack that is too large, too deep, too long, or has extensions where none may be.

    A tuple may be anywhere, but not in a tuple; a dictionary of records is never inside a value.
    """
    size = len(data)
    if size > PACKED_MAX_BYTES:
        raise MalformedMessage(f"a packed value of {size} bytes; at most {PACKED_MAX_BYTES}")
    # Open containers: the number of values still to come, the position of the end if it was
    # announced, and whether it is a tuple.
    stack: list[tuple[int, int | None, bool]] = [(1, size, False)]
    tuples = items = position = 0
    while stack:
        left, end, is_tuple = stack.pop()
        if not left:
            if end is not None and position != end:
                raise MalformedMessage(f"a packed value ends at {position}, not {end}")
            tuples -= is_tuple
            continue
        stack.append((left - 1, end, is_tuple))
        items += 1
        if items > ITEMS_MAX:
            raise MalformedMessage(f"more than {ITEMS_MAX} packed values")
        kind, position, length = _head(data, position)
        if kind == "atom":
            position += length
            if position > size:
                raise MalformedMessage("a packed value is cut off")
            continue
        if length > size - position:  # each value inside has a byte at least
            raise MalformedMessage(f"{length} packed values or bytes are announced but missing")
        if len(stack) > DEPTH_MAX:
            raise MalformedMessage(f"packed values more than {DEPTH_MAX} deep")
        if kind == "items":
            stack.append((length, None, False))
            continue
        code, position = data[position], position + 1
        if code == TUPLE_CODE:
            if tuples:
                raise MalformedMessage("a tuple inside a tuple")
            if not (position < size and _is_array(data[position])):
                raise MalformedMessage("a tuple that is not an array")
            tuples += 1
        elif code != DICTIONARY_CODE:
            raise MalformedMessage(f"an extension of type {code}")
        elif len(stack) > 1:
            raise MalformedMessage("a dictionary of records inside another value")
        stack.append((1, position + length - 1, code == TUPLE_CODE))


def _is_array(first: int) -> bool:
    return 0x90 <= first <= 0x9F or first in (0xDC, 0xDD)


def _head(data: bytes, position: int) -> tuple[str, int, int]:
    """Kind of the value at a position, start of its content, and size of the content.

    The size is a number of bytes for an ``atom``, a number of values for ``items``, and a number
    of bytes for an ``extension``, the first of which is its type.
    """
    if position >= len(data):
        raise MalformedMessage("a packed value is cut off")
    first = data[position]
    position += 1
    if first <= 0x7F or first >= 0xE0 or first in (0xC0, 0xC2, 0xC3):
        return "atom", position, 0
    if first <= 0x8F:
        return "items", position, 2 * (first & 0x0F)
    if first <= 0x9F:
        return "items", position, first & 0x0F
    if first <= 0xBF:
        return "atom", position, first & 0x1F
    if first in _FIXED:
        return "atom", position, _FIXED[first]
    if first in _FIXED_EXTENSIONS:
        return "extension", position, 1 + _FIXED_EXTENSIONS[first]
    if first not in _COUNTED:
        raise MalformedMessage(f"a packed value that begins with {first:#x}")
    kind, width = _COUNTED[first]
    start = position + width
    if start > len(data):
        raise MalformedMessage("a packed value is cut off")
    count = int.from_bytes(data[position:start], "big")
    if kind == "pairs":
        return "items", start, 2 * count
    return kind, start, count + 1 if kind == "extension" else count


_FIXED = {
    0xCA: 4, 0xCB: 8,
    0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8,
    0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8,
}  # fmt: skip
"""Number of bytes that follow the first byte of a number."""

_FIXED_EXTENSIONS = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}

_COUNTED = {
    0xC4: ("atom", 1), 0xC5: ("atom", 2), 0xC6: ("atom", 4),
    0xC7: ("extension", 1), 0xC8: ("extension", 2), 0xC9: ("extension", 4),
    0xD9: ("atom", 1), 0xDA: ("atom", 2), 0xDB: ("atom", 4),
    0xDC: ("items", 2), 0xDD: ("items", 4),
    0xDE: ("pairs", 2), 0xDF: ("pairs", 4),
}  # fmt: skip
"""Kind and size in bytes of the count, by first byte of values that begin with a count."""


def read_subkey(data: bytes) -> Subkey:
    """Decode the subkey of a record in a dictionary; ``None`` stands for a plain value."""
    if len(data) > SUBKEY_MAX_BYTES:
        raise MalformedMessage(f"a subkey of {len(data)} bytes; at most {SUBKEY_MAX_BYTES}")
    return _subkey(read_packed(data))


def _subkey(value: Any) -> Subkey:
    parts = value if isinstance(value, tuple) else (value,)
    if len(parts) > TUPLE_MAX:
        raise MalformedMessage(f"a subkey of {len(parts)} parts; at most {TUPLE_MAX}")
    for part in parts:
        if not isinstance(part, str | bytes | int | None):
            raise MalformedMessage(f"a subkey that is a {type(part).__name__}")
        if isinstance(part, str | bytes) and len(part) > SUBKEY_MAX_BYTES:
            raise MalformedMessage(f"a subkey of {len(part)}; at most {SUBKEY_MAX_BYTES}")
    subkey: Subkey = value
    return subkey


def _dictionary(packed: Any) -> Dictionary:
    match packed:
        case [float() as size_max, latest, list() as rows] if size_max == math.inf:
            entries = tuple(_entry(row) for row in rows)
        case _:
            raise MalformedMessage("a dictionary of records without its three parts")
    total_bytes = sum(len(value) for _, value, _ in entries)
    if total_bytes > KEY_MAX_BYTES:
        raise MalformedMessage(f"{total_bytes} bytes under one key; at most {KEY_MAX_BYTES}")
    return Dictionary(entries, _time(latest))


def _entry(row: Any) -> tuple[Subkey, bytes, float]:
    match row:
        case [subkey, bytes() as value, expiration_time]:
            return _subkey(subkey), value, _time(expiration_time)
    raise MalformedMessage("an entry that is no subkey, value and time")


# Messages


@lru_cache(maxsize=16_384)
def place_of(peer: bytes) -> bytes:
    """The place of a peer, by the bytes of its id: nobody can choose it apart from the key."""
    return hashlib.sha1(msgspec.msgpack.encode(base58_encode(peer))).digest()


def check_ping(request: Any, sender: bytes) -> None:
    _check_sender(request, sender)


def check_ping_reply(reply: Any, request: Any, sender: bytes) -> None:
    _check_sender(reply, sender)
    _time(reply.dht_time)


def check_store(request: Any, sender: bytes) -> None:
    _check_sender(request, sender)
    count = _counted(request.keys)
    for name in ("subkeys", "values", "expiration_time", "in_cache"):
        if len(getattr(request, name)) != count:
            raise MalformedMessage(f"{len(getattr(request, name))} {name} for {count} keys")
    for key in request.keys:
        _check_place(key)
    for expiration_time in request.expiration_time:
        _time(expiration_time)
    for subkey, value in zip(request.subkeys, request.values, strict=True):
        if not subkey:  # hivemind's nodes send each other all that they store; ours do not
            raise MalformedMessage(f"{len(value)} bytes that are not one peer's record")
        read_subkey(subkey)


def check_store_reply(reply: Any, request: Any, sender: bytes) -> None:
    _check_sender(reply, sender)
    if len(reply.store_ok) != len(request.keys):
        raise MalformedMessage(f"{len(reply.store_ok)} answers for {len(request.keys)} keys")


def check_find(request: Any, sender: bytes) -> None:
    _check_sender(request, sender)
    _counted(request.keys)
    for key in request.keys:
        _check_place(key)


def check_find_reply(reply: Any, request: Any, sender: bytes) -> None:
    _check_sender(reply, sender)
    if len(reply.results) != len(request.keys):
        raise MalformedMessage(f"{len(reply.results)} results for {len(request.keys)} keys")
    for result in reply.results:
        _check_nearest(result.nearest_node_ids, result.nearest_peer_ids)
        _time(result.expiration_time)
        if result.type == _FOUND_DICTIONARY:
            if not isinstance(read_packed(result.value), Dictionary):
                raise MalformedMessage("no dictionary where one is announced")
        elif result.type not in (_NOT_FOUND, _FOUND_REGULAR):
            raise MalformedMessage(f"a result of type {result.type}")


def _check_nearest(places: Sequence[bytes], peers: Sequence[bytes]) -> None:
    if len(places) != len(peers) or len(places) > NEAREST_MAX:
        raise MalformedMessage(f"{len(places)} places of {len(peers)} peers; at most {NEAREST_MAX}")
    for place in places:
        _check_place(place)
    for peer in peers:
        # A multihash: of an RSA key its SHA-256, of an Ed25519 key the key itself.
        if not (peer.startswith(b"\x12\x20") and len(peer) == 34) and not (
            peer.startswith(b"\x00\x24\x08\x01\x12\x20") and len(peer) == 38
        ):
            raise MalformedMessage(f"{len(peer)} bytes that are not a peer id")


def _check_sender(message: Any, sender: bytes) -> None:
    """Check the place that a message claims for its sender, whose id libp2p has verified."""
    if not message.peer.node_id:  # a peer that stores no records has no place
        return
    _check_place(message.peer.node_id)
    if message.peer.node_id != place_of(sender):
        raise MalformedMessage("a place that is not that of the sender's id")


def _check_place(place: bytes) -> None:
    if len(place) != PLACE_BYTES:
        raise MalformedMessage(f"a place of {len(place)} bytes; a place has {PLACE_BYTES}")


def _counted(keys: Sequence[bytes]) -> int:
    if len(keys) > KEYS_MAX:
        raise MalformedMessage(f"{len(keys)} keys; at most {KEYS_MAX}")
    return len(keys)


def _time(value: Any) -> float:
    """Check a time: a finite number in the range of clocks."""
    if type(value) not in (int, float) or not 0 <= value <= TIME_MAX:
        raise MalformedMessage(f"a time that is {value!r:.40}")
    return float(value)


@dataclass(frozen=True, slots=True)
class Rule:
    """Size limits and checks for the messages of one kind of call."""

    request_max_bytes: int
    reply_max_bytes: int
    check: Callable[[Any, bytes], None]
    """Called with the request and the bytes of the sender's peer id."""

    check_reply: Callable[[Any, Any, bytes], None]
    """Called with the reply, the request and the bytes of the answering peer's id."""


RULES = {
    "PingRequest": Rule(PING_MAX_BYTES, PING_MAX_BYTES, check_ping, check_ping_reply),
    "StoreRequest": Rule(MESSAGE_MAX_BYTES, PING_MAX_BYTES, check_store, check_store_reply),
    "FindRequest": Rule(PING_MAX_BYTES, MESSAGE_MAX_BYTES, check_find, check_find_reply),
}
"""Rules by the name of the request."""


def rule_for(request: str) -> Rule:
    """The rule for a call, by the name of its request. Raises ``MalformedMessage``."""
    rule = RULES.get(request)
    if rule is None:
        raise MalformedMessage(f"a {request}, which is no message of the directory")
    return rule


def check_size(name: str, data: bytes, size_max: int) -> None:
    if len(data) > size_max:
        raise MalformedMessage(f"a {name} of {len(data)} bytes; at most {size_max}")
