"""A swarm of an experiment on the live driver, beside the same one in the simulator.

    python -m tests.peer.simulate.live_swarm --peers 16 48 100 --seconds 72

Peers are whole averagers in virtual time (``averaging.virtual``), learners those of the simulator.
Membership, lines, churn and events of the experiment are not carried over: peers see each other, on
lines of one speed. What is printed is processor time by virtual second, and what came out.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from averaging.history.adoption import Parting
from averaging.history.parent_maps import ParentMap
from averaging.history.state import FragmentState
from averaging.live.learner_port import Progress, Snapshot
from averaging.numbers.layout import Layout
from averaging.round.interface.effects import Apply
from averaging.virtual import swarm as virtual
from averaging.virtual.membership import Membership
from averaging.virtual.peer import Peer, PeerPlan, Watch
from dht.identity import PeerId
from peer.simulate.learner import Seat, Trainee
from peer.simulate.membership import HEARTBEAT_S
from peer.simulate.names import problem_of
from peer.simulate.problems.problem import Places, Problem, layout_of
from peer.simulate.settings import Swarm
from peer.simulate.simulation import run, weather_of


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a swarm has come to."""

    loss: float
    version: float
    rounds: int
    contributors: float
    bytes_sent: int
    goodput: float
    merged_share: float
    processor_s: float
    """By virtual second."""


class Learner:
    """A simulated learner as an averager sees it, with a safe point after each step."""

    def __init__(
        self,
        swarm: virtual.Swarm,
        plan: PeerPlan,
        trainee: Trainee,
        seats: Sequence[Seat],
    ) -> None:
        self.trainee = trainee
        self.seats = seats
        self._swarm = swarm
        self._plan = plan
        self._peer: Peer | None = None
        self._stepped = asyncio.Event()

    def begin(self, peer: Peer) -> None:
        self._peer = peer
        self._swarm.call_in(self._plan.step_time_s, self._step)

    def end(self) -> None:
        self._peer = None

    def _step(self) -> None:
        if self._peer is None:
            return
        self.trainee.step += 1
        self._stepped.set()
        self._stepped = asyncio.Event()
        self._peer.stepped()
        self._swarm.call_in(self._plan.step_time_s, self._step)

    def progress(self) -> Progress:
        trainee = self.trainee
        return Progress(
            step=trainee.step,
            tokens=trainee.step * trainee.step_tokens,
            step_time_s=self._plan.step_time_s,
            batch_tokens_max=trainee.step_tokens,
        )

    async def snapshot(self, fragment: int, *, timeout_s: float) -> Snapshot | None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._stepped.wait()
        except TimeoutError:
            return None
        seat = self.seats[fragment]
        offer, values = seat.offer(), seat.snapshot
        assert values is not None
        return Snapshot(
            base=seat.base,
            values=values,
            base_version=offer.base_version,
            base_lineage=offer.base_lineage,
            mark=offer.mark,
            steps=offer.steps,
            tokens=offer.tokens,
        )

    def adopt(self, fragment: int, state: FragmentState, *, contained: int | None) -> None:
        self.seats[fragment].adopt(state, contained=contained)

    def rebase(self, fragment: int, state: FragmentState, parting: Parting) -> int | None:
        return self.seats[fragment].rebase(state, parting)

    def discard(self, fragment: int, state: FragmentState, *, reason: str) -> None:
        self.seats[fragment].discard(state)

    def passed(self, fragment: int, state: FragmentState) -> None:
        return

    def moved(self, fragment: int, before: FragmentState, after: FragmentState) -> None:
        return

    def misses_base(self, fragment: int) -> bool:
        return False

    def release(self, fragment: int) -> None:
        self.seats[fragment].release()


class Rounds(Watch):
    """Contributors of each finished round."""

    def __init__(self) -> None:
        self.contributors: dict[bytes, int] = {}

    def applied(
        self,
        peer: Peer,
        apply: Apply,
        before: FragmentState,
        after: FragmentState,
        merged: memoryview,
        maps: Mapping[int, ParentMap],
    ) -> None:
        self.contributors[apply.round] = len(apply.seal)


class Made:
    """Makes the learners of a swarm, one for each peer."""

    def __init__(self, swarm: Swarm, problem: Problem, layout: Layout, seed: int) -> None:
        self._swarm = swarm
        self._problem = problem
        self._places = Places(layout, problem.specs)
        self._seed = seed
        self.learners: list[Learner] = []
        values = problem.first_values(seed)
        self.first = [
            FragmentState.founded(layout.hash, index, self._places.read(index, values))
            for index in range(len(layout.fragments))
        ]

    def learner(
        self, swarm: virtual.Swarm, name: PeerId, plan: PeerPlan, states: Sequence[FragmentState]
    ) -> Learner:
        own = self._problem.learner([len(self.learners)], seed=self._seed)
        step_tokens = self._problem.step_tokens
        trainee = Trainee(own, self._places, step_tokens=step_tokens, rate=lambda: 1.0)
        outer = self._swarm.outer
        seats = [
            Seat(trainee, state, rule=outer.adoption, alpha=outer.blend_alpha) for state in states
        ]
        self.learners.append(Learner(swarm, plan, trainee, seats))
        return self.learners[-1]

    def loss_of(self, peers: Sequence[Peer]) -> float:
        """The loss of the mean of all peers' states."""
        thetas = [
            np.mean([state.theta for peer in peers if (state := peer.averager.states[i])], axis=0)
            for i in range(len(self.first))
        ]
        return self._problem.evaluate(self._places.join(thetas))


def live(swarm: Swarm, seconds: float, seed: int = 1) -> Outcome:
    problem = problem_of(swarm)
    layout = layout_of(problem, swarm.outer.fragments)
    made, watch = Made(swarm, problem, layout, seed), Rounds()
    step_s, step_tokens = swarm.peers.step_time_s, problem.step_tokens
    plans = [
        PeerPlan(step_time_s=step_s, tokens_per_step=step_tokens, founder=number == 0)
        for number in range(swarm.peers.count)
    ]
    settings = replace(virtual.SETTINGS, exchanges_max=swarm.peers.exchanges_max)
    with virtual.Swarm(
        plans,
        virtual.VirtualRun(layout, swarm.policy(), made.first, settings=settings),
        learner=made.learner,
        seed=seed,
        weather=weather_of(swarm),
        membership=Membership(beat_s=HEARTBEAT_S),
        watch=watch,
    ) as running:
        began = time.process_time()
        running.run(seconds)
        spent_s = time.process_time() - began
        peers = running.alive
        steps = sum(learner.trainee.step for learner in made.learners)
        merged = [seat.own.merged_step for one in made.learners for seat in one.seats]
        states = [state for peer in peers for state in peer.averager.states if state]
        return Outcome(
            loss=made.loss_of(peers),
            version=float(np.mean([state.version for state in states])),
            rounds=len(watch.contributors),
            contributors=float(np.mean(list(watch.contributors.values()))),
            bytes_sent=running.network.bytes_sent,
            goodput=steps * step_s / (len(peers) * seconds),
            merged_share=float(np.mean(merged)) * len(peers) / steps,
            processor_s=spent_s / seconds,
        )


def simulated(swarm: Swarm, seconds: float, seed: int = 1) -> Outcome:
    changes = {"end.tokens": 10**12, "end.time_s": seconds, "measure.every_cycles": 1000.0}
    began = time.process_time()
    result = run(swarm.with_settings(changes), seed)
    spent_s = time.process_time() - began
    return Outcome(
        loss=result.final.loss,
        version=result.final.version,
        rounds=len(result.rounds),
        contributors=float(np.mean([record.contributors for record in result.rounds])),
        bytes_sent=result.bytes_sent,
        goodput=result.goodput,
        merged_share=result.fate.merged / result.fate.processed,
        processor_s=spent_s / seconds,
    )


def small(peers: int) -> Swarm:
    """The example experiment in calm weather."""
    return Swarm().with_settings(
        {"peers.count": peers, "problem.size": 8, "outer.fragments": 2, "rounds.group_size": 8}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--peers", type=int, nargs="+", default=[16, 48])
    parser.add_argument("--seconds", type=float, default=72.0)
    options = parser.parse_args()
    for peers in options.peers:
        for drive in (simulated, live):
            print(f"{drive.__name__:10} {peers:4} {drive(small(peers), options.seconds)}")  # noqa: T201


if __name__ == "__main__":
    main()
