"""Protocols between an averager, its fragments, and their way to other peers' states.

``averaging.live.averager`` implements ``Services``, ``averaging.live.fragment`` and
``averaging.live.following`` use it; so neither imports the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from averaging.history.lineage import Lineage
from averaging.history.replay import ReplayEntry, ReplayLog
from averaging.history.state import FragmentState
from averaging.live.auditing import Auditing
from averaging.live.fetcher import Fetcher
from averaging.live.learner_port import LearnerPort
from averaging.live.links import Transport
from averaging.live.parts import Workshop
from averaging.live.settings import (
    AveragerSettings,
    AveragerStats,
    Participant,
    RunTerms,
    Surroundings,
)
from averaging.live.spot_checking import SpotChecking
from averaging.live.state_files import StateMemory
from averaging.live.threads import Threads
from averaging.messages import Head, Message
from averaging.numbers.layout import Fragment
from averaging.round.catching_up import UnreliableSources
from averaging.round.inputs import Input
from averaging.round.machine import FragmentRounds
from averaging.round.taking_over import Learner, Life
from averaging.rules.probation import Probation
from averaging.rules.spacing import Spacing
from dht.identity import PeerId


class FragmentServices(Learner, Protocol):
    """One fragment, as ``averaging.live.following`` sees it."""

    index: int
    fragment: Fragment
    machine: FragmentRounds
    state: FragmentState | None
    replay: ReplayLog | None
    earlier_tokens: int

    @property
    def averager(self) -> Services: ...

    @property
    def is_free(self) -> bool:
        """True if another round may begin."""
        ...

    def follow(self, state: FragmentState) -> None: ...

    def set_state(self, state: FragmentState) -> None: ...

    def keep_for_replay(self, entry: ReplayEntry, lineage: Lineage) -> None:
        """Keep a round that led to ``lineage``, for those who are behind."""
        ...

    def keep_if_good(self, state: FragmentState) -> None:
        """Keep a state that all peers keep, for the run's owner to attest."""
        ...

    def usual_norm(self) -> float | None:
        """How far a merge usually moves the fragment; ``None``: not known yet."""
        ...

    def reduced(self, parent: Lineage) -> ReplayEntry | None:
        """The round that follows on ``parent``, if this peer reduced all of it for others."""
        ...

    def take(self, given: Input) -> None:
        """Give the machine an input and carry out what it wants."""
        ...

    def event(self, event: str, **fields: Any) -> None: ...

    async def stop_encoding(self) -> None: ...


class Services(Protocol):
    """An averager, as its fragments see it."""

    port: LearnerPort | None
    me: Participant
    life: Life
    terms: RunTerms
    around: Surroundings
    settings: AveragerSettings
    stats: AveragerStats
    topic: bytes
    keeps: bool
    reachable: bool
    sources: UnreliableSources
    probation: Probation
    spacing: Spacing
    threads: Threads
    transport: Transport
    fetcher: Fetcher
    workshop: Workshop
    memory: StateMemory
    audits: Auditing
    spot_checks: SpotChecking | None

    def catching_up(self) -> AbstractAsyncContextManager[None]:
        """A turn to catch up with a fragment: few are fetched at once."""
        ...

    def fetching_state(self) -> AbstractAsyncContextManager[None]:
        """A turn to fetch a whole state: one at a time on a slow line."""
        ...

    @property
    def bytes_per_s(self) -> float: ...

    def send(self, peer: PeerId, message: Message) -> None:
        """Send a message in the form that its receiver speaks."""
        ...

    def now(self) -> float: ...

    def is_established(self, peer: PeerId) -> bool:
        """True if a peer has been here for a while and counts."""
        ...

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]: ...

    def event(self, event: str, **fields: Any) -> None: ...

    def blame(self, peer: PeerId, kind: str, reason: str, **fields: Any) -> None:
        """Count and report what a peer should not have sent."""
        ...

    def not_a_commit(self, peer: PeerId, reason: str, *, fragment: int) -> None:
        """Report an unreadable commit of an established peer, once per peer."""
        ...

    def silent(self, peer: PeerId, since: float) -> None:
        """One fragment waited for an answer in vain."""
        ...

    def shown(self, state: FragmentState) -> Head:
        """The head of a state as other peers are shown it."""
        ...

    def changed(self) -> None:
        """Wake those who wait in ``until``."""
        ...

    async def until(self, condition: Callable[[], bool]) -> None: ...

    def pinned(self) -> AbstractAsyncContextManager[tuple[FragmentState | None, ...]]: ...

    def may_step_in_place(self, state: FragmentState) -> bool: ...

    def set_timer(self) -> None: ...

    def tell_line_speed(self) -> None: ...

    # Turns

    def has_place(self) -> bool: ...

    def has_its_turn_later(self, fragment: int) -> bool: ...

    def turn_away(self, fragment: int) -> None: ...
