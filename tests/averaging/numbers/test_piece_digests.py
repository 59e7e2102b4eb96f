"""Hash trees over the pieces of slices."""

from __future__ import annotations

import pytest

from averaging.messages import ROSTER_MAX
from averaging.numbers.piece_digests import (
    DIGEST_BYTES,
    LEVELS_MAX,
    digest_of,
    leads_to,
    path_to,
    root_of,
)


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
