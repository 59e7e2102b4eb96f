"""A peer whose only partner has left: it merges by itself, at once or after a while."""

from __future__ import annotations

from averaging.messages import Stamp
from averaging.round.interface.phase import Phase
from averaging.rules.orders import RoundOrders
from averaging.virtual.swarm import Peer, PeerPlan
from tests.averaging.virtual.swarm import POLICY, Swarm

CYCLE_S = 10.0
SLACK_S = 3.0
"""Time for a snapshot, and until the next step finds the fragment due."""


def pair() -> tuple[Swarm, Peer]:
    """Two peers that have merged for a minute and are between two rounds, and the first of them."""
    swarm = Swarm(3, [PeerPlan(), PeerPlan()])
    swarm.keep_events = True
    swarm.run(60.0)
    while any(node.machine.phase is not Phase.IDLE for node in swarm.alive):
        swarm.run(swarm.now + 0.5)
    anna = swarm.nodes[swarm.names[0]]
    assert version_of(anna) > 2 and len(swarm.lineages()) == 1 and not folds(swarm)
    return swarm, anna


def version_of(node: Peer) -> int:
    assert node.state is not None
    return node.state.version


def folds(swarm: Swarm) -> list[float]:
    return [at for at, _, note in swarm.events if note.event == "folded"]


def test_a_peer_whose_partner_says_goodbye_folds_within_a_cycle() -> None:
    swarm, anna = pair()
    swarm.say_goodbye(swarm.names[1])
    left_at = swarm.now
    assert anna.machine.alone_until(anna.now()) is None
    swarm.run(left_at + 4 * CYCLE_S)
    first, *more = folds(swarm)
    assert first <= left_at + CYCLE_S + SLACK_S
    assert len(more) >= 2, "it goes on as a run of one peer"


def test_a_peer_whose_partner_vanishes_waits_for_it_and_knows_how_long() -> None:
    swarm, anna = pair()
    heard_at = anna.view[swarm.names[1]].heard_at
    swarm.crash(swarm.names[1])
    swarm.run(swarm.now + 40.0)  # it is silent for so long that it is not live any more
    until = anna.machine.alone_until(anna.now())
    assert until is not None and heard_at + POLICY.alone_s <= until <= swarm.now + 30.0
    swarm.run(until)
    assert not folds(swarm)
    swarm.run(until + CYCLE_S)
    assert until <= folds(swarm)[0] <= until + SLACK_S
    assert anna.machine.alone_until(anna.now()) is None


def test_an_order_to_end_waits_for_the_merge_of_a_peer_that_has_lost_the_other() -> None:
    for goodbye in (True, False):
        swarm, anna = pair()
        (swarm.say_goodbye if goodbye else swarm.crash)(swarm.names[1])
        began = swarm.now
        stamp = Stamp(1, bytes(16))
        ends = RoundOrders(stamp=stamp, encoded=b"end", last_version=version_of(anna) + 1)
        assert swarm.follow(anna.name, ends)
        swarm.run(began + CYCLE_S + SLACK_S)
        assert anna.machine.ending.is_final(anna.now()) is goodbye
        swarm.run(began + POLICY.alone_s + SLACK_S)
        assert anna.machine.ending.is_final(anna.now())
        assert version_of(anna) == ends.last_version
