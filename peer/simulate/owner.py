"""The owner of a simulated run: its directives, which reach some peers and travel on in rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from averaging.messages import Stamp
from averaging.rules.orders import RoundOrders
from averaging.virtual.peer import Peer
from dht.identity import PeerId
from peer.simulate.settings import Event, Swarm, sweep

LATER_VERSIONS = 2
"""Amendments count from so many versions on after the newest one."""


class Owner:
    """Issues directives, and remembers which one each peer knows, over its lives."""

    def __init__(self, experiment: Swarm) -> None:
        self.known: dict[PeerId, RoundOrders] = {}
        self._amended = experiment
        self._newest = RoundOrders()
        self._issued: dict[bytes, RoundOrders] = {}
        for event in experiment.event:
            amended(experiment, event)  # what cannot be is refused before anything begins

    def issue(self, event: Event, hearing: Sequence[Peer], *, version: int) -> None:
        """Issue a directive that these peers hear of. ``version``: the newest one of the run."""
        policies, number = self._newest.policies, len(self._issued) + 1
        if event.amends:
            self._amended = amended(self._amended, event)
            policies = (*policies, (version + LATER_VERSIONS, self._amended.policy()))
        self._newest = replace(
            self._newest,
            stamp=Stamp(number, number.to_bytes(16, "big")),
            encoded=b"directive %d" % number,
            paused="the owner has paused the run" if event.paused else None,
            policies=policies,
        )
        self._issued[self._newest.encoded] = self._newest
        for peer in hearing:
            self.take(peer, self._newest.encoded)

    def take(self, peer: Peer, directive: bytes) -> bool:
        """Have a peer follow a directive, if it is newer than its own; ``False``: it is older."""
        mine, theirs = peer.averager.terms.book.orders.stamp, self._issued[directive]
        assert theirs.stamp is not None
        if mine is not None and mine.number >= theirs.stamp.number:
            return mine == theirs.stamp
        self.known[peer.name] = theirs
        peer.swarm.within(lambda: peer.averager.follow(theirs))
        return True


def amended(experiment: Swarm, event: Event) -> Swarm:
    """The experiment with the settings that an order amends. Raises ``BadExperiment``."""
    return experiment.with_settings(next(sweep(event.amends)))
