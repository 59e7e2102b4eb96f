"""The lighter side of a fork: its work offered again, or written off.

Nine peers with goals of their own; two of them are cut off for so many cycles and come back. By
``python -m tests.averaging.simulated.rebase_experiment``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import fmean
from typing import Any
from unittest.mock import patch

import numpy as np

from averaging.round import taking_over
from tests.averaging.simulated.swarm import PeerPlan, Swarm

CYCLE_S = 10.0


@dataclass(frozen=True, slots=True)
class Row:
    rule: str
    apart_cycles: int
    merged_share: float
    """Share of all tokens processed, ten cycles after the sides met again."""
    discarded_tokens: float
    distance: float
    """Root mean square distance of theta from the mean of the goals."""
    distance_before: float

    def __str__(self) -> str:
        return (
            f"{self.rule:<12} {self.apart_cycles:>6} {self.merged_share:>8.1%} "
            f"{self.discarded_tokens:>10.0f} {self.distance:>9.4f} {self.distance_before:>8.3f}"
        )


HEADER = f"{'rule':<12} {'apart':>6} {'merged':>8} {'discarded':>10} {'distance':>9} {'before':>8}"


def rebase_experiment(
    apart_cycles: Sequence[int] = (3, 5), seeds: Sequence[int] = range(1, 6)
) -> list[Row]:
    rows = []
    for apart in apart_cycles:
        for rule in ("offer again", "write off"):
            with (
                nullcontext()
                if rule == "offer again"
                else patch.object(taking_over, "parting", _never)
            ):
                runs = [_run(seed, apart) for seed in seeds]
            rows.append(Row(rule, apart, *(fmean(column) for column in zip(*runs, strict=True))))
    return rows


def _never(mine: Any, theirs: Any, *, versions_max: int) -> None:
    return None


def _run(seed: int, apart_cycles: int) -> tuple[float, float, float, float]:
    swarm = Swarm(seed, [PeerPlan(founder=index == 0) for index in range(9)])
    apart_s = apart_cycles * CYCLE_S
    swarm.heap.call_at(20.0, swarm.network.partition, [swarm.names[:2]])
    swarm.heap.call_at(20.0 + apart_s, swarm.network.heal)
    swarm.run(20.0 + apart_s + 10 * CYCLE_S)
    goal = np.mean([swarm.goal(name) for name in swarm.names], axis=0)
    states = [node.state for node in swarm.trainers() if node.state is not None]
    heaviest = max(states, key=lambda state: state.merged.tokens)
    learners = [node.learner for node in swarm.trainers() if node.learner is not None]
    processed = sum(learner.step * learner.tokens_per_step for learner in learners)
    return (
        heaviest.merged.tokens / processed,
        float(sum(learner.discarded for learner in learners)),
        float(np.sqrt(np.mean((heaviest.theta - goal) ** 2))),
        float(np.sqrt(np.mean((swarm.origin.theta - goal) ** 2))),
    )


if __name__ == "__main__":
    print("\n".join([HEADER, *(str(row) for row in rebase_experiment())]))  # noqa: T201
