"""The owner's orders to a run of real processes: amend, pause, resume, attest, rollback and end."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from dht.identity import Identity
from tests.processes import Processes
from tests.swarms.commands import (
    Learner,
    Record,
    Swarm,
    answer,
    load,
    run_text,
    shoal,
    sums_up,
    tell,
    until,
)

pytestmark = [pytest.mark.timeout(580), pytest.mark.slow]

BACK_WITHIN_S = 120.0


class Owner:
    """The commands of a run's owner, whose key is at no peer."""

    def __init__(self, directory: Path) -> None:
        self.home = directory / "owner's data"
        self.key = directory / "far away" / "owner.key"
        self.key.parent.mkdir()
        self.id = Identity.load_or_create(self.key).peer_id
        self.link = ""

    def orders(self, command: str, *arguments: str, away: Learner | None = None) -> Record:
        """Give an order that all peers take but the one that is ``away``, if it was seen."""
        found = answer(*self.words(command, *arguments), home=self.home)
        allowed = set()
        if away is not None:
            allowed.add(Identity.load_or_create(away.directory / "identity.key").peer_id)
        assert set(found["refused"]) <= allowed, found
        return found

    def words(self, command: str, *arguments: str) -> list[str]:
        return ["run", command, self.link, "--key", str(self.key), *arguments]


def newest(learner: Learner) -> int:
    """The newest version that this learner's rounds have made since its last start."""
    return max((record["version"] for record in learner.records("round")), default=0)


def discarded(learner: Learner, reason: str) -> float:
    fates = learner.progress().get("fates", {})
    return float(fates.get(f"discarded.{reason}", 0.0))


def test_a_run_follows_its_owner_who_is_at_no_peer(processes: Processes, tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    swarm = Swarm(processes, tmp_path)
    policy = f'\n[policy]\nowner = "{owner.id}"\nprobation_rounds = 0\n'
    anna = swarm.start("anna", run_text(cycle=8, fragments=2) + policy, pace_s=0.1)
    owner.link = anna.link()
    boris, clara = (swarm.join(name, owner.link, pace_s=0.1) for name in ("boris", "clara"))
    everybody = (anna, boris, clara)
    for learner in everybody:
        learner.ready()
    until(lambda: bool(clara.own_rounds()), "clara merges", timeout_s=120.0)

    # Amend: from the same version on at all peers, refused where it cannot be.
    refused = shoal(*owner.words("amend", "--set", "outer.fragments=3"), home=owner.home)
    assert refused.returncode == 2 and "outer.fragments cannot be amended" in refused.stderr
    amended = owner.orders("amend", "--set", "inner.learning_rate=1e-3", "--at", "+2")
    assert amended["number"] == 1 and len(amended["taken"]) == 3
    assert "inner.learning_rate = 0.001" in amended["orders"][0]

    # Pause: all rest, and no version is made.
    owner.orders("pause")
    until(lambda: all(each.records("paused") for each in everybody), "all rest")
    time.sleep(3.0)
    before = [newest(each) for each in everybody]
    seen = answer("status", owner.link, home=owner.home)
    assert {peer["directive"] for peer in seen["peers"]} == {2}
    assert seen["directives"][0]["orders"] == ["paused", *amended["orders"]]
    assert [newest(each) for each in everybody] == before

    # Attest what all keep alike; then go on, so that there is something to take back.
    attested = owner.orders("attest")["orders"]
    assert any(each.startswith("attested version") for each in attested)
    owner.orders("pause", "--lift")
    top = max(before)
    until(lambda: newest(anna) >= top + 4, "the run goes on", timeout_s=120.0)

    clara.kill()  # it is away when the run is taken back
    began = time.monotonic()
    taken = owner.orders("rollback", away=clara)
    assert "rolled back by directive" in taken["orders"][-1]
    for learner in (anna, boris):
        learner.wait_for(
            lambda r: r.get("event") == "rolled_back" and not r["missing"],
            f"{learner.name} goes back",
            timeout_s=BACK_WITHIN_S,
        )
    back_s = time.monotonic() - began
    assert back_s < BACK_WITHIN_S
    root = anna.records("rolled_back")[0]["versions"]
    assert max(root) <= top + 1
    rounds = len(anna.own_rounds())
    until(lambda: len(anna.own_rounds()) > rounds + 2, "rounds go on", timeout_s=90.0)
    both = (anna, boris)  # their reports come every other second
    until(lambda: all(discarded(each, "rolled back") > 0 for each in both), "both tell of it")
    for learner in both:
        assert sums_up(learner.progress()["fates"])
        assert discarded(learner, "apart") == 0

    clara.come_back(owner.link)
    clara.ready()
    until(lambda: bool(clara.own_rounds()), "clara merges after the rollback", timeout_s=120.0)
    tell(f"two peers of three had gone back {back_s:.1f} s after the command began, {load()}")

    # End: last rounds, then all leave with one model.
    owner.orders("end")
    for learner in everybody:
        last = learner.end(timeout_s=120.0)
        assert sums_up(last["fates"]), last
    models = {learner.records("exported")[-1]["model"] for learner in everybody}
    assert len(models) == 1
