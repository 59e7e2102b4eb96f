"""Digests of attested states, and the roots that a rollback makes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from averaging.history.chain import Chain
from averaging.history.manifest import (
    describe,
    digest_of_pieces,
    grew_from,
    numbers_digest,
    read_manifest,
    rolled_back,
    root_lineage,
)
from averaging.history.standing import Apart, Standing, TheyAreBehind, relate
from averaging.messages import Link
from tests.averaging.live.served_states import state_of


def test_a_manifest_tells_the_digest_of_its_numbers() -> None:
    state = state_of(3, 200_000)
    manifest = read_manifest(describe(state), fragment=state.fragment, pieces=state.pieces)
    assert digest_of_pieces(manifest.digests) == numbers_digest(state)
    state.theta[7] += 1
    assert digest_of_pieces(manifest.digests) != numbers_digest(state)


def test_a_root_has_the_numbers_of_its_state_and_a_lineage_of_its_own() -> None:
    state = state_of(3, 1000)
    root = rolled_back(state, 7)
    assert root.version == state.version + 1
    assert root.theta is state.theta and root.momentum is state.momentum
    assert root.merged == state.merged
    assert root.lineage == root_lineage(state.lineage, state.merged.digest(), 7)
    assert root.lineage != rolled_back(state, 8).lineage
    assert root.chain.find(state.version, state.lineage) is not None
    assert numbers_digest(root) == numbers_digest(state)
    read = read_manifest(describe(root), fragment=root.fragment, pieces=root.pieces)
    assert read.lineage == root.lineage, "it binds the merged map as any lineage does"


def test_a_history_after_the_state_is_apart_from_the_root() -> None:
    state = state_of(3, 1000)
    after, root = Standing.of(rolled_back(state, 1)), Standing.of(rolled_back(state, 2))
    assert isinstance(relate(root.head(), root.chain, after.head()), Apart)
    assert isinstance(relate(root.head(), root.chain, Standing.of(state).head()), TheyAreBehind), (
        "the state itself is history of the root"
    )


def test_a_chain_that_has_dropped_the_root_does_not_say_that_it_was_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a swarm of sixty groups it drops the links of 170 versions ago, not of 10 000."""
    monkeypatch.setattr("averaging.history.chain.CHAIN_MAX_LINKS", 12)
    state = replace(state_of(0, 1000), chain=Chain([link(0, "first"), link(1, "first")]))
    other = state.chain.extended(link(2, "other"))
    root = rolled_back(replace(state, version=1, lineage=state.chain.tip.lineage), 7)
    chain, told = root.chain, []
    assert grew_from(other, root.version, root.lineage) is False
    for version in range(3, 12):
        chain = chain.extended(link(version, "mine"))
        chain = chain.united([link(version, "theirs"), link(version, "others")])
        told.append(grew_from(chain, root.version, root.lineage))
        other = other.extended(link(version, "other"))
        assert grew_from(other, root.version, root.lineage) is False
    assert told[:2] == [True, True] and told[-1] is None and False not in told
    assert grew_from(chain, chain.tip.version, root.lineage) is False


def link(version: int, name: str) -> Link:
    return Link(version, name.encode().ljust(32, b"-"), 10 * version)
