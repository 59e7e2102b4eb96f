"""Lineages: hashes of rounds and seals."""

from __future__ import annotations

import blake3

from averaging.history.lineage import after_fold, after_round, origin, seal_digest
from averaging.history.merged_map import Mark, MergedMap
from dht.identity import PeerId

ANNA, BORIS, CLARA = PeerId("anna"), PeerId("boris"), PeerId("clara")


def lineage(name: object) -> bytes:
    return blake3.blake3(repr(name).encode()).digest()


def test_every_part_of_a_round_is_in_its_lineage() -> None:
    a, b, commit, seal = (lineage(name) for name in ("a", "b", "commit", "seal"))
    x, y = lineage("x"), lineage("y")
    different = [
        after_round([a], commit, seal, [x, y]),
        after_round([b], commit, seal, [x, y]),
        after_round([a, b], commit, seal, [x, y]),
        after_round([b, a], commit, seal, [x, y]),
        after_round([a], seal, commit, [x, y]),
        after_round([a], commit, seal, [y, x]),
        after_round([a], commit, seal, [x]),
        after_round([a], commit, seal, []),
        after_round([a, commit], seal, x, [y]),
        after_fold(a, ANNA, 1, 2),
        after_fold(a, BORIS, 1, 2),
        after_fold(a, ANNA, 2, 2),
        origin(a, 0, b),
        origin(a, 1, b),
    ]

    assert len(set(different)) == len(different)
    assert {len(made) for made in different} == {32}


def test_a_seal_digest_depends_on_the_contributors() -> None:
    seals = {seal_digest(seal) for seal in ([], [0], [1], [0, 1], [0, 2], [256], [0, 1, 2])}
    assert len(seals) == 7


def test_known_lineages_never_change() -> None:
    a = bytes(range(32))
    made = [
        origin(a, 3, a),
        after_round([a], a, seal_digest([0, 2]), [a, a]),
        after_fold(a, ANNA, 1, 2),
        MergedMap({ANNA: Mark(1, 2, 3)}).digest(),
    ]
    assert [digest.hex() for digest in made] == [
        "14374dd9654d43800e50d0ef622006173ecc2b85a37f11abf8daa75311de12ff",
        "296317ee2c41a82f8f63c9effcee2b653c1a7d06e27b45c49525a0ce0b69b266",
        "dcbbfc8625a12ba0fead076447f6c1bde512f395f01d43d17b9e4c7614a95940",
        "c95bc43c91f95367abefd9df9d2c9136f46b1233e1efc643c8a10668c4b81d05",
    ]
