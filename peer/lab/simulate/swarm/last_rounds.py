"""The end of a simulated run by its date: each peer does what a live one does then
(``peer.agent.active_peer``), on a clock that is right.
"""

from __future__ import annotations

from averaging.round.inputs import AnswerEveryCall, Due, GatherEverybody, Input, LastRoundOver
from peer.lab.simulate.swarm.environment import Environment
from peer.lab.simulate.swarm.peer import SimulatedPeer
from peer.rules.ending import LastRounds

LOOK_EVERY_S = 0.5
WAIT_S = 30.0
"""Longest time for the last rounds, besides the quorum's deadline."""


class DateOfEnd:
    """Makes the peers' last rounds from a date on."""

    def __init__(self, environment: Environment, date_s: float) -> None:
        self._env = environment
        self._rounds: dict[SimulatedPeer, tuple[LastRounds, float]] = {}
        """The last rounds of the peers that have begun them, and until when."""
        self._over: set[SimulatedPeer] = set()
        environment.heap.call_at(date_s, self._look)

    def _look(self) -> None:
        for peer in self._env.alive:
            if peer not in self._rounds:
                self._begin(peer)
            elif peer not in self._over:
                self._go_on(peer)
        self._env.heap.call_in(LOOK_EVERY_S, self._look)

    def _begin(self, peer: SimulatedPeer) -> None:
        until = self._env.heap.now + self._env.policy.quorum.wait_s + WAIT_S
        self._rounds[peer] = LastRounds(_versions(peer)), until
        _tell(peer, AnswerEveryCall())
        _tell(peer, GatherEverybody())

    def _go_on(self, peer: SimulatedPeer) -> None:
        rounds, until = self._rounds[peer]
        missing = rounds.missing(_versions(peer))
        company = any(other not in self._over for other in self._env.alive if other is not peer)
        if not missing or not company or self._env.heap.now >= until:
            self._over.add(peer)
            _tell(peer, LastRoundOver())
            return
        for node in peer.nodes:
            if node.fragment.index in missing and not node.is_busy:
                node.take(Due())


def _versions(peer: SimulatedPeer) -> tuple[int, ...]:
    return tuple(0 if node.state is None else node.state.version for node in peer.nodes)


def _tell(peer: SimulatedPeer, given: Input) -> None:
    for node in peer.nodes:
        node.take(given)
