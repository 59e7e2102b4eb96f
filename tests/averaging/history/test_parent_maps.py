"""Lineages bind the merged maps that travel in a round: an invented entry is caught exactly."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from averaging.errors import BadPayload
from averaging.history.lineage import bound
from averaging.history.merged_map import Mark, MergedMap
from averaging.history.parent_maps import (
    ParentMap,
    decode_maps,
    encode_maps,
    parents_of,
    problem_of,
    read_maps,
    united,
)
from averaging.messages import Commit, Link
from dht.identity import PeerId
from tests.averaging.message_examples import ANNA, BORIS, COMMIT

CLARA = PeerId("clara")
HISTORY, OTHER = bytes([7]) * 32, bytes([8]) * 32
FIRST = MergedMap({ANNA: Mark(1, 20, 2000), BORIS: Mark(3, 5, 500)})
SECOND = MergedMap({ANNA: Mark(1, 10, 1000), CLARA: Mark(9, 1, 100)})
MAPS = {0: ParentMap(FIRST, HISTORY), 1: ParentMap(SECOND, OTHER)}


def meld() -> Commit:
    """A commit whose two members stand on the states of ``MAPS``."""
    parents = tuple(
        Link(4, bound(each.history, each.merged.digest()), each.merged.tokens)
        for each in MAPS.values()
    )
    members = tuple(
        msgspec.structs.replace(entry, parent=index) for index, entry in enumerate(COMMIT.members)
    )
    return msgspec.structs.replace(COMMIT, parents=parents, members=members)


def test_maps_arrive_as_they_were_sent() -> None:
    assert decode_maps(encode_maps(MAPS)) == MAPS
    assert encode_maps(dict(reversed(MAPS.items()))) == encode_maps(MAPS)
    assert decode_maps(encode_maps({})) == {}
    nothing = {3: ParentMap(MergedMap(), HISTORY)}
    assert decode_maps(encode_maps(nothing)) == nothing


def test_sixteen_maps_of_a_thousand_peers_take_160_bytes_for_each() -> None:
    maps = {
        index: ParentMap(
            MergedMap(
                {
                    PeerId(f"12D3KooW{number:044}"): Mark(
                        1 + number, 10_000 + number - index, (10_000 + number - index) * 8192
                    )
                    for number in range(1000)
                }
            ),
            HISTORY,
        )
        for index in range(16)
    }
    assert len(encode_maps(maps)) < 170 * 1000


def test_the_maps_that_the_lineages_of_the_parents_bind_are_taken() -> None:
    assert read_maps(encode_maps(MAPS), meld(), [0, 1]) == MAPS
    assert united(MAPS) == FIRST.united(SECOND)
    assert parents_of(meld(), [1]) == (1,)


@pytest.mark.parametrize(
    "invented",
    [
        FIRST.with_work(CLARA, 1, 1, 1),  # far below any bound on tokens
        FIRST.with_work(BORIS, 3, 6, 0),  # a step of another peer: its work would count as merged
        FIRST.with_work(ANNA, 1, 21, 1),
        MergedMap({ANNA: FIRST[ANNA]}),  # work of another peer is forgotten
    ],
)
def test_a_single_invented_mark_is_a_bad_payload(invented: MergedMap) -> None:
    maps = {**MAPS, 0: replace(MAPS[0], merged=invented)}

    with pytest.raises(BadPayload, match="not the one that the lineage of parent 0 binds"):
        read_maps(encode_maps(maps), meld(), [0, 1])


def test_the_history_of_a_state_is_bound_as_well() -> None:
    maps = {**MAPS, 0: replace(MAPS[0], history=OTHER)}
    assert problem_of(maps, meld(), [0, 1]) is not None


def test_a_member_brings_the_map_of_the_state_that_it_stands_on() -> None:
    assert problem_of({1: MAPS[1]}, meld(), [1]) is None
    for others in ({1: MAPS[1]}, {}, MAPS, {0: MAPS[0], 2: MAPS[0]}):
        assert "states that it brings" in (problem_of(others, meld(), [0]) or "")
    for strangers in ([], [2], [0, 2]):
        assert "members that the round does not have" in (problem_of(MAPS, meld(), strangers) or "")


def _table(**changes: object) -> bytes:
    peers, largest, rows = msgspec.msgpack.decode(encode_maps(MAPS))
    names = ("parent", "history", "absent", "incarnations", "steps", "tokens")
    first = dict(zip(names, rows[0], strict=True))
    peers = changes.pop("peers", peers)
    rows = [list({**first, **changes}.values()), *rows[1:]]
    return msgspec.msgpack.encode([peers, largest, rows])


@pytest.mark.parametrize(
    "data",
    [
        b"\xc1",
        b"",
        _table(peers=[BORIS, ANNA, CLARA]),
        _table(peers=[ANNA, ANNA, CLARA]),
        _table(steps=[0, 0]),
        _table(steps=[0, 2**53 - 1, 0]),
        _table(absent=[3]),
        _table(absent=[2, 2]),
        _table(parent=1),
    ],
)
def test_bytes_that_are_no_maps_are_a_bad_payload(data: bytes) -> None:
    with pytest.raises(BadPayload, match="not merged maps"):
        decode_maps(data)
