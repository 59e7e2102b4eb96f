"""Protocols between an averager, its fragments, and their way to other peers' states.

``averaging.live.averager`` implements ``Services``, ``averaging.live.fragment`` and
``averaging.live.following`` use it; so neither imports the other. The methods are documented where
they are implemented.
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
    averager: Services

    @property
    def is_free(self) -> bool: ...

    def follow(self, state: FragmentState) -> None: ...

    def set_state(self, state: FragmentState) -> None: ...

    def keep_for_replay(self, entry: ReplayEntry, lineage: Lineage) -> None: ...

    def keep_if_good(self, state: FragmentState) -> None: ...

    def usual_norm(self) -> float | None: ...

    def reduced(self, parent: Lineage) -> ReplayEntry | None: ...

    def take(self, given: Input) -> None: ...

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

    def catching_up(self) -> AbstractAsyncContextManager[None]: ...

    def fetching_state(self) -> AbstractAsyncContextManager[None]: ...

    @property
    def bytes_per_s(self) -> float: ...

    def send(self, peer: PeerId, message: Message) -> None: ...

    def now(self) -> float: ...

    def is_established(self, peer: PeerId) -> bool: ...

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]: ...

    def event(self, event: str, **fields: Any) -> None: ...

    def blame(self, peer: PeerId, kind: str, reason: str, **fields: Any) -> None: ...

    def not_a_commit(self, peer: PeerId, reason: str, *, fragment: int) -> None: ...

    def silent(self, peer: PeerId, since: float) -> None: ...

    def shown(self, state: FragmentState) -> Head: ...

    def changed(self) -> None: ...

    async def until(self, condition: Callable[[], bool]) -> None: ...

    def pinned(self) -> AbstractAsyncContextManager[tuple[FragmentState | None, ...]]: ...

    def may_step_in_place(self, state: FragmentState) -> bool: ...

    def set_timer(self) -> None: ...

    def tell_line_speed(self) -> None: ...

    # Turns

    def has_place(self) -> bool: ...

    def has_its_turn_later(self, fragment: int) -> bool: ...

    def turn_away(self, fragment: int) -> None: ...
