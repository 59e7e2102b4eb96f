"""Learners in homes train together with nothing but a bootstrap host outside."""

from __future__ import annotations

from pathlib import Path

import pytest

from peer.views.event_log import read_events
from tests.integration.wan.experiment import conduct
from tests.processes import Processes
from tests.swarms.commands import load, tell
from tests.swarms.topology import Nat
from tests.swarms.wide_area import sites

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]


def test_three_homes_behind_routers_lead_and_reduce_for_each_other(
    processes: Processes, tmp_path: Path
) -> None:
    homes = [Nat.PORT_RESTRICTED, Nat.FULL_CONE, Nat.ADDRESS_RESTRICTED]
    outcome = conduct(
        sites(0, homes), [("quiet", 30.0)], processes, tmp_path, cycle=60, layers=1, width=64
    )
    (quiet,) = outcome.rows
    tell(f"{quiet.rounds} rounds, {quiet.missed} of {quiet.member_rounds} missed; {load()}")
    assert quiet.rounds >= 5
    leaders = set()
    for index in range(len(homes)):
        events = list(read_events(tmp_path / f"home{index}" / "events.jsonl"))
        verdicts = [event["reachable"] for event in events if event["event"] == "reachability"]
        assert verdicts and verdicts[0] is False, "the routers let no dial in"
        rounds = [e for e in events if e["event"] == "round" and e["outcome"] == "finished"]
        leaders |= {each["leader"] for each in rounds}
    assert len(leaders) >= 2, "any of them may lead"
    for fates in outcome.fates.values():
        assert fates["merged"] > 0.5 * fates["processed"]


def test_homes_whose_routers_let_nothing_through_merge_by_a_relay_and_survive_faults(
    processes: Processes, tmp_path: Path
) -> None:
    """A router forgets its connections, and a home gets another address, while rounds go on."""
    homes = [Nat.SYMMETRIC, Nat.SYMMETRIC, Nat.PORT_RESTRICTED]
    happenings = [("quiet", 20.0), ("forget", 10.0), ("address", 10.0)]
    outcome = conduct(
        sites(0, homes), happenings, processes, tmp_path, relay="10M", cycle=60, layers=1, width=64
    )
    for each in outcome.rows:
        tell(f"{each.phase}: {each.rounds} rounds, {each.missed} of {each.member_rounds} missed")
    tell(load())
    assert outcome.rows[0].rounds >= 3
    for fates in outcome.fates.values():
        assert fates["merged"] > 0.5 * fates["processed"]
