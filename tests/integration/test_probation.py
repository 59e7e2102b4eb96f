"""A newcomer to an open run of real processes counts for the others once it has worked."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dht.identity import Identity
from peer.views.event_log import read_events
from tests.processes import Processes
from tests.swarms.commands import Learner, Record, Swarm, load, run_text, until

pytestmark = [pytest.mark.timeout(500), pytest.mark.slow]

ROUNDS = 20
SECONDS = 15.0
OPEN = f"\n[policy]\nprobation_rounds = {ROUNDS}\nprobation_minutes = {SECONDS / 60}\n"


def finished(learner: Learner) -> list[Record]:
    """The rounds that a learner has finished, oldest first."""
    events = read_events(learner.directory / "events.jsonl")
    return [e for e in events if e["event"] == "round" and e["outcome"] == "finished"]


def test_a_newcomer_leads_after_the_rounds_and_the_time_of_its_probation(
    processes: Processes, tmp_path: Path
) -> None:
    swarm = Swarm(processes, tmp_path)
    anna = swarm.start("anna", run_text() + OPEN)
    link = anna.link()
    boris = swarm.join("boris", link)
    boris.ready()

    def shared() -> list[Record]:
        return [each for each in finished(anna) if len(each["contributors"]) > 1]

    # Until then less is asked: half of what the peer with the most has done.
    until(
        lambda: len(done := shared()) > 2 * ROUNDS and done[-1]["at"] - done[0]["at"] > 2 * SECONDS,
        "the first two have worked twice as long as is asked",
        timeout_s=200.0,
    )
    clara = swarm.join("clara", link)
    clara.ready(timeout_s=120.0)
    her = Identity.load(clara.directory / "identity.key").peer_id

    def worked() -> list[Record]:
        return [each for each in finished(anna) if her in each["contributors"]]

    def led() -> list[Record]:
        return [each for each in finished(anna) if each["leader"] == her]

    until(lambda: bool(worked()), "her work was merged", timeout_s=120.0)
    until(lambda: bool(led()), "she led a round", timeout_s=200.0)
    first_led, before = led()[0], worked()
    before = before[: next(n for n, each in enumerate(before) if each["at"] >= first_led["at"])]
    took_s = first_led["at"] - before[0]["at"]
    sys.stderr.write(f"led after {len(before)} merges in {took_s:.0f} s; {load()}\n")
    # Boris may have seen a merge or two that anna missed.
    assert len(before) >= 0.8 * ROUNDS
    assert took_s >= 0.8 * SECONDS
    assert took_s < 60.0 + 4 * SECONDS
    swarm.end()
