"""Needs of a larger run, from the overhead that was measured with a small one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peer.run_file.merging import Outer
from peer.run_file.sections import GptModel, PythonStdlibData, RunFile
from peer.trainer.needs import needs_of
from tests.benchmark.regions.extrapolation import extrapolate, text
from tests.benchmark.regions.figures import Row

RUN = RunFile(
    name="large",
    model=GptModel(layers=2, width=64, heads=4, context=32),
    data=PythonStdlibData(sequence_length=32),
    outer=Outer(fragments=2, codec="int4"),
)
ROW = Row(
    mbit=100.0,
    cycle=32,
    computing=1.0,
    rounds_per_minute=10.0,
    part=1.0,
    round_mb=1.1,
    predicted_mb=1.0,
    line_used=0.5,
    loss=None,
)


def test_a_region_sends_its_share_and_the_measured_overhead() -> None:
    needs = needs_of(RUN)

    found = extrapolate(RUN, 4, [ROW])
    assert found.overhead == pytest.approx(0.1)
    assert 1e9 * found.cycle_gb == pytest.approx(needs.cycle_bytes * 0.75 * 1.1)
    assert found.shortest_cycle_s[5.0] == pytest.approx(8 * found.cycle_gb / 5.0)
    assert 1e9 * found.agent_gb == pytest.approx(needs.agent_bytes)
    assert 0.0 < found.codec_s < 1.0


def test_rounds_that_members_missed_do_not_make_a_larger_run_need_less() -> None:
    missed = replace(ROW, round_mb=0.83)
    assert (
        extrapolate(RUN, 4, [missed]).cycle_gb
        == extrapolate(RUN, 4, [replace(ROW, round_mb=1.0)]).cycle_gb
    )


def test_the_needs_are_told_for_each_line() -> None:
    said = text(extrapolate(RUN, 4, [ROW]))
    assert "a line of 2 Gbit/s" in said
    assert "a line of 5 Gbit/s" in said
    assert "+10% of overhead" in said
