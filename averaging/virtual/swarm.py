"""Peers in virtual time, their network, and what happens to them.

    swarm = Swarm(plans, VirtualRun(layout, policy, states), learner=learner, seed=7)
    with swarm:
        swarm.call_at(30.0, swarm.crash, swarm.names[1])
        swarm.run(120.0)

``run`` lets time pass; between two of its calls anything can be looked at and done.

A ``Peer`` is one life of one peer: an averager, its host and its learner. A peer that pauses is a
machine that sleeps: it neither hears nor trains, and what it had to do meanwhile it does when it
wakes up.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, Self, TypeAlias, TypeVar

from averaging.guard.door import Defences
from averaging.history.state import FragmentState
from averaging.live.averager import Averager
from averaging.live.guard import unguarded
from averaging.live.learner_port import LearnerPort
from averaging.live.settings import AveragerSettings, Participant, RunTerms, Surroundings
from averaging.live.slices import watch as live
from averaging.messages import Message
from averaging.numbers.codecs import codec_names
from averaging.numbers.layout import Layout
from averaging.round.fetched_states import Life
from averaging.round.interface.effects import Effect, Note
from averaging.round.interface.inputs import Input
from averaging.round.machine import FragmentRounds
from averaging.rules.peer_view import PeerView
from averaging.rules.policy import RoundPolicy
from averaging.virtual.keys import Keys
from dht.host import Messaging
from dht.identity import PeerId, RunId
from dht.memory.event_heap import Timer
from dht.memory.host import MemoryNetwork
from dht.memory.network import CALM, Weather
from dht.memory.virtual_loop import VirtualLoop, running_loop
from dht.protocol import SPOKEN, Range
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerPlan:
    """The properties of a peer."""

    step_time_s: float = 1.0
    tokens_per_step: int = 100
    clock_offset_s: float = 0.0
    starts_at: float = 0.0
    dial_out_only: bool = False
    trains: bool = True
    """Without a learner it is a keeper."""
    founder: bool = False
    site: str | None = None
    speaks: Range = SPOKEN
    codecs: tuple[str, ...] = field(default_factory=codec_names)
    bytes_per_s: float | None = None
    """Speed of its line in the slower direction, as it knows it; ``None``: it measures it."""


class Learner(LearnerPort, Protocol):
    """A learner that trains in virtual time. It schedules its own steps."""

    def begin(self, peer: Peer) -> None:
        """Train from now on, and call ``peer.stepped`` after each step."""
        ...

    def rest(self) -> None:
        """Make no more steps: the peer is about to leave. It is at a safe point all the time."""
        ...

    def end(self) -> None:
        """The peer is gone."""
        ...


class Watch:
    """Sees all peers of a swarm. An exception that it raises ends the simulation.

    Beside these methods it may have those of ``averaging.live.slices.watch.Watch``, each with the
    peer ahead of its arguments: the peer's averager then does what they say.
    """

    def noted(self, peer: Peer, fragment: int, note: Note) -> None: ...

    def handled(self, peer: Peer, fragment: int) -> None:
        """An input was handled: the moment at which promises hold."""

    def stands(self, peer: Peer, state: FragmentState) -> None:
        """A peer has taken another state."""

    def told(self, peer: Peer, event: str, fields: Mapping[str, Any]) -> None:
        """An event of the averager, for people and logs."""

    def convicted(self, peer: Peer, guilty: PeerId, what: str) -> None:
        """A peer has a proof that another one has lied."""


View: TypeAlias = MutableMapping[PeerId, PeerView]
Absent: TypeAlias = MutableMapping[PeerId, float | None]


class Membership(Protocol):
    """Keeps up to date what the peers of a swarm know of each other."""

    def begin(self, swarm: Swarm) -> None:
        """The swarm is about to begin."""

    def known_to(self, peer: PeerId) -> tuple[View, Absent]:
        """The view of the others with which a peer begins a life, and those that are absent."""
        ...

    def came(self, peer: Peer) -> None:
        """A peer has started."""

    def convicted(self, peer: Peer, guilty: PeerId) -> None:
        """A peer has a proof that another one has lied."""

    def left(self, peer: Peer) -> None:
        """A peer has said goodbye to everybody."""


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


class _Sleeper(Averager):
    """An averager on a machine that may sleep: its timers ring when it wakes up."""

    sleeps = False
    _missed = False

    def tick(self) -> None:
        if self.sleeps:
            self._missed = True
        else:
            super().tick()

    def wake(self) -> None:
        self.sleeps = False
        if self._missed:
            self._missed = False
            super().tick()


class Peer:
    """One life of one peer, as its swarm has planned it."""

    def __init__(self, swarm: Swarm, life: Life) -> None:
        name = life.peer
        self.swarm = swarm
        self.plan = plan = swarm.plans[name]
        self.life = life
        states = swarm.states_of(name)
        self.learner = swarm.new_learner(swarm, name, plan, states) if plan.trains else None
        self.alive = True
        self.view, self.absent = swarm.membership.known_to(name)
        self.machines: dict[int, FragmentRounds] = {}
        self.task: asyncio.Task[None] | None = None
        self.seen: dict[int, FragmentState | None] = {each.fragment: each for each in states}
        seed = f"{swarm.seed} {name} {life.incarnation}"
        defences = swarm.defences(name)
        self.averager = _Sleeper(
            swarm.host_of(name),
            self.learner,
            me=Participant(
                identity=swarm.keys[name],
                incarnation=life.incarnation,
                founder=plan.founder,
                reachable=not plan.dial_out_only,
                site=plan.site,
                speaks=plan.speaks,
                codecs=plan.codecs,
            ),
            terms=swarm.terms_of(name),
            around=Surroundings(
                view=self.view,
                absent=self.absent,
                watch=_Watched(self),
                clock_s=plan.clock_offset_s,
                line_bytes_s=plan.bytes_per_s,
                verify=swarm.verify,
                draw_bits=random.Random(seed).getrandbits,
                on_event=self._tell,
                guard=unguarded
                if defences is None
                else replace(defences, on_convicted=self._convicted),
                **swarm.around(name),
            ),
            states=states,
            settings=swarm.of.settings,
        )

    def __repr__(self) -> str:
        phases = " ".join(map(str, self.averager.phases))
        return f"Peer({self.name}, {self.life.incarnation}, {phases})"

    @property
    def name(self) -> PeerId:
        return self.life.peer

    @property
    def incarnation(self) -> int:
        return self.life.incarnation

    @property
    def machine(self) -> FragmentRounds:
        """The machine of the first fragment."""
        return self.machines[0]

    @property
    def is_complete(self) -> bool:
        """True if it has a state of each fragment: a newcomer fetches them before it trains."""
        return None not in self.averager.states

    @property
    def state(self) -> FragmentState | None:
        """The state of the first fragment."""
        return self.averager.states[0]

    def now(self) -> float:
        """The time on the peer's own clock."""
        return self.swarm.now + self.plan.clock_offset_s

    # Life

    def start(self) -> None:
        self.task = asyncio.get_running_loop().create_task(self._live(), name=f"{self.name}")
        if self.learner is not None:
            self.learner.begin(self)

    async def _live(self) -> None:
        try:
            await self.averager.run()
        except Exception as error:
            self.swarm.failed(error)
            raise

    def stop(self) -> None:
        """Everything ends at once, as in a crash."""
        self.alive = False
        if self.learner is not None:
            self.learner.end()
        if self.task is not None:
            self.task.cancel()

    def sleep(self) -> None:
        self.averager.sleeps = True

    def wake(self) -> None:
        if self.alive:
            self.averager.wake()

    @property
    def sleeps(self) -> bool:
        return self.averager.sleeps

    # Inputs

    def stepped(self) -> None:
        """The learner has made a step."""
        self.averager.look()

    def take(self, given: Input, fragment: int = 0) -> None:
        """Give the machine of a fragment an input."""
        self.swarm.within(lambda: self.averager.give(fragment, given))

    def send(self, to: PeerId, message: Message) -> None:
        """Say something to another peer, whatever the own machine thinks of it."""
        self.swarm.within(lambda: self.averager.send(to, message))

    # What happens

    def _tell(self, event: str, fields: Mapping[str, Any]) -> None:
        self.show("told", event, fields)

    def _convicted(self, guilty: PeerId, what: str) -> None:
        self.swarm.membership.convicted(self, guilty)
        self.show("convicted", guilty, what)

    def show(self, hook: str, *given: Any) -> Any:
        """Call a hook of the swarm's watch, and end the simulation if it raises: a task group may
        take its time to end."""
        try:
            return getattr(self.swarm.watch, hook)(self, *given)
        except Exception as error:
            self.swarm.failed(error)
            raise


class _Watched(live.Watch):
    """Tells the watch of a swarm what one of its peers does, while the peer lives."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        for hook in vars(live.Watch).keys() - vars(_Watched).keys():
            if not hook.startswith("_") and hasattr(peer.swarm.watch, hook):
                setattr(self, hook, partial(self._show, hook))

    def _show(self, hook: str, *given: Any) -> Any:
        if self._peer.alive and hasattr(self._peer.swarm.watch, hook):
            return self._peer.show(hook, *given)
        return getattr(super(), hook)(*given)

    def began(self, machine: FragmentRounds) -> None:
        self._peer.machines[machine.fragment] = machine
        self._show("began", machine)

    def effect(self, fragment: int, effect: Effect) -> Effect | None:
        instead: Effect | None = self._show("effect", fragment, effect)
        if isinstance(instead, Note) and self._peer.alive:
            self._peer.show("noted", fragment, instead)
        return instead

    def handled(self, fragment: int) -> None:
        peer = self._peer
        if not peer.alive:
            return
        state = peer.averager.states[fragment]
        if state is not None and state is not peer.seen.get(fragment):
            peer.seen[fragment] = state
            peer.show("stands", state)
        peer.show("handled", fragment)


class Swarm:
    """Live averagers in virtual time. A swarm has an event loop of its own and is to be closed."""

    def __init__(
        self,
        plans: Sequence[PeerPlan],
        run: VirtualRun,
        *,
        learner: Callable[[Swarm, PeerId, PeerPlan, Sequence[FragmentState]], Learner],
        membership: Membership,
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
        self.new_learner = learner
        keys = keys or Keys()
        self.verify = keys.verify
        self._loop = VirtualLoop(seed=seed) if run.memory is None else running_loop()
        self._failure: asyncio.Future[None] = self._loop.create_future()
        self._ending: list[asyncio.Task[None]] = []
        """Tasks of peers that have ended, or will soon."""
        self.memory = run.memory or self.within(
            lambda: MemoryNetwork(weather, seed=seed, bulk_factor=run.bulk_factor)
        )
        self.network = self.memory.simulated
        self.heap = self.memory.heap
        made = [keys.of(number) for number in range(len(plans))]
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

    def __exit__(self, *_: object) -> None:
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
            pause_s = min(until, self.now + LOOK_S) - self.now
            self.await_(asyncio.wait([self._failure], timeout=pause_s))
            self.check_errors()

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
        self.lives[name] += 1
        peer = Peer(self, Life(name, self.lives[name]))
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
