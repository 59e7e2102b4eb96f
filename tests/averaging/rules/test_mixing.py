"""Melds: when they come, which peers meet, and the arithmetic of their means."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from averaging import messages as said
from averaging.history.chain import Chain
from averaging.history.merged_map import Mark, MergedMap
from averaging.history.standing import (
    LINKS_SHOWN,
    Apart,
    IAmBehind,
    Same,
    Standing,
    TheyAreBehind,
    after_commit,
    merged_after,
    with_merged_map,
)
from averaging.messages import Commit, Head, Link
from averaging.numbers.arithmetic import Moved, Numbers, Weighted, encoded_size
from averaging.numbers.arrays import Float32s
from averaging.numbers.chunks import Cutting
from averaging.numbers.codec import Scratch
from averaging.numbers.layout import Layout, TensorSpec
from averaging.numbers.outer import Nesterov, Step
from averaging.round.gathering.roster import MELD_LINKS, Leader, compose, recomposed
from averaging.rules.mixing import (
    MELD_LAG,
    RECENT,
    Goal,
    MixingPolicy,
    RunsEnd,
    grew_from,
    meets,
    shows_final,
)
from averaging.rules.policy import RoundPolicy
from dht.identity import PeerId
from tests.averaging.numbers.plain_steps import step
from tests.averaging.values import lineage, standing
from tests.averaging.virtual.swarm import SEVERAL_GROUPS, Storm, reach_one_final_lineage, storm

LAYOUT = Layout.build(
    [TensorSpec("a", (7, 300)), TensorSpec("b", (40,)), TensorSpec("c", (1500,))], 1
)

FRAGMENT = LAYOUT.fragments[0]
POLICY = RoundPolicy(group_size=4, codec="int8", mu=0.5)
PEERS = [PeerId(f"p{index}") for index in range(4)]


# Which peers meet


def test_a_peer_a_little_behind_takes_part_and_one_further_behind_fetches() -> None:
    here = Head(10, lineage("here"), ())

    assert meets(Same(), here, here)
    for relation in (TheyAreBehind(), IAmBehind()):
        assert meets(relation, here, Head(10 - MELD_LAG, lineage("there"), ()))
        assert not meets(relation, here, Head(9 - MELD_LAG, lineage("there"), ()))


def test_the_lighter_side_gives_way_only_after_a_long_parting() -> None:
    here, there = Head(20, lineage("here"), ()), Head(19, lineage("there"), ())
    light = Apart(ancestor=20 - RECENT, mine=1, theirs=100)

    assert meets(light, here, there)
    assert not meets(replace(light, ancestor=19 - RECENT), here, there)
    assert not meets(replace(light, ancestor=None), here, there)
    assert meets(replace(light, ancestor=None, mine=90), here, there)


# The commit


def commit_of(standings: list[Standing], policy: RoundPolicy = POLICY) -> Commit:
    joins = [(peer, join_of(here)) for peer, here in zip(PEERS, standings, strict=False)]
    leader = Leader(peer=PEERS[0], incarnation=1, topic=bytes(16), fragment=0, nonce=1)
    made = compose(
        leader,
        joins,
        policy,
        encoded_bytes=lambda codec: encoded_size(codec, FRAGMENT.unit_sizes),
    )
    return said.decode_commit(said.encode_commit(made))


def join_of(here: Standing) -> said.Join:
    return said.Join(
        fragment=0,
        topic=bytes(16),
        incarnation=1,
        join=1,
        head=here.head(),
        base_version=here.version,
        staleness=0,
        mark=40,
        steps=10,
        tokens=500,
        batch_tokens_max=50,
        bytes_per_s=0.0,
        reachable=True,
        codecs=("f32", "int8"),
    )


def test_a_meld_has_everybody_contribute_and_names_the_codecs_of_all_three() -> None:
    long = standing(*(f"a{i}" for i in range(30)))
    commit = commit_of([standing("s", "b"), standing("s", "c"), long])

    assert (commit.kind, commit.codec) == ("meld", "int8/f32/f16")
    plain = commit_of([standing("s", "b"), standing("s", "c"), long], replace(POLICY, mu=0.0))
    assert plain.codec == "int8/f32", "the run has no momentum"
    assert [len(links) for links in commit.ancestors] == [MELD_LINKS, 2, 2]
    assert commit.version == 30


def test_two_sides_of_a_fork_show_as_much_of_their_chains_as_heads_do() -> None:
    long = standing(*(f"a{i}" for i in range(30)))
    commit = commit_of([standing("s", "b"), long])

    assert commit.ancestors[0] == long.head().links and len(commit.ancestors[0]) > MELD_LINKS


def test_on_one_lineage_nothing_is_melded() -> None:
    assert commit_of([standing("s", "b")] * 3).kind == "merge"


def test_members_hold_a_meld_against_the_settings_of_the_run() -> None:
    commit = commit_of([standing("s", "a"), standing("s", "b")])

    def codec_by(mixing: MixingPolicy) -> str:
        return recomposed(
            commit,
            replace(POLICY, mixing=mixing),
            encoded_bytes=lambda codec: encoded_size(codec, FRAGMENT.unit_sizes),
        ).codec

    assert codec_by(MixingPolicy()) == commit.codec
    assert codec_by(MixingPolicy(theta="f16", momentum="int8")) == "int8/f16/int8"


# The standing after the round


def test_members_of_a_meld_leave_on_one_lineage_that_grew_out_of_the_contributors() -> None:
    here = [standing("s", name) for name in "abcd"]
    commit = commit_of(here)
    entry = {member.peer: index for index, member in enumerate(commit.members)}
    seal = tuple(sorted(entry[peer] for peer in PEERS[:3]))
    after = [after_commit(one, commit, bytes(32), seal, [bytes(32)]) for one in here[:3]]

    assert len({one.lineage for one in after}) == 1
    found = [after[0].chain.find(1, lineage(name)) is not None for name in "abcd"]
    assert found == [True, True, True, False], "who was left out is no ancestor"


def test_after_a_meld_all_old_and_new_work_is_merged_once() -> None:
    here = [
        standing("s", "a", merged=MergedMap({PEERS[0]: Mark(1, 30, 3000)})),
        standing("s", "b", merged=MergedMap({PEERS[0]: Mark(1, 20, 2000)})),
    ]
    commit = commit_of(here)
    united = here[0].merged.united(here[1].merged)
    merged = merged_after(united, commit, (0, 1))
    after = with_merged_map(after_commit(here[0], commit, bytes(32), (0, 1), [bytes(32)]), merged)

    entries = {member.peer: member for member in commit.members}
    assert merged[PEERS[0]].tokens == 3000 + entries[PEERS[0]].tokens
    assert merged[PEERS[1]] == Mark(
        entries[PEERS[1]].incarnation, entries[PEERS[1]].mark, entries[PEERS[1]].tokens
    )
    assert after.merged == merged and after.chain.tip.tokens == merged.tokens


@pytest.mark.parametrize("seed", range(20))
def test_chains_unite_to_all_links_of_both(seed: int) -> None:
    rng = np.random.default_rng(seed)

    def some() -> list[Link]:
        picked = sorted({(int(v), int(k)) for v, k in rng.integers(0, [40, 3], (25, 2))})
        return [Link(v, lineage(f"{v}/{k}"), 10 * v) for v, k in picked]

    one, other = some(), some()
    united = Chain(one).united(other)

    assert list(united) == list(Chain([*one, *other]))
    assert list(united.before_tip()) == list(united)[:-1]
    longer = united.extended(Link(50, lineage("new"), 500))
    assert list(longer)[:-1] == list(united) and list(Chain(one)) == one


# The numbers


def melt(codec: str, states: list[tuple[Float32s, ...]], weights: list[float]) -> Melted:
    """Return the results of a meld of members' (base, values, theta, momentum).

    Without a codec of momentum, in a run that has none.
    """
    scratch = Scratch()
    payloads = []
    mu = 0.5 if codec.count("/") == 2 else 0.0
    for base, values, theta, momentum in states:
        numbers = Numbers(codec=codec, merge="mean", eta=0.7, mu=mu)
        cutting = Cutting(FRAGMENT, numbers.up, numbers.down, (1,))
        payload = memoryview(bytearray(cutting.data_size))
        for chunk in cutting.chunks[0]:
            given = Moved(base, values, carried=(theta, momentum) if mu else (theta,))
            numbers.encode(chunk, given, payload[chunk.data], scratch)
            numbers.up.check(chunk, payload[chunk.data], scratch)
        payloads.append(payload)
    out = memoryview(bytearray(cutting.merged_size))
    for chunk in cutting.chunks[0]:
        parts = [payload[chunk.data] for payload in payloads]
        numbers.merge(chunk, Weighted(parts, weights), out[chunk.merged], scratch)
    ended = []
    for _, _, theta, momentum in states:
        numbers = Numbers(codec=codec, merge="mean", eta=0.7, mu=mu)
        after, moved = theta.copy(), momentum[: theta.size if mu else 0].copy()
        for chunk in cutting.chunks[0]:
            numbers.step(chunk, out[chunk.merged], Step(theta, after, moved), scratch)
        ended.append((after, moved, numbers.dispersion))
    return ended


Melted = list[tuple[Float32s, Float32s, float]]


def members(count: int) -> list[tuple[Float32s, ...]]:
    rng = np.random.default_rng(7)
    size = FRAGMENT.size
    middle = rng.standard_normal(size, dtype=np.float32)
    made: list[tuple[Float32s, ...]] = []
    for _ in range(count):
        theta: Float32s = middle + np.float32(0.1) * rng.standard_normal(size, dtype=np.float32)
        values: Float32s = theta - np.float32(0.05) * rng.standard_normal(size, dtype=np.float32)
        made.append((theta, values, theta, rng.standard_normal(size, dtype=np.float32)))
    return made


def test_averaging_first_and_stepping_then_is_stepping_first_and_averaging_then() -> None:
    """The identity behind melds, which holds where all members merge the same Delta."""
    states = members(3)
    weights = [0.5, 0.3, 0.2]
    delta = sum(
        (
            np.float32(w) * (base - values)
            for w, (base, values, _, _) in zip(weights, states, strict=True)
        ),
        start=np.zeros(FRAGMENT.size, np.float32),
    )
    thetas, momenta = [], []
    for _, _, theta, momentum in states:
        own, moved = theta.copy(), momentum.copy()
        step(own, moved, delta, Nesterov(0.7, 0.5))
        thetas.append(own)
        momenta.append(moved)

    for theta, momentum, _ in melt("f32/f32/f32", states, weights):
        np.testing.assert_allclose(theta, np.mean(thetas, axis=0), atol=2e-6)
        np.testing.assert_allclose(momentum, np.mean(momenta, axis=0), atol=2e-6)


def test_without_momentum_a_meld_is_a_step_from_the_mean_and_uploads_none() -> None:
    states, weights = members(3), [0.5, 0.3, 0.2]
    mean = np.mean([theta for _, _, theta, _ in states], axis=0)
    moved = np.average([base - values for base, values, _, _ in states], axis=0, weights=weights)

    for theta, momentum, _ in melt("f32/f32", states, weights):
        np.testing.assert_allclose(theta, mean - 0.7 * moved, atol=2e-6)
        assert momentum.size == 0
    sizes = FRAGMENT.unit_sizes
    momenta = encoded_size("f32/f32/f16", sizes) - encoded_size("f32/f32", sizes)
    assert momenta == encoded_size("f16", sizes)


@pytest.mark.parametrize("codec", ["f32/f32/f16", "int4/f16/int8", "int4/f32"])
def test_all_leave_a_meld_with_the_same_bits(codec: str) -> None:
    ended = melt(codec, members(4), [0.25] * 4)

    assert len({theta.tobytes() + momentum.tobytes() for theta, momentum, _ in ended}) == 1


def test_a_meld_measures_how_far_each_was_from_the_mean() -> None:
    states = members(4)
    mean = np.mean([theta for _, _, theta, _ in states], axis=0)
    expected = [np.linalg.norm(theta - mean) / np.linalg.norm(mean) for _, _, theta, _ in states]

    measured = [dispersion for _, _, dispersion in melt("f32/f32/f16", states, [0.25] * 4)]
    np.testing.assert_allclose(measured, expected, rtol=1e-4)


def test_a_meld_needs_a_codec_for_each_vector() -> None:
    for codec in ("int4/f32", "int4/f32/f16/f16"):
        with pytest.raises(ValueError, match="3 names"):
            Numbers(codec=codec, merge="mean", eta=1.0, mu=0.5)
    with pytest.raises(ValueError, match="2 names"):
        Numbers(codec="int4/f32/f16", merge="mean", eta=1.0, mu=0.0)


GOAL = Goal(tokens=100)


def chain(*tokens: int, side: int = 0) -> Chain:
    """Return a chain with these counts of merged tokens."""
    return Chain(
        Link(version, bytes([version, side]) * 16, merged) for version, merged in enumerate(tokens)
    )


def head(of: Chain) -> Head:
    links = of.thinned(LINKS_SHOWN)
    return Head(of.tip.version, of.tip.lineage, links)


def test_a_version_is_final_when_it_grew_from_one_with_the_runs_tokens() -> None:
    assert not grew_from(chain(0, 50, 99, 120), GOAL)
    assert grew_from(chain(0, 50, 100, 120), GOAL)
    assert not shows_final(head(chain(0, 50, 99, 120)), GOAL)
    assert shows_final(head(chain(0, 50, 100, 120)), GOAL)


def test_a_peer_gives_way_to_a_final_state_and_to_a_heavier_final_one() -> None:
    early, final = head(chain(0, 90, 110)), head(chain(0, 100, 120, side=1))
    heavier, twin = head(chain(0, 100, 121, side=2)), head(chain(0, 100, 120, side=3))

    end = RunsEnd(GOAL, melds=True)
    assert end.gives_way(early, final) and not end.gives_way(final, early)
    assert end.gives_way(final, heavier) and not end.gives_way(heavier, final)
    assert end.gives_way(final, twin) != end.gives_way(twin, final), "one of them does"
    assert end.settles(final, early) and end.settles(early, final)
    assert not end.settles(early, head(chain(0, 90, 130, side=1))), "neither is final: they meld"


def test_of_two_sides_of_one_group_that_have_ended_the_lighter_gives_way() -> None:
    """Each had the run's tokens before the partition healed, and joins no round any more."""
    mine, heavier = head(chain(0, 90, 110)), head(chain(0, 90, 130, side=1))
    twin, late = head(chain(0, 90, 110, side=2)), head(chain(0, 50, 99, side=3))
    mixed = head(chain(0, 100, 105, side=4))
    end = RunsEnd(GOAL, melds=False)

    assert end.gives_way(mine, heavier) and not end.gives_way(heavier, mine)
    assert end.gives_way(mine, twin) != end.gives_way(twin, mine)
    assert end.gives_way(heavier, mixed), "also for a peer that sees several groups this is final"
    assert end.settles(mine, late) and end.gives_way(late, mine), "it has not ended"
    assert not end.settles(late, head(chain(0, 50, 99, side=5))), "neither has ended: they meld"


def test_a_run_ends_at_its_last_version_whatever_its_tokens() -> None:
    goal = Goal(tokens=None, version=2)
    before, at, after = chain(0, 500), chain(0, 10, 20, side=1), chain(0, 10, 20, 30, side=2)
    assert [goal.is_reached_by(head(each)) for each in (before, at, after)] == [False, True, True]
    assert not grew_from(at, goal) and grew_from(after, goal)
    end = RunsEnd(goal, melds=False)
    assert end.gives_way(head(before), head(at)), "though it is the heavier one"
    assert not end.gives_way(head(at), head(before))
    assert Goal(tokens=20, version=3).is_reached(2, 20), "whichever comes first"


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))]
)
def test_after_a_storm_several_groups_end_on_one_lineage(seed: int) -> None:
    """Invariants of storms are checked after each event; this test adds that the run ends, and that
    nothing follows."""
    ends_on_one_lineage(seed, replace(SEVERAL_GROUPS[seed % 2], tokens_end=3_000))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_sides_of_one_group_that_have_both_ended_end_on_one_lineage(seed: int) -> None:
    ends_on_one_lineage(seed, Storm(peers=(4, 8), accidents=(2, 5), tokens_end=25_000))


def ends_on_one_lineage(seed: int, how: Storm) -> None:
    weather = storm(seed, how)
    weather.run(how.rough_s)
    reach_one_final_lineage(weather, within_s=120.0)
    before = weather.versions()
    weather.run(weather.now + 60.0)
    assert weather.versions() == before
