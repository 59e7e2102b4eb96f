"""Foundings of one run with other first weights are told apart; with equal ones they are one."""

from __future__ import annotations

import numpy as np
import pytest

from averaging.history.chain import CHAIN_MAX_LINKS, Chain
from averaging.history.merged_map import MergedMap
from averaging.history.standing import Apart, Same, Standing, TheyAreBehind, relate
from averaging.history.state import FragmentState
from averaging.messages import Link

THETA = np.linspace(-1.0, 1.0, 8, dtype=np.float32)


def founded(first: float = 0.0) -> FragmentState:
    """A founder's state; ``first``: what its weights differ by from another one's."""
    return FragmentState.founded(bytes(32), 0, THETA + np.float32(first), 0)


def grown(chain: Chain, side: bytes, versions: int) -> Standing:
    for version in range(1, versions + 1):
        lineage = (side + version.to_bytes(4, "big")).rjust(32, b"\0")
        chain = chain.extended(Link(version, lineage, 10 * version))
    return Standing(chain.tip.version, chain.tip.lineage, chain, MergedMap())


def test_founders_with_equal_first_weights_begin_one_history() -> None:
    """The seed of the run file gives them: what each did until they meet is a fork like others."""
    anna, boris = founded(), founded()
    assert relate(Standing.of(anna).head(), anna.chain, Standing.of(boris).head()) == Same()
    mine, theirs = grown(anna.chain, b"a", 3), grown(boris.chain, b"b", 5)
    relation = relate(mine.head(), mine.chain, theirs.head())
    assert relation == Apart(ancestor=0, mine=30, theirs=50)


def test_founders_with_other_first_weights_begin_two() -> None:
    anna, boris = founded(), founded(1.0)
    relation = relate(Standing.of(anna).head(), anna.chain, Standing.of(boris).head())
    assert isinstance(relation, Apart) and relation.founded_apart


@pytest.mark.parametrize("versions", [3, CHAIN_MAX_LINKS + 700])
def test_a_second_founding_is_known_as_one_however_long_ago_it_was(versions: int) -> None:
    anna = grown(founded().chain, b"a", versions)
    boris = grown(founded(1.0).chain, b"b", versions + 5)
    for mine, theirs in ((anna, boris), (boris, anna)):
        relation = relate(mine.head(), mine.chain, theirs.head())
        assert isinstance(relation, Apart) and relation.founded_apart


def test_one_history_is_one_however_long_it_is() -> None:
    chain = founded().chain
    anna = grown(chain, b"a", CHAIN_MAX_LINKS + 700)
    assert relate(anna.head(), anna.chain, Standing.of(founded()).head()) == TheyAreBehind()
    fork = grown(chain, b"fork", CHAIN_MAX_LINKS + 700)
    relation = relate(anna.head(), anna.chain, fork.head())
    assert isinstance(relation, Apart) and not relation.founded_apart
