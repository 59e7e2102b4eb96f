"""A member that lies on orders: when it does."""

from __future__ import annotations

import json
import time
from pathlib import Path

from dht.identity import PeerId
from tests.chaos.attackers.lying_agent import LOOK_EVERY_S, WrittenOrders
from tests.chaos.judging.lies import Lie

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
