"""Sums with the same bits on every machine, and the check for flushed subnormals."""

from __future__ import annotations

import ctypes
import math
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from averaging.errors import SubnormalsFlushed
from averaging.numbers.arrays import (
    BROADCAST_VALUES,
    LINE_BYTES,
    SUM_TILE,
    aligned,
    arithmetic,
    check_subnormals,
    norm,
    squared_norm,
)


def fold(terms: list[float]) -> float:
    """The documented order, in plain Python."""
    while len(terms) > 1:
        lower = (len(terms) + 1) // 2
        upper = terms[lower:]
        terms = [a + b for a, b in zip(terms, upper, strict=False)] + terms[len(upper) : lower]
    return terms[0] if terms else 0.0


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=70))
def test_the_sum_is_folded_in_halves(some: list[float]) -> None:
    values = np.array(some, np.float32)

    assert squared_norm(values) == fold([float(value) * float(value) for value in values])


def test_tiles_are_added_from_the_first_to_the_last() -> None:
    values = np.random.default_rng(1).normal(size=2 * SUM_TILE + 5).astype(np.float32)
    tiles = [values[:SUM_TILE], values[SUM_TILE : 2 * SUM_TILE], values[2 * SUM_TILE :]]

    assert squared_norm(values) == sum(squared_norm(tile) for tile in tiles)


def test_the_norm_agrees_with_an_exact_computation() -> None:
    values = np.random.default_rng(2).normal(size=100_003).astype(np.float32)

    assert norm(values) == pytest.approx(math.sqrt(math.fsum(float(v) ** 2 for v in values)))
    assert norm(np.zeros(0, np.float32)) == 0.0
    assert norm(np.full(3, 3e38, np.float32)) == pytest.approx(3e38 * math.sqrt(3))


def test_values_are_not_changed_by_taking_their_norm() -> None:
    values = np.arange(1000, dtype=np.float32)
    squared_norm(values)

    assert np.array_equal(values, np.arange(1000, dtype=np.float32))


def test_arithmetic_leaves_numpy_as_it_was() -> None:
    errors, buffered = np.geterr(), np.getbufsize()

    with arithmetic():
        assert np.getbufsize() == BROADCAST_VALUES
        with arithmetic():
            assert np.isinf(np.float32(3e38) * np.float32(3e38))
        assert np.getbufsize() == BROADCAST_VALUES

    assert np.getbufsize() == buffered != BROADCAST_VALUES
    assert np.geterr() == errors


@pytest.mark.parametrize("size", [1, 63, 1 << 20])
def test_aligned_bytes_begin_at_a_cache_line(size: int) -> None:
    held = [aligned(size) for _ in range(5)]

    assert {array.size for array in held} == {size}
    assert {array.ctypes.data % LINE_BYTES for array in held} == {0}


def test_this_machine_keeps_subnormals() -> None:
    check_subnormals()


@contextmanager
def flush_to_zero(mask: int) -> Iterator[None]:
    """Set bits of the processor's MXCSR register for this thread, as careless libraries do."""
    environment = (ctypes.c_uint32 * 64)()
    libm = ctypes.CDLL("libm.so.6")
    libm.fegetenv(environment)
    before = environment[7]  # glibc's fenv_t on x86-64 ends with MXCSR
    environment[7] = before | mask
    libm.fesetenv(environment)
    try:
        yield
    finally:
        environment[7] = before
        libm.fesetenv(environment)


@pytest.mark.skipif(
    platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc",
    reason="knows the floating-point environment of glibc on x86-64 only",
)
@pytest.mark.parametrize(("mask", "what"), [(0x8000, "results"), (0x0040, "operands")])
def test_flushed_subnormals_are_noticed(mask: int, what: str) -> None:
    caught = None
    with flush_to_zero(mask):
        try:
            check_subnormals()
        except SubnormalsFlushed as error:
            caught = error
    assert caught is not None
    assert caught.what == what
    assert "torch.set_flush_denormal" in str(caught)
    check_subnormals()
