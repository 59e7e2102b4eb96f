"""Figures of real hosts: discovery, recovery of a seed, cost; and the measurement itself."""

from __future__ import annotations

import json
import sys

import pytest
import uvloop

from tests.benchmark import host_figures


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_thirty_hosts_on_one_machine_see_one_another() -> None:
    figures = uvloop.run(host_figures.meeting(30))
    assert figures["all_see_all_s"] < 90, figures


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_seed_that_comes_back_is_found_within_30_seconds() -> None:
    figures = uvloop.run(host_figures.return_of_a_seed())
    assert figures["found_again_after_s"] < 30, figures


@pytest.mark.bench
def test_figures_of_a_host_show_no_unnecessary_wait() -> None:
    figures = {
        "start_up": host_figures.start_up(),
        "latencies": uvloop.run(host_figures.latencies()),
        "throughput": uvloop.run(host_figures.throughput()),
    }
    sys.stdout.write(json.dumps(figures, indent=2) + "\n")
    # Wide enough for any machine: a failure means an unnecessary wait.
    assert figures["latencies"]["call_100_bytes_ms"]["median"] < 50
    assert figures["throughput"]["framed_to_bare"]["median"] > 0.5
