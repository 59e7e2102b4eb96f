"""Bounds on the norms of an upload, read without decoding it."""

from __future__ import annotations

import numpy as np
import pytest

from averaging.numbers.arrays import uninitialised
from averaging.numbers.codec import Scratch
from averaging.numbers.codecs import codec_named, codec_names
from averaging.numbers.norm_bounds import squares_at_most

SIZES = (3000, 0, 1, 1024, 1023, 0, 5 * 1024, 7, 7, 7)


@pytest.mark.parametrize("name", codec_names())
def test_the_bound_of_each_unit_is_above_its_norm_and_not_by_much(name: str) -> None:
    codec, scratch = codec_named(name), Scratch()
    values = np.random.default_rng(3).standard_normal(sum(SIZES), dtype=np.float32)
    values[:3000] *= 1e6
    data = uninitialised(codec.encoded_size(SIZES))
    codec.encode(values, SIZES, data, scratch)

    found = squares_at_most(codec, data, SIZES)

    ends = np.cumsum(SIZES)
    for size, end, bound in zip(SIZES, ends, found, strict=True):
        exact = float(np.square(values[end - size : end], dtype=np.float64).sum())
        assert exact <= bound * (1 + 1e-6)
        # A block counts as if all were its peak; scales of f16 are powers of two.
        assert bound <= 4 * 16 * exact


@pytest.mark.parametrize("name", codec_names())
def test_the_bound_of_a_unit_is_the_same_alone_and_among_others(name: str) -> None:
    codec, scratch = codec_named(name), Scratch()
    values = np.random.default_rng(4).standard_normal(sum(SIZES), dtype=np.float32)
    data = uninitialised(codec.encoded_size(SIZES))
    codec.encode(values, SIZES, data, scratch)

    alone, at = [], 0
    for size in SIZES:
        end = at + codec.encoded_size((size,))
        alone += squares_at_most(codec, data[at:end], (size,)).tolist()
        at = end

    assert squares_at_most(codec, data, SIZES).tolist() == alone


def test_an_empty_payload_has_a_bound_of_zero() -> None:
    assert squares_at_most(codec_named("int8"), memoryview(b""), (0, 0)).tolist() == [0.0, 0.0]
