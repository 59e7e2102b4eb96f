"""``shoal simulate compare``: the arithmetic of links, and the table on a cheap problem."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peer.simulate.paper import compare
from peer.simulate.problems.quadratic import Quadratic

CHEAP = {"problem.name": "quadratic"}
SETTING = compare.Setting(parameters=1e9, step_s=1.0, learners=8, cycles=8)


def test_a_ring_sends_everything_nearly_twice_and_waits_for_each_hop() -> None:
    spent = compare.all_reduce_s(SETTING, link_mbit=1000.0, latency_s=0.0)
    assert spent == pytest.approx(2 * 7 / 8 * 16)
    later = compare.all_reduce_s(SETTING, link_mbit=1000.0, latency_s=0.1)
    assert later - spent == pytest.approx(1.4)


def test_data_parallel_hides_its_gradients_behind_two_thirds_of_a_step() -> None:
    fast = compare.data_parallel_step_s(SETTING, 1.0, link_mbit=1e6, latency_s=0.0)
    assert fast == 1.0
    slow = compare.data_parallel_step_s(SETTING, 1.0, link_mbit=1000.0, latency_s=0.0)
    assert slow == pytest.approx(1.0 + 28.0 - 2 / 3)


def test_merged_data_travels_at_the_size_of_the_large_model() -> None:
    experiment = compare.experiment_of(
        SETTING, step_s=1.0, link_mbit=1000.0, latency_s=0.02, changes=CHEAP
    )
    size = sum(spec.size for spec in Quadratic().specs)
    assert experiment.network.bulk_factor == pytest.approx(1e9 / size)
    assert experiment.network.mbit_s == (1000.0, 1000.0)


@pytest.mark.slow  # a figure of RESULTS.md
def test_data_parallel_needs_longer_on_a_slower_link_and_shoal_hardly_does() -> None:
    rows, _ = compare.table(
        replace(SETTING, loss=0.1),
        seeds=(0,),
        links_mbit=(2000.0, 100_000.0),
        latencies_s=(0.02,),
        changes=CHEAP,
    )
    slow, fast = rows
    assert slow.data_parallel_s > 8 * fast.data_parallel_s
    assert slow.shoal_s is not None
    assert fast.shoal_s is not None
    assert slow.shoal_s.value < 2 * fast.shoal_s.value
    assert slow.speedup is not None
    assert slow.speedup > 4


def test_a_loss_out_of_reach_is_refused_with_what_to_do() -> None:
    setting = replace(SETTING, loss=1e-6, cycles=2)
    with pytest.raises(ValueError, match="ask for a higher loss or for more cycles"):
        compare.table(setting, seeds=(0,), links_mbit=(1000.0,), latencies_s=(0.02,), changes=CHEAP)


def test_a_step_is_measured_with_the_clock_that_is_given() -> None:
    times = iter([10.0, 13.0])
    assert compare.measured_step_s(Quadratic(), clock=lambda: next(times)) == pytest.approx(0.05)


@pytest.mark.parametrize("wrong", [{"learners": 1}, {"parameters": 0.0}, {"loss": -1.0}])
def test_settings_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"must be above zero|at least 2"):
        compare.Setting(**wrong)  # type: ignore[arg-type]
