"""The parts of one peer of a run: its seat, its role, its end, and services beside averaging.

Every peer is the same ``peer.agent.peer.Peer``. What it is there for says its role: an agent's
trains beside a program, a keeper's keeps the run. A service gets the peer that it belongs to. What
follows from the end of a run, or of this peer's part in it, waits here until ``peer.agent.leaving``
does it, from the first states on.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from averaging.guard.door import Judge, LossGate
from averaging.history.state import FragmentState
from averaging.live.averager import Averager
from averaging.live.learner_port import LearnerPort
from averaging.live.slices.watch import Watch
from averaging.live.states.fetcher import FetchProgress
from dht.identity import Identity, PeerId
from dht.records import Role as RoleName
from peer.bridge.settings import PeerSettings, default_name
from peer.description import Described
from peer.installed import extras
from peer.rules.ending import Effect, Ending, Input, State
from peer.rules.leaving import Departure
from peer.run_file.sections import RunFile
from peer.status import PeerStatus
from peer.storage.outer_state import merged_of

Fields: TypeAlias = Mapping[str, Any]


class Service:
    """One piece of a peer's work, from the moment at which it is on line. This one does nothing."""

    name = "nothing"

    async def open(self, stack: AsyncExitStack) -> None:
        """Answer others from now on. What is put on the stack is closed before the host is."""

    async def run(self, averager: Averager) -> None:
        """Work for ever, once there is an averager."""

    async def save(self) -> None:
        """Write down what is to last, when the work is over."""

    def note(self, name: str, fields: Fields) -> None:
        """Hear of an event that people may want to hear of."""


Begin: TypeAlias = Callable[[Any], Service]
"""Gets the ``Peer`` that the service belongs to, and gives the service what it needs of it."""


def of_every_peer() -> list[Begin]:
    """The services that no setting asks for."""
    return [module.begin for module in extras("credit.service")]


@dataclass(frozen=True, slots=True)
class FirstStates:
    """The states to begin averaging with.

    Only the averager may keep references to them: it replaces them by newer ones.
    """

    states: tuple[FragmentState, ...] = ()
    settled: tuple[int, ...] | None = None
    """Only from a checkpoint: own tokens of this incarnation, by fragment, that it accounts for as
    merged or given up."""

    def are_own(self, me: PeerId) -> bool:
        """True if nobody else has worked in the run so far: it was founded here."""
        return bool(self.states) and set(merged_of(self.states)) <= {me}


class Role:
    """The purpose of a peer. This one gets in without a state, and makes no steps."""

    incarnation = 0
    learner: LearnerPort | None = None
    """Makes the steps that are merged."""
    gate: LossGate | None = None
    """Measures the loss before and after a state that others made."""
    judge: Judge | None = None
    """Judges the contributions of others."""

    async def first_states(self) -> FirstStates:
        """The way into the run, once the peer is on line."""
        return FirstStates()

    def work(
        self, averager: Averager, first: FirstStates
    ) -> Mapping[str, Coroutine[Any, Any, None]]:
        """The work of the role while it takes part, by name."""
        return {}

    def left(self, departure: Departure) -> None:
        """The peer has left the run, and is about to go off line."""

    async def until_adopted(self, timeout_s: float) -> None:
        """Wait until the trainer has adopted the last versions."""

    def why_closed(self, protocol: str) -> str | None:
        """A reason to refuse streams of this protocol now."""
        return None

    def note(self, name: str, fields: Fields) -> None:
        """Hear of an event that people may want to hear of, and of each phase of the peer."""

    def on_fetched(self, progress: FetchProgress) -> None:
        """Hear of a download."""

    def on_round(self, fields: Fields) -> None:
        """A round of this peer has ended, with or without a result."""

    def on_turn_to_measure(self, version: int, tokens: int) -> None:
        """It is this peer's turn to measure the held-out loss of the run.

        ``version`` of the first fragment, ``tokens`` of the run.
        """

    def with_training(self, status: PeerStatus) -> PeerStatus:
        """The status of this peer with what its role knows."""
        return status

    def pending_tokens(self) -> int:
        """Tokens of the trainer that are not merged yet."""
        return 0

    def ledger(self) -> Fields | None:
        """The trainer's ledger, for the checkpoint."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """The peer that takes part, the run, and how it takes part."""

    run: RunFile
    identity: Identity
    directory: Path
    settings: PeerSettings
    role: RoleName
    credential: bytes = b""
    """Proof that the run admits this peer (``dht.membership.credentials``)."""
    stays: bool = False
    """True if the peer serves the state and the history of the run after its end, too."""
    frozen: tuple[Described, ...] | None = None
    """The trainer's parameters that are not exchanged; ``None`` if they are not known."""
    services: tuple[Begin, ...] = ()
    """Further services of this peer, which begin when it is on line."""
    watch: Watch = field(default_factory=Watch)
    """Sees what the averager does, and may change it: for tests."""

    @property
    def me(self) -> PeerId:
        return self.identity.peer_id

    @property
    def name(self) -> str:
        return self.settings.name or default_name(self.me)


T = TypeVar("T")


class EndOfRun:
    """The inputs that an ``Ending`` has heard, and the effects that are still to be carried out."""

    def __init__(self, ending: Ending) -> None:
        self.ending = ending
        self.todo: deque[tuple[State, Effect]] = deque()
        """The effects to carry out, each with the state that it follows from."""
        self._news: asyncio.Future[None] | None = None
        """Done when something is heard that changes the state, or is to be acted upon."""

    def __repr__(self) -> str:
        return f"EndOfRun({self.ending!r}, todo={len(self.todo)})"

    def hear(self, heard: Input) -> None:
        before = self.ending.state
        now = asyncio.get_running_loop().time()
        effects = self.ending.hear(heard, now=now, wall_time=time.time())
        self.todo.extend((self.ending.state, effect) for effect in effects)
        is_news = bool(effects) or self.ending.state is not before
        if is_news and self._news is not None and not self._news.done():
            self._news.set_result(None)

    def _next_news(self) -> asyncio.Future[None]:
        if self._news is None or self._news.done():
            self._news = asyncio.get_running_loop().create_future()
        return self._news

    async def happens(self, *, within_s: float) -> bool:
        """Wait for news, so long at most. Returns whether there are any."""
        done, _ = await asyncio.wait((self._next_news(),), timeout=within_s)
        return bool(done)

    async def unless_leaving(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of ``work``; ``None``, with ``work`` cancelled, if this peer leaves first."""
        return await self.unless(lambda: self.ending.departure is not None, work)

    async def unless(self, is_void: Callable[[], bool], work: Coroutine[Any, Any, T]) -> T | None:
        """The result of ``work``; ``None``, with ``work`` cancelled, if it is void before."""
        working = asyncio.ensure_future(work)
        try:
            while not (working.done() or is_void()):
                await asyncio.wait(
                    (working, self._next_news()), return_when=asyncio.FIRST_COMPLETED
                )
            return working.result() if working.done() else None
        finally:
            working.cancel()
            await asyncio.wait((working,))
