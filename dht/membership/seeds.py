"""Plan of the dials to seeds and cached peers, and the report when none of them answers. Pure.

Seeds are the addresses given with a run; cached peers are those met in earlier sessions. Neither
is ever given up: each is dialled again as long as the peer runs, with a backoff that stays below
half a minute. The planner decides and remembers; ``dht.presence.seeking`` dials. The time and the
random generator are arguments.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from multiaddr import Multiaddr

from dht.addresses import deduplicate, no_seed, peer_of
from dht.errors import ANOTHER_PEER
from dht.identity import PeerId

SEEDS_MAX = 64
CACHED_MAX = 128
"""Limit of addresses of peers met earlier."""

REASON_MAX = 120

ATTEMPTS_AT_ONCE = 8
CONNECT_TIMEOUT_S = 5.0
JITTER = 0.25
"""Share by which pauses differ, or all peers would dial a returning seed at once."""

RETRY_FIRST_S = 1.0
RETRY_MAX_S = 15.0
"""Longest pause. With jitter and the attempt's timeout, a returning seed is met within 30 s."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A dial to make now. Its outcome has to be reported to the planner."""

    peer: PeerId
    address: Multiaddr


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results for one address, for a human."""

    address: Multiaddr
    source: Literal["seed", "cached"]
    state: Literal["connected", "failed", "untried"]
    reason: str
    attempts: int
    answer_s: float | None
    """Duration of the last successful attempt."""


LOST_MIN = 2
"""Peers that do not fall silent at the same time by themselves."""


@dataclass(frozen=True, slots=True)
class NobodyAnswered:
    """Every address was tried and none answered. The planner goes on trying them."""

    outcomes: tuple[Outcome, ...]
    lost: int = 0
    """Number of peers that were connected before, all of which have fallen silent."""

    def __str__(self) -> str:
        if self.lost >= LOST_MIN:
            return (
                f"all {self.lost} connected peers fell silent, and no address answers: this "
                "machine's own line seems to be down; still trying, and training goes on meanwhile"
            )
        seeds = [outcome for outcome in self.outcomes if outcome.source == "seed"]
        cached = len(self.outcomes) - len(seeds)  # counted: there may be many, and most have left
        if not seeds:
            return (
                f"none of the {cached} addresses of peers met earlier answered; still trying: they "
                "may have left; whoever knows an address of this peer finds it all the same"
            )
        tried = ", ".join(f"{outcome.address}: {outcome.reason}" for outcome in seeds)
        if cached:
            tried += f", and {cached} addresses of peers met earlier"
        advice = "check that one of them is running and that its port is open"
        if all(outcome.reason.startswith(ANOTHER_PEER) for outcome in seeds):
            advice = "the ids after /p2p/ are misspelt or no longer used: ask for a new link"
        return (
            f"no bootstrap address answered; tried {tried}; still trying: {advice}, then see "
            "'shoal docs no-peer-answers'"
        )


@dataclass(slots=True)
class _Entry:
    peer: PeerId
    address: Multiaddr
    source: Literal["seed", "cached"]
    due_at: float
    trying_since: float | None = None
    failures: int = 0
    attempts: int = 0
    reason: str = ""
    answer_s: float | None = None


@dataclass(slots=True)
class SeedPlanner:
    """Decides which addresses to dial, and when. Asked after each outcome and at ``next_at``.

    ``due`` returns attempts; ``succeeded`` or ``failed`` ends each. ``met`` tells the planner which
    peers are connected, by any way.
    """

    me: PeerId
    rng: np.random.Generator
    _entries: dict[str, _Entry] = field(default_factory=dict)
    _connected: frozenset[PeerId] = frozenset()
    _lonely: bool = True
    _told: bool = False
    _met_most: int = 0
    """Most peers that were connected at once since the last report."""

    def add_seeds(self, addresses: Iterable[Multiaddr], *, now: float) -> None:
        """Add the addresses given with the run. Raises ``AddressError`` for one without an id."""
        for address in deduplicate(addresses):
            peer = peer_of(address)
            if peer is None:
                raise no_seed(address)
            self._add(peer, address, "seed", now)

    def add_cached(self, addresses: Iterable[Multiaddr], *, now: float) -> None:
        """Add peers met earlier. They are dialled only while too few members are connected."""
        for address in addresses:
            peer = peer_of(address)
            if peer is not None:
                self._add(peer, address, "cached", now)

    def _add(
        self, peer: PeerId, address: Multiaddr, source: Literal["seed", "cached"], now: float
    ) -> None:
        limit = SEEDS_MAX + CACHED_MAX if source == "cached" else SEEDS_MAX
        if peer != self.me and len(self._entries) < limit:
            self._entries.setdefault(str(address), _Entry(peer, address, source, due_at=now))

    def met(self, connected: Collection[PeerId], *, lonely: bool, now: float) -> None:
        """Set the connected peers, and whether too few are met."""
        now_connected = frozenset(connected)
        for entry in self._entries.values():
            if entry.peer in now_connected:
                entry.failures = 0
            elif entry.peer in self._connected:  # lost: redial soon, but not all peers at once
                entry.reason = "the connection was lost"
                entry.due_at = now + RETRY_FIRST_S * self.rng.random()
        if lonely and not self._lonely:
            for entry in self._entries.values():  # any known peer may help now
                if entry.source == "cached":
                    entry.due_at = min(entry.due_at, now + RETRY_FIRST_S)
        self._connected = now_connected
        self._met_most = max(self._met_most, len(now_connected))
        self._lonely = lonely
        if any(entry.peer in now_connected for entry in self._entries.values()):
            self._told = False  # reported again after the next loss

    def due(self, now: float) -> tuple[Attempt, ...]:
        """The attempts to make now: seeds before cached peers, the longest waiting first."""
        under_way = sum(entry.trying_since is not None for entry in self._entries.values())
        ready = [entry for entry in self._waiting() if entry.due_at <= now]
        ready.sort(key=lambda entry: (entry.source != "seed", entry.due_at, str(entry.address)))
        chosen = ready[: max(0, ATTEMPTS_AT_ONCE - under_way)]
        for entry in chosen:
            entry.trying_since = now
            entry.attempts += 1
        return tuple(Attempt(entry.peer, entry.address) for entry in chosen)

    def next_at(self) -> float:
        """Time of the next due attempt; infinity while all are connected or under way."""
        return min((entry.due_at for entry in self._waiting()), default=math.inf)

    def succeeded(self, attempt: Attempt, *, now: float) -> None:
        entry = self._entries[str(attempt.address)]
        if entry.trying_since is not None:
            entry.answer_s = now - entry.trying_since
        entry.trying_since = None
        entry.failures = 0
        entry.reason = ""
        # The next attempt, unless ``met`` reports the peer as connected.
        entry.due_at = now + RETRY_MAX_S
        self._connected |= {attempt.peer}

    def failed(self, attempt: Attempt, reason: str, *, now: float) -> None:
        entry = self._entries[str(attempt.address)]
        entry.trying_since = None
        entry.failures += 1
        # One line, whatever the reason contains.
        entry.reason = " ".join(reason.split())[:REASON_MAX] or "no reason given"
        doubled = RETRY_FIRST_S * 2.0 ** min(entry.failures - 1, 30)
        spread = 1 + JITTER * (2 * self.rng.random() - 1)
        entry.due_at = now + min(RETRY_MAX_S, doubled) * spread

    def report(self) -> NobodyAnswered | None:
        """A report, once, when every address was tried and failed and no peer is connected."""
        tried = [entry for entry in self._entries.values() if self._may_try(entry)]
        if self._told or not tried or self._connected:
            return None
        if any(entry.failures == 0 for entry in tried):
            return None
        self._told, lost, self._met_most = True, self._met_most, 0
        return NobodyAnswered(tuple(o for o in self.outcomes() if o.state == "failed"), lost)

    def outcomes(self) -> tuple[Outcome, ...]:
        """The results for each address, seeds first, in the order in which they were given."""
        entries = sorted(self._entries.values(), key=lambda entry: entry.source != "seed")
        return tuple(
            Outcome(
                address=entry.address,
                source=entry.source,
                state=(
                    "connected"
                    if entry.peer in self._connected
                    else "failed"
                    if entry.reason
                    else "untried"
                ),
                reason=entry.reason,
                attempts=entry.attempts,
                answer_s=entry.answer_s,
            )
            for entry in entries
        )

    def _may_try(self, entry: _Entry) -> bool:
        return entry.source == "seed" or self._lonely

    def _waiting(self) -> list[_Entry]:
        return [
            entry
            for entry in self._entries.values()
            if entry.trying_since is None
            and entry.peer not in self._connected
            and self._may_try(entry)
        ]
