"""The moment when a swarm stands on one version that is certified for each of its
trainers."""

from __future__ import annotations

from averaging.round.opinions.certificates import link_of
from tests.averaging.virtual.swarm import Swarm


def is_certified(swarm: Swarm) -> bool:
    heads = [
        (node, node.machine.standing.head())
        for node in swarm.trainers()
        if node.machine.standing is not None
    ]
    return len({head.lineage for _, head in heads}) == 1 and all(
        node.machine.certificates.is_certified(link_of(head), node.now()) for node, head in heads
    )


def settles(swarm: Swarm, *, within_s: float) -> bool:
    """Run until it is so, or the time is over. Returns whether it is."""
    end = swarm.now + within_s
    while swarm.now < end and not is_certified(swarm):
        swarm.run(swarm.now + 1.0)
    return is_certified(swarm)
