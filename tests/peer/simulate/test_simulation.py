"""The simulated swarm as a whole: training, reproducibility, and the fate of all tokens."""

from __future__ import annotations

from typing import Any

import pytest

from peer.simulate.outcome import SwarmResult
from peer.simulate.settings import BadExperiment, Swarm, parse, sweep
from peer.simulate.simulation import run


def experiment(**settings: Any) -> Swarm:
    """Four peers on a small problem; ``__`` in the name of a setting stands for a dot."""
    small = {
        "peers.count": 4,
        "problem.size": 4,
        "outer.fragments": 2,
        "outer.steps_per_cycle": 12,
        "end.cycles": 8.0,
    }
    given = {name.replace("__", "."): value for name, value in settings.items()}
    return Swarm().with_settings({**small, **given})


def assert_every_token_has_a_fate(result: SwarmResult) -> None:
    fate = result.fate
    assert fate.excess == 0
    assert fate.processed == pytest.approx(
        fate.merged + fate.pending + sum(fate.discarded.values())
    )


def test_a_swarm_of_one_group_trains_and_stays_one() -> None:
    result = run(experiment(), 1)

    assert result.final.loss < 0.1 * result.points[0].loss
    assert all(point.dispersion == 0.0 and point.lineages == 1.0 for point in result.points)
    assert {record.kind for record in result.rounds} == {"merge"}
    assert {record.contributors for record in result.rounds} == {4}
    assert result.goodput > 0.99
    assert_every_token_has_a_fate(result)


def test_the_same_seed_gives_the_same_run_to_the_last_bit() -> None:
    weather = {
        "peers__speed_spread": 0.2,
        "peers__step_jitter": 0.1,
        "weather__jitter_s": 0.05,
        "weather__crash_share": 0.2,
        "weather__away_s": 20.0,
    }
    first, second = (run(experiment(**weather), 3) for _ in range(2))

    assert first == second


@pytest.mark.parametrize("returns", [pytest.param("empty", marks=pytest.mark.slow), "checkpoint"])
def test_peers_that_come_and_go_lose_only_work_that_was_not_offered(returns: str) -> None:
    result = run(
        experiment(
            peers__count=6,
            end__cycles=20.0,
            weather__crash_share=0.3,
            weather__away_s=20.0,
            weather__returns=returns,
        ),
        5,
    )

    assert result.notes["caught_up"] if returns == "checkpoint" else result.fetched_bytes
    assert result.fate.discarded["crash"] > 0
    assert result.final.loss < 0.2 * result.points[0].loss
    assert_every_token_has_a_fate(result)


def test_a_peer_that_is_behind_replays_what_it_missed() -> None:
    """Replayed int4 payloads of two rounds are far smaller than a state."""
    nap = {"kind": "pause", "at_s": 40.0, "lasts_s": 26.0, "peers": [3]}
    result = run(experiment(event=[nap], problem__size=64, outer__fragments=1), 1)

    assert result.notes["caught_up"] >= 1
    assert 0 < result.fetched_bytes < 8 * 64 * 8 * 16
    assert_every_token_has_a_fate(result)


def test_a_learner_that_waits_loses_time_and_one_that_does_not_loses_none() -> None:
    slow_lines = {"weather__latency_s": [0.5, 0.6], "outer__overlap_steps": 0}
    waiting = run(experiment(**slow_lines, outer__waits=True), 1)
    free = run(experiment(**slow_lines), 1)

    assert free.blocked_share == 0.0
    assert waiting.blocked_share > 0.1
    assert waiting.goodput == pytest.approx(1.0 - waiting.blocked_share, abs=0.02)


def test_peers_that_join_in_the_middle_take_part() -> None:
    late = {"kind": "join", "at_s": 30.0, "peers": [2, 3]}
    result = run(experiment(event=[late]), 1)

    assert result.points[1].live == 2 and result.final.live == 4
    assert result.rounds[-1].contributors == 4


def test_embeddings_and_head_travel_in_codecs_of_their_own() -> None:
    pytest.importorskip("torch")
    text = {
        "problem__name": "examples.paper.text_mlp:TextMlp",
        "problem__size": 16,
        "end__cycles": 2.0,
    }
    alike = run(experiment(**text, outer__fragments=4), 1)
    apart = run(experiment(**text, outer__fragments=4, outer__embedding_codecs="f32"), 1)

    assert {record.contributors for record in apart.rounds} == {4}
    embedding_and_head = 256 * (16 + 16)
    more = 2 * (4 - 0.5) * embedding_and_head * 3 / 4  # each peer reduces a quarter itself
    assert apart.bytes_sent - alike.bytes_sent >= 0.9 * 4 * more


def test_settings_are_checked_and_an_unknown_one_names_its_neighbours() -> None:
    with pytest.raises(BadExperiment, match=r"rounds\.qorum is not .*did you mean 'quorum'"):
        parse("[rounds]\nqorum = 3")
    with pytest.raises(BadExperiment, match="not valid TOML"):
        parse("[peers")
    with pytest.raises(BadExperiment, match="names peer 9"):
        run(parse("event = [{kind = 'crash', at_s = 1.0, peers = [9]}]"))


def test_a_sweep_is_all_combinations_of_its_values() -> None:
    settings = list(sweep(["outer.momentum=0.0,0.5", "rounds.quorum=all,2", "peers.speeds=[1,2]"]))

    assert len(settings) == 4
    assert settings[0] == {"outer.momentum": 0.0, "rounds.quorum": "all", "peers.speeds": [1, 2]}
    assert Swarm().with_settings(settings[3]).rounds.quorum == 2
    with pytest.raises(BadExperiment, match="of the form"):
        list(sweep(["outer.momentum"]))
