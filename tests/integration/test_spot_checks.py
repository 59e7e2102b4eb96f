"""A member that poisons within the norm bound, as real processes: honest learners notice it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from averaging.audit.spot_checks import REFUSED
from averaging.audit.strikes import LIMIT
from dht.identity import Identity
from peer.views.event_log import read_events
from tests.integration.swarm_processes import (
    ANY_LOOPBACK_PORT,
    Command,
    Learner,
    Swarm,
    run_text,
    until,
)
from tests.processes import Processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# Each checks a contribution every six steps; merging is at once, and newcomers count at once.
POLICY = "\n[policy]\nprobation_rounds = 0\nprobation_minutes = 0.0\nspot_checks = 4.0\n"
NAMES = ("anna", "boris", "clara", "dora")
PACE_S = 0.25


def events(learner: Learner, name: str) -> list[dict[str, Any]]:
    return [e for e in read_events(learner.directory / "events.jsonl") if e["event"] == name]


def test_honest_learners_refuse_who_uploads_the_reverse_and_nobody_else(
    processes: Processes, tmp_path: Path
) -> None:
    swarm = Swarm(processes, tmp_path)
    # Large enough a rate for contributions of 24 steps to change the loss at once.
    text = run_text(learning_rate=1e-2, batch_size=8).replace("= 20000", "= 2000") + POLICY
    anna = swarm.start(NAMES[0], text, pace_s=PACE_S)
    link = anna.link()
    honest = [anna, *(swarm.join(name, link, pace_s=PACE_S) for name in NAMES[1:])]
    orders, folder = tmp_path / "orders", tmp_path / "mallory"
    orders.write_text(json.dumps({"lie": "poison"}), encoding="utf-8")
    mallory = Command(
        processes,
        [
            *("join", link, "--directory", str(folder), "--name", "mallory", "--json", "--yes"),
            *("--listen", ANY_LOOPBACK_PORT, "--pace", str(PACE_S), "--orders", str(orders)),
        ],
        module="peer.lab.chaos.hostile",
        environment={"XDG_DATA_HOME": str(tmp_path / "data"), "OMP_NUM_THREADS": "1"},
    )
    until((folder / "hostile.jsonl").exists, "mallory has poisoned", timeout_s=240.0)
    liar = Identity.load(folder / "identity.key").peer_id

    def refused(learner: Learner) -> list[str]:
        return [e["peer"] for e in events(learner, "upload_refused") if e["reason"] == REFUSED]

    until(
        lambda: sum(map(len, map(refused, honest))) >= 12,
        "reducers have refused mallory's uploads",
        timeout_s=400.0,
    )
    # One failure of an honest contribution has no consequence: the model is tiny, its rate high.
    struck = {
        event["peer"]
        for learner in honest
        for event in events(learner, "spot_check_failed")
        if event["strikes"] >= LIMIT
    }
    assert struck == {liar}
    assert {peer for learner in honest for peer in refused(learner)} == {liar}
    passed = {e["peer"] for learner in honest for e in events(learner, "spot_check_passed")}
    assert passed >= {Identity.load(each.directory / "identity.key").peer_id for each in honest}
    assert not any(events(learner, "spot_check_evaded") for learner in honest)
    mallory.stop()
    swarm.end()
