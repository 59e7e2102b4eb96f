"""The pieces of slices that are audited one by one."""

from __future__ import annotations

from itertools import pairwise

import pytest

from averaging.messages import ROSTER_MAX
from averaging.numbers.arithmetic import Numbers
from averaging.numbers.chunks import (
    CHUNK_MIN_VALUES,
    CHUNK_VALUES,
    CHUNKS,
    DIGEST_BYTES,
    LEVELS_MAX,
    Cutting,
    digest_of,
    leads_to,
    path_to,
    root_of,
)
from averaging.numbers.layout import Layout, TensorSpec, reducers_count

NUMBERS = Numbers(codec="int4", codec_down=None, merge="mean", eta=0.7, mu=0.9)


def cutting(*shapes: tuple[int, int], shares: tuple[int, ...] = (1,)) -> Cutting:
    specs = [TensorSpec(f"t{number:04}", shape) for number, shape in enumerate(shapes)]
    return Cutting(Layout.build(specs, 1).fragments[0], NUMBERS.up, NUMBERS.down, shares)


def sizes(cut: Cutting, index: int = 0) -> list[int]:
    return [sum(piece.sizes) for piece, _ in cut.pieces(index)]


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("shares", [(1,), (3, 1), (1, 2, 2)])
def test_pieces_are_all_of_a_slice_in_order(shares: tuple[int, ...], merged: bool) -> None:
    shapes = [(1024, 1024)] * 3 + [(100, 300)] * 7 + [(64, 64)] * 30 + [(1, 64)] * 20
    cut = cutting(*shapes, shares=shares)
    for index in range(len(shares)):
        places = [place for _, place in cut.pieces(index, merged=merged)]
        whole = cut.merged_of(index) if merged else cut.data_of(index)
        assert places[0].start == 0 and places[-1].stop == whole.stop - whole.start
        assert all(one.stop == other.start for one, other in pairwise(places))


def test_many_units_make_sixteen_pieces_that_are_about_equal() -> None:
    found = sizes(cutting(*[(64, 64)] * 100))
    assert len(found) == CHUNKS
    assert max(found) <= 7 * 4096


def test_no_unit_is_cut_and_the_small_ones_are_no_part_of_the_large_ones_piece() -> None:
    found = sizes(cutting((512, 512), (512, 128), *[(16, 1000)] * 40))
    assert found[:2] == [512 * 512, 512 * 128]
    assert len(found) == CHUNKS
    assert min(found[2:]) >= CHUNK_MIN_VALUES


def test_tiny_slices_have_no_pieces_of_their_own() -> None:
    assert sizes(cutting(*[(1, 1000)] * 16)) == [16_000]


def test_a_large_slice_has_more_pieces() -> None:
    cut = cutting(*[(1024, 1024)] * 20)
    assert sizes(cut) == [CHUNK_VALUES] * 20


@pytest.mark.parametrize(
    ("width", "layers", "fewest", "most"),
    [(32, 1, 1, 1), (64, 2, 3, 3), (128, 4, 5, 6), (256, 5, 1, 4)],
)
def test_the_slices_of_small_models_have_so_many_pieces(
    width: int, layers: int, fewest: int, most: int
) -> None:
    """The model is a transformer of bytes in four fragments, with ten members and int4."""
    shapes = {"embedding": (256, width), "places": (256, width)}
    for layer in range(layers):
        for name, rows, columns in (
            ("into", 3 * width, width),
            ("out", width, width),
            ("up", 4 * width, width),
            ("down", width, 4 * width),
        ):
            shapes[f"h{layer}.{name}"] = rows, columns
            shapes[f"h{layer}.{name}.bias"] = 1, rows
        shapes |= {f"h{layer}.norm{number}": (1, width) for number in range(4)}
    layout = Layout.build([TensorSpec(*each) for each in shapes.items()], 4)
    found = []
    for fragment in layout.fragments:
        count = reducers_count(10, NUMBERS.up.encoded_size(fragment.unit_sizes))
        cut = Cutting(fragment, NUMBERS.up, NUMBERS.down, (1,) * count)
        found += [len(sizes(cut, index)) for index in range(count)]
    assert (min(found), max(found)) == (fewest, most)


# Hash trees over the pieces of slices.


def pieces_of(count: int) -> list[bytes]:
    return [b"piece %d" % number for number in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 31])
def test_each_piece_and_no_other_leads_to_the_root_from_its_place(count: int) -> None:
    pieces = pieces_of(count)
    leaves = [digest_of(piece) for piece in pieces]
    root = root_of(leaves)
    for index, piece in enumerate(pieces):
        path = path_to(index, leaves)
        assert leads_to(root, path, piece, index=index, count=count)
        assert not leads_to(root, path, b"another", index=index, count=count)
        assert not leads_to(root, path + bytes(DIGEST_BYTES), piece, index=index, count=count)
        assert not leads_to(bytes(DIGEST_BYTES), path, piece, index=index, count=count)
        for other in set(range(count)) - {index}:
            assert not leads_to(root, path, piece, index=other, count=count)
        if path:
            assert not leads_to(root, path[1:], piece, index=index, count=count)
            assert not leads_to(root, path[:-DIGEST_BYTES], piece, index=index, count=count)


def test_roots_differ_by_order_number_and_content() -> None:
    leaves = [digest_of(piece) for piece in pieces_of(5)]
    others = [leaves[::-1], leaves[:-1], [*leaves, leaves[-1]], [*leaves, bytes(32)], []]
    assert len({root_of(each) for each in (leaves, *others)}) == 1 + len(others)


def test_an_inner_node_passes_for_no_piece() -> None:
    leaves = [digest_of(piece) for piece in pieces_of(4)]
    root = root_of(leaves)
    inner = b"".join(leaves[:2])
    assert not leads_to(root, root_of(leaves[2:]), inner, index=0, count=2)


def test_paths_to_a_million_pieces_are_short_enough_for_proofs_of_any_roster() -> None:
    longest = DIGEST_BYTES * LEVELS_MAX
    assert len(path_to(0, [bytes(32)] * (1 << 12))) == 12 * DIGEST_BYTES
    assert (ROSTER_MAX + 1) * longest < 64 << 10
