"""Real peers in groups of two that end at the run's token budget have the same model."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.processes import Processes
from tests.swarms.commands import Swarm, address_of, run_text, sums_up, tell

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PEERS = 4
PACE_S = 0.1
TOKENS = 150_000
"""Tokens of about thirty seconds of four peers; a cycle takes 2.4 s."""


def test_groups_of_two_end_at_the_token_budget_with_one_model(
    processes: Processes, tmp_path: Path
) -> None:
    swarm = Swarm(processes, tmp_path)
    seed = address_of(swarm.bootstrap())
    text = run_text(seed, tokens=TOKENS, fragments=2)
    text = text.replace("[membership]", "group_size = 2\n\n[membership]")
    link = swarm.start("peer-0", text, pace_s=PACE_S).link()
    for number in range(1, PEERS):
        swarm.join(f"peer-{number}", link, pace_s=PACE_S)
    ended = [learner.end(timeout_s=150.0) for learner in swarm.learners]

    kinds: Counter[str] = Counter()
    for learner in swarm.learners:
        lines = (learner.directory / "events.jsonl").read_text(encoding="utf-8").splitlines()
        events = [json.loads(line) for line in lines]
        assert not [e["text"] for e in events if e["event"] == "left_apart"]
        kinds.update(e["kind"] for e in events if e["event"] == "round")
    tell(f"rounds, as members told them: {dict(kinds)}")
    assert kinds["meld"] > 0
    assert all(last["finished"] and sums_up(last["fates"]) for last in ended), ended
    models = {(each.directory / "model.safetensors").read_bytes() for each in swarm.learners}
    assert len(models) == 1
