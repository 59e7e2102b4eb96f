"""One life of one peer in a virtual swarm: an averager, its host and its learner, and who watches.

A peer that pauses is a machine that sleeps: it neither hears nor trains, and what it had to do
meanwhile it does when it wakes up.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from averaging.guard.door import Defences
from averaging.history.state import FragmentState
from averaging.live.averager import Averager
from averaging.live.guard import unguarded
from averaging.live.learner_port import LearnerPort
from averaging.live.settings import AveragerSettings, Participant, RunTerms, Surroundings
from averaging.live.slices import watch as live
from averaging.messages import Message
from averaging.numbers.codecs import codec_names
from averaging.round.fetched_states import Life
from averaging.round.interface.effects import Effect, Note
from averaging.round.interface.inputs import Input
from averaging.round.machine import FragmentRounds
from averaging.rules.peer_view import PeerView
from dht.host import Messaging
from dht.identity import PeerId, Signer
from dht.memory.event_heap import Timer
from dht.memory.network import SimulatedNetwork
from dht.protocol import SPOKEN, Range

T = TypeVar("T")


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


@dataclass(frozen=True, slots=True)
class Known:
    """The peer's view of the others, kept up to date by the membership."""

    view: MutableMapping[PeerId, PeerView]
    absent: MutableMapping[PeerId, float | None]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Kit:
    """The things with which a peer begins a life."""

    key: Signer
    host: Messaging
    terms: RunTerms
    settings: AveragerSettings
    verify: Callable[[PeerId, bytes, bytes], bool]
    learner: Learner | None
    known: Known
    states: Sequence[FragmentState]
    defences: Defences | None
    around: Mapping[str, Any]
    """More of its surroundings."""


class Convicting(Protocol):
    """A membership, as a peer tells it of liars."""

    def convicted(self, peer: Peer, guilty: PeerId) -> None: ...


class Swarm(Protocol):
    """The swarm as its peers and their membership know it."""

    seed: int
    watch: Watch
    network: SimulatedNetwork
    plans: dict[PeerId, PeerPlan]
    nodes: dict[PeerId, Peer]

    @property
    def membership(self) -> Convicting: ...

    @property
    def now(self) -> float: ...

    @property
    def alive(self) -> Sequence[Peer]: ...

    def call_in(self, delay_s: float, action: Callable[..., object], *args: Any) -> Timer: ...

    def within(self, action: Callable[[], T]) -> T: ...

    def failed(self, error: Exception) -> None: ...

    def is_paused(self, name: PeerId) -> bool: ...


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
    """One life of one peer."""

    def __init__(self, swarm: Swarm, plan: PeerPlan, life: Life, kit: Kit) -> None:
        self.swarm = swarm
        self.plan = plan
        self.life = life
        self.learner = kit.learner
        self.alive = True
        self.view = kit.known.view
        self.absent = kit.known.absent
        self.machines: dict[int, FragmentRounds] = {}
        self.task: asyncio.Task[None] | None = None
        self.seen: dict[int, FragmentState | None] = {each.fragment: each for each in kit.states}
        seed = f"{swarm.seed} {life.peer} {life.incarnation}"
        self.averager = _Sleeper(
            kit.host,
            kit.learner,
            me=Participant(
                identity=kit.key,
                incarnation=life.incarnation,
                founder=plan.founder,
                reachable=not plan.dial_out_only,
                site=plan.site,
                speaks=plan.speaks,
                codecs=plan.codecs,
            ),
            terms=kit.terms,
            around=Surroundings(
                view=self.view,
                absent=self.absent,
                watch=_Watched(self),
                clock_s=plan.clock_offset_s,
                line_bytes_s=plan.bytes_per_s,
                verify=kit.verify,
                draw_bits=random.Random(seed).getrandbits,
                on_event=self._tell,
                guard=unguarded
                if kit.defences is None
                else replace(kit.defences, on_convicted=self._convicted),
                **kit.around,
            ),
            states=kit.states,
            settings=kit.settings,
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
