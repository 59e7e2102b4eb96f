"""Figures of a trial in several regions, from what was seen of it."""

from __future__ import annotations

import pytest

from examples.paper.bandwidth.run import Setting, gbit_s
from tests.benchmark.regions.figures import (
    Course,
    Failure,
    Merged,
    Progress,
    predicted_bytes,
    record,
    row,
    table,
)

SETTING = Setting(
    parameters=8e6, step_s=0.5, learners=4, codec="f32", steps_per_cycle=32, fragments=8
)


def course(*, steps_per_s: float = 2.0, merges_of_b: int = 10, sent_bytes: int = 0) -> Course:
    """Sixty seconds of two regions, of which ``a`` merges every four seconds."""
    reports = [Progress(float(at), round(steps_per_s * at)) for at in range(0, 101, 2)]
    merged = [Merged(22.0 + 4 * each, each % 8, each // 8) for each in range(15)]
    before = [Merged(10.0, 7, 0), Merged(19.9, 6, 0)]
    return Course(
        began_s=20.0,
        ended_s=80.0,
        progress={"a": reports, "b": reports},
        merged={"a": [*before, *merged], "b": merged[:merges_of_b]},
        sent_bytes=sent_bytes,
        loss=2.5,
    )


def test_a_region_sends_its_share_of_an_all_reduce_in_each_round() -> None:
    # One million values per fragment in f32, twice, without the own quarter.
    assert predicted_bytes(SETTING) == pytest.approx(4e6 * 2 * 3 / 4)


def test_the_prediction_is_that_of_the_bandwidth_table() -> None:
    rounds_per_s = 8 / (32 * 0.5)
    assert predicted_bytes(SETTING) * rounds_per_s * 8e-9 == pytest.approx(gbit_s("shoal", SETTING))


@pytest.mark.parametrize(("steps_per_s", "share"), [(2.0, 1.0), (1.5, 0.75)])
def test_a_learner_computes_as_long_as_its_steps_take_alone(
    steps_per_s: float, share: float
) -> None:
    assert course(steps_per_s=steps_per_s).computing(0.5) == pytest.approx(share)


def test_a_learner_that_reports_nothing_does_not_compute() -> None:
    silent = Course(
        began_s=0.0,
        ended_s=60.0,
        progress={"a": [Progress(30.0, 5)]},
        merged={"a": []},
        sent_bytes=0,
        loss=None,
    )
    assert silent.computing(0.5) == 0.0
    assert silent.part == 0.0


def test_rounds_outside_of_the_counted_time_do_not_count() -> None:
    assert course().rounds == 15


def test_a_region_that_missed_rounds_took_part_in_fewer() -> None:
    assert course(merges_of_b=9).part == pytest.approx((1.0 + 9 / 15) / 2)


def test_a_row_compares_the_counted_bytes_with_the_prediction() -> None:
    sent = round(1.05 * 15 * 4 * predicted_bytes(SETTING))
    found = row(course(sent_bytes=sent), SETTING, mbit=100.0)
    assert found.off == pytest.approx(0.05)
    assert found.rounds_per_minute == 15.0
    assert found.line_used == pytest.approx(sent / 4 * 8e-6 / 60 / 100)
    assert record(found)["off"] == found.off


def test_the_table_says_how_a_failed_region_came_back() -> None:
    away = Failure(away_s=20.0, rounds_per_minute=14.0, returned_s=9.4)
    lost = Failure(away_s=20.0, rounds_per_minute=14.0, returned_s=None)
    text = table([row(course(), SETTING, mbit=50.0, failure=each) for each in (away, lost)])
    assert "merged again 9 s after its start" in text
    assert "not merged again" in text
    assert "| 50 | 32 | 100.0% | 15.0 | 83% |" in text
