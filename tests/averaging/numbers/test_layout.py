"""The partition of a model into fragments and units, and its hash."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from averaging.numbers.layout import (
    ENCODED_MIN_BYTES,
    UNIT_MAX_VALUES,
    Layout,
    TensorSpec,
    cut,
    reducers_count,
)


def gpt(blocks: int, width: int, words: int) -> list[TensorSpec]:
    shapes = {
        "norm.bias": (width,),
        "norm.weight": (width,),
        "attention": (3 * width, width),
        "projection": (width, width),
        "up": (4 * width, width),
        "down": (width, 4 * width),
    }
    body = [
        TensorSpec(f"block.{block}.{name}", shape)
        for block in range(blocks)
        for name, shape in shapes.items()
    ]
    return [TensorSpec("embedding", (words, width)), *body, TensorSpec("head", (words, width))]


def covered(layout: Layout) -> dict[str, list[tuple[int, int]]]:
    """The values of each tensor that the units hold, in order."""
    ranges: dict[str, list[tuple[int, int]]] = {}
    for fragment in layout.fragments:
        offset = 0
        order = [(-unit.size, unit.tensor, unit.start) for unit in fragment.units]
        assert order == sorted(order)
        for unit in fragment.units:
            assert unit.offset == offset, "units lie one after the other"
            assert unit.size > 0
            offset = unit.values.stop
            ranges.setdefault(unit.tensor, []).append((unit.start, unit.end))
        assert fragment.size == offset
    return {name: sorted(found) for name, found in ranges.items()}


shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)


@given(st.lists(shapes, min_size=1, max_size=30), st.integers(1, 40), st.randoms())
def test_every_value_is_in_exactly_one_unit(
    some: list[tuple[int, ...]], fragments: int, rng: random.Random
) -> None:
    specs = [TensorSpec(f"tensor {index}", shape) for index, shape in enumerate(some)]
    total = sum(spec.size for spec in specs)
    if not total:
        with pytest.raises(ValueError, match="no tensor has a value"):
            Layout.build(specs, fragments)
        return
    special = [spec.name for spec in specs if rng.random() < 0.2]
    layout = Layout.build(specs, fragments, embeddings=special[::2], heads=special[1::2])

    assert 1 <= len(layout.fragments) <= fragments
    assert layout.size == total
    found = covered(layout)
    for spec in specs:
        end = 0
        for start, stop in found.pop(spec.name, []):
            assert start == end
            end = stop
        assert end == spec.size
    assert not found


def test_the_layout_does_not_depend_on_the_order_or_dtype_of_the_tensors() -> None:
    specs = gpt(4, 32, 500)
    other = [TensorSpec(spec.name, spec.shape, "bfloat16") for spec in reversed(specs)]

    here = Layout.build(specs, 6, embeddings=["embedding"], heads=["head"])
    there = Layout.build(other, 6, embeddings=["embedding"], heads=["head"])

    assert here.fragments == there.fragments
    assert here.hash == there.hash


def test_the_hash_tells_names_shapes_kinds_and_fragment_counts_apart() -> None:
    specs = [TensorSpec("a", (4, 6)), TensorSpec("b", (24,))]
    hashes = {
        Layout.build(specs, 2).hash,
        Layout.build(specs, 3).hash,
        Layout.build(specs, 2, embeddings=["a"]).hash,
        Layout.build(specs, 2, heads=["a"]).hash,
        Layout.build([specs[0], TensorSpec("c", (24,))], 2).hash,
        Layout.build([TensorSpec("a", (6, 4)), specs[1]], 2).hash,
    }

    assert len(hashes) == 6


def test_statistics_are_a_last_fragment_that_changes_no_other_one() -> None:
    specs = gpt(4, 32, 500)
    running = [TensorSpec("norm.running_mean", (32,)), TensorSpec("norm.count", ())]
    without = Layout.build(specs, 6)
    names = {spec.name for spec in running}
    layout = Layout.build([*specs, *running], 6, statistics=names)

    assert layout.fragments[:-1] == without.fragments
    assert {unit.tensor for unit in layout.fragments[-1].units} == names
    flags = [fragment.has_statistics for fragment in layout.fragments]
    assert flags == [False] * 6 + [True]
    assert layout.hash not in {without.hash, Layout.build([*specs, *running], 6).hash}


def test_a_model_of_statistics_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to train"):
        Layout.build([TensorSpec("mean", (3,))], 1, statistics=["mean"])


def test_the_hash_of_a_known_layout_never_changes() -> None:
    layout = Layout.build(gpt(2, 8, 100), 4, embeddings=["embedding"], heads=["head"])

    assert layout.hash.hex() == "48d93da97dd826351140a3f697155ab6d8940a2544669605000ccf91db514d20"
    assert [fragment.size for fragment in layout.fragments] == [784, 784, 800, 800]


def test_fragments_are_of_nearly_equal_size() -> None:
    layout = Layout.build(gpt(12, 96, 6007), 24, embeddings=["embedding"], heads=["head"])

    sizes = [fragment.size for fragment in layout.fragments]
    assert len(sizes) == 24
    assert max(sizes) <= 4 / 3 * layout.size / 24


def test_embeddings_and_head_share_no_fragment_with_the_body() -> None:
    layout = Layout.build(gpt(12, 96, 6007), 24, embeddings=["embedding"], heads=["head"])

    for fragment in layout.fragments:
        apart = [unit.kind in ("embedding", "head") for unit in fragment.units]
        assert all(apart) or not any(apart)


@pytest.mark.parametrize("words", [30, 60, 64, 100, 256, 1000, 6007])
@pytest.mark.parametrize("fragments", [2, 4, 24])
def test_no_fragment_is_tiny_however_small_the_vocabulary(words: int, fragments: int) -> None:
    layout = Layout.build(gpt(6, 48, words), fragments, embeddings=["embedding"], heads=["head"])

    sizes = [fragment.size for fragment in layout.fragments]
    assert len(sizes) == fragments
    assert max(sizes) <= 3 * min(sizes)


def test_embeddings_stay_units_of_their_kind_among_the_body() -> None:
    layout = Layout.build(gpt(6, 48, 16), 4, embeddings=["embedding"], heads=["head"])

    kinds = [kind for fragment in layout.fragments for kind in fragment.kinds]
    assert kinds.count("embedding") == 1
    assert kinds.count("head") == 1


def test_a_single_fragment_holds_embeddings_too() -> None:
    layout = Layout.build(gpt(1, 8, 100), 1, embeddings=["embedding"], heads=["head"])

    assert len(layout.fragments) == 1
    assert {"embedding", "head", "matrix", "vector"} == set(layout.fragments[0].kinds)


def test_a_tensor_larger_than_a_fragment_is_split_by_rows() -> None:
    layout = Layout.build([TensorSpec("large", (1000, 30)), TensorSpec("small", (50, 30))], 10)

    ranges = covered(layout)
    assert len(ranges["large"]) > 1
    assert all(start % 30 == 0 and end % 30 == 0 for start, end in ranges["large"])
    assert len(ranges["small"]) == 1


def test_one_tensor_makes_as_many_fragments_as_asked_for() -> None:
    layout = Layout.build([TensorSpec("only", (100, 7))], 24)

    assert len(layout.fragments) == 24
    assert max(fragment.size for fragment in layout.fragments) == 35


def test_more_fragments_than_values_leaves_no_empty_fragment() -> None:
    layout = Layout.build([TensorSpec("a", (3,)), TensorSpec("b", ())], 24)

    assert [fragment.size for fragment in layout.fragments] == [1, 1, 1, 1]


def test_scalars_are_vectors_and_empty_tensors_take_no_place() -> None:
    specs = [TensorSpec("scalar", ()), TensorSpec("empty", (0, 5)), TensorSpec("row", (1, 9))]
    layout = Layout.build(specs, 1)

    assert [(unit.tensor, unit.kind) for unit in layout.fragments[0].units] == [
        ("row", "vector"),
        ("scalar", "vector"),
    ]


@pytest.mark.parametrize(
    "shape", [(2**20,), (2**20 + 1,), (3, 2**20 + 5), (5, 700, 900), (2**22 + 3,), (1, 2**21)]
)
def test_no_unit_is_larger_than_the_limit(shape: tuple[int, ...]) -> None:
    layout = Layout.build([TensorSpec("large", shape)], 1)

    sizes = layout.fragments[0].unit_sizes
    assert max(sizes) <= UNIT_MAX_VALUES
    assert len(sizes) <= 2 * -(-layout.size // UNIT_MAX_VALUES)


def test_twenty_thousand_tensors_are_laid_out() -> None:
    specs = [TensorSpec(f"tensor {index}", (index % 97, 3)) for index in range(20_000)]
    layout = Layout.build(specs, 24)

    sizes = [fragment.size for fragment in layout.fragments]
    assert max(sizes) - min(sizes) <= 97 * 3


def test_a_bad_description_is_refused_with_its_name() -> None:
    with pytest.raises(ValueError, match="two tensors are named 'a'"):
        Layout.build([TensorSpec("a", (1,)), TensorSpec("a", (2,))], 1)
    with pytest.raises(ValueError, match=r"\['missing'\]"):
        Layout.build([TensorSpec("a", (1,))], 1, embeddings=["missing"])
    with pytest.raises(ValueError, match="'counts' is int64"):
        TensorSpec("counts", (4,), "int64")
    with pytest.raises(ValueError, match="fragments is 0"):
        Layout.build([TensorSpec("a", (1,))], 0)


# Cutting a fragment into slices by shares.


shares = st.lists(st.integers(0, 10**10), min_size=1, max_size=20).filter(any)


@given(st.lists(st.integers(1, 5000), max_size=60), shares)
def test_slices_cover_all_units_once_and_end_at_units(sizes: list[int], shares: list[int]) -> None:
    slices = cut(sizes, shares)

    assert len(slices) == len(shares)
    unit = offset = 0
    for index, (piece, share) in enumerate(zip(slices, shares, strict=True)):
        assert (piece.index, piece.first_unit, piece.offset) == (index, unit, offset)
        assert piece.size == sum(sizes[piece.units])
        assert share or not piece.size, "who has no share gets no values"
        unit, offset = piece.end_unit, piece.values.stop
    assert unit == len(sizes)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=60), shares)
def test_a_slice_is_as_near_to_its_share_as_its_units_allow(
    sizes: list[int], shares: list[int]
) -> None:
    largest = max(sizes)
    for piece, share in zip(cut(sizes, shares), shares, strict=True):
        ideal = Fraction(sum(sizes) * share, sum(shares))
        assert abs(piece.size - ideal) <= largest


def test_equal_shares_of_equal_units_are_equal() -> None:
    assert [piece.size for piece in cut([10] * 12, [1, 1, 1, 1])] == [30, 30, 30, 30]


def test_a_faster_link_gets_more() -> None:
    assert [piece.size for piece in cut([10] * 12, [1, 3, 2])] == [20, 60, 40]


def test_a_fragment_of_one_unit_goes_to_one_reducer() -> None:
    assert sorted(piece.size for piece in cut([1000], [1, 1, 1])) == [0, 0, 1000]


def test_halfway_between_two_unit_ends_the_earlier_is_taken() -> None:
    assert [piece.size for piece in cut([10], [1, 1])] == [0, 10]
    assert [piece.size for piece in cut([10, 10, 10], [1, 1])] == [10, 20]


@pytest.mark.parametrize("bad", [[], [0, 0], [1, -1]])
def test_impossible_shares_are_refused(bad: list[int]) -> None:
    with pytest.raises(ValueError, match="shares"):
        cut([1, 2, 3], bad)


def test_the_number_of_reducers_follows_the_encoded_bytes() -> None:
    assert reducers_count(8, 1) == 1
    assert reducers_count(8, ENCODED_MIN_BYTES) == 1
    assert reducers_count(8, ENCODED_MIN_BYTES + 1) == 2
    assert reducers_count(8, 100 * ENCODED_MIN_BYTES) == 8
    assert reducers_count(8, 0) == 1
