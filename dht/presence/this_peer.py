"""State that all parts of one presence share."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

import numpy as np

from dht.host import Host
from dht.identity import PeerId
from dht.membership.known_runs import KnownRuns
from dht.membership.own_record import OwnRecord
from dht.membership.table import PeerTable
from dht.presence.events import Events
from dht.presence.settings import PresenceSettings, Profile


@dataclass(slots=True)
class PresenceStats:
    """Counts of what was done so far."""

    heartbeats: int = 0
    look_ups: int = 0
    hellos_sent: int = 0
    hellos_received: int = 0
    refused: int = 0
    """Hellos and goodbyes that were refused: malformed, of another run, or too many."""


@dataclass(frozen=True, slots=True)
class ThisPeer:
    """The host and the identity of one presence, its settings, and its knowledge of members."""

    host: Host
    profile: Profile
    settings: PresenceSettings
    rng: np.random.Generator
    own: OwnRecord
    runs: KnownRuns
    events: Events
    stats: PresenceStats = field(default_factory=PresenceStats)

    @property
    def id(self) -> PeerId:
        return self.host.peer_id

    @property
    def table(self) -> PeerTable:
        """The other members of the own run. Raises ``ValueError`` at a bootstrap peer."""
        return self.runs.own_table()

    @property
    def table_if_any(self) -> PeerTable | None:
        """The other members of the own run; ``None`` at a bootstrap peer."""
        return None if self.profile.run is None else self.runs.own_table()

    def now(self) -> float:
        """The time of the running event loop."""
        return asyncio.get_running_loop().time()


async def pause(event: asyncio.Event, pause_s: float) -> None:
    """Wait until the event is set or the pause is over, and clear the event."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(pause_s):
            await event.wait()
    event.clear()
