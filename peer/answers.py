"""Answers of other peers, which may be any bytes."""

from __future__ import annotations

from typing import TypeVar

import msgspec

T = TypeVar("T")


def decoded(data: bytes, decoder: msgspec.msgpack.Decoder[T], what: str, *, max_bytes: int) -> T:
    """Decode what a peer has sent as ``what``. Raises ``ValueError``."""
    if len(data) > max_bytes:
        raise ValueError(f"{what} has at most {max_bytes} bytes, not {len(data)}")
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not {what}: {error}") from error
