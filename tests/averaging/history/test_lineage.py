from __future__ import annotations

import pickle
import random
from itertools import pairwise

import blake3
import pytest
from hypothesis import given
from hypothesis import strategies as st

from averaging.history.chain import BLOCK_LINKS, CHAIN_MAX_LINKS, Chain, ChainLink
from averaging.history.lineage import after_fold, after_round, origin, seal_digest
from averaging.history.merged_map import Mark, MergedMap
from dht.identity import PeerId

ANNA, BORIS, CLARA = PeerId("anna"), PeerId("boris"), PeerId("clara")


def lineage(name: object) -> bytes:
    return blake3.blake3(repr(name).encode()).digest()


def link(version: int, side: str = "", tokens: int | None = None) -> ChainLink:
    return ChainLink(version, lineage((version, side)), 100 * version if tokens is None else tokens)


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


# Hashes


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


def test_a_seal_is_who_not_how_many() -> None:
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


# Chains


def test_a_chain_knows_its_ancestors_and_nobody_elses() -> None:
    chain = forked(10, 5, "mine")

    assert chain.find(*link(9)[:2]) == link(9)
    assert chain.find(*link(12, "mine")[:2]) == link(12, "mine")
    assert chain.find(*link(12, "theirs")[:2]) is None
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
    assert mine.find(*link(5, "theirs")[:2]) is None


@given(st.lists(st.tuples(st.integers(0, 20), st.sampled_from("ab")), max_size=40))
def test_however_chains_share_their_storage_each_is_as_if_alone(
    steps: list[tuple[int, str]],
) -> None:
    """Extend any earlier chain, again and again, beside plain lists."""
    chains = [Chain()]
    models: list[list[ChainLink]] = [[]]
    for which, side in steps:
        model = models[which % len(models)]
        new = link(model[-1].version + 1 if model else 0, f"{side}{len(models)}")
        chains.append(chains[which % len(chains)].extended(new))
        models.append([*model, new])

    for chain, model in zip(chains, models, strict=True):
        assert list(chain) == model
        assert list(reversed(chain)) == model[::-1]
        assert all(chain.find(entry.version, entry.lineage) == entry for entry in model)


def test_versions_only_grow() -> None:
    with pytest.raises(ValueError, match="does not come after"):
        history(range(5)).extended(link(4))


def test_versions_may_skip() -> None:
    chain = history(range(3)).extended(link(10))

    assert chain.since(1) == (link(2), link(10))
    assert chain.find(*link(10)[:2]) is not None


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
    mixed = mine.united(theirs).extended(link(18, "mix"))

    assert mixed == theirs.united(mine).extended(link(18, "mix"))
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


def test_ten_thousand_links_are_kept_and_the_oldest_fall_off() -> None:
    chain = history(range(CHAIN_MAX_LINKS + 500))

    assert len(chain) == CHAIN_MAX_LINKS
    assert next(iter(chain)) == link(500)
    assert chain.find(*link(499)[:2]) is None
    assert chain.find(*link(500)[:2]) is not None
    assert len(chain.united([link(3), link(20_000)])) == CHAIN_MAX_LINKS


def test_storage_does_not_grow_for_ever() -> None:
    chain = history(range(3 * CHAIN_MAX_LINKS))

    assert sum(map(len, chain._blocks)) <= CHAIN_MAX_LINKS + 2 * BLOCK_LINKS


@pytest.mark.parametrize("seed", range(20))
def test_chains_that_share_blocks_do_not_change_one_another(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against plain sets of links, with blocks of a few, some of which several chains hold."""
    monkeypatch.setattr("averaging.history.chain.BLOCK_LINKS", 4)
    rng = random.Random(seed)
    made: list[tuple[Chain, set[ChainLink]]] = [(Chain(), set())]
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
            assert chain.find(*wanted[:2]) == (wanted if wanted in links else None)


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


def test_a_recent_parting_is_found_exactly_in_a_thinned_chain_an_old_one_roughly() -> None:
    recent = forked(1000, 8, "theirs").thinned(24)
    assert forked(1000, 3, "mine").common_ancestor(recent) == link(999)

    old = forked(1000, 500, "theirs").thinned(24)
    found = forked(1000, 3, "mine").common_ancestor(old)
    assert found is not None
    assert found.version >= 500


def test_chains_can_be_sent_between_processes() -> None:
    chain = forked(10, 5, "mine")
    assert pickle.loads(pickle.dumps(chain)) == chain  # noqa: S301  our own bytes


# What is merged


def test_work_is_covered_up_to_its_mark_in_its_incarnation() -> None:
    merged = MergedMap().with_work(ANNA, 2, 100, 5000)

    assert merged.covers(ANNA, 2, 100)
    assert merged.covers(ANNA, 2, 1)
    assert not merged.covers(ANNA, 2, 101)
    assert not merged.covers(ANNA, 1, 1), "an earlier life's last work is not known to be merged"
    assert not merged.covers(ANNA, 3, 1)
    assert not merged.covers(BORIS, 2, 1)


def test_tokens_add_up_across_incarnations() -> None:
    merged = MergedMap().with_work(ANNA, 1, 10, 100).with_work(BORIS, 5, 1, 7)
    merged = merged.with_work(ANNA, 1, 20, 100).with_work(ANNA, 2, 3, 30)

    assert merged[ANNA] == Mark(2, 3, 230)
    assert merged.tokens == 237


def test_a_fork_counts_nothing_twice() -> None:
    before = MergedMap().with_work(ANNA, 1, 10, 100).with_work(BORIS, 1, 10, 100)
    mine = before.with_work(ANNA, 1, 20, 50)
    theirs = before.with_work(BORIS, 1, 30, 70).with_work(CLARA, 1, 1, 1)

    both = mine.united(theirs)
    assert both.tokens == 150 + 170 + 1
    assert both[ANNA].step == 20
    assert both[BORIS].step == 30


marks = st.builds(Mark, st.integers(0, 3), st.integers(0, 5), st.integers(0, 9))
maps = st.dictionaries(st.sampled_from([ANNA, BORIS, CLARA]), marks).map(MergedMap)


@given(maps, maps, maps)
def test_uniting_is_a_maximum(a: MergedMap, b: MergedMap, c: MergedMap) -> None:
    assert a.united(a) == a
    assert a.united(b) == b.united(a)
    assert a.united(b.united(c)) == a.united(b).united(c)
    both = a.united(b)
    assert both.tokens >= max(a.tokens, b.tokens)
    for side in (a, b):
        for peer, mark in side.items():
            assert both[peer].tokens >= mark.tokens
            same_life = both[peer].incarnation == mark.incarnation
            assert both.covers(peer, mark.incarnation, mark.step) == same_life


def test_the_digest_of_a_known_map_never_changes() -> None:
    marks = {ANNA: Mark(1, 2, 3), BORIS: Mark(4, 5, 6)}
    assert MergedMap(marks).digest().hex() == (
        "6d25b46c8eda0e075e5a5f38a4448839c8a92601b9a7bac3550ca76ea9fc78aa"
    )


def test_the_digest_does_not_depend_on_the_order_of_entries() -> None:
    entries = [(ANNA, Mark(1, 2, 3)), (BORIS, Mark(1, 2, 3)), (CLARA, Mark(9, 9, 9))]
    digests = set()
    for seed in range(6):
        random.Random(seed).shuffle(entries)
        digests.add(MergedMap(dict(entries)).digest())
    assert len(digests) == 1
    assert MergedMap().digest() not in digests
    assert MergedMap({ANNA: Mark(1, 2, 4)}).digest() != MergedMap({ANNA: Mark(1, 3, 3)}).digest()
