"""Limits, pauses and requests to leave, which the owner of the machine sets while a peer runs."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from dht.identity import Identity
from peer import cli
from peer.guest import other_programs
from tests.processes import Processes, free_port
from tests.swarms.commands import (
    Command,
    Swarm,
    is_ready,
    load,
    run_text,
    sums_up,
    until,
)
from tests.swarms.commands import tell as report
from tests.swarms.learners import Learner, seed_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

Start = Callable[..., Learner]


@pytest.fixture
def start(processes: Processes, tmp_path: Path) -> Start:
    def make(name: str, **settings: Any) -> Learner:
        seed = sum(name.encode())
        return Learner(processes, tmp_path / name, name=name, sample_seed=seed, **settings)

    return make


def tell(learner: Learner, *words: str) -> None:
    tell_folder(learner.directory, *words)


def tell_folder(folder: Path, *words: str) -> None:
    assert cli.run([*words, "--directory", str(folder)]) == 0


def test_a_pause_stops_steps_loses_no_work_and_delays_no_peer(start: Start) -> None:
    anna = start("anna")
    seeds = [seed_of(anna)]
    boris, clara = start("boris", seeds=seeds), start("clara", seeds=seeds)
    swarm = (anna, boris, clara)
    until(lambda: all(peer.own_rounds() >= 3 for peer in swarm), "rounds of all")

    tell(clara, "pause")
    until(lambda: bool(clara.events("paused")), "a pause", timeout_s=10)
    time.sleep(1.0)  # the current step
    rested_at = clara.last()["step"]
    # The others soon continue without clara: rounds of two, as fast as before.
    until(lambda: anna.events("round")[-1]["members"] == 2, "rounds without clara")
    began, before = time.monotonic(), anna.own_rounds()
    until(lambda: anna.own_rounds() >= before + 6, "more rounds")
    seconds = max(float(event["seconds"]) for event in anna.events("round")[-6:])
    assert seconds < 5.0, f"a peer waited: {seconds} s"
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


def used_by_others(*, over_s: float) -> float:
    """Share of the processors that programs other than Shoal use now."""
    before = other_programs.times_now()
    time.sleep(over_s)
    return other_programs.others_share(before, other_programs.times_now())


def test_training_pauses_while_other_programs_use_the_processors(
    start: Start, processes: Processes
) -> None:
    anna = start("anna", pace_s=0.2)
    anna.ready()
    spinning = [
        processes.python("-c", "while True: pass") for _ in range(2 * (os.cpu_count() or 1))
    ]
    # What other swarms on this machine use is not counted, so that these programs never had 90%.
    limit = round(75 * used_by_others(over_s=3.0))
    tell(anna, "limits", "--idle-only", f"{limit}%")
    until(lambda: bool(anna.events("paused")), "a rest", timeout_s=60)
    assert f"other programs use {limit}%" in str(anna.events("paused")[0]["reason"])
    for process in spinning:
        process.kill()
    tell(anna, "limits", "--idle-only", "off")
    until(lambda: bool(anna.events("resumed")), "going on", timeout_s=20)
    anna.stop()
    assert sums_up(anna.end()["fates"])


def test_a_used_up_monthly_quota_stops_large_transfers(
    processes: Processes, tmp_path: Path
) -> None:
    quota = 1.2e6
    swarm = Swarm(processes, tmp_path)
    anna = swarm.start("anna", run_text(cycle=16, codec="f16"))
    boris = swarm.join("boris", anna.link())
    boris.ready()
    tell_folder(boris.directory, "limits", "--quota", f"{quota / 1e3:.0f}K")  # about 20 exchanges
    boris.wait_for(lambda r: r.get("event") == "paused", "the volume is used", timeout_s=120)
    rounds = len(anna.own_rounds())
    time.sleep(20.0)
    assert len(anna.own_rounds()) >= rounds, "the others waited for it"
    boris.stop()
    ended = boris.end()
    used = json.loads((boris.directory / "volume.json").read_text())["bytes"]
    report(f"used {used / 1e3:.0f} of {quota / 1e3:.0f} kB")
    assert 0.5 * quota <= used <= 1.1 * quota
    shown = ended["bytes_sent"] + ended["bytes_received"]
    assert 0.95 * used <= shown <= used, "the screen counts the same bytes as the quota"
    assert sums_up(ended["fates"]), ended["fates"]
    anna.stop()
    anna.end()


def test_a_paused_keeper_goes_offline_and_returns(processes: Processes, tmp_path: Path) -> None:
    swarm = Swarm(processes, tmp_path)
    anna = swarm.start("anna", run_text(cycle=16))
    home = tmp_path / "keeper"
    keeper = swarm.keep(home, anna.link())
    tell_folder(home, "pause")
    keeper.wait_for(lambda r: r.get("event") == "paused", "a rest", timeout_s=30)
    anna.wait_for(lambda r: r.get("event") == "peer_left", "its goodbye", timeout_s=30)
    daemons = psutil.Process(keeper.process.pid).children(recursive=True)
    assert daemons == [], "it is online"
    tell_folder(home, "resume")
    keeper.wait_for(lambda r: r.get("event") == "resumed", "going on", timeout_s=30)
    until(lambda: sum(map(is_ready, keeper.records())) == 2, "it has the state again")
    tell_folder(home, "leave")
    assert keeper.wait(timeout_s=60) == 0, "it was interrupted"
    anna.stop()
    anna.end()


@pytest.mark.parametrize("command", ["join", "keep"])
def test_a_peer_that_searches_for_others_leaves_at_once_on_request(
    processes: Processes, tmp_path: Path, command: str
) -> None:
    swarm = Swarm(processes, tmp_path)
    peer = Identity.from_seed(bytes(32)).peer_id
    nobody = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{peer}"
    file = tmp_path / "run.toml"
    file.write_text(run_text(nobody))
    home = tmp_path / "anna"
    if command == "join":
        waiting: Command = swarm.join("anna", str(file))
    else:
        options = ["--directory", str(home), "--json", "--yes"]
        waiting = Command(processes, ["keep", str(file), *options])
    looks = ("looking for peers", "looking for the run's state")
    waiting.wait_for(lambda r: r.get("text") in looks, "it looks for others", timeout_s=60)
    tell_folder(home, "leave")
    began = time.monotonic()
    assert waiting.wait(timeout_s=60) == 0
    report(f"{command} left after {time.monotonic() - began:.1f} s; {load()}")
    assert time.monotonic() - began < 20.0, "it waited for other peers"


def test_the_status_of_a_run_of_four_peers_takes_less_than_five_seconds(
    processes: Processes, tmp_path: Path
) -> None:
    swarm = Swarm(processes, tmp_path)
    anna = swarm.start("anna", run_text())
    link = anna.link()
    others = [swarm.join(name, link) for name in ("boris", "clara", "doris")]
    for peer in others:
        peer.ready(timeout_s=180)
    took = []
    for _ in range(3):
        began = time.monotonic()
        asked = processes.start([sys.executable, "-P", "-m", "peer.cli", "status", link, "--json"])
        assert asked.wait(timeout=60) == 0
        took.append(time.monotonic() - began)
        seen = json.loads(processes.output_of(asked).splitlines()[-1])
        assert sorted(peer["name"] for peer in seen["peers"]) == [
            "anna", "boris", "clara", "doris"
        ]  # fmt: skip
    report(f"status of 4 peers: {[f'{seconds:.1f} s' for seconds in took]}; {load()}")
    for peer in (anna, *others):
        peer.stop()
    for peer in (anna, *others):
        peer.end()
    if min(took) >= 5.0 and os.getloadavg()[0] > 2 * (os.cpu_count() or 1):
        pytest.skip(f"{min(took):.1f} s on a machine with {load()} tells nothing")
    assert min(took) < 5.0
