"""A member that lies on orders: when it does, and that each way to lie is told and noticed."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from dht.identity import PeerId
from tests.chaos.attackers.lying_agent import LOOK_EVERY_S, WrittenOrders
from tests.chaos.judging.lies import PROVABLE, Lie
from tests.chaos.lies_in_memory import HONEST, outcome

ME = PeerId("me")


def test_a_liar_follows_its_orders_once_a_commit_counts_it(tmp_path: Path) -> None:
    orders, log = tmp_path / "orders", tmp_path / "log"
    liar = WrittenOrders(orders, log)
    assert liar.now(ME) is None
    orders.write_text(json.dumps({"lie": "censor", "victim": "anna"}))
    time.sleep(1.5 * LOOK_EVERY_S)
    assert liar.now(ME) is None, "nobody counts it yet"
    liar.established(ME)
    liar.established(ME)
    time.sleep(1.5 * LOOK_EVERY_S)
    assert liar.now(ME) is Lie.CENSOR and liar.victim == "anna"
    liar.told(ME, Lie.CENSOR, b"\x01")
    orders.write_text(json.dumps({"lie": None, "victim": "anna"}))
    time.sleep(1.5 * LOOK_EVERY_S)
    assert liar.now(ME) is None
    counts, lied = (json.loads(line) for line in log.read_text().splitlines())
    assert counts["what"] == "counts"
    assert (lied["what"], lied["lie"], lied["round"]) == ("lied", "censor", "01")
    assert counts["at"] <= lied["at"] <= time.time()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("lie", list(Lie))
def test_every_way_to_lie_is_told_and_costs_no_history(lie: Lie) -> None:
    """The swarm checks that equal lineages have equal bits and that every token has a fate."""
    seen = outcome(lie, audit_rate=0.5, lie_s=80.0)
    assert seen.lies > 0
    assert not seen.wronged, "an honest peer is blamed"
    assert seen.versions > 5
    banned = [count for count in seen.banned_by.values() if count]
    if lie in PROVABLE:
        assert banned and set(banned) == {len(HONEST)}, "each ban is everybody's"
    else:
        assert not banned
