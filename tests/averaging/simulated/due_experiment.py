"""Do peers of different speeds meet? Rosters and waits with due times, and free-running.

Run by ``test_due.py``, which prints the table. Free-running is the control: everybody offers
every H own steps, whatever the others do, and nobody comes when called.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from averaging.round.interface.effects import Note
from averaging.rules.due import DuePolicy, DueTime
from averaging.rules.policy import RoundPolicy
from averaging.rules.quorum import QuorumPolicy
from dht.memory.network import Weather
from tests.averaging.simulated.swarm import POLICY, Node, PeerPlan, Swarm

CYCLE_STEPS = 24
TAU = 2.0
PEERS = 8
LINKS = Weather(latency_s=(0.005, 0.05), jitter_s=0.01, bandwidth_bytes_s=1e6)

SPEEDS: dict[str, Sequence[float]] = {
    "equal": [1.0] * 8,
    "18% apart": [1.0, 1.18] * 4,
    "1..3x": [1.0 + 2.0 * i / 7 for i in range(8)],
    "4x": [1.0] * 4 + [4.0] * 4,
}
"""Step times in seconds."""


class FreeRunning(DueTime):
    """Due every H own steps since its own start, deaf to everybody."""

    __slots__ = ()

    def closed(self, step: int, interval: int) -> None:
        while self._due <= step:
            self._due += self.policy.cycle_steps

    def attempt_failed(self, step: int, interval: int) -> None:
        self.closed(step, interval)

    def answers_call(self, step: int, interval: int, *, hurried: bool = False) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of one swarm, after a warm-up of two cycles."""

    speeds: str
    schedule: str
    rounds: int
    roster_share: float
    """Mean of members over live peers, at each closing."""
    wait_steps: float
    """Mean time from the offer to the commit, in steps of the median peer."""
    finish_steps: float
    """Mean time from the offer to the new version, in steps of the median peer."""
    empty_share: float
    """Attempts that ended without a round."""

    def __str__(self) -> str:
        return (
            f"{self.speeds:<10} {self.schedule:<13} {self.rounds:>6} {self.roster_share:>7.1%}"
            f" {self.wait_steps:>7.2f} {self.finish_steps:>8.2f} {self.empty_share:>7.1%}"
        )


HEADER = (
    f"{'speeds':<10} {'schedule':<13} {'rounds':>6} {'roster':>7} {'wait':>7}"
    f" {'finish':>8} {'empty':>7}"
)


def due_experiment(seeds: Sequence[int] = range(3), cycles: int = 14) -> list[Row]:
    """Eight peers that join at random times, for each spread of speeds and both schedules."""
    rows = []
    for name, speeds in SPEEDS.items():
        for free in (False, True):
            parts = [_run(name, speeds, seed, cycles, free=free) for seed in seeds]
            rounds = sum(part.rounds for part in parts)
            rows.append(
                Row(
                    name,
                    "free-running" if free else "due times",
                    rounds,
                    fmean(part.roster_share for part in parts),
                    fmean(part.wait_steps for part in parts),
                    fmean(part.finish_steps for part in parts),
                    fmean(part.empty_share for part in parts),
                )
            )
    return rows


def _run(name: str, speeds: Sequence[float], seed: int, cycles: int, *, free: bool) -> Row:
    rng = random.Random(seed)
    median_s = median(speeds)
    cycle_s = CYCLE_STEPS * median_s
    policy: RoundPolicy = replace(
        POLICY,
        due=DuePolicy(cycle_steps=CYCLE_STEPS, fragments=1),
        quorum=QuorumPolicy(wait_s=cycle_s / 2, tau=TAU),
    )
    plans = [
        PeerPlan(
            step_time_s=speed,
            starts_at=0.0 if index == 0 else rng.uniform(0.0, 2 * cycle_s),
            clock_offset_s=rng.uniform(-1e4, 1e4),
            founder=index == 0,
        )
        for index, speed in enumerate(speeds)
    ]
    swarm = Swarm(seed, plans, weather=LINKS, policy=policy)
    since = 4 * cycle_s
    offered: dict[str, float] = {}
    shares: list[float] = []
    waits: list[float] = []
    finishes: list[float] = []
    attempts = [0, 0]

    def watch(node: Node, note: Note) -> None:
        now = swarm.heap.now
        if note.event == "joining":
            offered.setdefault(node.name, now)
        elif note.event == "entered" and node.name in offered:
            if now >= since:
                waits.append(now - offered[node.name])
                attempts[0] += 1
        elif note.event == "finished" and node.name in offered:
            started = offered.pop(node.name)
            if now >= since:
                finishes.append(now - started)
        elif note.event == "idle" and node.name in offered:
            offered.pop(node.name)
            if now >= since:
                attempts[1] += 1
        elif note.event == "closed" and now >= since:
            members, live = note.fields["members"], note.fields["live"]
            assert isinstance(members, int) and isinstance(live, int)
            shares.append(members / live)

    swarm.on_note = watch
    if free:
        swarm.on_start = lambda node: _set_free(node, policy)
    swarm.run(since + cycles * cycle_s)
    return Row(
        name,
        "free-running" if free else "due times",
        len(shares),
        fmean(shares or [0.0]),
        fmean(waits or [0.0]) / median_s,
        fmean(finishes or [0.0]) / median_s,
        attempts[1] / max(1, sum(attempts)),
    )


def _set_free(node: Node, policy: RoundPolicy) -> None:
    node.machine.pace.due_time = FreeRunning(policy.due, fragment=0, step=0)


def table(rows: Sequence[Row]) -> str:
    return "\n".join([HEADER, *(str(row) for row in rows)])


if __name__ == "__main__":
    print(table(due_experiment()))  # noqa: T201
