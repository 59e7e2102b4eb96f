"""The life of a run beyond its training: nobody on line, founded twice, over, afterwards."""

from __future__ import annotations

import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from dht.identity import RunId
from peer.storage.checkpoint import CheckpointFolder
from peer.storage.earlier import load_last_seen
from peer.storage.home import OUTER
from tests.processes import Processes
from tests.swarms import learner_process
from tests.swarms.commands import Learner, Swarm, answer, run_text, shoal, sums_up, until
from tests.swarms.learners import Learner as OwnLearner

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

REFUSED = 4


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"/ip4/127.0.0.1/tcp/{server.getsockname()[1]}"


def founded(learner: Learner) -> bool:
    return "founding" in [record["name"] for record in learner.records("phase")]


def test_a_run_comes_back_to_life_when_its_peers_do_and_nobody_founds_it_again(
    processes: Processes, tmp_path: Path
) -> None:
    swarm = Swarm(processes, tmp_path)
    anna = swarm.start("anna", run_text(), listen=free_address())
    link = anna.link()
    until(lambda: anna.progress().get("steps", 0) > 30, "anna trains")
    anna.stop()
    left = anna.end()
    boris = swarm.join("boris", link)
    until(lambda: "is on line (never seen from this machine)" in boris.output, "boris waits")
    anna.come_back(link)
    anna.ready()
    boris.ready(timeout_s=180)
    until(lambda: boris.progress().get("rounds", 0) > 0, "they merge")
    assert not founded(anna) and not founded(boris)
    assert anna.progress()["global_tokens"] >= left["global_tokens"]
    swarm.end()
    seen = load_last_seen(boris.directory, RunId(link.removeprefix("shoal://")[:64]))
    assert seen is not None and seen.tokens


def test_two_that_start_one_run_file_on_one_machine_train_in_one_run(
    processes: Processes, tmp_path: Path
) -> None:
    """Each was told to take another folder, in which it founded the run again, silently."""
    swarm = Swarm(processes, tmp_path)
    learners = [swarm.start(name, run_text()) for name in ("anna", "boris")]
    for learner in learners:
        learner.ready(timeout_s=180)
    until(lambda: all(each.own_rounds() for each in learners), "they merge", timeout_s=120)
    assert sorted(map(founded, learners)) == [False, True]
    (later,) = [each for each in learners if each.records("joins_here")]
    assert not founded(later)
    swarm.end()


def test_the_model_of_a_run_that_has_ended_stays_with_its_keeper(
    processes: Processes, tmp_path: Path
) -> None:
    swarm = Swarm(processes, tmp_path)
    anna = swarm.start("anna", run_text(cycle=8, tokens=60_000), pace_s=0.06)
    home = tmp_path / "keeper"
    keeper = swarm.keep(home, anna.link())
    link = keeper.wait_for(lambda r: r.get("event") == "link", "the keeper's link")["link"]
    ended = anna.end(timeout_s=180)
    assert ended["finished"]
    assert ended["held_out_loss"] > 0, "the only learner of a run measures"
    assert 0 < ended["held_out_tokens"] <= ended["global_tokens"]
    keeper.wait_for(lambda r: r.get("event") == "exported", "the keeper has exported")
    assert keeper.process.poll() is None

    told = answer("status", link, home=tmp_path / "other")
    assert told["ended_at"] and told["global_tokens"] >= 60_000
    assert 0 < told["held_out"]["tokens"] <= ended["held_out_tokens"]
    after = tmp_path / "after.safetensors"
    assert shoal("export", link, str(after), home=tmp_path / "other").returncode == 0
    kept = (home / "model.safetensors").read_bytes()
    assert after.read_bytes() == kept == (anna.directory / "model.safetensors").read_bytes()
    for command in (("say", "def f", "--seed", "1"), ("eval",)):
        word, *options = command
        ours, theirs = (
            answer(word, where, *options, home=tmp_path / "other")
            for where in (link, str(anna.directory))
        )
        assert ours | {"tokens_per_s": 0} == theirs | {"tokens_per_s": 0}
    assert not list((tmp_path / "other").rglob("*.parts"))
    boris = swarm.join("boris", link)
    assert boris.wait(timeout_s=120) == REFUSED, boris.output
    assert "this run has ended on" in boris.output and "shoal export" in boris.output
    keeper.stop()
    assert keeper.wait() == 130


@pytest.mark.parametrize("kept", [True, False], ids=["beside a keeper", "alone"])
def test_the_only_learner_of_a_run_that_ends_at_a_date_leaves_no_work_behind(
    processes: Processes, tmp_path: Path, *, kept: bool
) -> None:
    date = (datetime.now(UTC) + timedelta(seconds=40)).strftime("%Y-%m-%dT%H:%M:%SZ")
    swarm = Swarm(processes, tmp_path)
    text = run_text(tokens=f'"unlimited"\ndate = {date}', cycle=2000)
    schedule = "[schedule]\ndecay_tokens = 100_000_000"
    anna = swarm.start("anna", text.replace("[schedule]", schedule))
    if kept:
        keeper = swarm.keep(tmp_path / "keeper", anna.link())
    anna.ready()
    ended = anna.end(timeout_s=120)
    assert ended["finished"]
    assert sums_up(ended["fates"])
    assert ended["fates"]["merged"] > 0 and not ended["fates"]["pending"], ended["fates"]
    assert not anna.records("left_apart")
    if kept:
        keeper.wait_for(lambda r: r.get("event") == "exported", "the keeper has exported")
        (merged,) = {
            (home / "model.safetensors").read_bytes()
            for home in (tmp_path / "keeper", anna.directory)
        }
        assert merged
        keeper.stop()
        assert keeper.wait() == 130


def test_the_parameters_of_a_programs_own_model_are_kept_and_exported_by_name(
    processes: Processes, tmp_path: Path
) -> None:
    run = learner_process.text(buffers="mean", name="own-model")
    anna = OwnLearner(processes, tmp_path / "anna", run=run, norm=True)
    link = anna.ready()["link"]
    out = tmp_path / "out.safetensors"
    exported = shoal("export", link, str(out), home=tmp_path / "other")
    assert exported.returncode == 0, exported.stderr
    shapes = {name: tuple(values.shape) for name, values in load_file(out).items()}
    assert shapes == {
        "weight": (16, 24),
        "bias": (16,),
        **{f"norm.{name}": (24,) for name in ("weight", "bias", "running_mean", "running_var")},
        "norm.num_batches_tracked": (),
    }
    keeper = Swarm(processes, tmp_path).keep(tmp_path / "keeper", link)
    kept = keeper.wait_for(lambda r: r.get("event") == "link", "the keeper's link")["link"]
    checkpoints = CheckpointFolder(tmp_path / "keeper" / OUTER)
    until(lambda: bool(checkpoints.numbers()), "the keeper has a checkpoint", timeout_s=120)
    anna.stop()
    anna.end()
    after = tmp_path / "after.safetensors"
    exported = shoal("export", kept, str(after), home=tmp_path / "other")
    assert exported.returncode == 0, exported.stderr
    assert {name: tuple(v.shape) for name, v in load_file(after).items()} == shapes
    keeper.stop()
    assert keeper.wait() == 130


def test_of_two_histories_founded_apart_the_heavier_goes_on_and_both_sides_read_of_it(
    processes: Processes, tmp_path: Path
) -> None:
    swarm = Swarm(processes, tmp_path)
    anna = swarm.start("anna", run_text())
    until(lambda: anna.progress().get("steps", 0) > 60, "anna trains")
    weights = tmp_path / "other.safetensors"
    exported = shoal("export", anna.link(), str(weights), home=tmp_path / "other")
    assert (exported.returncode, weights.exists()) == (0, True), exported.stderr
    assert anna.process.poll() is None
    # Another founder with other first weights, which does not know of the first one.
    elsewhere = {"XDG_DATA_HOME": str(tmp_path / "another machine")}
    options = ["--weights", str(weights)]
    boris = swarm.start("boris", run_text(), options=options, environment=elsewhere)
    until(lambda: boris.progress().get("steps", 0) > 20, "boris trains")
    boris.stop()
    own = boris.end()["fates"]["merged"]
    assert own > 0
    boris.options = boris.options[: boris.options.index("--weights")]  # `shoal join` refuses them
    boris.come_back(anna.link())
    boris.wait_for(lambda r: r.get("event") == "went_over", "boris goes over", timeout_s=180)
    anna.wait_for(lambda r: r.get("event") == "founded_apart", "anna reads of it")
    until(lambda: boris.own_rounds() != [], "boris merges on the other side", timeout_s=120)
    assert boris.progress()["fates"]["discarded.apart"] >= own
    assert all(record["kind"] == "merge" for record in anna.records("round") if "kind" in record)
    assert anna.records("went_over") == []
    swarm.end()
