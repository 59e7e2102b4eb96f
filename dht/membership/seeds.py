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

from dht.addresses import no_seed, peer_of
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


Source = Literal["seed", "cached"]


@dataclass(slots=True)
class Seed:
    """An address to dial, and what came of it so far."""

    peer: PeerId
    address: Multiaddr
    source: Source
    due_at: float
    under_way: bool = False
    failures: int = 0
    """Number of attempts in a row that failed."""

    reason: str = ""
    """Reason of the last failure, for a human; empty if it was not tried, or answered."""


LOST_MIN = 2
"""Peers that do not fall silent at the same time by themselves."""


@dataclass(frozen=True, slots=True)
class NobodyAnswered:
    """Every address was tried and none answered. The planner goes on trying them."""

    tried: tuple[Seed, ...]
    lost: int = 0
    """Number of peers that were connected before, all of which have fallen silent."""

    def __str__(self) -> str:
        if self.lost >= LOST_MIN:
            return (
                f"all {self.lost} connected peers fell silent, and no address answers: this "
                "machine's own line seems to be down; still trying, and training goes on meanwhile"
            )
        seeds = [seed for seed in self.tried if seed.source == "seed"]
        cached = len(self.tried) - len(seeds)  # counted: there may be many, and most have left
        if not seeds:
            return (
                f"none of the {cached} addresses of peers met earlier answered; still trying: they "
                "may have left; whoever knows an address of this peer finds it all the same"
            )
        tried = ", ".join(f"{seed.address}: {seed.reason}" for seed in seeds)
        if cached:
            tried += f", and {cached} addresses of peers met earlier"
        advice = "check that one of them is running and that its port is open"
        if all(seed.reason.startswith(ANOTHER_PEER) for seed in seeds):
            advice = "the ids after /p2p/ are misspelt or no longer used: ask for a new link"
        return (
            f"no bootstrap address answered; tried {tried}; still trying: {advice}, then see "
            "'shoal docs no-peer-answers'"
        )


@dataclass(slots=True)
class SeedPlanner:
    """Decides which addresses to dial, and when. Asked after each outcome and at ``next_at``.

    ``due`` returns the addresses to dial now, and ``succeeded`` or ``failed`` ends each attempt.
    ``met`` tells the planner which peers are connected, by any way.
    """

    me: PeerId
    rng: np.random.Generator
    _seeds: dict[str, Seed] = field(default_factory=dict)
    _connected: frozenset[PeerId] = frozenset()
    _lonely: bool = True
    _told: bool = False
    _met_most: int = 0
    """Most peers that were connected at once since the last report."""

    def add(self, addresses: Iterable[Multiaddr], source: Source, *, now: float) -> None:
        """Add the addresses given with the run, or those of peers met earlier, which are dialled
        only while too few members are connected. Raises ``AddressError`` for one without an id."""
        limit = SEEDS_MAX + CACHED_MAX if source == "cached" else SEEDS_MAX
        for address in addresses:
            if (peer := peer_of(address)) is None:
                raise no_seed(address)
            if peer != self.me and len(self._seeds) < limit:
                self._seeds.setdefault(str(address), Seed(peer, address, source, due_at=now))

    def met(self, connected: Collection[PeerId], *, lonely: bool, now: float) -> None:
        """Set the connected peers, and whether too few are met."""
        now_connected = frozenset(connected)
        for seed in self._seeds.values():
            if seed.peer in now_connected:
                seed.failures = 0
            elif seed.peer in self._connected:  # lost: redial soon, but not all peers at once
                seed.reason = "the connection was lost"
                seed.due_at = now + RETRY_FIRST_S * self.rng.random()
        if lonely and not self._lonely:
            for seed in self._seeds.values():  # any known peer may help now
                if seed.source == "cached":
                    seed.due_at = min(seed.due_at, now + RETRY_FIRST_S)
        self._connected = now_connected
        self._met_most = max(self._met_most, len(now_connected))
        self._lonely = lonely
        if any(seed.peer in now_connected for seed in self._seeds.values()):
            self._told = False  # reported again after the next loss

    def due(self, now: float) -> list[Seed]:
        """The addresses to dial now: seeds before cached peers, the longest waiting first."""
        under_way = sum(seed.under_way for seed in self._seeds.values())
        ready = [seed for seed in self._waiting() if seed.due_at <= now]
        ready.sort(key=lambda seed: (seed.source != "seed", seed.due_at, str(seed.address)))
        chosen = ready[: max(0, ATTEMPTS_AT_ONCE - under_way)]
        for seed in chosen:
            seed.under_way = True
        return chosen

    def next_at(self) -> float:
        """Time of the next due attempt; infinity while all are connected or under way."""
        return min((seed.due_at for seed in self._waiting()), default=math.inf)

    def succeeded(self, seed: Seed, *, now: float) -> None:
        seed.under_way, seed.failures, seed.reason = False, 0, ""
        # The next attempt, unless ``met`` reports the peer as connected.
        seed.due_at = now + RETRY_MAX_S
        self._connected |= {seed.peer}

    def failed(self, seed: Seed, reason: str, *, now: float) -> None:
        seed.under_way = False
        seed.failures += 1
        # One line, whatever the reason contains.
        seed.reason = " ".join(reason.split())[:REASON_MAX] or "no reason given"
        doubled = RETRY_FIRST_S * 2.0 ** min(seed.failures - 1, 30)
        spread = 1 + JITTER * (2 * self.rng.random() - 1)
        seed.due_at = now + min(RETRY_MAX_S, doubled) * spread

    def report(self) -> NobodyAnswered | None:
        """A report, once, when every address was tried and failed and no peer is connected."""
        tried = tuple(seed for seed in self._seeds.values() if self._may_try(seed))
        if self._told or not tried or self._connected:
            return None
        if any(seed.failures == 0 for seed in tried):
            return None
        self._told, lost, self._met_most = True, self._met_most, 0
        return NobodyAnswered(tried, lost)

    def given(self) -> list[tuple[Seed, bool]]:
        """The addresses given with the run, each with whether its peer is connected."""
        seeds = [seed for seed in self._seeds.values() if seed.source == "seed"]
        return [(seed, seed.peer in self._connected) for seed in seeds]

    def _may_try(self, seed: Seed) -> bool:
        return seed.source == "seed" or self._lonely

    def _waiting(self) -> list[Seed]:
        return [
            seed
            for seed in self._seeds.values()
            if not seed.under_way and seed.peer not in self._connected and self._may_try(seed)
        ]
