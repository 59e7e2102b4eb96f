"""Decoding what other peers have sent, which may be any bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

T = TypeVar("T")
Bytes = TypeVar("Bytes", bound=bytes | memoryview)

UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors of msgspec for bytes that are not what is expected; the last is of arrays that are nested
a thousand deep."""


def decoded(
    data: Bytes, decode: Callable[[Bytes], T], what: str, *, max_bytes: int | None = None
) -> T:
    """Decode what a peer has sent as ``what``. Raises ``ValueError``."""
    if max_bytes is not None and len(data) > max_bytes:
        raise ValueError(f"{what} of {len(data)} bytes; at most {max_bytes}")
    try:
        return decode(data)
    except UNDECODABLE as error:
        raise ValueError(f"not {what}: {error}") from error
