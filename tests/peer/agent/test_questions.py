"""What a peer asks others, and what it tells of their answers."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from dht.identity import Identity, PeerId
from peer.agent.questions import Questions, to_ask
from tests.peer.statuses import BORIS, CLARA, a_status


@pytest.mark.parametrize(
    ("kind", "how"), [("batch", "the first batch is the same"), ("seed", "the random seed is")]
)
def test_the_first_peer_with_the_same_batches_is_reported_and_no_other(kind: str, how: str) -> None:
    told: list[tuple[str, dict[str, str]]] = []
    here: Any = SimpleNamespace(event=lambda name, /, **fields: told.append((name, fields)))
    questions = Questions(here)

    def hear(peer: str, digest: str, ours: str) -> None:
        answer = a_status(peer=peer, name=f"name of {peer}", batches=digest)
        here.batches = ours
        questions._tell_same_batches(answer)

    hear(BORIS, "", "")  # both draw in an order of their own
    ours = f"{kind} 0011"
    hear(BORIS, "", ours)
    hear(BORIS, f"{kind} 2233", ours)
    assert not told
    hear(CLARA, ours, ours)
    hear(BORIS, ours, ours)
    ((name, fields),) = told
    assert name == "same_batches" and fields.pop("how").startswith(how)
    assert fields == {"peer": CLARA, "name": f"name of {CLARA}"}


def test_news_reach_two_hundred_peers_within_a_minute() -> None:
    peers = [Identity.from_seed(bytes([n]) * 32).peer_id for n in range(200)]
    knows = {peers[7]}
    asked = Counter[PeerId]()
    for turn in range(6):
        before = set(knows)
        for peer in peers:
            others = [other for other in peers if other != peer]
            chosen = to_ask(peer, others, turn)
            asked.update(chosen)
            if before.intersection(chosen):
                knows.add(peer)
    assert len(knows) == len(peers)
    assert max(asked.values()) <= 40, "nobody is asked by all"
