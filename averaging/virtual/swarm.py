"""Peers in virtual time, their network, and what happens to them.

    swarm = Swarm(plans, VirtualRun(layout, policy, states), learner=learner, seed=7)
    with swarm:
        swarm.call_at(30.0, swarm.crash, swarm.names[1])
        swarm.run(120.0)

``run`` lets time pass; between two of its calls anything can be looked at and done.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self, TypeVar

from averaging.guard.door import Defences
from averaging.history.state import FragmentState
from averaging.live.settings import AveragerSettings, RunTerms
from averaging.numbers.layout import Layout
from averaging.round.fetched_states import Life
from averaging.rules.policy import RoundPolicy
from averaging.virtual.keys import Keys
from averaging.virtual.membership import Observers
from averaging.virtual.peer import Kit, Learner, Peer, PeerPlan, Watch
from dht.host import Messaging
from dht.identity import PeerId, RunId
from dht.memory.event_heap import Timer
from dht.memory.host import MemoryNetwork
from dht.memory.network import CALM, Weather
from dht.memory.virtual_loop import VirtualLoop, running_loop
from dht.wrapped_host import DiallingHost

T = TypeVar("T")

RUN = RunId("virtual")
SETTINGS = AveragerSettings(progress_s=1e6, threads=1)
"""Learners say when they have made a step; nobody has to look."""
LAST_OFFERS_S = 12.0
"""Time in which a peer that leaves has its work merged, and ..."""
DRAIN_S = 12.0
"""... in which its last rounds end, as at a peer of a real run."""
LEAVING_LOOK_S = 0.5
LOOK_S = 5.0
"""Errors that the event loop was told of are looked for so often."""


@dataclass(frozen=True, slots=True)
class VirtualRun:
    """Everything that all peers of a swarm share."""

    layout: Layout
    policy: RoundPolicy
    first: Sequence[FragmentState]
    """The first states of peers that have nothing on their disks."""
    run_id: RunId = RUN
    settings: AveragerSettings = SETTINGS
    bulk_factor: float = 1.0
    """The model stands for one that is so many times as large (``dht.memory.stream``)."""
    memory: MemoryNetwork | None = None
    """The network that the swarm is on, whose event loop runs and lets time pass; not set, the
    swarm has both for itself."""


class Swarm:
    """Live averagers in virtual time. A swarm has an event loop of its own and is to be closed."""

    def __init__(
        self,
        plans: Sequence[PeerPlan],
        run: VirtualRun,
        *,
        learner: Callable[[Swarm, PeerId, PeerPlan, Sequence[FragmentState]], Learner],
        membership: Observers,
        seed: int = 0,
        weather: Weather = CALM,
        watch: Watch | None = None,
        keys: Keys | None = None,
    ) -> None:
        """``learner`` makes the one of a life."""
        self.of = run
        self.layout = run.layout
        self.policy = run.policy
        self.seed = seed
        self.membership = membership
        self.watch = watch or Watch()
        self.nodes: dict[PeerId, Peer] = {}
        """The last life of each peer."""
        self.disks: dict[PeerId, dict[int, FragmentState]] = {}
        """The states from which peers start again."""
        self.lives: Counter[PeerId] = Counter()
        self._learner = learner
        self._keys = keys or Keys()
        self._loop = VirtualLoop(seed=seed) if run.memory is None else running_loop()
        self._failure: asyncio.Future[None] = self._loop.create_future()
        self._ending: list[asyncio.Task[None]] = []
        """Tasks of peers that have ended, or will soon."""
        self.memory = run.memory or self.within(
            lambda: MemoryNetwork(weather, seed=seed, bulk_factor=run.bulk_factor)
        )
        self.network = self.memory.simulated
        self.heap = self.memory.heap
        made = [self._keys.of(number) for number in range(len(plans))]
        self.keys = {key.peer_id: key for key in made}
        self.plans = dict(zip(self.keys, plans, strict=True))
        for name, plan in self.plans.items():
            if plan.dial_out_only:
                self.network.dial_out_only(name)
            self.call_at(plan.starts_at, self.start, name)
        self.membership.begin(self)

    def __repr__(self) -> str:
        return f"Swarm({len(self.alive)} of {len(self.plans)} peers, at {self.now:.3f} s)"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # Time

    @property
    def now(self) -> float:
        return self.heap.now

    def call_at(self, when: float, action: Callable[..., object], *args: Any) -> Timer:
        return self.heap.call_at(when, action, *args)

    def call_in(self, delay_s: float, action: Callable[..., object], *args: Any) -> Timer:
        return self.heap.call_in(delay_s, action, *args)

    def within(self, action: Callable[[], T]) -> T:
        """Act on the swarm's event loop, without letting time pass."""
        if self._loop.is_running():
            return action()

        async def act() -> T:
            return action()

        return self._loop.run_until_complete(act())

    def await_(self, work: Coroutine[Any, Any, T]) -> T:
        """Let as much time pass as a coroutine takes. Not to be called by events."""
        return self._loop.run_until_complete(work)

    def run(self, until: float) -> None:
        """Let time pass. Raises the first error of a peer or of the watch."""
        while self.now < until:
            self._loop.run_until_complete(self._pass(min(until, self.now + LOOK_S)))
            self.check_errors()

    async def _pass(self, until: float) -> None:
        await asyncio.wait([self._failure], timeout=until - self.now)

    def failed(self, error: Exception) -> None:
        """End the simulation with this error."""
        if not self._failure.done():
            self._failure.set_exception(error)

    def check_errors(self) -> None:
        """Raise the first error of a peer, of the watch, or that the event loop was told of."""
        if self._failure.done():
            error = self._failure.exception()
        else:
            error = next(iter(self._loop.unhandled), None)
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if error is not None:
            raise error

    def close(self) -> None:
        """End all peers. What is left over then is an error, unless there was one before."""
        if self._loop.is_closed():
            return
        try:
            self._loop.run_until_complete(self._end())
        finally:
            failed = self._failure.done()
            self._failure.cancel()
            self._loop.close()
        unhandled = [error for error in self._loop.unhandled if isinstance(error, Exception)]
        if unhandled and not failed:
            raise unhandled[0]

    async def _end(self) -> None:
        for peer in self.alive:
            self.crash(peer.name)
        ended = await asyncio.gather(*self._ending, return_exceptions=True)
        left = [each for each in asyncio.all_tasks() if each is not asyncio.current_task()]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        errors = [each for each in ended if isinstance(each, Exception)]
        if errors and not self._failure.done():
            raise errors[0]

    # Peers

    @property
    def names(self) -> list[PeerId]:
        return list(self.plans)

    @property
    def alive(self) -> list[Peer]:
        return [peer for peer in self.nodes.values() if peer.alive]

    def trainers(self) -> list[Peer]:
        return [peer for peer in self.alive if peer.learner is not None]

    def is_paused(self, name: PeerId) -> bool:
        return self.network.is_paused(name)

    def addresses(self, peer: PeerId) -> Sequence[Any]:
        """The addresses of a peer, as its record says."""
        if peer not in self.nodes or self.plans[peer].dial_out_only:
            return ()
        return (self.memory.full_address_of(peer),)

    def host_of(self, name: PeerId) -> Messaging:
        """The host of a new life."""
        host = self.memory.host(self.keys[name])
        return DiallingHost(host, self.addresses, dials=host)

    def around(self, name: PeerId) -> Mapping[str, Any]:
        """More of the surroundings of a new life (``averaging.live.settings.Surroundings``)."""
        return {}

    def defences(self, name: PeerId) -> Defences | None:
        """The defences of a new life against liars; ``None``: it has no guard."""
        return Defences()

    def states_of(self, name: PeerId) -> list[FragmentState]:
        """The states that a new life begins with."""
        if not self.plans[name].trains:
            return []
        disk = self.disks.get(name, {})
        # The outer step moves momentum in place: each life has its own.
        states = (disk.get(state.fragment, state) for state in self.of.first)
        return [replace(state, momentum=state.momentum.copy()) for state in states]

    def start(self, name: PeerId) -> Peer:
        """Start a peer, for the first time or again."""
        return self.within(lambda: self._start(name))

    def _start(self, name: PeerId) -> Peer:
        plan = self.plans[name]
        self.lives[name] += 1
        states = self.states_of(name)
        kit = Kit(
            key=self.keys[name],
            host=self.host_of(name),
            terms=self.terms_of(name),
            settings=self.of.settings,
            verify=self._keys.verify,
            learner=self._learner(self, name, plan, states) if plan.trains else None,
            known=self.membership.known_to(name),
            states=states,
            defences=self.defences(name),
            around=self.around(name),
        )
        peer = Peer(self, plan, Life(name, self.lives[name]), kit)
        self.nodes[name] = peer
        self.membership.came(peer)
        peer.start()
        return peer

    def terms_of(self, name: PeerId) -> RunTerms:
        """The terms of the run, as a new life of a peer has them."""
        return RunTerms(self.of.run_id, self.layout, self.policy)

    def crash(self, name: PeerId) -> None:
        """Switch a machine off."""
        peer = self.nodes[name]
        if peer.alive:
            self.within(lambda: self._crash(peer))

    def _crash(self, peer: Peer) -> None:
        peer.stop()
        self.memory.crash(peer.name)
        assert peer.task is not None
        self._ending.append(peer.task)

    def restart(self, name: PeerId) -> None:
        """Start a peer that is down from its disk."""
        if not self.nodes[name].alive:
            self.start(name)

    def say_goodbye(self, name: PeerId) -> None:
        """A peer leaves in order: everybody hears that it trains no more."""
        peer = self.nodes[name]
        self.membership.left(peer)
        self.crash(name)

    def leave(self, name: PeerId) -> None:
        """Let a peer leave in order: it trains no more, its work is offered, its rounds end, and it
        says goodbye."""
        peer = self.nodes[name]
        if peer.alive:
            self.within(lambda: self._ending.append(self._loop.create_task(self._leave(peer))))

    async def _leave(self, peer: Peer) -> None:
        averager, until = peer.averager, self.now + LAST_OFFERS_S
        if peer.learner is not None:
            peer.learner.rest()
        while peer.alive and self.now < until:
            if not averager.offer_before_leaving():
                break
            await asyncio.sleep(LEAVING_LOOK_S)
        if peer.alive:
            await averager.drain(timeout_s=DRAIN_S)
        if peer.alive:
            self.say_goodbye(peer.name)

    def pause(self, name: PeerId) -> None:
        """Put a machine to sleep."""
        self.nodes[name].sleep()
        self.network.pause(name)

    def resume(self, name: PeerId) -> None:
        self.network.resume(name)
        self.within(self.nodes[name].wake)

    def partition(self, groups: Sequence[Iterable[PeerId]]) -> None:
        """Cut every path between the groups; the others form one more."""
        self.memory.partition(groups)

    def heal(self) -> None:
        self.memory.heal()

    def save(self, peer: Peer, state: FragmentState) -> None:
        """Write a checkpoint of a fragment: the peer's next life begins with it."""
        disk = self.disks.setdefault(peer.name, {})
        disk[state.fragment] = replace(state, momentum=state.momentum.copy())
