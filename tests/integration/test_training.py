"""Real learners with real agents and daemons on loopback: training, crashes and restarts.

Slow: every process imports torch or hivemind first, which takes seconds.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from peer.views.event_log import read_events
from tests.processes import Processes
from tests.swarms import learner_process
from tests.swarms.commands import sums_up, until
from tests.swarms.learners import Learner, seed_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def start(processes: Processes, tmp_path: Path) -> Iterator[Callable[..., Learner]]:
    def make(name: str, **settings: Any) -> Learner:
        seed = settings.pop("sample_seed", sum(name.encode()))
        return Learner(processes, tmp_path / name, name=name, sample_seed=seed, **settings)

    yield make


def test_two_learners_train_one_model_and_leave(start: Callable[..., Learner]) -> None:
    anna = start("anna")
    boris = start("boris", seeds=[seed_of(anna)])
    until(lambda: anna.own_rounds() >= 6 and boris.own_rounds() >= 6, "rounds of both")
    assert anna.last()["peers"] == boris.last()["peers"] == 2
    assert anna.last()["loss"] < 0.5 * anna.said("step")[0]["loss"]
    arrived = boris.said("step")[0]
    assert arrived["loss"] < anna.said("step")[0]["loss"]  # it started with the state of the run
    # The bytes of a round are counted once no peer can need its data any more.
    until(lambda: boris.last()["bytes"] > 0, "bytes are counted")
    boris.stop()
    ended = boris.end()
    assert sums_up(ended["fates"]), ended["fates"]
    assert ended["fates"]["merged"] > 0
    until(lambda: bool(anna.events("peer_left")), "goodbye")
    anna.stop()
    assert sums_up(anna.end()["fates"])
    rounds = [e for e in read_events(anna.directory / "events.jsonl") if e["event"] == "round"]
    merged = [e for e in rounds if e["outcome"] == "finished"]
    assert merged, rounds
    for event in merged:
        assert len(event["members"]) == 2 and len(event["weights"]) == len(event["contributors"])
        assert event["sent_bytes"] + event["received_bytes"] >= 0 and event["seconds"] >= 0
        assert isinstance(event["left_out"], dict)


def test_a_lone_trainer_is_not_set_back_when_its_agent_is_replaced(
    start: Callable[..., Learner],
) -> None:
    anna = start("anna", run=learner_process.text(alone_s=5.0, cycle=8))
    anna.ready()
    until(lambda: min(anna.last()["versions"]) >= 6, "folds beyond the first checkpoint")
    before = anna.last()
    os.kill(before["agent"], signal.SIGKILL)
    until(lambda: bool(anna.events("kept")), "the agent accepts the version of its trainer")
    kept = anna.events("kept")[0]
    assert kept["version"] > kept["since"]
    until(lambda: min(anna.last()["versions"]) > max(before["versions"]), "it folds again")
    after = [said["loss"] for said in anna.said("step") if said["step"] > before["step"]]
    assert max(after) < max(4 * before["loss"], 1e-6), "it was set back to the checkpoint"
    anna.stop()
    fates = anna.end()["fates"]
    assert sums_up(fates)
    assert not any(fates.get(f"discarded.{reason}") for reason in ("lost", "crash")), fates


def test_a_run_ends_at_its_date_with_a_last_round_and_the_same_parameters_everywhere(
    start: Callable[..., Learner],
) -> None:
    date = (datetime.now(UTC) + timedelta(seconds=90)).strftime("%Y-%m-%dT%H:%M:%SZ")
    # A cycle is much longer than the time that is left when all are ready, so all merges happen
    # because the run ends.
    text = learner_process.text(tokens=f'"unlimited"\ndate = {date}', cycle=2000)
    anna = start("anna", run=text)
    seeds = [seed_of(anna)]
    boris, clara = (start(name, run=text, seeds=seeds) for name in ("boris", "clara"))
    learners = (anna, boris, clara)
    for learner in learners:
        learner.ready()
    assert datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ") < date, "too slow to say anything"
    for learner in learners:
        assert learner.end()["finished"]
        assert learner.events("last_round")
        assert not learner.events("left_apart")
    for fragment in range(3):
        merged = [e for e in clara.events("round") if e["fragment"] == fragment]
        assert any(event["contributors"] == 3 for event in merged), clara.events("round")
    models = {(learner.directory / "model.safetensors").read_bytes() for learner in learners}
    assert len(models) == 1


def test_synchronous_learners_move_from_version_to_version_together(
    start: Callable[..., Learner],
) -> None:
    text = learner_process.text(
        overlap=0, quorum='"all"', codec="f32", fragments=1, cycle=10, name="synchronous"
    )
    anna = start("anna", run=text)
    boris = start("boris", run=text, seeds=[seed_of(anna)])
    until(lambda: boris.own_rounds() >= 6, "rounds", timeout_s=150)
    boris.stop()
    boris.end()
    anna.stop()
    anna.end()
    by_version: dict[int, set[int]] = {}
    for step in boris.said("step"):
        if step["peers"] == 2:
            by_version.setdefault(step["versions"][0], set()).add(step["step"])
    # Until anna has noticed that boris trains, she merges alone, and boris catches up.
    whole = [len(steps) for steps in list(by_version.values())[-4:-1]]
    assert whole == [10, 10, 10], by_version


def test_learners_of_different_precision_agree_and_an_idle_coarse_one_changes_nothing(
    start: Callable[..., Learner],
) -> None:
    anna = start("anna")
    seeds = [seed_of(anna)]
    boris = start("boris", seeds=seeds, dtype="bfloat16", frozen=True)
    clara = start("clara", seeds=seeds, dtype="float16", rate=0.02)
    until(lambda: boris.own_rounds() >= 4 and clara.own_rounds() >= 4, "rounds of all")
    losses = {learner: learner.last()["loss"] for learner in (anna, boris, clara)}
    assert losses[boris] < 0.5 * anna.said("step")[0]["loss"], losses
    for learner in (boris, clara, anna):
        learner.stop()
    for learner in (boris, clara, anna):
        assert sums_up(learner.end()["fates"])
