"""Compiled codecs have the bits of numpy's, whatever the values and the shapes are.

``python -m tests.peer.extras.compiled.test_codecs`` puts them into the table of codecs of its own
process and runs tests of codecs and outer steps on them, those of golden files among them.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba", reason="compiled codecs need the extra 'fast'")

from averaging.errors import BadPayload, NotFinite
from averaging.numbers.arrays import SUM_TILE
from averaging.numbers.codec import Addends, Codec, Scratch
from averaging.numbers.codecs import Float32
from averaging.numbers.merge import Units, merge_encoded, rule_named
from averaging.numbers.outer import Nesterov, Step, step_encoded
from peer.extras.compiled import codecs, kernels
from peer.extras.compiled.codecs import PAIRS, CodecsDiffer, compare, compare_sums

ROOT = Path(__file__).parents[4]
TESTS = [ROOT / "tests/averaging/numbers" / f"test_{name}.py" for name in ("codec", "outer")]
KEPT = "not f32 and (golden or group or alignment or threads or refused or encoded)"
"""The other tests hold for any codec with the same bits."""
IGNORED = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
"""This module has imported hypothesis before pytest looks for its plugins."""

EACH = pytest.mark.parametrize("pair", PAIRS, ids=[codec.name for codec, _ in PAIRS])
SIZES = (1, 1, 5, 24, 24, 24, 1024, 1025, 3000, 2048)
OPTIMIZER = Nesterov(0.7, 0.9)


def some_values(rows: int, sizes: tuple[int, ...] = SIZES, scale: float = 1.0) -> Any:
    values = np.random.default_rng(3).standard_normal((rows, sum(sizes)), dtype=np.float32)
    return values * np.float32(scale)


def encoded(codec: Codec, values: Any, sizes: tuple[int, ...] = SIZES) -> bytearray:
    out = bytearray(codec.encoded_size(sizes))
    codec.encode(values, sizes, out, Scratch())
    return out


@pytest.mark.slow  # it compiles all kernels once more; that bits are equal is tested below
def test_the_table_with_compiled_codecs_passes_the_tests_of_codecs() -> None:
    command = [sys.executable, "-m", __name__]
    ran = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    passed = re.search(r"(\d+) passed", ran.stdout)
    assert passed is not None and int(passed[1]) > 100, ran.stdout


numbers = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.sampled_from([0.0, -0.0, 1e-45, -1e-45, 1.1754944e-38, 2.0**-100, 3.4028235e38]),
)


@EACH
@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([1, 2, 7, 8, 9, 64, 1000, 1023, 1024, 1025, 2100]), max_size=6),
    magnitude=st.integers(-149, 120),
    spread=st.integers(0, 60),
    values=st.lists(numbers, max_size=30),
    weights=st.tuples(st.floats(0, 1, width=32), st.floats(0, 1, width=32)),
    eta=st.sampled_from([1.0, 0.7, 1e-30]),
    mu=st.sampled_from([0.0, 0.5, 0.9]),
    seed=st.integers(0, 99),
)
def test_the_bits_of_any_finite_values_are_those_of_numpy(
    pair: tuple[Codec, Codec],
    sizes: list[int],
    magnitude: int,
    spread: int,
    values: list[float],
    weights: tuple[float, float],
    eta: float,
    mu: float,
    seed: int,
) -> None:
    """Magnitudes of one vector differ by up to 2^``spread``; some values are of hypothesis."""
    rng = np.random.default_rng(seed)
    count = sum(sizes)
    vectors = rng.standard_normal((2, count), dtype=np.float32)
    with np.errstate(all="ignore"):
        vectors = np.ldexp(vectors, magnitude + rng.integers(0, spread + 1, vectors.shape))
    vectors = np.clip(vectors.astype(np.float32), np.float32(-1.7e38), np.float32(1.7e38))
    if count:
        places = rng.integers(0, count, len(values))
        vectors[1, places] = np.clip(np.array(values, np.float32), -1.7e38, 1.7e38)
    compare(pair, vectors, tuple(sizes), weights, Nesterov(eta, mu))


@EACH
@pytest.mark.parametrize("source", [*(number for number, _ in enumerate(PAIRS)), "f32"])
def test_a_sum_is_the_same_whichever_of_both_codecs_are_compiled(
    pair: tuple[Codec, Codec], source: int | str
) -> None:
    sources = (Float32(),) if source == "f32" else PAIRS[int(source)]
    results = set()
    for given_in in sources:
        payloads = [encoded(given_in, each) for each in some_values(3)]
        for codec in pair:
            out = bytearray(codec.encoded_size(SIZES))
            given = Addends(payloads, [0.2, 0.5, 0.3])
            codec.encode_sum(given_in, given, SIZES, out, Scratch())
            results.add(bytes(out))
    assert len(results) == 1


@EACH
@pytest.mark.parametrize("rule", ["rda", "centered_clip"])
def test_merges_by_norms_have_the_bits_of_numpy(pair: tuple[Codec, Codec], rule: str) -> None:
    results = set()
    for codec in pair:
        payloads = [encoded(codec, each) for each in some_values(3)]
        out = bytearray(codec.encoded_size(SIZES))
        units = Units(SIZES, ["matrix"] * len(SIZES))
        given = Addends(payloads, [0.2, 0.5, 0.3])
        merge_encoded(rule_named(rule), codec, given, units, out, Scratch())
        results.add(bytes(out))
    assert len(results) == 1


@EACH
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("unit", [0, 2, 4, 8])
def test_the_first_unit_that_is_not_finite_is_named(
    pair: tuple[Codec, Codec], bad: float, unit: int
) -> None:
    values = some_values(1)[0]
    values[[sum(SIZES[:unit]), -1]] = bad
    for codec in pair:
        with pytest.raises(NotFinite) as caught:
            encoded(codec, values)
        assert caught.value.unit == unit


@EACH
def test_infinities_and_nan_in_a_state_give_the_same_step(
    pair: tuple[Codec, Codec],
) -> None:
    theta, momentum, moved = some_values(3)
    for vector in (theta, momentum):
        vector[::7], vector[1::7], vector[2::7] = np.inf, -np.inf, np.nan
        vector[3::7], vector[4::7] = -0.0, 1e-45
    results = []
    for codec in pair:
        after, held, payload = theta.copy(), momentum.copy(), encoded(codec, moved)
        step_encoded(Step(after, after, held), codec, payload, SIZES, OPTIMIZER, Scratch())
        results.append((after.tobytes(), held.tobytes()))
    assert results[0] == results[1]


@EACH
def test_bytes_at_odd_addresses_and_read_only_vectors_are_taken(
    pair: tuple[Codec, Codec],
) -> None:
    values = some_values(1)[0]
    values.flags.writeable = False
    _, codec = pair
    data = encoded(codec, values)
    assert data == encoded(pair[0], values)
    shifted = bytes(memoryview(bytes(1) + data)[1:])
    out, expected = np.zeros((2, values.size), np.float32)
    codec.decode(shifted, SIZES, out, Scratch())
    pair[0].decode(data, SIZES, expected, Scratch())
    assert out.tobytes() == expected.tobytes()
    step_encoded(Step(values, out, values), codec, data, SIZES, Nesterov(1, 0), Scratch())


@EACH
def test_without_momentum_the_step_takes_an_empty_vector_and_with_it_refuses_one(
    pair: tuple[Codec, Codec],
) -> None:
    before, moved = some_values(2)
    nothing, results = np.zeros(0, np.float32), []
    for codec in pair:
        after, data = before.copy(), encoded(codec, moved)
        step_encoded(Step(before, after, nothing), codec, data, SIZES, Nesterov(0.7, 0), Scratch())
        results.append(after.tobytes())
        with pytest.raises(ValueError):
            step_encoded(Step(before, after, nothing), codec, data, SIZES, OPTIMIZER, Scratch())
    assert results[0] == results[1]


@EACH
@pytest.mark.parametrize("wrong", [-1, 1])
def test_no_kernel_gets_a_payload_or_a_vector_of_another_length(
    pair: tuple[Codec, Codec], wrong: int
) -> None:
    _, codec = pair
    values, scratch = some_values(1)[0], Scratch()
    data = encoded(codec, values)
    other = bytearray(len(data) + wrong)
    short = np.zeros(values.size + wrong, np.float32)
    with pytest.raises(ValueError, match="values"):
        codec.encode(values, SIZES, other, scratch)
    with pytest.raises(ValueError, match="values"):
        codec.encode(values, SIZES, data, scratch, base=short)
    with pytest.raises(BadPayload):
        codec.encode_sum(codec, Addends([data, other], [1, 1]), SIZES, data, scratch)
    with pytest.raises(ValueError, match="weights"):
        codec.encode_sum(codec, Addends([data, data], [1]), SIZES, data, scratch)
    with pytest.raises(BadPayload):
        codec.decode(other, SIZES, values, scratch)
    with pytest.raises(ValueError, match="values"):
        codec.decode_add(data, SIZES, 1.0, short, scratch)
    for vectors in ((values, values, short), (values, short, values), (short, values, values)):
        with pytest.raises(ValueError, match="values"):
            step_encoded(Step(*vectors), codec, data, SIZES, OPTIMIZER, scratch)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 1000, 1023, 4097, SUM_TILE, SUM_TILE + 3])
def test_squares_are_added_in_the_order_of_numpy(count: int) -> None:
    for scale in (1e10, 1e-30):
        rows = some_values(1, (3 * count,), scale)[0].reshape(3, count)
        compare_sums(rows)


def test_a_kernel_with_another_bit_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    codecs.check()
    kernel = kernels.step

    def fused(codec: int, tiles: Any, data: Any, theta: Any, *others: Any) -> None:
        kernel(codec, tiles, data, theta, *others)
        out = others[-1]
        if codec == kernels.INT2:
            out[-1] = np.nextafter(out[-1], np.float32(np.inf))

    monkeypatch.setattr(kernels, "step", fused)
    with pytest.raises(CodecsDiffer, match="int2 has other bits than numpy's in theta"):
        codecs.check()


@pytest.mark.parametrize("name", ["encode", "merge", "decode", "step"])
def test_no_call_compiles_anything(name: str) -> None:
    """One signature each: a call with other types would compile in the middle of a round."""
    kernel = getattr(kernels, name)
    assert len(kernel.signatures) == 1
    with pytest.raises(TypeError):
        kernel(*["not a vector"] * len(kernel.signatures[0]))
    assert len(kernel.signatures) == 1


if __name__ == "__main__":
    codecs.take()
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-k", KEPT, *IGNORED, *map(str, TESTS)]))
