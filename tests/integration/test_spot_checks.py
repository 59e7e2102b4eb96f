"""Members that poison within the norm bound, as real processes: honest learners notice them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from averaging.guard.rules.spot_checks import REFUSED
from averaging.rules.reputation import LIMIT
from dht.identity import Identity, PeerId
from peer.views.event_log import read_events
from tests.processes import Processes
from tests.swarms.commands import (
    ANY_LOOPBACK_PORT,
    Command,
    Learner,
    Swarm,
    run_text,
    until,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

# Each checks a contribution every six steps; merging is at once, and newcomers count at once.
POLICY = "\n[policy]\nprobation_rounds = 0\nprobation_minutes = 0.0\nspot_checks = 4.0\n"
NAMES = ("anna", "boris", "clara", "dora")
PACE_S = 0.25
LATER_ROUNDS = 40


def run_of_checks() -> str:
    # Large enough a rate for contributions of 24 steps to change the loss at once.
    text = run_text(learning_rate=1e-2, batch_size=8)
    return text.replace("warmup_tokens = 20000", "warmup_tokens = 2000") + POLICY


def events(learner: Learner, name: str) -> list[dict[str, Any]]:
    return [e for e in read_events(learner.directory / "events.jsonl") if e["event"] == name]


def identity_in(directory: Path) -> PeerId:
    return Identity.load(directory / "identity.key").peer_id


def honest_learners(swarm: Swarm) -> list[Learner]:
    first = swarm.start(NAMES[0], run_of_checks(), pace_s=PACE_S)
    link = first.link()
    return [first, *(swarm.join(name, link, pace_s=PACE_S) for name in NAMES[1:])]


def poisoner(processes: Processes, tmp_path: Path, link: str, name: str) -> tuple[Command, Path]:
    """A learner that uploads the reverse of what it learns, and its folder."""
    orders, folder = tmp_path / "orders", tmp_path / name
    orders.write_text(json.dumps({"lie": "poison"}), encoding="utf-8")
    command = Command(
        processes,
        [
            *("join", link, "--directory", str(folder), "--name", name, "--json", "--yes"),
            *("--listen", ANY_LOOPBACK_PORT, "--pace", str(PACE_S), "--orders", str(orders)),
        ],
        module="tests.chaos.attackers.hostile",
        environment={"XDG_DATA_HOME": str(tmp_path / "data"), "OMP_NUM_THREADS": "1"},
    )
    return command, folder


def refusals(learner: Learner) -> list[dict[str, Any]]:
    """The authors whose work a peer left out, as a reducer or as the leader of a round, and
    when."""
    told = [*events(learner, "upload_refused"), *events(learner, "not_proposed")]
    return [event for event in told if event["reason"] == REFUSED]


def merged_rounds(honest: Sequence[Learner]) -> list[dict[str, Any]]:
    """Each finished round once, in the order in which the first of them finished it."""
    found: dict[str, dict[str, Any]] = {}
    told = [e for learner in honest for e in events(learner, "round")]
    for event in sorted(told, key=lambda each: each["at"]):
        if event["outcome"] == "finished" and event["kind"] == "merge":
            found.setdefault(event["round"], event)
    return list(found.values())


def rounds_since_refusal(honest: Sequence[Learner]) -> list[dict[str, Any]]:
    first = min((e["at"] for each in honest for e in refusals(each)), default=float("inf"))
    return [event for event in merged_rounds(honest) if event["at"] > first]


def test_honest_learners_refuse_a_peer_that_uploads_the_reverse_and_nobody_else(
    processes: Processes, tmp_path: Path
) -> None:
    swarm = Swarm(processes, tmp_path)
    honest = honest_learners(swarm)
    mallory, folder = poisoner(processes, tmp_path, honest[0].link(), "mallory")
    until((folder / "hostile.jsonl").exists, "mallory has poisoned", timeout_s=240.0)
    liar = identity_in(folder)

    until(
        lambda: len(rounds_since_refusal(honest)) >= LATER_ROUNDS,
        "rounds have been merged since mallory was first refused",
        timeout_s=600.0,
        look_every_s=1.0,
    )
    rounds, later = merged_rounds(honest), rounds_since_refusal(honest)
    clean = [each for each in later if liar not in each["contributors"]]
    quarter = len(later) // 4
    by_leaders = {e["round"] for each in honest for e in events(each, "not_proposed")}
    last = [each for each in later[-quarter:] if liar not in each["contributors"]]
    print(  # noqa: T201
        f"\n{len(rounds) - len(later)} rounds before the first refusal; "
        f"{len(clean)} of {len(later)} later ones without mallory's work, "
        f"{len(last)} of the last {quarter}; "
        f"{len(by_leaders)} left out by a leader, "
        f"{sum(each['leader'] == liar for each in later)} led by mallory; "
        f"{sum(bool(refusals(each)) for each in honest)} of {len(honest)} have refused it"
    )
    # One failure of an honest contribution has no consequence: the model is tiny, its rate high.
    struck = {
        event["peer"]
        for learner in honest
        for event in events(learner, "spot_check_failed")
        if event["strikes"] >= LIMIT
    }
    assert struck == {liar}
    assert {e["peer"] for learner in honest for e in refusals(learner)} == {liar}
    assert len(clean) > len(later) / 2
    passed = {e["peer"] for learner in honest for e in events(learner, "spot_check_passed")}
    assert passed >= {identity_in(each.directory) for each in honest}
    assert not any(events(learner, "spot_check_evaded") for learner in honest)
    mallory.stop()
    swarm.end()
