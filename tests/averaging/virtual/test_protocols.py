"""Swarms of two and of three releases: rolling upgrades, in calm weather and in storms."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import msgspec
import pytest

from averaging.messages import Join
from averaging.round.gathering.roster import agreed_protocol
from averaging.round.interface.effects import Apply, Note
from averaging.rules.peer_view import PeerView
from averaging.virtual.swarm import Peer, PeerPlan
from dht.identity import PeerId
from dht.memory.network import CALM
from dht.protocol import Range
from tests.averaging.message_examples import EXAMPLES
from tests.averaging.next_protocol import BEFORE, SPOKEN, next_protocol  # noqa: F401
from tests.averaging.virtual.swarm import Storm, Swarm, storm
from tests.averaging.virtual.swarm import weather_out as survive
from tests.seeds import seeds

pytestmark = pytest.mark.usefixtures("next_protocol")

PEERS = 6
EVERY_S = 30.0


class Watch:
    """The outcomes of the rounds of a swarm, by protocol number."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm
        self.rounds: Counter[int] = Counter()
        self.notes: Counter[str] = Counter()
        swarm.on_apply = self.applied
        swarm.on_note = self.noted

    def applied(self, node: Peer, apply: Apply) -> None:
        commit = apply.commit
        for entry in commit.members:
            # A crash between commit and seal may bring the member back as another release.
            if self.swarm.nodes[entry.peer].incarnation == entry.incarnation:
                oldest, newest = self.swarm.plans[entry.peer].speaks
                assert oldest <= commit.protocol <= newest, (commit.protocol, entry.peer)
        self.rounds[commit.protocol] += 1

    def noted(self, node: Peer, note: Note) -> None:
        self.notes[note.event] += 1


def upgrade(swarm: Swarm, name: PeerId, speaks: Range = SPOKEN) -> None:
    """Start a peer again with another release."""
    swarm.plans[name] = replace(swarm.plans[name], speaks=speaks)
    if name in swarm.nodes:
        swarm.crash(name)
        swarm.call_in(3.0, swarm.restart, name)


def plans(*speak: Range) -> list[PeerPlan]:
    return [
        PeerPlan(speaks=each, founder=number == 0, step_time_s=1.0 + 0.01 * number)
        for number, each in enumerate(speak)
    ]


@pytest.mark.parametrize("seed", range(1))
def test_peers_are_upgraded_one_by_one_and_every_round_is_read_by_all(seed: int) -> None:
    swarm = Swarm(seed, plans(*[BEFORE] * PEERS), weather=CALM)
    watch = Watch(swarm)
    for number, name in enumerate(random.Random(seed).sample(swarm.names, PEERS)):
        swarm.call_at(40.0 + EVERY_S * number, upgrade, swarm, name)
    last = 40.0 + EVERY_S * (PEERS - 1)

    swarm.run(last)
    assert set(watch.rounds) == {1}, f"seed {seed}: {watch.rounds} while a peer lacks the newest"
    mixed, before = max(swarm.versions()), watch.rounds[1]
    assert mixed >= 8, f"seed {seed}: the run stood still"

    swarm.run(last + 120.0)
    assert watch.rounds[2] > 3 * PEERS, f"seed {seed}: {watch.rounds}"
    assert watch.rounds[1] <= before + PEERS, f"seed {seed}: {watch.rounds}"
    assert len(swarm.lineages()) == 1, f"seed {seed}"
    assert watch.notes["void"] == 0, f"seed {seed}: {watch.notes}"


@pytest.mark.parametrize("seed", seeds(1, soak=200))
def test_storms_over_two_releases_break_no_promise(seed: int) -> None:
    """Every invariant of a storm, while peers come back as another release or as an older one."""
    # Every peer is started again: two that made a version alone are believed late (seed 68 once).
    how = Storm(peers=(3, 7), audit_rate=0.2 if seed % 3 == 0 else 0.0, calm_s=300.0)
    swarm = storm(seed, how)
    watch = Watch(swarm)
    for name in swarm.names:
        begins_as = BEFORE if swarm.rng.random() < 0.5 else SPOKEN
        swarm.plans[name] = replace(swarm.plans[name], speaks=begins_as)
        at = swarm.rng.uniform(10.0, how.rough_s)
        swarm.call_at(at, upgrade, swarm, name, swarm.rng.choice([SPOKEN, BEFORE]))
    survive(swarm, how)
    assert watch.rounds, f"seed {seed}"


def test_storms_reach_rounds_of_both_numbers() -> None:
    """Or the test above would not test what it is for."""
    seen: Counter[int] = Counter()
    for seed in range(1, 4):
        swarm = storm(seed, Storm(peers=(3, 7)))
        watch = Watch(swarm)
        for name in swarm.names:
            swarm.call_at(50.0, upgrade, swarm, name)
        survive(swarm)
        seen += watch.rounds
    assert min(seen[1], seen[2]) > 10, seen


def test_three_releases_at_one_leader_go_on_with_those_who_have_a_number_in_common() -> None:
    """The oldest and the newest do not see each other; the middle ones see both."""
    oldest, middle, newest = (1, 1), (1, 2), (2, 3)
    swarm = Swarm(
        3,
        plans(middle, middle, middle, newest, newest, oldest),
        sees=lambda one, other: {one.plan.speaks, other.plan.speaks} != {oldest, newest},
    )
    told: list[str] = []

    def heard(sender: PeerId, to: PeerId, message: object) -> bool:
        reason = getattr(message, "reason", "")
        if to == swarm.names[5] and "protocol" in reason:
            told.append(reason)
        return True

    watch = Watch(swarm)
    swarm.on_send = heard
    swarm.run(200.0)
    assert watch.rounds[1] + watch.rounds[2] >= 5 * 6, watch.rounds
    newer = [swarm.nodes[name] for name in swarm.names[:5]]
    assert len({node.state.lineage for node in newer if node.state}) == 1
    assert told and "this side is too old: upgrade it with" in told[0], told


JOIN = next(example for example in EXAMPLES if isinstance(example, Join))
BORIS, CLARA = PeerId("boris"), PeerId("clara")


def join_of(*numbers: int) -> Join:
    return msgspec.structs.replace(JOIN, signatures=tuple((number, b"s") for number in numbers))


@pytest.mark.parametrize(
    ("numbers", "seen", "agreed"),
    [
        ([(1, 2), (1, 2)], 2, 2),
        ([(1, 2), (1,)], 2, 1),
        ([(1, 2), (1, 2)], 1, 1),  # somebody looks on who reads no newer rounds
        ([(1, 2), (2, 3), (2, 3)], 2, 2),
        ([(1, 2), (2, 3)], 1, 2),  # all members go before those who look on
        ([(1, 2), (1,), (1,), (2, 3)], 2, 1),
        ([(1, 2), (1,), (2, 3)], 2, 2),
    ],
)
def test_a_round_is_of_the_newest_number_that_its_members_have_signed(
    numbers: list[tuple[int, ...]], seen: int, agreed: int
) -> None:
    joins = {PeerId(f"p{place}"): join_of(*each) for place, each in enumerate(numbers)}
    view = {
        BORIS: PeerView(first_seen=0.0, heard_at=100.0, protocol=seen),
        CLARA: PeerView(first_seen=0.0, heard_at=0.0, protocol=1),  # long gone
    }
    assert agreed_protocol(joins, view, (1, 2), 100.0) == agreed
