"""Frames that are packed, and what is made of those of a hostile member."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Generator
from typing import Any, TypeVar

import numpy as np
import pytest

from dht.host import FRAME_MAX_BYTES
from dht.libp2p.framing.packing import PIECE_BYTES, in_turns, packing, unpacking

T = TypeVar("T")


def result_of(work: Generator[None, None, T]) -> T:
    return asyncio.run(in_turns(work))


def codes(size: int) -> bytes:
    """Bytes of which few are frequent, as those of int4 are."""
    return np.random.default_rng(1).binomial(15, 0.5, size).astype(np.uint8).tobytes()


LONG = result_of(packing([memoryview(bytes(FRAME_MAX_BYTES))])) or b""
"""Few bytes that hold many."""


@pytest.mark.parametrize("size", [4096, 100_001, FRAME_MAX_BYTES])
def test_a_packed_frame_is_smaller_and_comes_back(size: int) -> None:
    content = codes(size)
    frame = result_of(packing([memoryview(content)[:7], memoryview(content)[7:]]))
    assert frame is not None and len(frame) < 0.6 * size
    assert result_of(unpacking(bytearray(frame))) == content


def test_a_frame_that_does_not_get_smaller_is_not_packed() -> None:
    assert result_of(packing([memoryview(np.random.default_rng(1).bytes(50_000))])) is None


def test_with_the_size_ahead_a_packed_frame_is_smaller_too() -> None:
    """A frame of the largest size that is packed to more than that would break the stream."""
    noise = np.random.default_rng(1).bytes(FRAME_MAX_BYTES)
    sizes = []
    for zeros in range(600, 1400, 8):  # what they save, the rest costs
        frame = result_of(packing([memoryview(bytes(zeros) + noise[zeros:])]))
        sizes.append(FRAME_MAX_BYTES if frame is None else len(frame))
        assert frame is None or len(frame) < FRAME_MAX_BYTES
    assert FRAME_MAX_BYTES in sizes and min(sizes) < FRAME_MAX_BYTES


@pytest.mark.parametrize(
    "change",
    [
        lambda frame: b"",
        lambda frame: frame[:3],
        lambda frame: (FRAME_MAX_BYTES + 1).to_bytes(4, "big") + frame[4:],
        lambda frame: len(frame).to_bytes(4, "big") + frame[4:],
        lambda frame: (9999).to_bytes(4, "big") + frame[4:],
        lambda frame: (10_001).to_bytes(4, "big") + frame[4:],
        lambda frame: frame[:-1],
        lambda frame: frame + b"x",
        lambda frame: frame[:4] + b"\xff" * 50,
        lambda frame: (100).to_bytes(4, "big") + LONG[4:],
    ],
)
def test_a_packed_frame_that_is_not_what_it_announces_is_refused(change: Any) -> None:
    frame = result_of(packing([memoryview(codes(10_000))]))
    with pytest.raises(ValueError, match="packed"):
        result_of(unpacking(bytearray(change(frame))))


def test_a_piece_of_several_blocks_is_refused_before_it_is_read() -> None:
    """Half a megabyte in blocks of twenty bytes, each with a code of its own, took 24 ms."""
    content = codes(10_000)
    code = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_HUFFMAN_ONLY)
    parts = [content[at : at + 100] for at in range(0, len(content), 100)]
    piece = b"".join(code.compress(part) + code.flush(zlib.Z_BLOCK) for part in parts)
    piece += code.flush()
    assert zlib.decompress(piece, -zlib.MAX_WBITS) == content and len(piece) < len(content)
    frame = len(content).to_bytes(4, "big") + len(piece).to_bytes(2, "big") + piece
    with pytest.raises(ValueError, match="not one block"):
        result_of(unpacking(bytearray(frame)))


def test_other_tasks_run_while_a_large_frame_is_packed_and_unpacked() -> None:
    content = codes(8 * PIECE_BYTES)
    frame = result_of(packing([memoryview(content)]))
    assert frame is not None

    async def turns_of(work: Generator[None, None, T]) -> int:
        turns = 0
        waiting = asyncio.create_task(in_turns(work))
        while not waiting.done():
            turns += 1
            await asyncio.sleep(0)
        return turns

    assert asyncio.run(turns_of(packing([memoryview(content)]))) >= 8
    assert asyncio.run(turns_of(unpacking(bytearray(frame)))) >= len(frame) // PIECE_BYTES
