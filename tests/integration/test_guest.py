"""A peer keeps to what the owner of its machine allows, while it runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from peer import cli
from tests.integration.test_training import Learner, seed_of, sums_up, until
from tests.processes import Processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

Start = Callable[..., Learner]


@pytest.fixture
def start(processes: Processes, tmp_path: Path) -> Start:
    def make(name: str, **settings: object) -> Learner:
        seed = sum(name.encode())
        return Learner(processes, tmp_path / name, name=name, sample_seed=seed, **settings)

    return make


def tell(learner: Learner, *words: str) -> None:
    assert cli.run([*words, "--directory", str(learner.directory)]) == 0


def test_a_pause_stops_steps_loses_no_work_and_keeps_nobody_waiting(start: Start) -> None:
    anna = start("anna")
    seeds = [seed_of(anna)]
    boris, clara = start("boris", seeds=seeds), start("clara", seeds=seeds)
    swarm = (anna, boris, clara)
    until(lambda: all(peer.own_rounds() >= 3 for peer in swarm), "rounds of all")

    tell(clara, "pause")
    until(lambda: bool(clara.events("paused")), "a pause", timeout_s=10)
    time.sleep(1.0)  # the step that was under way
    rested_at = clara.last()["step"]
    # The others soon do without clara: rounds of two, and no slower.
    until(lambda: anna.events("round")[-1]["members"] == 2, "rounds without clara")
    began, before = time.monotonic(), anna.own_rounds()
    until(lambda: anna.own_rounds() >= before + 6, "more rounds")
    seconds = max(float(event["seconds"]) for event in anna.events("round")[-6:])
    assert seconds < 5.0, f"somebody waited: {seconds} s"
    assert time.monotonic() - began < 60.0
    assert clara.last()["step"] == rested_at

    tell(clara, "resume")
    rounds = clara.own_rounds()
    until(lambda: clara.last()["step"] > rested_at, "steps again", timeout_s=15)
    until(lambda: clara.own_rounds() >= rounds + 2, "is merged again")

    tell(clara, "leave")
    fates = clara.end()["fates"]
    assert sums_up(fates), fates
    assert not any(count for name, count in fates.items() if name.startswith("discarded.")), fates
    for peer in (anna, boris):
        peer.stop()
        peer.end()


def test_a_share_of_the_time_is_kept_to_within_a_tenth(start: Start) -> None:
    anna = start("anna", pace_s=0.0)
    anna.ready()
    tell(anna, "limits", "--cpu", "50%")
    time.sleep(3.0)

    def busy_s() -> float:
        times = psutil.Process(anna.process.pid).cpu_times()
        return times.user + times.system

    began, before = time.monotonic(), busy_s()
    time.sleep(8.0)
    share = (busy_s() - before) / (time.monotonic() - began)
    anna.stop()
    anna.end()
    assert share < 0.55
