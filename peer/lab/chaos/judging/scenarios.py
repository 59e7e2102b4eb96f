"""The scenarios of ``shoal chaos run``: the faults of each, and the swarm that it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from peer.lab.chaos.judging.schedule import FaultKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A named mixture of faults."""

    name: str
    text: str
    kinds: Mapping[FaultKind, float] = field(default_factory=dict)
    """Kinds of faults with their weights."""
    hostile: bool = False
    """One more learner takes part, which spoils its uploads."""
    proxied: bool = False
    """Every connection goes through a proxy."""
    skewed: bool = False
    """The learners' clocks can be set, and are wrong from the start."""


SCENARIOS: Mapping[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            name="kill",
            text="kill -9 of learners, with agent and daemon",
            kinds={FaultKind.KILL: 1.0},
        ),
        Scenario(
            name="leader",
            text="kill -9 of the leader of a round, in each phase of the round",
            kinds={FaultKind.LEADER: 1.0},
        ),
        Scenario(
            name="seeds",
            text="kill -9 of all bootstrap peers, and of learners meanwhile",
            kinds={FaultKind.SEEDS: 2.0, FaultKind.KILL: 1.0},
        ),
        Scenario(
            name="freeze",
            text="SIGSTOP of learners for 5 to 60 s",
            kinds={FaultKind.FREEZE: 1.0},
        ),
        Scenario(
            name="slow",
            text="learners at a tenth of their speed; links of 1 Mbit/s, of 200 ms, or that break",
            kinds={FaultKind.CRAWL: 1.0, FaultKind.LINK: 2.0},
            proxied=True,
        ),
        Scenario(
            name="partition",
            text="two halves without connections between them, then healed",
            kinds={FaultKind.PARTITION: 1.0},
            proxied=True,
        ),
        Scenario(
            name="agent",
            text="kill -9 of agents alone, and of libp2p daemons alone",
            kinds={FaultKind.AGENT: 1.0, FaultKind.DAEMON: 1.0},
        ),
        Scenario(
            name="disk",
            text="files that cannot grow, unwritable folders, damaged checkpoints",
            kinds={FaultKind.FULL: 1.0, FaultKind.UNWRITABLE: 1.0, FaultKind.DAMAGE: 1.0},
        ),
        Scenario(
            name="clock",
            text="clocks that are wrong by seconds to hours, and that jump",
            kinds={FaultKind.CLOCK: 2.0, FaultKind.KILL: 1.0},
            skewed=True,
        ),
        Scenario(
            name="poison",
            text="a learner that uploads NaN, Inf, flipped signs, a thousandfold norm and wrong "
            "sizes; a stranger that sends garbage on every protocol",
            kinds={FaultKind.GARBAGE: 1.0},
            hostile=True,
        ),
        Scenario(
            name="flood",
            text="a stranger that keeps opening streams and announces too large frames",
            kinds={FaultKind.FLOOD: 1.0},
        ),
        Scenario(
            name="churn",
            text="everything at random",
            kinds={
                FaultKind.KILL: 4.0,
                FaultKind.LEADER: 3.0,
                FaultKind.SEEDS: 1.0,
                FaultKind.FREEZE: 2.0,
                FaultKind.AGENT: 2.0,
                FaultKind.DAEMON: 2.0,
                FaultKind.DAMAGE: 1.0,
                FaultKind.GARBAGE: 1.0,
                FaultKind.FLOOD: 1.0,
            },
        ),
    )
}

ALL = "all"


def chosen(names: tuple[str, ...]) -> tuple[Scenario, ...]:
    """The scenarios with these names, in their order. Raises ``ValueError``."""
    if ALL in names:
        return tuple(SCENARIOS.values())
    for name in names:
        if name not in SCENARIOS:
            known = ", ".join([*SCENARIOS, ALL])
            raise ValueError(f"there is no scenario {name!r}; there are: {known}")
    return tuple(SCENARIOS[name] for name in dict.fromkeys(names))
