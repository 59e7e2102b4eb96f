"""Chains: ancestors, chains made from one another, and thinning."""

from __future__ import annotations

import pickle
import random
from itertools import pairwise

import blake3
import pytest
from hypothesis import given
from hypothesis import strategies as st

from averaging.history.chain import CHAIN_MAX_LINKS, Chain
from averaging.messages import Link


def lineage(name: object) -> bytes:
    return blake3.blake3(repr(name).encode()).digest()


def link(version: int, side: str = "", tokens: int | None = None) -> Link:
    return Link(version, lineage((version, side)), 100 * version if tokens is None else tokens)


def at(link: Link) -> tuple[int, bytes]:
    return link.version, link.lineage


def history(versions: range, side: str = "") -> Chain:
    chain = Chain()
    for version in versions:
        chain = chain.extended(link(version, side))
    return chain


def forked(common: int, length: int, side: str) -> Chain:
    chain = history(range(common))
    for version in range(common, common + length):
        chain = chain.extended(link(version, side))
    return chain


def test_a_chain_finds_its_own_ancestors_only() -> None:
    chain = forked(10, 5, "mine")

    assert chain.find(*at(link(9))) == link(9)
    assert chain.find(*at(link(12, "mine"))) == link(12, "mine")
    assert chain.find(*at(link(12, "theirs"))) is None
    assert chain.find(13, lineage((12, "mine"))) is None, "a lineage belongs to its version"
    assert chain.find(15, lineage("future")) is None
    assert chain.tip == link(14, "mine")


def test_extending_does_not_change_the_shorter_chain() -> None:
    short = history(range(5))
    mine = short.extended(link(5, "mine"))
    theirs = short.extended(link(5, "theirs"))

    assert list(short) == [link(version) for version in range(5)]
    assert mine.tip == link(5, "mine")
    assert theirs.tip == link(5, "theirs")
    assert mine.find(*at(link(5, "theirs"))) is None


def test_versions_only_grow() -> None:
    with pytest.raises(ValueError, match="does not come after"):
        history(range(5)).extended(link(4))


def test_versions_may_skip() -> None:
    chain = history(range(3)).extended(link(10))

    assert chain.since(1) == (link(2), link(10))
    assert chain.find(*at(link(10))) is not None


def test_the_common_ancestor_is_the_newest_shared_link() -> None:
    mine, theirs = forked(10, 5, "mine"), forked(10, 8, "theirs")

    assert mine.common_ancestor(theirs) == link(9)
    assert theirs.common_ancestor(mine) == link(9)
    assert mine.common_ancestor(history(range(7))) == link(6)
    assert mine.common_ancestor(history(range(20), "stranger")) is None
    assert mine.common_ancestor(Chain()) is None
    assert mine.common_ancestor(mine) == mine.tip


def test_after_a_mix_both_histories_are_ancestors() -> None:
    mine, theirs = forked(10, 5, "mine"), forked(10, 8, "theirs")
    mixed = mine.united(theirs).extended(link(18, "meld"))

    assert mixed == theirs.united(mine).extended(link(18, "meld"))
    for chain in (mine, theirs):
        assert all(mixed.find(entry.version, entry.lineage) == entry for entry in chain)
    assert len(mixed) == 10 + 5 + 8 + 1


LINKS = st.sets(st.tuples(st.integers(1, 4), st.sampled_from("abcdefgh")), max_size=16)


@given(LINKS, LINKS)
def test_a_version_may_have_as_many_links_as_there_are_groups(
    mine: set[tuple[int, str]], theirs: set[tuple[int, str]]
) -> None:
    chain = Chain(link(*each) for each in mine)
    others = [link(*each) for each in theirs]

    assert list(chain.united(others)) == list(Chain(link(*each) for each in mine | theirs))
    for each in others:
        found = chain.find(each.version, each.lineage)
        assert (found is not None) == (each in list(chain))


def test_ten_thousand_links_are_kept_and_the_oldest_are_dropped() -> None:
    chain = history(range(CHAIN_MAX_LINKS + 500))

    assert len(chain) == len(list(chain)) == CHAIN_MAX_LINKS
    assert list(chain)[:2] == [link(0), link(501)]
    assert chain.find(*at(link(500))) is None
    assert chain.find(*at(link(501))) is not None
    assert len(chain.united([link(0), link(3), link(20_000)])) == CHAIN_MAX_LINKS


def test_the_founders_version_is_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("averaging.history.chain.CHAIN_MAX_LINKS", 12)
    chain = Chain()
    for version in range(200):
        chain = chain.extended(link(version))
        if version % 7 == 3:
            chain = chain.united([link(0), link(version, "other"), link(max(1, version - 50))])
        if version % 11 == 5:
            chain = Chain(chain)  # as from a checkpoint
        ordered = list(chain)
        assert chain.root == ordered[0] == link(0) and ordered == sorted(ordered)
        assert len(chain) == len(ordered) <= 12
        assert list(reversed(chain)) == ordered[::-1]
        assert chain.find(*at(link(0))) == link(0)
        shown = chain.thinned(6)
        assert shown[-1] == link(0) and list(shown) == sorted(set(shown), reverse=True)
        assert chain.common_ancestor([link(0)]) == link(0)
        assert chain.before_tip().root == (link(0) if version else None)
    assert len(chain) == 12 and chain.tip.version == 199


@pytest.mark.parametrize("seed", range(20))
def test_a_chain_has_the_links_that_it_was_made_of(seed: int) -> None:
    """Against plain sets of links."""
    rng = random.Random(seed)
    made: list[tuple[Chain, set[Link]]] = [(Chain(), set())]
    for _ in range(120):
        chain, links = rng.choice(made[-4:])
        tip = max((each.version for each in links), default=-1)
        match rng.randrange(3):
            case 0:
                new = link(tip + 1, rng.choice("abc"))
                made.append((chain.extended(new), links | {new}))
            case 1:
                some = {link(rng.randrange(tip + 2), rng.choice("abcdef")) for _ in range(6)}
                made.append((chain.united(some), links | some))
            case _:
                made.append((chain.before_tip(), links - {max(links, default=None)}))
    for chain, links in made:
        ordered = sorted(links)
        assert list(chain) == ordered and list(reversed(chain)) == ordered[::-1]
        assert len(chain) == len(ordered) and chain == Chain(ordered)
        assert chain.thinned(8) == Chain(ordered).thinned(8)
        middle = rng.randrange(60)
        assert chain.since(middle) == tuple(each for each in ordered if each.version > middle)
        for side in "abcdef":
            wanted = link(middle, side)
            assert chain.find(*at(wanted)) == (wanted if wanted in links else None)


@pytest.mark.parametrize("length", [0, 1, 2, 8, 9, 10, 25, 24, 1000, 10_000])
@pytest.mark.parametrize("count", [1, 2, 8, 24])
def test_a_thinned_chain_is_dense_at_the_newest_end_and_reaches_the_oldest(
    length: int, count: int
) -> None:
    chain = history(range(length))
    thin = chain.thinned(count)

    assert len(thin) == min(length, count)
    assert list(thin) == sorted(set(thin), reverse=True)
    assert set(thin) <= set(chain)
    if length:
        close = min(length, max(1, count // 2))
        assert [entry.version for entry in thin[:close]] == list(
            range(length - 1, length - 1 - close, -1)
        )
        assert count == 1 or thin[-1] == link(0)
    gaps = [a.version - b.version for a, b in pairwise(thin)]
    assert gaps[:-1] == sorted(gaps[:-1])


def test_a_thinned_chain_finds_a_recent_fork_exactly_and_an_old_one_roughly() -> None:
    recent = forked(1000, 8, "theirs").thinned(24)
    assert forked(1000, 3, "mine").common_ancestor(recent) == link(999)

    old = forked(1000, 500, "theirs").thinned(24)
    found = forked(1000, 3, "mine").common_ancestor(old)
    assert found is not None
    assert found.version >= 500


def test_chains_can_be_sent_between_processes() -> None:
    chain = forked(10, 5, "mine")
    assert pickle.loads(pickle.dumps(chain)) == chain  # noqa: S301  our own bytes
