"""Merge rules, and that their bytes do not depend on how the work is divided."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from averaging.errors import NotFinite
from averaging.numbers import merge
from averaging.numbers.arrays import Float32s, norm
from averaging.numbers.codec import Addends, Codec, Scratch
from averaging.numbers.codecs import codec_named
from averaging.numbers.layout import Kind
from averaging.numbers.merge import (
    Contributions,
    MergesMany,
    Units,
    medians,
    merge_encoded,
    register,
    rule_named,
    rule_names,
)
from tests.averaging.numbers import reference

RULES = pytest.mark.parametrize("rule", ["mean", "rda", "centered_clip"])
CODECS = pytest.mark.parametrize("codec", ["f32", "int8"])

SIZES = (3000, 3000, 700, 64, 64, 1)
KINDS: tuple[Kind, ...] = ("matrix", "embedding", "head", "vector", "vector", "matrix")


def contributions(count: int, *, sizes: tuple[int, ...] = SIZES, seed: int = 0) -> list[Float32s]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(sum(sizes)).astype(np.float32) for _ in range(count)]


def encode(codec: Codec, values: Float32s, sizes: tuple[int, ...]) -> bytes:
    out = bytearray(codec.encoded_size(sizes))
    codec.encode(values, sizes, out, Scratch())
    return bytes(out)


def merged(
    rule: str,
    vectors: list[Float32s],
    weights: list[float],
    *,
    codec: str = "f32",
    sizes: tuple[int, ...] = SIZES,
    kinds: tuple[Kind, ...] = KINDS,
) -> Float32s:
    chosen = codec_named(codec)
    given = Addends([encode(chosen, vector, sizes) for vector in vectors], weights)
    out = bytearray(chosen.encoded_size(sizes))
    merge_encoded(rule_named(rule), chosen, given, Units(sizes, kinds), out, Scratch())
    result = np.empty(sum(sizes), np.float32)
    chosen.decode(out, sizes, result, Scratch())
    return result


def one_matrix(rule: str, vectors: list[Float32s], weights: list[float]) -> Float32s:
    size = vectors[0].size
    return merged(rule, vectors, weights, sizes=(size,), kinds=("matrix",))


def test_the_mean_has_the_bits_of_the_reference() -> None:
    vectors = contributions(8)
    weights = [0.05, 0.1, 0.2, 0.05, 0.15, 0.25, 0.1, 0.1]

    assert np.array_equal(merged("mean", vectors, weights), reference.mean(vectors, weights))


def test_rda_is_the_papers_formula() -> None:
    vectors = contributions(5, sizes=(4000,))
    weights = [0.1, 0.2, 0.3, 0.15, 0.25]

    result = one_matrix("rda", vectors, weights)
    assert result == pytest.approx(reference.rda(vectors, weights), rel=1e-4, abs=1e-6)


def test_rda_of_orthogonal_displacements_does_not_shrink() -> None:
    vectors = [np.zeros(64, np.float32) for _ in range(4)]
    for index, vector in enumerate(vectors):
        vector[index] = 2.0

    assert norm(one_matrix("mean", vectors, [0.25] * 4)) == pytest.approx(1.0)
    assert norm(one_matrix("rda", vectors, [0.25] * 4)) == pytest.approx(2.0)


def test_rda_is_the_mean_for_embeddings_head_and_vectors() -> None:
    vectors = contributions(3)
    mean, rda = merged("mean", vectors, [0.2, 0.3, 0.5]), merged("rda", vectors, [0.2, 0.3, 0.5])

    same = [np.array_equal(a, b) for a, b in zip(units(mean), units(rda), strict=True)]
    assert same == [kind != "matrix" for kind in KINDS]


def units(vector: Float32s) -> list[Float32s]:
    return np.split(vector, np.cumsum(SIZES)[:-1])


def test_rda_without_a_mean_direction_falls_back_to_the_mean() -> None:
    vector = contributions(1, sizes=(100,))[0]

    assert not one_matrix("rda", [vector, -vector], [0.5, 0.5]).any()
    tilted = one_matrix("rda", [vector, vector * np.float32(-3)], [0.5, 0.5])
    assert tilted == pytest.approx(-vector, rel=1e-6)


def test_rda_stays_finite_with_zeros_and_vanishing_contributions() -> None:
    vector = contributions(1, sizes=(100,))[0]
    nothing = np.zeros(100, np.float32)

    assert one_matrix("rda", [nothing, nothing], [0.5, 0.5]) == pytest.approx(nothing)
    assert one_matrix("rda", [vector, nothing], [0.5, 0.5]) == pytest.approx(vector / 2, rel=1e-5)
    assert np.isfinite(one_matrix("rda", [vector, vector * np.float32(1e-38)], [0.5, 0.5])).all()


def test_one_huge_contribution_of_many_does_not_matter_much() -> None:
    honest = contributions(7, sizes=(500,))
    center = np.float32(3.0)
    honest = [vector + center for vector in honest]
    wild = honest[0] * np.float32(-1e6)
    without = one_matrix("centered_clip", honest, [1 / 7] * 7)
    with_wild = one_matrix("centered_clip", [*honest, wild], [1 / 8] * 8)

    assert norm(with_wild - without) < 0.5 * norm(without)


def test_centered_clip_resists_better_than_the_mean_when_displacements_agree() -> None:
    rng = np.random.default_rng(5)
    shared = rng.standard_normal(500).astype(np.float32)
    honest = [
        shared + np.float32(0.1) * rng.standard_normal(500).astype(np.float32) for _ in range(7)
    ]
    wild = -shared

    def error(rule: str) -> float:
        return norm(one_matrix(rule, [*honest, wild], [1 / 8] * 8) - shared)

    assert error("centered_clip") < 0.5 * error("mean")


@RULES
@CODECS
def test_the_bytes_do_not_depend_on_how_units_are_grouped(rule: str, codec: str) -> None:
    vectors = contributions(4)
    weights = [0.1, 0.2, 0.3, 0.4]
    chosen = codec_named(codec)
    payloads = [encode(chosen, vector, SIZES) for vector in vectors]
    whole = bytearray(chosen.encoded_size(SIZES))
    given = Addends(payloads, weights)
    merge_encoded(rule_named(rule), chosen, given, Units(SIZES, KINDS), whole, Scratch())

    parts = bytearray(len(whole))
    at = 0
    for size, kind in zip(SIZES, KINDS, strict=True):
        end = at + chosen.encoded_size((size,))
        pieces = Addends([payload[at:end] for payload in payloads], weights)
        target = memoryview(parts)[at:end]
        merge_encoded(rule_named(rule), chosen, pieces, Units((size,), (kind,)), target, Scratch())
        at = end
    assert parts == whole


@RULES
@CODECS
def test_scratch_that_was_used_before_does_not_change_the_bytes(rule: str, codec: str) -> None:
    chosen = codec_named(codec)
    given = Addends([encode(chosen, vector, SIZES) for vector in contributions(4)], [0.25] * 4)
    results = set()
    scratch = Scratch()
    for fill in (0.0, np.nan, 1e30):
        for index in range(4):
            scratch.vector(index, max(SIZES)).fill(fill)
        out = bytearray(chosen.encoded_size(SIZES))
        merge_encoded(rule_named(rule), chosen, given, Units(SIZES, KINDS), out, scratch)
        results.add(bytes(out))
    assert len(results) == 1


@RULES
def test_a_single_contribution_is_its_own_merge(rule: str) -> None:
    vectors = contributions(1)

    assert merged(rule, vectors, [1.0]) == pytest.approx(vectors[0], rel=1e-5, abs=1e-6)


@RULES
def test_the_order_of_contributors_is_part_of_the_bits(rule: str) -> None:
    """The order must be the roster's: this test would fail if the order did not matter."""
    vectors = contributions(5)
    weights = [0.1, 0.15, 0.2, 0.25, 0.3]
    pairs = list(zip(vectors, weights, strict=True))
    results = {
        merged(rule, [v for v, _ in order], [w for _, w in order]).tobytes()
        for order in itertools.islice(itertools.permutations(pairs), 0, 120, 13)
    }

    assert len(results) > 1


@given(
    st.lists(
        st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=9, max_size=9),
        min_size=1,
        max_size=5,
    )
)
@settings(max_examples=60)
def test_no_rule_makes_more_of_displacements_than_the_longest(vectors: list[list[float]]) -> None:
    arrays = [np.array(vector, np.float32) for vector in vectors]
    weights = [1 / len(arrays)] * len(arrays)
    longest = max(norm(array) for array in arrays)
    for rule in rule_names():
        assert norm(one_matrix(rule, arrays, weights)) <= longest * 1.01 + 1e-30


@pytest.mark.parametrize("rule", ["mean", "centered_clip"])
def test_a_sum_that_overflows_is_refused_with_its_unit(rule: str) -> None:
    vectors = [np.full(sum(SIZES), 1.0, np.float32) for _ in range(2)]
    for vector in vectors:
        vector[3000 + 5] = 3e38
    with pytest.raises(NotFinite) as caught:
        merged(rule, vectors, [1.0, 1.0])
    assert caught.value.unit == 1


@RULES
@CODECS
@pytest.mark.parametrize("size", [1, 24, 1024, 4096, 5000])
def test_units_that_are_merged_together_get_the_bits_that_each_gets_alone(
    rule: str, codec: str, size: int
) -> None:
    kind: Kind = "matrix"
    sizes, kinds = (size,) * 7, (kind,) * 7
    vectors = contributions(2, sizes=sizes)
    vectors[0][size : 2 * size] = 0
    vectors[1][3 * size : 4 * size] = -vectors[0][3 * size : 4 * size]  # no mean direction
    weights = [0.5, 0.5]

    together = merged(rule, vectors, weights, codec=codec, sizes=sizes, kinds=kinds)

    alone = [
        merged(rule, list(pair), weights, codec=codec, sizes=(size,), kinds=("matrix",))
        for pair in zip(*(np.split(vector, 7) for vector in vectors), strict=True)
    ]
    assert together.tobytes() == np.concatenate(alone).tobytes()


def test_only_units_whose_norm_is_that_of_one_tile_are_merged_together() -> None:
    class Noting(MergesMany):
        name = "noting"

        def only_adds(self, kind: Kind) -> bool:
            return False

        def merge(self, unit: Contributions, accumulator: Float32s) -> None:
            asked.append(unit.sizes)
            unit.decode(0, accumulator)
            alone = [norm(row) for row in unit.rows(accumulator)]
            assert np.array_equal(unit.norms(), [alone])

    asked: list[tuple[int, ...]] = []
    sizes = (24, 24, 7, 4096, 4096, 5000, 5000)
    chosen = codec_named("int8")
    payload = encode(chosen, contributions(1, sizes=sizes)[0], sizes)
    out = bytearray(len(payload))
    kinds: list[Kind] = ["matrix"] * len(sizes)
    given = Addends([payload], [1.0])
    merge_encoded(Noting(), chosen, given, Units(sizes, kinds), out, Scratch())

    assert asked == [(24, 24), (7,), (4096, 4096), (5000,), (5000,)]


def test_the_median_is_the_middle() -> None:
    assert medians(np.array([[3.0]])) == 3.0
    assert np.array_equal(medians(np.array([[5.0, 4.0], [1.0, 9.0], [3.0, -1.0]])), [3.0, 4.0])
    assert medians(np.array([[4.0], [1.0], [2.0], [100.0]])) == 3.0


@pytest.mark.parametrize("rule", ["rda", "centered_clip"])
def test_a_merge_is_the_same_whether_or_not_contributions_are_decoded_once(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors, weights = contributions(5), [0.1, 0.3, 0.2, 0.3, 0.1]
    kept = merged(rule, vectors, weights)
    monkeypatch.setattr(merge, "TOGETHER_VALUES", 2 * max(SIZES))
    assert np.array_equal(merged(rule, vectors, weights), kept)
    monkeypatch.setattr(merge, "KEPT_VALUES", 0)
    assert np.array_equal(merged(rule, vectors, weights), kept)


def test_a_new_rule_is_ten_lines_and_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    # Its name would stand in what other tests of this process read.
    monkeypatch.setattr(merge, "_rules", dict(merge._rules))

    class First:
        name = "first of the roster"

        def only_adds(self, kind: Kind) -> bool:
            return False

        def merge(self, unit: Contributions, accumulator: Float32s) -> None:
            unit.decode(0, accumulator)

    register(First())
    vectors = contributions(3)

    assert np.array_equal(merged("first of the roster", vectors, [0.2, 0.3, 0.5]), vectors[0])
    with pytest.raises(ValueError, match="already"):
        register(First())


def test_an_unknown_rule_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"'mode'.*mean.*rda.*centered_clip"):
        rule_named("mode")
