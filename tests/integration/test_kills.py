"""Kills at any moment do not slow down the other peers, and no token is lost or counted twice.

For three minutes, every few seconds, ``kill -9`` hits a learner, the leader of a round, or the
bootstrap peers, with agent and daemon; the peer is restarted a little later. ``tests.chaos``
injects the faults, and its oracle compares the run with a control without faults.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.chaos.judging.evidence import Evidence, Report
from tests.chaos.judging.scenarios import Scenario
from tests.chaos.judging.schedule import FaultKind
from tests.chaos.judging.verdict import Promise
from tests.chaos.run import ChaosSettings, run_chaos
from tests.swarms.commands import load, tell

MINUTES = float(os.environ.get("TEST_SECONDS", "180")) / 60
"""Minutes with faults."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * 60 * MINUTES + 600)]

KILLS = Scenario(
    name="kills",
    text="kill -9 of learners, leaders and bootstrap peers",
    kinds={FaultKind.KILL: 0.4, FaultKind.LEADER: 0.4, FaultKind.SEEDS: 0.2},
)
BLOCKED_MAX_MS = 5.0
P99_STEPS = 100
"""The p99 of fewer steps is their maximum, which depends on the load of the machine."""
BESIDE_CONTROL_MAX = 3.0
"""Where the machine is busy, trainers are blocked while they wait for a processor, beside kills and
in the control alike: 20 ms at a load of 16."""


def last_reports(evidence: Evidence) -> list[Report]:
    """The last report of each start with enough steps."""
    lives = [life for peer in evidence.honest for life in peer.lives if life.reports]
    return [life.reports[-1] for life in lives if life.reports[-1].steps >= P99_STEPS]


def test_kills_do_not_slow_the_others_down_and_nothing_is_lost(tmp_path: Path) -> None:
    settings = ChaosSettings(
        scenarios=(KILLS,), directory=tmp_path, peers=4, minutes=MINUTES, pace_s=0.25
    )
    outcome = run_chaos(settings, tell)
    (judged,) = outcome.judged
    assert judged.control is not None
    hurt, quiet = last_reports(judged.evidence), last_reports(judged.control)
    whole, usual = (max(each.blocked_p99_ms for each in some) for some in (hurt, quiet))
    work = max(each.blocked_cpu_p99_ms for each in hurt)
    tell(f"p99 blocked {whole:.1f} ms, {work:.1f} of processor; control {usual:.1f}; {load()}")
    assert len(judged.evidence.faults) >= 2 * MINUTES
    assert judged.kept, judged.verdicts
    told = {verdict.promise for verdict in judged.verdicts if verdict.kept}
    assert {Promise.RETURNS, Promise.LEDGER, Promise.ONCE} <= told
    assert work < BLOCKED_MAX_MS
    assert whole < max(BLOCKED_MAX_MS, BESIDE_CONTROL_MAX * usual)
