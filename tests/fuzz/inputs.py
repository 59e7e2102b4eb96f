"""Hostile inputs made from honest ones, with structure: nesting, extension types and lengths."""

from __future__ import annotations

import random
from typing import Any

import msgspec

NUMBERS = (0, -1, 1, 127, 128, 255, 2**16, 2**31, 2**32, 2**53, 2**62 + 1, 2**63 - 1, 2**64 - 1)
FLOATS = (0.0, -0.0, 1e300, float("inf"), float("-inf"), float("nan"), -1.0)
CODES = (0x40, 0x50, 0x51, 0, -1, 127)
LENGTHS = (0, 1, 0x7F, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF)
HEADS = (0xC4, 0xC5, 0xC6, 0xC7, 0xC8, 0xC9, 0xD9, 0xDA, 0xDB, 0xDC, 0xDD, 0xDE, 0xDF)
"""First bytes of msgpack values that announce a length."""


def hostile(example: bytes, rng: random.Random) -> bytes:
    """One input: the example with changed structure or bytes, or nothing like it."""
    kind = rng.randrange(8)
    if kind == 0:
        return rng.randbytes(rng.randrange(64))
    if kind == 1:
        return _nested(rng)
    if kind == 2:
        return _announced(example, rng)
    if kind in (3, 4):
        changed = _restructured(example, rng)
        if changed is not None:
            return changed
    return _mutated(example, rng)


def _mutated(example: bytes, rng: random.Random) -> bytes:
    data = bytearray(example or b"\0")
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data))
        match rng.randrange(6):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                data[at] ^= 1 << rng.randrange(8)
            case 2:
                data[at:at] = rng.randbytes(rng.randint(1, 4))
            case 3 if len(data) > 1:
                del data[at]
            case 4 if len(data) > 1:
                del data[at:]
            case _:
                piece = data[at : at + rng.randint(1, 64)]
                data[at:at] = piece * rng.randint(1, 4)
        if not data:
            data = bytearray(b"\0")
    return bytes(data)


def _nested(rng: random.Random) -> bytes:
    """Containers and extension types inside one another, up to far beyond any recursion limit."""
    depth = rng.choice((1, 2, 3, 7, 33, 250, 2000))
    inside = rng.choice((b"\xc0", b"\xc4\x00", b"\xa1a", b""))
    code = rng.choice(CODES) & 0xFF
    match rng.randrange(4):
        case 0:
            return b"\x91" * depth + inside
        case 1:
            return b"\x81\xa1k" * depth + inside
        case 2:
            return b"[" * depth + b"]" * rng.choice((0, depth))
    for _ in range(min(depth, 250)):
        content = rng.choice((b"", b"\x91", b"\x93\xcb\x7f\xf0\0\0\0\0\0\0\0\x91")) + inside
        inside = b"\xc9" + len(content).to_bytes(4, "big") + bytes([code]) + content
    return inside


def _announced(example: bytes, rng: random.Random) -> bytes:
    """The example with a length in it that does not fit what follows."""
    head = rng.choice(HEADS)
    width = {0: 1, 1: 2, 2: 4}[(head - 0xC4) % 3 if head < 0xD9 else (head - 0xD9) % 3]
    length = min(rng.choice(LENGTHS), 256**width - 1)
    at = rng.randrange(len(example) + 1)
    rest = example[at:] if rng.randrange(2) else b""
    return example[:at] + bytes([head]) + length.to_bytes(width, "big") + rest


def _restructured(example: bytes, rng: random.Random) -> bytes | None:
    """The example with one of its values replaced; ``None`` if it is no msgpack."""
    try:
        tree = msgspec.msgpack.decode(example)
        return msgspec.msgpack.encode(_changed(tree, rng, depth=0))
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError):
        return None


def _changed(value: Any, rng: random.Random, *, depth: int) -> Any:
    if isinstance(value, list) and value and rng.randrange(4):
        items = list(value)
        at = rng.randrange(len(items))
        match rng.randrange(8):
            case 0:
                del items[at]
            case 1:
                items.insert(at, items[at])
            case 2:
                items *= rng.choice((2, 17, 300))
            case _:
                items[at] = _changed(items[at], rng, depth=depth + 1)
        return items
    if isinstance(value, dict) and value and rng.randrange(4):
        key = rng.choice(list(value))
        return {**value, key: _changed(value[key], rng, depth=depth + 1)}
    if isinstance(value, bytes) and len(value) > 8 and rng.randrange(2):
        # It may be a message of its own.
        inner = _restructured(value, rng) if depth < 3 else None
        return _mutated(value, rng) if inner is None else inner
    return _atom(rng)


def _atom(rng: random.Random) -> Any:
    match rng.randrange(7):
        case 0:
            return rng.choice(NUMBERS)
        case 1:
            return rng.choice(FLOATS)
        case 2:
            return rng.choice(("", "a" * rng.choice((1, 65, 301, 5000)), "\x1b[2J", "é\0"))
        case 3:
            return rng.randbytes(rng.choice((0, 1, 16, 31, 32, 33, 64, 1025)))
        case 4:
            return msgspec.msgpack.Ext(rng.choice(CODES), rng.randbytes(rng.randrange(8)))
        case 5:
            return rng.choice(([], {}, [[]], {"a": 1}, [None] * 100))
    return rng.choice((None, True, False))
