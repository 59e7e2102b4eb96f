"""Overlaps of units with the boxes that processes hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.trainer.units import Box, overlap, owners


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    full = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    offset = tuple(draw(st.integers(0, extent - 1)) for extent in full)
    shape = tuple(
        draw(st.integers(0, extent - first)) for extent, first in zip(full, offset, strict=True)
    )
    return Box(full, offset, shape)


@given(boxes(), st.data())
def test_an_overlap_agrees_with_indexing_the_whole_tensor(box: Box, data: st.DataObject) -> None:
    values = np.arange(int(np.prod(box.full))).reshape(box.full)
    held = values[tuple(slice(o, o + s) for o, s in zip(box.offset, box.shape, strict=True))]
    start = data.draw(st.integers(0, values.size))
    end = data.draw(st.integers(start, values.size))
    expected = [v for v in held.reshape(-1) if start <= v < end]
    found = overlap(box, start, end)
    if found is None:
        assert not expected
        return
    assert found.size == len(expected)
    assert held.reshape(-1)[found.in_box].tolist() == expected
    assert values.reshape(-1)[start:end][found.in_unit].tolist() == expected


def test_rows_of_a_tensor_are_one_slice() -> None:
    found = overlap(Box((8, 3), (2, 0), (4, 3)), 3, 12)
    assert found is not None
    assert (found.in_unit, found.in_box, found.size) == (slice(3, 9), slice(0, 6), 6)


def test_copies_and_empty_parts_own_nothing() -> None:
    left, right, none = Box((3,), (0,), (2,)), Box((3,), (2,), (1,)), Box((3,), (3,), (0,))
    assert owners([left, right, none, left, right, none]) == [0, 1]
    assert owners([Box((3,), (0,), (3,))] * 4) == [0]


def test_a_box_has_the_dimensions_of_its_tensor() -> None:
    with pytest.raises(ValueError, match="dimensions"):
        Box((3, 2), (0,), (3,))
