"""Measures what audits cost: their share of the bytes and of the processor time of rounds.

``python -m tests.benchmark.audit_cost --members 8 --codec int4``. All peers run on the virtual loop
of one process, so that processor time is that of their arithmetic and of moving bytes in memory;
nothing is encrypted, which makes the share of audits look larger than on a network. A timer that
counts the process's own time looks every few milliseconds whether an audit is at work, so that
other programs on the machine change little.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType

from averaging.guard.auditing import Auditing
from averaging.numbers.layout import Layout, TensorSpec
from averaging.rules.due import DuePolicy
from averaging.rules.quorum import QuorumPolicy
from dht.memory.host import MemoryNetwork
from dht.memory.virtual_loop import run
from tests.averaging.live.quadratic import POLICY, Peer, swarm

CYCLE = 8
LOOKS_EVERY_S = 0.004
SERVES = Auditing._serve.__code__


@dataclass(slots=True)
class Looks:
    """Looks at what the process is doing."""

    at_audits: int = 0
    at_others: int = 0

    def look(self, signal_number: int, frame: FrameType | None) -> None:
        task = asyncio.current_task()
        is_audit = task is not None and task.get_name().startswith("audit ")
        while frame is not None and not is_audit:
            is_audit, frame = frame.f_code is SERVES, frame.f_back
        self.at_audits += is_audit
        self.at_others += not is_audit

    @contextmanager
    def begun(self) -> Iterator[None]:
        signal.signal(signal.SIGPROF, self.look)
        signal.setitimer(signal.ITIMER_PROF, LOOKS_EVERY_S, LOOKS_EVERY_S)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)


@dataclass(frozen=True, slots=True)
class Cost:
    """Of all rounds of the group, sent and received together."""

    rounds: int
    bytes: float
    audit_bytes: float
    cpu_s: float
    looks: Looks

    def __str__(self) -> str:
        audits, others = self.looks.at_audits, self.looks.at_others
        error = math.sqrt(audits) / others
        return (
            f"{self.rounds} rounds of {1e3 * self.cpu_s / self.rounds:.0f} ms; audits cost "
            f"{self.audit_bytes / (self.bytes - self.audit_bytes):.1%} of the bytes and "
            f"{audits / others:.1%} (error {error:.1%}) of the processor time of the others"
        )


def measure(
    rate: float,
    *,
    members: int,
    codec: str,
    values: int,
    seconds: float,
    merge: str,
    slice_bytes_min: int,
) -> Cost:
    """Let a group make rounds at this rate of audits."""
    policy = replace(
        POLICY,
        due=DuePolicy(cycle_steps=CYCLE, fragments=1),
        quorum=QuorumPolicy(required="all", wait_s=20.0),
        codec=codec,
        merge=merge,
        slice_bytes_min=slice_bytes_min,
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
            looks, began = Looks(), time.process_time()
            before = [replace(p.averager.stats) for p in peers]
            with looks.begun():
                await made.live(seconds)
            took = time.process_time() - began
            after = [peer.averager.stats for peer in peers]
            pairs = list(zip(before, after, strict=True))
            rounds = max(b.rounds - a.rounds for a, b in pairs)
            sent = sum(b.sent_bytes - a.sent_bytes for a, b in pairs)
            received = sum(b.received_bytes - a.received_bytes for a, b in pairs)
            audits = sum(b.audit_bytes - a.audit_bytes for a, b in pairs)
            assert not any(peer.averager.guard.convicted for peer in peers)
            return Cost(rounds, sent + received, audits, took, looks)

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
    parser.add_argument("--seconds", type=float, default=1600.0)
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--slice-bytes-min", type=int, default=1024)
    given = vars(parser.parse_args())
    print(measure(given.pop("rate"), **given))


if __name__ == "__main__":
    main()
