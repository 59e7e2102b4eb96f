"""Roles in a simulated swarm beside training: members that poison, those that judge, the owner.

**A member that poisons** takes part and trains as any other one does, and keeps its own parameters.
Only the values that it uploads are made up. Each unit of them is as long as the unit of its true
displacement, or a given multiple of it, so norms alone betray nothing:

- ``sign``: back along its own displacement;
- ``noise``: a random direction, another one for each upload;
- ``drift``: a fixed direction for the whole run, the same for all such members.

A member that merges falsely passes the first contribution to a slice off as the mean, which is
within any bound on norms.

**Spot checks** are a learner's judgement of others' contributions. Losses are real: those of the
model with the checker's own states, on the batch of one of the author's steps, without and with
what the author has uploaded. Measuring takes no virtual time.

**The owner** gives directives, which reach some peers and travel on in rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

import msgspec
import numpy as np

from averaging.guard.door import Losses, OtherData, Trial
from averaging.history.readings import Reading
from averaging.history.state import FragmentState
from averaging.messages import Stamp
from averaging.numbers.arrays import Float32s
from averaging.round.interface.effects import Merge
from averaging.rules.orders import RoundOrders
from averaging.virtual.swarm import Peer
from dht.identity import PeerId
from peer.simulate.problems.problem import ChecksOthers, Places
from peer.simulate.settings import Event, Swarm, sweep

Poison: TypeAlias = Literal["sign", "noise", "drift"]


def poisoned(
    base: Float32s,
    values: Float32s,
    *,
    direction: Float32s | None,
    length: float,
    sizes: Sequence[int],
) -> Float32s:
    """The values to upload instead of ``values``.

    ``direction``: where they point from the base; ``None``: back along the own displacement.
    ``length``: norm of each unit's displacement, as a multiple of the true one's. ``sizes``: number
    of values in each unit.
    """
    moved = values - base
    if direction is None:
        return base - np.float32(length) * moved
    out, at = base.copy(), 0
    for size in sizes:
        unit = slice(at, at + size)
        norm = float(np.linalg.norm(direction[unit]))
        if norm > 0.0:
            factor = length * float(np.linalg.norm(moved[unit])) / norm
            out[unit] += np.float32(factor) * direction[unit]
        at += size
    return out


def directions(
    kind: Poison, size: int, *, seed: int, fragment: int, peer: int, life: int
) -> Callable[[], Float32s | None]:
    """A function that gives the direction of each next upload; ``None``: back along one's own."""
    if kind == "sign":
        return lambda: None
    if kind == "noise":
        rng = np.random.default_rng([seed, 4, fragment, peer, life])
        return lambda: rng.standard_normal(size, np.float32)
    fixed = np.random.default_rng([seed, 5, fragment]).standard_normal(size, np.float32)
    return lambda: fixed


def merged_falsely(merge: Merge) -> Merge:
    """The merge that a false reducer carries out instead."""
    if len(merge.contributors) < 2:
        return merge
    weights = (1.0, *[0.0] * (len(merge.weights) - 1))
    return msgspec.structs.replace(merge, weights=weights)


AUTHOR, STEP = "author", "step"
DIGEST = bytes(32)
"""All read the same."""


class Judge:
    """The judge of one life of one peer (``averaging.guard.spot_checking.Judge``)."""

    same_data = True

    def __init__(
        self,
        problem: ChecksOthers,
        places: Places,
        *,
        number: int,
        seed: int,
        steps_before: int,
        states: Callable[[], Sequence[FragmentState | None]],
        judges: bool,
    ) -> None:
        """``steps_before``: steps of the earlier lives, of whose data this one's goes on."""
        self.judges = judges
        self._problem = problem
        self._places = places
        self._number = number
        self._seed = seed
        self._steps_before = steps_before
        self._states = states

    def __repr__(self) -> str:
        return f"Judge({self._number})"

    async def reading_of(self, step: int) -> Reading | None:
        place = {AUTHOR: self._number, STEP: self._steps_before + step - 1}
        return Reading(place, 1, DIGEST)

    async def judge(self, trial: Trial) -> Losses | OtherData | None:
        states, place = self._states(), trial.reading.position
        if place.keys() != {AUTHOR, STEP}:
            return OtherData()
        if None in states:
            return None

        def loss(instead: Float32s) -> float:
            thetas = [state.theta for state in states if state is not None]
            thetas[trial.fragment] = instead
            values = self._places.join(thetas)
            return self._problem.loss_of_step(values, place[AUTHOR], self._seed, place[STEP])

        return Losses(loss(trial.before), loss(trial.after))


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
