"""Two sites with two learners each, as real processes: one of each site uses the slow link.

The bytes on the link are read from the event logs of all four. A delegate is killed during rounds.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.processes import Processes
from tests.swarms.commands import Learner, Swarm, address_of, run_text, sums_up, tell

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

WIDTH = 64
FRAGMENTS = 2
PACE_S = 0.1
OVERHEAD = 0.15
"""Share of openings and commits in the traffic, with slices of 90 kB."""

Event = dict[str, Any]


def event_log(learner: Learner) -> list[Event]:
    """The event log so far, without an incomplete last line."""
    text = (learner.directory / "events.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


class Places:
    """The learners, and their log entries about the rounds that all of them reported."""

    def __init__(self, learners: list[Learner]) -> None:
        self.by_peer = {event_log(learner)[0]["peer"]: learner for learner in learners}
        self.site_of = {peer: each.name.split("-")[0] for peer, each in self.by_peer.items()}

    def rounds(self) -> dict[str, dict[str, Event]]:
        """Finished rounds with contributions of two sites, by round and then by member."""
        found: dict[str, dict[str, Event]] = defaultdict(dict)
        for me, learner in self.by_peer.items():
            for event in event_log(learner):
                if event["event"] == "round" and event["outcome"] == "finished":
                    found[event["round"]][me] = event
        return {
            name: events
            for name, events in found.items()
            if len({self.site_of[p] for e in events.values() for p in e["contributors"]}) == 2
        }

    def whole(self) -> list[dict[str, Event]]:
        """Rounds with four contributors, as logged by all four."""
        return [
            events
            for events in self.rounds().values()
            if len(events) == 4 and all(len(e["contributors"]) == 4 for e in events.values())
        ]

    def crossing(self, events: dict[str, Event]) -> int:
        """Bytes of one round between the sites."""
        return sum(
            received
            for me, event in events.items()
            for other, received in event["received_from"].items()
            if self.site_of[other] != self.site_of[me]
        )

    def wait_for(self, count: int, since_s: float = 0.0, *, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while (seen := len([e for e in self.whole() if began(e) > since_s])) < count:
            assert time.monotonic() < deadline, f"{seen} of {count} whole rounds"
            time.sleep(0.5)


def began(events: dict[str, Event]) -> float:
    return float(min(event["at"] - event["seconds"] for event in events.values()))


def test_one_peer_of_each_site_uses_the_slow_link_and_may_crash(
    processes: Processes, tmp_path: Path
) -> None:
    swarm = Swarm(processes, tmp_path)
    seed = address_of(swarm.bootstrap())
    text = run_text(seed, codec="f16", width=WIDTH, fragments=FRAGMENTS)
    founder = swarm.start("a-0", text, pace_s=PACE_S, options=["--site", "a"])
    link = founder.link()
    for name in ("a-1", "b-0", "b-1"):
        swarm.join(name, link, pace_s=PACE_S, options=["--site", name[0]])
    for learner in swarm.learners:
        learner.ready()
    places = Places(swarm.learners)
    places.wait_for(4)

    shares = []
    for events in places.whole():
        delegates = {rider: d for e in events.values() for rider, d in e["delegates"].items()}
        assert len(delegates) == 2, "one of each place is carried by the other"
        for rider, delegate in delegates.items():
            assert places.site_of[rider] == places.site_of[delegate]
        # A rider receives one payload, the merged one, and only from its delegate.
        payloads = [sum(events[rider]["received_from"].values()) for rider in delegates]
        shares.append(2 * places.crossing(events) / sum(payloads))
    tell(f"{len(shares)} rounds; payloads over the slow line, of 4 without sites: {shares}")
    # Without sites each of four payloads would cross the link once.
    assert max(shares) < 2 * (1 + OVERHEAD)
    assert min(shares) > 2 * (1 - OVERHEAD)

    newest = max(places.whole(), key=began)
    delegate = min(
        delegate for event in newest.values() for delegate in event["delegates"].values()
    )
    victim = places.by_peer[delegate]
    killed_at = time.time()
    victim.kill()
    others = [each for each in swarm.learners if each is not victim]

    def goes_on() -> bool:
        later = [
            event
            for each in others
            for event in event_log(each)
            if event["event"] == "round" and event["outcome"] == "finished"
            if event["at"] - event["seconds"] > killed_at and len(event["contributors"]) == 3
        ]
        return len(later) >= 2 * len(others)

    deadline = time.monotonic() + 60.0
    while not goes_on():
        assert time.monotonic() < deadline, "the others do not go on without the delegate"
        time.sleep(0.5)
    victim.come_back(link)
    victim.ready()
    places.wait_for(1, since_s=killed_at)
    for last in swarm.end():
        assert sums_up(last["fates"]), last["fates"]
