"""A run file on public lines: its traffic is as predicted, and a killed region comes back."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from peer.run_file.reading import parse, with_settings
from tests.integration.wan.experiment import conduct, predicted_bytes
from tests.processes import Processes
from tests.swarms.wide_area import sites

RUN = parse((Path(__file__).parents[3] / "examples" / "regions" / "run.toml").read_text())


def test_a_region_sends_its_share_of_an_all_reduce_in_each_round() -> None:
    changes = {"model.layers": 1, "outer.codec": "f32"}
    run = with_settings(RUN, changes, source="test")
    alone, four = (predicted_bytes(run, count, 0.5) for count in (1, 4))
    assert alone == 0.0
    twice = with_settings(run, {"outer.steps_per_cycle": 64}, source="test")
    assert predicted_bytes(twice, 4, 0.1) == pytest.approx(four)
    assert predicted_bytes(run, 2, 0.5) == pytest.approx(four * 2 / 3)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_traffic_is_as_predicted_and_a_region_comes_back(
    processes: Processes, tmp_path: Path
) -> None:
    run = with_settings(RUN, {"outer.steps_per_cycle": 24}, source="test")
    outcome = conduct(
        sites(4, [], public_mbit=100.0),
        [("quiet", 60.0), ("kill", 20.0)],
        processes,
        tmp_path,
        pace_s=0.5,
        run=run,
    )
    quiet, *_, after = outcome.rows
    assert outcome.sent_bytes(quiet) == pytest.approx(outcome.predicted_bytes, rel=0.15)
    assert quiet.missed_share < 0.2
    assert after.together_s < inf
