"""Two foundings of one run are told apart, whatever they have in common."""

from __future__ import annotations

import numpy as np
import pytest

from averaging.history.chain import CHAIN_MAX_LINKS, Chain, ChainLink
from averaging.history.merged_map import MergedMap
from averaging.history.standing import Apart, Standing, TheyAreBehind, relate
from averaging.history.state import FragmentState

THETA = np.linspace(-1.0, 1.0, 8, dtype=np.float32)


def founded(nonce: bytes) -> FragmentState:
    return FragmentState.founded(bytes(32), 0, THETA.copy(), nonce=nonce)


def grown(chain: Chain, side: bytes, versions: int) -> Standing:
    for version in range(1, versions + 1):
        lineage = (side + version.to_bytes(4, "big")).rjust(32, b"\0")
        chain = chain.extended(ChainLink(version, lineage, 10 * version))
    return Standing(chain.tip.version, chain.tip.lineage, chain, MergedMap())


def test_founders_of_one_recipe_begin_with_equal_weights_and_two_histories() -> None:
    anna, boris = founded(b"a" * 16), founded(b"b" * 16)
    assert np.array_equal(anna.theta, boris.theta)
    relation = relate(Standing.of(anna).head(), anna.chain, Standing.of(boris).head())
    assert isinstance(relation, Apart) and relation.founded_apart


@pytest.mark.parametrize("versions", [3, CHAIN_MAX_LINKS + 700])
def test_a_second_founding_is_known_as_one_however_long_ago_it_was(versions: int) -> None:
    anna = grown(founded(b"a" * 16).chain, b"a", versions)
    boris = grown(founded(b"b" * 16).chain, b"b", versions + 5)
    for mine, theirs in ((anna, boris), (boris, anna)):
        for chain in (mine.chain, None):
            relation = relate(mine.head(), chain, theirs.head())
            assert isinstance(relation, Apart) and relation.founded_apart


def test_one_history_is_one_however_long_it_is() -> None:
    chain = founded(b"a" * 16).chain
    anna = grown(chain, b"a", CHAIN_MAX_LINKS + 700)
    assert (
        relate(anna.head(), anna.chain, Standing.of(founded(b"a" * 16)).head()) == TheyAreBehind()
    )
    fork = grown(chain, b"fork", CHAIN_MAX_LINKS + 700)
    relation = relate(anna.head(), anna.chain, fork.head())
    assert isinstance(relation, Apart) and not relation.founded_apart
