"""Measures what audits cost: bytes and processor time of rounds with and without them, in turns.

``python -m tests.benchmark.audit_cost --members 8 --codec int4 --turns 3``. All peers run on the
virtual loop of one process, so that processor time is that of their arithmetic and of moving bytes
in memory; nothing is encrypted, which makes the share of audits look larger than on a network.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass, replace

from averaging.numbers.layout import Layout, TensorSpec
from averaging.rules.due import DuePolicy
from averaging.rules.quorum import QuorumPolicy
from dht.memory.host import MemoryNetwork
from dht.memory.virtual_loop import run
from tests.averaging.live.quadratic import POLICY, Peer, swarm

CYCLE = 8


@dataclass(frozen=True, slots=True)
class Cost:
    """Per round of the group, sent and received together."""

    rate: float
    rounds: int
    bytes: float
    audit_bytes: float
    cpu_s: float


def measure(
    rate: float, *, members: int, codec: str, values: int, seconds: float, merge: str = "mean"
) -> Cost:
    """Let a group make rounds at this rate of audits."""
    policy = replace(
        POLICY,
        due=DuePolicy(cycle_steps=CYCLE, fragments=1),
        quorum=QuorumPolicy(required="all", wait_s=20.0),
        codec=codec,
        merge=merge,
        slice_bytes_min=1024,
        audit_rate=rate,
    )
    layout = Layout.build(
        [TensorSpec(f"t{i:03}", (256, values // 256 // 64)) for i in range(64)], 1
    )

    async def main() -> Cost:
        async with swarm(MemoryNetwork(), layout=layout) as made:
            peers = [await made.add(f"peer {i}", policy=policy) for i in range(members)]
            for peer in peers:
                _train_seldom(peer)
            await made.live(3.0 * CYCLE)
            began, before = time.process_time(), [replace(p.averager.stats) for p in peers]
            await made.live(seconds)
            took = time.process_time() - began
            after = [peer.averager.stats for peer in peers]
            rounds = max(b.rounds - a.rounds for a, b in zip(before, after, strict=True))
            moved = [
                b.sent_bytes + b.received_bytes - a.sent_bytes - a.received_bytes
                for a, b in zip(before, after, strict=True)
            ]
            audits = [b.audit_bytes - a.audit_bytes for a, b in zip(before, after, strict=True)]
            assert not any(peer.averager.guard.convicted for peer in peers)
            return Cost(rate, rounds, sum(moved) / rounds, sum(audits) / rounds, took / rounds)

    return run(main())


def _train_seldom(peer: Peer) -> None:
    """A step of the learner costs nothing, except once in a cycle."""
    learner = peer.learner
    assert learner is not None
    learner.is_noisy = False
    train = learner.train_once

    def seldom() -> None:
        if learner.step % CYCLE == 0:
            train()
            return
        learner.step += 1
        learner._stepped.set()
        learner._stepped = type(learner._stepped)()

    learner.train_once = seldom


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--codec", default="int4")
    parser.add_argument("--merge", default="mean")
    parser.add_argument("--values", type=int, default=1 << 21)
    parser.add_argument("--seconds", type=float, default=400.0)
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    ratios = []
    for _ in range(given.turns):
        without, audited = (
            measure(
                rate,
                members=given.members,
                codec=given.codec,
                merge=given.merge,
                values=given.values,
                seconds=given.seconds,
            )
            for rate in (0.0, given.rate)
        )
        ratios.append((audited.bytes / without.bytes, audited.cpu_s / without.cpu_s))
        print(json.dumps([asdict(without), asdict(audited)]), flush=True)
    for what, found in zip(("bytes", "cpu"), zip(*ratios, strict=True), strict=True):
        print(f"{what}: {statistics.median(found):.3f} ({min(found):.3f} to {max(found):.3f})")


if __name__ == "__main__":
    main()
