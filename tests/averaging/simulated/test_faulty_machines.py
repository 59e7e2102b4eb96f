"""Storms of honest peers whose machines fail: nobody is convicted, and the swarm goes on.

Peers crash and come back with other clocks, and the uploads that they keep for auditors rot in
memory. What an auditor is shown then is not what was merged: that costs its owner a strike, and
proves nothing, because nobody has signed it. Not among them: a memory that fails while a reducer
merges (``averaging.audit.proofs``).
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from averaging.simulated.auditing import NodeAudits
from dht.identity import PeerId
from tests.averaging.simulated.swarm import Node, Storm, Swarm, storm, weather_out
from tests.seeds import all_that_happens, seeds

FAULTY = Storm(peers=(4, 7), accidents=(3, 6), audit_rate=0.4)
ROT_EVERY_S = 3.0
CLOCK_OFF_S = 1e5
QUICK, SOAK, CHUNK = 10, 10_000, 10


def rot(swarm: Swarm, rng: random.Random) -> None:
    """Now and then one bit flips in what a peer keeps of a round that is over."""
    swarm.heap.call_in(rng.expovariate(1 / ROT_EVERY_S), rot, swarm, rng)
    node = rng.choice(swarm.trainers() or [None])
    audits = None if node is None else node.audits
    if audits is None or not audits._kept:
        return
    kept = rng.choice(list(audits._kept.values()))
    if not kept.own:
        return
    index = rng.choice(sorted(kept.own))
    data = bytearray(kept.own[index].data)
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        kept.own[index] = replace(kept.own[index], data=bytes(data))
        swarm.truth.coverage["rotten upload"] += 1


def lose_clocks(swarm: Swarm, rng: random.Random) -> None:
    """A peer that starts again has another idea of the time."""

    def started(node: Node) -> None:
        name = node.name
        off_s = rng.uniform(-CLOCK_OFF_S, CLOCK_OFF_S)
        swarm.plans[name] = replace(swarm.plans[name], clock_offset_s=off_s)
        swarm.truth.coverage["another clock"] += node.incarnation > 1

    swarm.on_start = started


def failing(seed: int) -> Counter[str]:
    """One storm. Raises ``Broken``, also if an honest peer is convicted."""
    rng = random.Random(f"faulty {seed}")
    swarm = storm(seed, FAULTY)
    lose_clocks(swarm, rng)
    rot(swarm, rng)
    weather_out(swarm, FAULTY)
    for node in swarm.alive:
        assert node.audits is not None
        assert not node.audits.convicted
        swarm.truth.coverage["inconclusive"] += node.audits.inconclusive
        swarm.truth.coverage["audited"] += node.audits.audited
    return swarm.truth.coverage


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", seeds(QUICK, soak=SOAK, step=CHUNK))
def test_no_machine_that_fails_convicts_its_owner(first: int) -> None:
    happened = all_that_happens(failing, first=first, count=CHUNK)
    assert happened["audited"] > 3 * CHUNK
    assert happened["rotten upload"] > 5 * CHUNK
    assert happened["another clock"] > CHUNK // 2
    assert happened["inconclusive"] > 0


def test_a_rotten_upload_that_its_owner_signs_again_would_convict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kept upload is never signed a second time: the claim is the one that was uploaded."""
    show = NodeAudits.show_upload
    resigned: list[PeerId] = []

    def signs_again(self: NodeAudits, round_id: bytes, index: int, *, alone: bool) -> object:
        kept = self._kept.get(round_id)
        part = None if kept is None else kept.own.pop(index, None)
        if kept is None or part is None:
            return None
        resigned.append(self._means.me)
        self.signed_upload(round_id, index, replace(part, claim=None))
        return show(self, round_id, index, alone=alone)

    monkeypatch.setattr(NodeAudits, "show_upload", signs_again)
    with pytest.raises(Exception, match="which is honest: signed two uploads"):
        for seed in range(6):
            failing(seed)
    assert resigned
