"""Two releases in one swarm: peers are upgraded one by one while the run goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dht.identity import Identity
from tests.integration.previous_release import unpack
from tests.processes import Processes
from tests.swarms.commands import (
    Learner,
    Record,
    Swarm,
    load,
    run_text,
    sums_up,
    tell,
    until,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NAMES = ("anna", "boris", "clara", "dora", "emil", "fanny", "gustav", "hanna")
PACE_S = 0.4
TROUBLE = ("not_a_commit", "strange_join", "refused", "upload_refused", "hello_refused", "void")
GAVE_UP = "I gave this round up"
OTHER_LEADER = {"I am not promised to this leader", GAVE_UP}
"""Reasons of members that are called by a better leader, a peer that has just come back, while the
roster of theirs closes. They merge under the better one at once, whatever its release."""


class Upgraded(Learner):
    """A learner that begins as the release before, and comes back as the present one."""

    def upgrade(self, link: str) -> Record:
        """Stop it as its owner would, and start the present release in its place."""
        self.stop()
        left = self.end(timeout_s=60.0)
        del self._environment["PYTHONPATH"]
        self.come_back(link)
        return left


def all_events(learner: Learner, name: str) -> list[Record]:
    """Events of this name in the logs of all of a peer's lives."""
    found = []
    for file in sorted(learner.directory.glob("events*.jsonl*")):
        for line in file.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            if record.get("event") == name:
                found.append(record)
    return found


def newest(learner: Learner) -> int:
    return max((record["version"] for record in learner.records("round")), default=0)


def merges(learner: Learner) -> bool:
    return bool(learner.own_rounds())


def shoal(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "peer.cli", *arguments],
        env={**os.environ, "XDG_DATA_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=120.0,
        check=False,
    )


def test_eight_peers_are_upgraded_one_by_one_and_the_run_notices_nothing(
    processes: Processes, tmp_path: Path
) -> None:
    before = {"PYTHONPATH": str(unpack(tmp_path / "release before"))}
    key = tmp_path / "owner.key"
    owner = Identity.load_or_create(key).peer_id
    text = run_text(cycle=8, fragments=2, batch_size=2) + (
        f'\n[policy]\nowner = "{owner}"\nprobation_rounds = 0\n'
    )
    path = tmp_path / "anna.toml"
    path.write_text(text, encoding="utf-8")
    swarm = Swarm(processes, tmp_path)

    def begin(name: str, *command: str) -> Upgraded:
        learner = Upgraded(processes, tmp_path / name, command, pace_s=PACE_S, environment=before)
        swarm.learners.append(learner)
        return learner

    anna = begin("anna", "start", str(path))
    link = anna.link()
    everybody = [anna, *(begin(name, "join", link) for name in NAMES[1:])]
    for learner in everybody:
        learner.ready(timeout_s=180.0)
    until(lambda: all(each.own_rounds() for each in everybody), "all merge", timeout_s=120.0)

    def amend() -> subprocess.CompletedProcess[str]:
        return shoal(
            tmp_path / "owner's data",
            *("run", "amend", link, "--key", str(key), "--json"),
            *("--set", "outer.codec=int3", "--at", "+2"),
        )

    lives: list[Record] = []
    for number, learner in enumerate(everybody):
        top = max(map(newest, everybody))
        lives.append(learner.upgrade(link))
        learner.ready(timeout_s=120.0)
        until(partial(merges, learner), "it merges", timeout_s=90.0)
        assert max(map(newest, everybody)) > top, "the run stood still meanwhile"
        if number == 3:  # a codec that half of the peers lack cannot be ordered yet
            early = amend()
            assert early.returncode == 2 and "4 of 8 peers lack" in early.stderr, early.stderr
    done = amend()
    assert done.returncode == 0, done.stderr
    since = newest(anna)
    until(lambda: newest(anna) >= since + 6, "the run goes on in the new codec", timeout_s=120.0)
    status = json.loads(shoal(tmp_path / "other", "status", link, "--json").stdout)
    assert {tuple(each["protocol"]) for each in status["releases"].values()} == {(1, 2)}

    lives += swarm.end()
    behind = [each for each in everybody if all_events(each, "outdated")]
    closed = [record for each in everybody for record in all_events(each, "closed")]
    numbers = {record.get("protocol", 1) for record in closed}
    codecs = {record["codec"] for each in everybody for record in all_events(each, "round")}
    declined = {r["reason"] for each in everybody for r in all_events(each, "declined")}
    trouble = {
        name: [r for each in everybody for r in all_events(each, name) if not is_passing(r)]
        for name in TROUBLE
    }
    tell(
        f"{len(closed)} rosters, protocols {sorted(numbers)}, codecs {sorted(codecs)}, "
        f"{newest(anna)} versions; {load()}"
    )
    assert numbers == {1, 2}
    assert declined <= OTHER_LEADER
    assert not any(trouble.values()), {name: found[:3] for name, found in trouble.items() if found}
    assert [learner.lives for learner in everybody] == [2] * len(everybody)
    assert not any(all_events(learner, "agent_died") for learner in everybody)
    left = 0.0
    for life in lives:
        assert sums_up(life["fates"]), life
        discarded = discarded_of(life["fates"])
        left += discarded.pop(LEFT, 0.0)
        assert discarded == {}, life
    tell(f"{left:g} tokens of those that left found nobody")
    assert left <= LEFT_SHARE_MAX * sum(life["tokens"] for life in lives)
    assert not behind, "a peer of the release before cannot say that it is behind"


LEFT = "discarded.left"
LEFT_SHARE_MAX = 0.005
"""Share of all tokens that leavers may lose: the release before offers its last work for 12 s,
which busy processors may take, and whoever leaves last at the end of the test is alone."""


def is_passing(event: Record) -> bool:
    """True of what comes from a start alone: a peer that serves nothing yet, or a change of leader.

    Every reason for which a member declined is compared elsewhere.
    """
    reason = str(event.get("reason", ""))
    starting = "this protocol is not served" in str(event.get("text", ""))
    return starting or reason == GAVE_UP or "voters refused its commit" in reason


def discarded_of(fates: dict[str, Any]) -> dict[str, float]:
    return {name: count for name, count in fates.items() if name.startswith("discarded") and count}
