"""Differences from the reported goodput table, and the arithmetic of a user's own swarm."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import pytest

from peer.simulate.paper.failures import YEAR_S
from peer.simulate.paper.goodput import (
    CHIPS,
    REPORTED,
    ClusterModel,
    rms_difference,
    section,
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


ELASTIC_GRID = tuple(
    product((10.0, 12.0, 14.0, 16.0, 18.0), (10.0, 15.0, 20.0), (60.0, 120.0, 180.0))
)
"""Values that ``calibrate`` tries: pause after a failure, pause to readmit, time between these."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """The pauses that fit the reported elastic cells and one rigid cell best."""

    elastic_stop_s: float
    elastic_return_s: float
    elastic_return_every_s: float
    rms_points: float
    rigid_stop_s: float


def calibrate(
    model: ClusterModel,
    *,
    seeds: Sequence[int],
    grid: Sequence[tuple[float, float, float]],
) -> Calibration:
    """Search the pauses on a grid, using the five elastic cells and the rigid one at 1.2M chips."""
    best: tuple[float, tuple[float, float, float]] | None = None
    for stop_s, return_s, every_s in grid:
        trial = replace(
            model,
            elastic_stop_s=stop_s,
            elastic_return_s=return_s,
            elastic_return_every_s=every_s,
        )
        cells = table(trial, seeds=seeds, rows=(("elastic", 1),), failures_per_cell=3_000)
        rms = rms_difference(cells)
        if best is None or rms < best[0]:
            best = (rms, (stop_s, return_s, every_s))
    assert best is not None
    target = REPORTED["rigid", 1][CHIPS.index(1_200_000)] / 100
    per_s = model.failures_per_chip_year * 1_200_000 / YEAR_S
    return Calibration(*best[1], best[0], (1 / target - 1) / per_s)


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


def test_a_single_seed_has_no_error_to_show() -> None:
    cells = table(ClusterModel(), seeds=(0,))
    shown = [cell for row in section(cells).rows for cell in row]
    assert not any("nan" in cell for cell in shown), shown
