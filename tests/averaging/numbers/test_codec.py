"""The general tests of codecs, run on every codec of the table, and golden bytes."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import blake3
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from averaging.errors import BadPayload, NotFinite
from averaging.numbers.arrays import Float32s, Float64s
from averaging.numbers.codec import Addends, Scratch
from averaging.numbers.codecs import codec_named, codec_names, register
from averaging.numbers.tiles import BLOCK, TILE

GOLDEN = Path(__file__).parents[2] / "golden"
ALL = pytest.mark.parametrize("name", codec_names())
BLOCKWISE = pytest.mark.parametrize("name", [name for name in codec_names() if name != "f32"])

SIZES = (1, 2, 3, 7, 7, 7, 1023, 1024, 1025, 2047, 5000, 1, 1, 1, TILE + 3 * BLOCK + 17)
"""Odd lengths, runs of equal small units, whole blocks, and more than a tile."""


def encoded(name: str, values: Float32s, sizes: tuple[int, ...]) -> bytes:
    codec = codec_named(name)
    out = bytearray(codec.encoded_size(sizes))
    codec.encode(values, sizes, out, Scratch())
    return bytes(out)


def decoded(name: str, data: bytes, sizes: tuple[int, ...]) -> Float32s:
    out = np.full(sum(sizes), np.nan, np.float32)
    codec_named(name).decode(data, sizes, out, Scratch())
    return out


def some_values(count: int, scale: float = 1.0, seed: int = 0) -> Float32s:
    return (normal(count, seed) * scale).astype(np.float32)


@lru_cache(maxsize=8)
def normal(count: int, seed: int) -> Float64s:
    """Hundreds of tests use the same half million values, and drawing them took a third of their
    time."""
    return np.random.default_rng(seed).standard_normal(count)


def blocks(sizes: tuple[int, ...]) -> list[slice]:
    found = []
    start = 0
    for size in sizes:
        found += [slice(start + at, start + min(at + BLOCK, size)) for at in range(0, size, BLOCK)]
        start += size
    return found


def assert_within_bound(name: str, values: Float32s, sizes: tuple[int, ...]) -> None:
    codec = codec_named(name)
    data = encoded(name, values, sizes)
    codec.check(data, sizes, Scratch())
    result = decoded(name, data, sizes).astype(np.float64)
    for block in blocks(sizes):
        exact = values[block].astype(np.float64)
        bound = codec.error_bound(float(np.abs(exact).max()))
        worst = float(np.abs(result[block] - exact).max())
        assert worst <= bound, f"off by {worst}, the bound is {bound}"


@ALL
@pytest.mark.parametrize("scale", [1.0, 1e37, 1e-37, 1e-44])
def test_errors_are_within_the_stated_bound(name: str, scale: float) -> None:
    assert_within_bound(name, some_values(sum(SIZES), scale), SIZES)


floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@ALL
@given(units=st.lists(st.lists(floats, max_size=40), max_size=6))
def test_any_finite_values_come_back_within_the_bound(name: str, units: list[list[float]]) -> None:
    values = np.array([value for unit in units for value in unit], np.float32)

    assert_within_bound(name, values, tuple(len(unit) for unit in units))


@ALL
def test_the_largest_floats_do_not_overflow(name: str) -> None:
    largest = np.finfo(np.float32).max
    values = np.array([largest, -largest, largest / 2, 0, 1], np.float32)

    assert_within_bound(name, values, (5,))
    assert np.isfinite(decoded(name, encoded(name, values, (5,)), (5,))).all()


@ALL
def test_zeros_stay_zero(name: str) -> None:
    values = np.zeros(sum(SIZES), np.float32)

    assert not decoded(name, encoded(name, values, SIZES), SIZES).any()


@BLOCKWISE
@pytest.mark.parametrize("scale", [0.0, 1e-44, 1e-38])
def test_scales_stay_normal_so_that_no_quotient_is_infinite(name: str, scale: float) -> None:
    data = encoded(name, some_values(sum(SIZES), scale), SIZES)
    heads = [np.frombuffer(data, "<u4", 1, at)[0] for at in scale_offsets(name, SIZES)]
    scales = [np.uint32(head & ~kept_in_scale(name)).view(np.float32) for head in heads]

    assert len(set(scales)) == 1
    assert scales[0] > 2.0**-115


def test_f16_keeps_eleven_bits_of_every_value() -> None:
    values = some_values(100_000, 1e-6)
    result = decoded("f16", encoded("f16", values, (100_000,)), (100_000,))

    peaks = np.repeat([np.abs(values[block]).max() for block in blocks((100_000,))], BLOCK)
    bound = np.maximum(np.abs(values) * 2.0**-11, peaks[: values.size] * 2.0**-38)
    assert (np.abs(result - values) <= bound).all()


@pytest.mark.parametrize(
    ("name", "steps"), [("f32", 1000), ("f16", 1000), ("int8", 127), ("int4", 7)]
)
def test_a_value_that_a_code_represents_is_decoded_exactly(name: str, steps: int) -> None:
    values = np.arange(-steps, steps + 1, dtype=np.float32)

    result = decoded(name, encoded(name, values, (values.size,)), (values.size,))
    assert np.array_equal(result, values)


@ALL
def test_an_encoded_size_is_the_sum_over_its_units(name: str) -> None:
    codec = codec_named(name)
    assert codec.encoded_size(()) == 0
    assert codec.encoded_size((0,)) == 0
    whole = codec.encoded_size(SIZES)
    assert whole == sum(codec.encoded_size((size,)) for size in SIZES)


def test_sizes_are_what_the_format_says() -> None:
    assert codec_named("f32").encoded_size((1025,)) == 4100
    assert codec_named("f16").encoded_size((1025,)) == 4 + 2048 + 4 + 2
    assert codec_named("int8").encoded_size((1025,)) == 4 + 1024 + 4 + 1
    assert codec_named("int4").encoded_size((1025, 3)) == 4 + 512 + 4 + 1 + 4 + 2
    assert codec_named("int2").encoded_size((1025, 9)) == 4 + 256 + 4 + 2 + 4 + 4


@ALL
def test_bytes_do_not_depend_on_how_units_are_grouped(name: str) -> None:
    values = some_values(sum(SIZES), seed=1)
    whole = encoded(name, values, SIZES)
    parts = b""
    start = 0
    for size in SIZES:
        parts += encoded(name, values[start : start + size], (size,))
        start += size

    assert parts == whole
    assert np.array_equal(
        decoded(name, whole, SIZES),
        np.concatenate(
            [
                decoded(name, encoded(name, v, (v.size,)), (v.size,))
                for v in np.split(values, np.cumsum(SIZES)[:-1])
            ]
        ),
    )


@ALL
def test_a_difference_is_encoded_as_if_it_had_been_made_first(name: str) -> None:
    base, values = some_values(sum(SIZES), seed=2), some_values(sum(SIZES), seed=3)
    codec = codec_named(name)
    out = bytearray(codec.encoded_size(SIZES))
    codec.encode(values, SIZES, out, Scratch(), base=base)

    assert bytes(out) == encoded(name, base - values, SIZES)


@ALL
@pytest.mark.parametrize("weight", [0.3, 1e20, 0.0])
@pytest.mark.parametrize("scale", [1.0, 1e10])
def test_adding_multiplies_the_weight_into_the_scale(
    name: str, weight: float, scale: float
) -> None:
    values = some_values(sum(SIZES), scale)
    codec = codec_named(name)
    data = encoded(name, values, SIZES)
    accumulator = some_values(sum(SIZES), seed=4)
    before = accumulator.copy()
    codec.decode_add(data, SIZES, weight, accumulator, Scratch())

    if name == "f32":
        term = values * np.float32(weight)
    else:
        term = codes_of(name, data, SIZES)
        heads = [np.frombuffer(data, "<f4", 1, at)[0] for at in scale_offsets(name, SIZES)]
        for block, scale in zip(blocks(SIZES), heads, strict=True):
            term[block] *= scale * np.float32(weight)
    assert np.array_equal(accumulator, before + term)


def kept_in_scale(name: str) -> np.uint32:
    """The bits of a scale that are not the scale's."""
    return np.uint32(127 if name == "int2" else 0)


def codes_of(name: str, data: bytes, sizes: tuple[int, ...]) -> Float32s:
    """The values that are decoded if every scale is 1."""
    changed = bytearray(data)
    one = np.float32(1).view(np.uint32)
    for at in scale_offsets(name, sizes):
        head = np.frombuffer(changed, "<u4", 1, at)
        changed[at : at + 4] = (one | (head & kept_in_scale(name))).tobytes()
    codes = decoded(name, bytes(changed), sizes)
    return codes if name == "f16" else np.rint(codes)


def scale_offsets(name: str, sizes: tuple[int, ...]) -> list[int]:
    offsets = []
    at = 0
    for size in sizes:
        count = -(-size // BLOCK)
        offsets += [at + 4 * index for index in range(count)]
        at += codec_named(name).encoded_size((size,))
    return offsets


@ALL
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("unit", [0, 7, 14])
def test_a_value_that_is_not_finite_is_refused(name: str, bad: float, unit: int) -> None:
    values = some_values(sum(SIZES))
    values[sum(SIZES[:unit])] = bad
    with pytest.raises(NotFinite) as caught:
        encoded(name, values, SIZES)

    assert caught.value.unit == unit
    assert "tensor 'head'" in str(caught.value.in_tensor("head"))


@ALL
def test_a_difference_that_overflows_is_refused(name: str) -> None:
    base, values = np.full(5, 3e38, np.float32), np.full(5, -3e38, np.float32)
    codec = codec_named(name)
    with pytest.raises(NotFinite):
        codec.encode(values, (5,), bytearray(codec.encoded_size((5,))), Scratch(), base=base)


@ALL
@pytest.mark.parametrize("change", [-1, 1, -1000, 10_000])
def test_a_wrong_length_is_refused_before_anything_is_written(name: str, change: int) -> None:
    codec = codec_named(name)
    data = bytes(codec.encoded_size(SIZES) + change)
    out = np.ones(sum(SIZES), np.float32)
    with pytest.raises(BadPayload, match="the layout says"):
        codec.check(data, SIZES, Scratch())
    with pytest.raises(BadPayload, match="the layout says"):
        codec.decode(data, SIZES, out, Scratch())
    with pytest.raises(BadPayload, match="the layout says"):
        codec.decode_add(data, SIZES, 1.0, out, Scratch())
    assert (out == 1).all()


@BLOCKWISE
@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf, -1.0])
def test_an_impossible_scale_is_refused(name: str, scale: float) -> None:
    good = encoded(name, some_values(sum(SIZES)), SIZES)
    for at in scale_offsets(name, SIZES):
        data = bytearray(good)
        data[at : at + 4] = np.float32(scale).tobytes()
        with pytest.raises(BadPayload, match="has the scale"):
            codec_named(name).check(data, SIZES, Scratch())


@ALL
@pytest.mark.parametrize("first", range(0, 60, 20))
def test_bytes_that_pass_the_check_decode_to_finite_values(name: str, first: int) -> None:
    for seed in range(first, first + 20):
        check_decodes_to_finite_values(name, seed)


def check_decodes_to_finite_values(name: str, seed: int) -> None:
    rng = random.Random(seed)
    sizes = tuple(rng.choice(SIZES[:12]) for _ in range(rng.randrange(1, 6)))
    codec = codec_named(name)
    data = bytearray(encoded(name, some_values(sum(sizes), 10.0 ** rng.randrange(-40, 38)), sizes))
    if seed % 2:
        data[:] = rng.randbytes(len(data))
    elif name != "f32":  # valid data, except for one scale, which is the largest float
        at = rng.choice(scale_offsets(name, sizes))
        data[at : at + 4] = np.finfo(np.float32).max.tobytes()
    out = np.empty(sum(sizes), np.float32)
    codec.decode(data, sizes, out, Scratch())  # raises nothing, whatever the bytes are
    try:
        codec.check(data, sizes, Scratch())
    except BadPayload:
        return
    assert np.isfinite(out).all(), f"seed {seed}"


@ALL
def test_payloads_need_no_alignment(name: str) -> None:
    values = some_values(sum(SIZES))
    data = encoded(name, values, SIZES)
    shifted = memoryview(b"x" + data)[1:]

    assert np.array_equal(decoded(name, bytes(data), SIZES), decoded(name, shifted, SIZES))  # type: ignore[arg-type]


@ALL
def test_scratch_that_was_used_before_does_not_change_the_result(name: str) -> None:
    scratch = Scratch()
    for buffer in (scratch.first, scratch.second):
        buffer.fill(np.nan)
    scratch.bytes.fill(-1)
    codec = codec_named(name)
    values = some_values(sum(SIZES))
    out = bytearray(codec.encoded_size(SIZES))
    codec.encode(values, SIZES, out, scratch)
    assert bytes(out) == encoded(name, values, SIZES)
    result = np.empty_like(values)
    codec.decode(out, SIZES, result, scratch)
    assert np.array_equal(result, decoded(name, bytes(out), SIZES))


@ALL
def test_pieces_are_the_decoded_vector_in_order(name: str) -> None:
    values = some_values(sum(SIZES))
    data = encoded(name, values, SIZES)
    scratch = Scratch()
    whole = np.empty_like(values)
    end = 0
    for part, piece in codec_named(name).pieces(data, SIZES, 1.0, scratch):
        assert part.start == end
        assert piece.size == part.stop - part.start <= TILE
        scratch.second.fill(np.nan)
        whole[part] = piece
        end = part.stop
    assert end == values.size
    assert np.array_equal(whole, decoded(name, data, SIZES))


@ALL
def test_threads_with_their_own_scratch_do_not_disturb_each_other(name: str) -> None:
    sizes = (3 * TILE, 2000, 64, 64)
    inputs = [some_values(sum(sizes), seed=seed) for seed in range(6)]
    expected = [encoded(name, values, sizes) for values in inputs]
    with ThreadPoolExecutor(3) as pool:
        for _ in range(3):
            results = pool.map(lambda values: encoded(name, values, sizes), inputs)
            assert list(results) == expected


def golden_values() -> Float32s:
    """Return values made with integers, so that no machine's random numbers or rounding matter."""
    integers = (np.arange(3000, dtype=np.int64) * 2654435761) % 4093 - 2046
    powers = np.arange(3000) // 100 - 15
    values: Float32s = np.ldexp(integers.astype(np.float32), powers).astype(np.float32)
    return values


GOLDEN_BITS = {
    "f32": "d387032e3e308534951fc3470ef5d7ee90db23ae633cdc29e8630615187da801",
    "f16": "d387032e3e308534951fc3470ef5d7ee90db23ae633cdc29e8630615187da801",
    "int8": "621d174d431e1aff8b3aeba8bd61025fd6be2540408ddb53c06afdbc639d09ce",
    "int4": "c41109e503a49dae8bf84f5728a2c6bf62b695102bc337250a545897a772d5a8",
    "int2": "b41c83d31bdcf7d4dddb526b72bd1db5fb4e4f3ac6a55ca25d892a9507f06991",
}

GOLDEN_SIZES = (1500, 1024, 400, 25, 25, 25, 1)


@ALL
def test_encoded_values_have_their_golden_bytes(name: str) -> None:
    expected = (GOLDEN / f"codec_{name}.bin").read_bytes()

    assert encoded(name, golden_values(), GOLDEN_SIZES) == expected


@ALL
def test_golden_bytes_decode_to_golden_bits(name: str) -> None:
    data = (GOLDEN / f"codec_{name}.bin").read_bytes()
    result = decoded(name, data, GOLDEN_SIZES)
    codec_named(name).decode_add(data, GOLDEN_SIZES, 0.3, result, Scratch())

    assert blake3.blake3(result.astype("<f4").tobytes()).hexdigest() == GOLDEN_BITS[name]


def test_int2_decodes_each_bin_to_the_mean_magnitude_of_its_values() -> None:
    values = some_values(BLOCK, 0.01, seed=5)
    result = decoded("int2", encoded("int2", values, (BLOCK,)), (BLOCK,))

    sizes, step = np.abs(values), np.abs(values).max() / 127
    low, high = np.unique(np.abs(result))
    is_large = np.abs(result) == high
    assert sizes[is_large].min() >= sizes[~is_large].max() - step
    assert sizes[is_large].min() == pytest.approx(1.5 * sizes.mean(), rel=0.05)
    assert low == pytest.approx(sizes[~is_large].mean(), rel=0.02)
    assert high == pytest.approx(sizes[is_large].mean(), rel=0.02)
    assert (np.signbit(result) == np.signbit(values)).all()


@ALL
def test_very_many_units_of_a_single_value_are_decoded(name: str) -> None:
    sizes = (1,) * 100_000
    values = some_values(len(sizes))

    assert np.allclose(decoded(name, encoded(name, values, sizes), sizes), values, rtol=2.0**-10)


def test_int2_keeps_values_of_one_magnitude() -> None:
    values = np.where(np.arange(BLOCK) % 3, 0.5, -0.5).astype(np.float32)

    result = decoded("int2", encoded("int2", values, (BLOCK,)), (BLOCK,))
    assert np.allclose(result, values, rtol=2.0**-15, atol=0)


def test_an_unknown_codec_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"'int5'.*f32.*f16.*int8.*int4"):
        codec_named("int5")


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ValueError, match="'int8' already"):
        register(codec_named("int8"))


@ALL
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("source", codec_names())
def test_an_encoded_sum_is_the_sum_encoded(name: str, count: int, source: str) -> None:
    codec, given = codec_named(name), codec_named(source)
    vectors = [some_values(sum(SIZES), seed=seed) for seed in range(count)]
    for vector in vectors:
        vector[::3] = -0.0  # a sum that starts from zero has no negative zero
    payloads = [encoded(source, vector, SIZES) for vector in vectors]
    weights = [0.3, 0.6, 0.1][:count]

    total = np.zeros(sum(SIZES), np.float32)
    for payload, weight in zip(payloads, weights, strict=True):
        given.decode_add(payload, SIZES, weight, total, Scratch())
    out = bytearray(codec.encoded_size(SIZES))
    codec.encode_sum(given, Addends(payloads, weights), SIZES, out, Scratch())

    assert bytes(out) == encoded(name, total, SIZES)


@ALL
def test_a_sum_that_overflows_is_refused_with_its_unit(name: str) -> None:
    largest = np.full(sum(SIZES), 1.0, np.float32)
    largest[-1] = np.finfo(np.float32).max
    payload = encoded(name, largest, SIZES)
    out = bytearray(len(payload))
    codec = codec_named(name)

    with pytest.raises(NotFinite) as caught:
        codec.encode_sum(codec, Addends([payload] * 3, [1.0] * 3), SIZES, out, Scratch())
    assert caught.value.unit == len(SIZES) - 1


def test_an_incomplete_codec_is_refused_with_what_it_lacks() -> None:
    """A plugin's codec was taken, and failed with an ``AttributeError`` inside the first round."""

    class Sign:
        name = "sign"

        def encode(self) -> None: ...

    with pytest.raises(
        ValueError, match=r"the codec Sign lacks .*decode, .*encoded_size"
    ) as caught:
        register(Sign())  # type: ignore[arg-type]
    assert "encode," not in str(caught.value) and "sign" not in codec_names()
