"""The scenarios of ``tests.chaos``: the faults of each, and the swarm that it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tests.chaos.judging.schedule import FaultKind


@dataclass(frozen=True, slots=True)
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
    listed: bool = False
    """The run admits its learners alone, so that nobody else can be a member."""
    peers: int = 4
    """Usual number of learners, without hostile ones."""
    lies: bool = False
    """Some more members take part, which lie (``tests.chaos.judging.lies``)."""
    late: bool = False
    """The last learner joins late, and asks the others for the state."""
    audit_rate: float | None = None
    """Chance that a piece of a merge is audited; ``None``: the usual one."""
    minutes: float = 2.0
    """Usual length."""
    resizes: bool = False
    """Learners start and end on a schedule (``sizes_text``)."""

    def sizes_text(self, peers: int) -> str | None:
        """The schedule of a swarm that grows to so many learners (``tests.swarms.sizes``).

        It shrinks to the half, doubles at once, and loses nine tenths at once.
        """
        if not self.resizes:
            return None
        half, few = max(2, peers // 2), max(2, round(peers / 10))
        return f"2,{peers},{half}/{peers},{peers}/{few},{few}"

    @property
    def control(self) -> Scenario:
        """A swarm to compare with, without faults: the same one for all with the same name."""
        if self.lies:
            return replace(self, name=f"control of {self.name}", text="nobody lies", lies=False)
        return QUIET


QUIET = Scenario("control", "no faults")

SCENARIOS: Mapping[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario("kill", "kill -9 of learners, with agent and daemon", {FaultKind.KILL: 1.0}),
        Scenario(
            "leader",
            "kill -9 of the leader of a round, in each phase of the round",
            {FaultKind.LEADER: 1.0},
        ),
        Scenario(
            "seeds",
            "kill -9 of all bootstrap peers, and of learners meanwhile",
            {FaultKind.SEEDS: 2.0, FaultKind.KILL: 1.0},
        ),
        Scenario("freeze", "SIGSTOP of learners for 5 to 60 s", {FaultKind.FREEZE: 1.0}),
        Scenario(
            "slow",
            "learners at a tenth of their speed; links of 1 Mbit/s, of 200 ms, or that break",
            {FaultKind.CRAWL: 1.0, FaultKind.LINK: 2.0},
            proxied=True,
        ),
        Scenario(
            "partition",
            "two halves without connections between them, then healed",
            {FaultKind.PARTITION: 1.0},
            proxied=True,
        ),
        Scenario(
            "agent",
            "kill -9 of agents alone, and of libp2p daemons alone",
            {FaultKind.AGENT: 1.0, FaultKind.DAEMON: 1.0},
        ),
        Scenario(
            "disk",
            "files that cannot grow, unwritable folders, damaged checkpoints",
            {FaultKind.FULL: 1.0, FaultKind.UNWRITABLE: 1.0, FaultKind.DAMAGE: 1.0},
        ),
        Scenario(
            "clock",
            "clocks that are wrong by seconds to hours, and that jump",
            {FaultKind.CLOCK: 2.0, FaultKind.KILL: 1.0},
            skewed=True,
        ),
        Scenario(
            "poison",
            "a learner that uploads NaN, Inf, flipped signs, a thousandfold norm and wrong sizes; "
            "a stranger that sends garbage on every protocol",
            {FaultKind.GARBAGE: 1.0},
            hostile=True,
        ),
        Scenario(
            "flood",
            "a stranger that keeps opening streams and announces too large frames",
            {FaultKind.FLOOD: 1.0},
        ),
        Scenario(
            "strangers",
            "strangers with ever new keys, which join, forge heads, squat in the directory, use up "
            "bandwidth, and send every other kind of hostile request",
            {FaultKind.CROWD: 1.0},
            listed=True,
            minutes=60.0,
        ),
        Scenario(
            "liars",
            "three in ten members lie in every way, once they are established",
            lies=True,
            late=True,
            # A fragment of the small model is one slice, of one piece, which one member of ten
            # merges: each tells a false merge in one round of ten.
            audit_rate=0.5,
            peers=7,
            minutes=4.0,
        ),
        Scenario(
            "resize",
            "a swarm that grows, shrinks, doubles at once and loses nine tenths at once",
            peers=12,
            minutes=10.0,
            resizes=True,
        ),
        Scenario(
            "churn",
            "a random mixture of faults",
            {
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
