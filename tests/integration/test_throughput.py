"""A trainer with an agent makes at least 95% of the steps that it makes without one.

The trainer has one core for its single thread; its agent, its daemon and all processes of a slow
partner share the other core. Both cases alternate, so that a busy machine affects them alike.
"""

from __future__ import annotations

import json
import os
import statistics
from pathlib import Path
from typing import Any

import pytest

from tests.processes import Processes
from tests.swarms.commands import Command, Record, load, run_text, tell

SECONDS = float(os.environ.get("TEST_SECONDS", "30"))
TURNS = 3

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(TURNS * (2 * SECONDS + 120) + 120),
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="takes two cores to keep apart"),
]

TEXT = run_text(
    layers=4, width=128, sequence_length=64, batch_size=4, cycle=24, heartbeat_s=10.0, expiry_s=30.0
)


def trainer(processes: Processes, **settings: Any) -> Command:
    given = {"run": TEXT, "core": 0, "agent_core": 1, "seconds": SECONDS, **settings}
    return Command(processes, [json.dumps(given)], module="tests.integration.timed_trainer")


def measured(command: Command) -> Record:
    record = command.wait_for_word("measured", timeout_s=SECONDS + 120)
    assert command.wait(timeout_s=90) == 0, command.output[-3000:]
    return record


def test_a_trainer_keeps_its_speed_with_an_agent(processes: Processes, tmp_path: Path) -> None:
    # Its steps are rare, so that the core is free for the agents, as on a machine with a GPU.
    partner = trainer(
        processes,
        directory=str(tmp_path / "partner"),
        joins=True,
        core=1,
        pace_s=1.0,
        seconds=3600.0,
    )
    link = str(partner.wait_for_word("ready")["link"])
    seeds = [link.partition("seed=")[2].split("&")[0]]
    alone, together = [], []
    for turn in range(TURNS):
        alone.append(measured(trainer(processes, joins=False)))
        joined = trainer(
            processes, directory=str(tmp_path / f"trainer-{turn}"), joins=True, seeds=seeds
        )
        together.append(measured(joined))
    partner.kill()
    shares = [t["steps_per_s"] / a["steps_per_s"] for t, a in zip(together, alone, strict=True)]
    # Single turns differ by up to a tenth on a shared machine.
    share = statistics.mean(t["steps_per_s"] for t in together) / statistics.mean(
        a["steps_per_s"] for a in alone
    )
    blocked = [t["blocked"] for t in together]
    tell(
        f"steps/s alone {[round(a['steps_per_s'], 2) for a in alone]}, with an agent "
        f"{[round(t['steps_per_s'], 2) for t in together]}: {share:.1%} "
        f"(each turn {[f'{each:.1%}' for each in shares]}); blocked "
        f"{[f'{each:.2%}' for each in blocked]}; rounds {[t['rounds'] for t in together]}; "
        f"{load()}"
    )
    assert all(t["rounds"] > 0 for t in together), "nothing was exchanged meanwhile"
    assert share >= 0.95
    assert statistics.median(blocked) < 0.02
