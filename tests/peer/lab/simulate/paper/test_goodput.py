"""Differences from the reported goodput table, and the arithmetic of a user's own swarm."""

from itertools import product

import pytest

from peer.lab.simulate.paper.goodput import (
    ELASTIC_GRID,
    ClusterModel,
    calibrate,
    rms_difference,
    swarm,
    table,
)


@pytest.fixture(scope="module")
def cells():  # type: ignore[no-untyped-def]
    return table(ClusterModel(), seeds=(0, 1, 2))


def test_each_decoupled_cell_is_predicted_within_five_points_and_two_rms(cells) -> None:  # type: ignore[no-untyped-def]
    decoupled = [c for c in cells if c.system == "decoupled"]
    assert len(decoupled) == 20
    assert max(abs(c.goodput - c.reported) for c in decoupled) < 5
    assert rms_difference(decoupled) < 2


def test_rigid_cells_lie_within_six_points(cells) -> None:  # type: ignore[no-untyped-def]
    assert max(abs(c.goodput - c.reported) for c in cells if c.system == "rigid") < 6


def test_at_one_point_two_million_chips_the_headline_figures_come_out(cells) -> None:  # type: ignore[no-untyped-def]
    at = {(c.system, c.learners): c.goodput for c in cells if c.chips == 1_200_000}
    assert at["decoupled", 8] == pytest.approx(88, abs=2)
    assert at["rigid", 1] == pytest.approx(27, abs=2)


NEAR_THE_SHIPPED_PAUSES = tuple(product((16.0, 18.0), (10.0, 15.0), (120.0, 180.0)))


@pytest.mark.parametrize(
    "grid", [NEAR_THE_SHIPPED_PAUSES, pytest.param(ELASTIC_GRID, marks=pytest.mark.slow)]
)
def test_the_shipped_pauses_are_those_the_calibration_finds(
    grid: tuple[tuple[float, float, float], ...],
) -> None:
    shipped = ClusterModel()
    found = calibrate(shipped, seeds=(0, 1, 2), grid=grid)
    assert (found.elastic_stop_s, found.elastic_return_s, found.elastic_return_every_s) == (
        shipped.elastic_stop_s,
        shipped.elastic_return_s,
        shipped.elastic_return_every_s,
    )
    assert found.rigid_stop_s == pytest.approx(shipped.rigid_stop_s, abs=0.5)


def test_a_swarm_loses_only_the_machine_that_failed() -> None:
    rigid, elastic, decoupled = swarm(learners=12, mtbf_s=9 * 3600, rejoin_s=240, seed=0)
    assert decoupled.goodput == pytest.approx(100 * 32_400 / 32_640, abs=0.1)
    assert rigid.goodput < elastic.goodput < decoupled.goodput


def test_more_learners_in_one_rigid_job_fail_more_often() -> None:
    few, many = (swarm(learners=n, mtbf_s=3600, rejoin_s=60, seed=0)[0] for n in (2, 32))
    assert many.goodput < few.goodput


def test_invalid_numbers_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="mtbf"):
        swarm(learners=3, mtbf_s=0, rejoin_s=60, seed=0)
