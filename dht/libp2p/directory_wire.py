"""Checks of the directory's messages, made before hivemind reads them.

hivemind's handlers accept lists of different lengths, places of any size, and values for which its
serializer calls itself until the stack is exhausted. Here every message is checked as a whole, its
size first: it names one key, and its value is what ``write_records`` wrote, which only
``read_records`` reads. A message that no program of ours sends raises ``MalformedMessage``.

The messages are those of hivemind's ``dht.proto``. This module imports nothing of hivemind.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any

import msgspec

from dht.decoding import decoded
from dht.identity import base58_encode
from dht.records import PEER_RECORD_MAX_BYTES

FOUND_MAX_BYTES = 1 << 20
"""Limit of a reply with records; all of a full key take less than half of it."""

MESSAGE_MAX_BYTES = 4 << 10
"""Limit of all other messages, which have a key or a record at most."""

NEAREST_MAX = 64
"""Limit of peers named as nearer to a key. A bucket of the routing table has 20."""

RECORDS_MAX = 2048
"""Limit of records in one reply; a full key has fewer."""

PLACE_BYTES = 20
"""Size of a place in the directory, which is a number."""

NO_SUBKEY = b"\xc0"
"""The mark of a value that is one whole, as hivemind's protocol writes it."""

_NOT_FOUND, _FOUND = range(2)


class MalformedMessage(ValueError):
    """Bytes from another peer are not a message of the directory's protocol."""


_records = msgspec.msgpack.Decoder(
    Annotated[
        list[Annotated[bytes, msgspec.Meta(max_length=PEER_RECORD_MAX_BYTES)]],
        msgspec.Meta(max_length=RECORDS_MAX),
    ]
)


def write_records(records: Iterable[bytes]) -> bytes:
    """The records under one key as the value of a reply."""
    return msgspec.msgpack.encode(list(records))


def read_records(value: bytes) -> list[bytes]:
    """The records that ``write_records`` of another peer wrote. Raises ``MalformedMessage``."""
    try:
        return decoded(value, _records.decode, "records of one key")
    except ValueError as error:
        raise MalformedMessage(str(error)) from error


@lru_cache(maxsize=16_384)
def place_of(peer: bytes) -> bytes:
    """The place of a peer, by the bytes of its id: nobody can choose it apart from the key."""
    return hashlib.sha1(msgspec.msgpack.encode(base58_encode(peer))).digest()


def check_sender(message: Any, sender: bytes) -> None:
    """Check the place that a message claims for its sender, whose id libp2p has verified."""
    if not message.peer.node_id:  # a peer that stores no records has no place
        return
    _check_place(message.peer.node_id)
    if message.peer.node_id != place_of(sender):
        raise MalformedMessage("a place that is not that of the sender's id")


def check_store(request: Any, sender: bytes) -> None:
    check_sender(request, sender)
    for name in ("keys", "values", "expiration_time"):
        _one(name, getattr(request, name))
    _check_place(request.keys[0])
    if list(request.subkeys) != [NO_SUBKEY] or list(request.in_cache) != [False]:
        raise MalformedMessage("a value that is not one record to store")


def check_store_reply(reply: Any, sender: bytes) -> None:
    check_sender(reply, sender)
    _one("answers", reply.store_ok)


def check_find(request: Any, sender: bytes) -> None:
    check_sender(request, sender)
    _check_place(_one("keys", request.keys))


def check_find_reply(reply: Any, sender: bytes) -> None:
    check_sender(reply, sender)
    result = _one("results", reply.results)
    _check_nearest(result.nearest_node_ids, result.nearest_peer_ids)
    if result.type == _FOUND:
        read_records(result.value)
    elif result.type != _NOT_FOUND:
        raise MalformedMessage(f"a result of type {result.type}")


def _one(what: str, items: Sequence[Any]) -> Any:
    if len(items) != 1:
        raise MalformedMessage(f"{len(items)} {what}; a message is about one key")
    return items[0]


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


def _check_place(place: bytes) -> None:
    if len(place) != PLACE_BYTES:
        raise MalformedMessage(f"a place of {len(place)} bytes; a place has {PLACE_BYTES}")


@dataclass(frozen=True, slots=True)
class Rule:
    """Checks for the messages of one kind of call."""

    check: Callable[[Any, bytes], None]
    """Called with the request and the bytes of the sender's peer id."""

    check_reply: Callable[[Any, bytes], None]
    """Called with the reply and the bytes of the answering peer's id."""

    reply_max_bytes: int = MESSAGE_MAX_BYTES


RULES = {
    "PingRequest": Rule(check_sender, check_sender),
    "StoreRequest": Rule(check_store, check_store_reply),
    "FindRequest": Rule(check_find, check_find_reply, FOUND_MAX_BYTES),
}
"""Rules by the name of the request."""


def rule_for(request: str) -> Rule:
    """The rule for a call, by the name of its request. Raises ``MalformedMessage``."""
    rule = RULES.get(request)
    if rule is None:
        raise MalformedMessage(f"a {request}, which is no message of the directory")
    return rule
