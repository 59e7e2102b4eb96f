"""Profile, settings, events and own signed record, which all parts of one presence share."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
from msgspec.structs import replace
from multiaddr import Multiaddr

from dht.addresses import pack
from dht.decoding import decoded
from dht.errors import DhtError
from dht.host import Host
from dht.identity import Identity, PeerId, RunId
from dht.membership.reachability import Reachability
from dht.membership.table import Member, MembershipSettings, PeerTable, bucket_key
from dht.protocol import SPOKEN, Range
from dht.records import RUN_FILE_MAX_BYTES, SEQUENCE_MAX, PeerRecord, Role, Sealed, seal
from dht.whole_files import write_whole

T = TypeVar("T")

DIRECTORY_TIMEOUT_S = 8.0
"""Time for one look-up in the directory, or one record stored in it."""

CALL_TIMEOUT_S = 5.0
"""Time for a call to another peer, and for a connection with it."""

GOODBYE_TIMEOUT_S = 3.0
"""Time for telling all others that this peer leaves."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Description of this peer for the others."""

    run: RunId | None
    """The run it takes part in; ``None`` for a bootstrap peer, which serves every run."""

    role: Role = "learner"
    name: str = ""
    site: str = ""
    run_file: bytes | None = None
    """The run file, which is served to any peer that asks for it by run id."""

    credential: bytes = b""
    """Proof that the run admits this peer (``dht.membership.credentials``)."""

    observes: bool = False
    """Read the membership of the run without joining it: nothing is published. An observer asks
    for dial-backs only when told to (``Presence.check_reachability``), because a dial-back can
    cost it the connection through which it observes."""

    def __post_init__(self) -> None:
        if self.observes and self.run is None:
            raise ValueError("observes is true without a run; it needs one to look at")
        size = 0 if self.run_file is None else len(self.run_file)
        if size > RUN_FILE_MAX_BYTES:
            raise ValueError(f"run file has {size} bytes; at most {RUN_FILE_MAX_BYTES}")

    @property
    def is_member(self) -> bool:
        """Say whether this peer publishes a record of itself in the run."""
        return self.run is not None and not self.observes


@dataclass(frozen=True, slots=True, kw_only=True)
class PresenceSettings:
    """Settings by which a peer stays in touch. The defaults are for the open internet."""

    membership: MembershipSettings = field(default_factory=MembershipSettings)
    protocol_versions: Range = SPOKEN
    cache_path: Path | None = None
    """File that keeps the peers met for the next session; ``None``: they are not kept."""

    directives_path: Path | None = None
    """File that keeps the directives of the run's owner; ``None``: they are not kept."""

    calls_per_minute: int = 120
    """Limit on the calls of one other peer to this one; a tenth of it for dial-backs."""


_logger = logging.getLogger("dht.presence")

Fact = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class PresenceEvent:
    """Something that a human may want to know. ``text`` is one line."""

    name: str
    """``connected``, ``nobody_answered``, ``peer_joined``, ``peer_left``, ``peer_lost``,
    ``reachability``, ``hello_refused``, ``other_run``, ``clock_off``, ``identity_in_use``,
    ``cache_unreadable``, ``cache_unwritable``, ``directive``, ``invite_ends`` or
    ``not_admitted``."""

    text: str
    fields: Mapping[str, Fact] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Events:
    """Reports the events of one presence to its owner and to the log."""

    on_event: Callable[[PresenceEvent], None] | None = None
    on_reachable: Callable[[bool], Awaitable[None]] | None = None
    """Told ``True`` when others can dial this peer, ``False`` when not, or no longer known."""
    on_record: Callable[[Member], None] | None = None
    """Told of a member of the own run at once when a new record of it has come."""

    def tell(self, event: str, text: str, **fields: Fact) -> None:
        """Log an event and pass it to the owner."""
        _logger.info("%s %s", event, " ".join(f"{name}={fields[name]}" for name in fields))
        if self.on_event is not None:
            self.on_event(PresenceEvent(event, text, fields))


@dataclass(slots=True)
class PresenceStats:
    """Counts of what was done so far."""

    heartbeats: int = 0
    look_ups: int = 0
    hellos_sent: int = 0
    hellos_received: int = 0
    refused: int = 0
    """Hellos that were refused: malformed, of another run, or too many."""


@dataclass(slots=True, eq=False, repr=False)
class ThisPeer:
    """The host and the identity of one presence, its settings, its knowledge of members, and the
    record that it signs of itself."""

    host: Host
    identity: Identity
    profile: Profile
    settings: PresenceSettings
    rng: np.random.Generator
    facts: PeerRecord
    """The content of the own record, but for the addresses. It may be replaced at any time."""

    table: PeerTable
    """The other members of the own run; at a bootstrap peer the members of all runs."""
    events: Events
    reachability: Reachability = field(default_factory=lambda: Reachability(scope=None))
    stats: PresenceStats = field(default_factory=PresenceStats)
    seed_peers: frozenset[PeerId] = frozenset()
    """The peers that this one was given to begin with."""

    addresses: tuple[Multiaddr, ...] = ()
    """Announced addresses, best first. The last ones are left out if they do not fit."""

    sequence: int = 0
    """The last sequence number used."""

    key: str = ""
    sealed: bytes | None = None
    """The record that was signed last, for this key; ``None`` once a fact in it has changed."""

    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the next heartbeat should come at once."""

    hurried_at: float = -math.inf
    """Time at which that was last so."""

    @property
    def id(self) -> PeerId:
        return self.host.peer_id

    def now(self) -> float:
        """The time of the running event loop."""
        return asyncio.get_running_loop().time()

    def hurry(self) -> None:
        """Have the next heartbeat at once: a fact changed for which no peer should wait."""
        self.hurried_at = self.now()
        self.wanted.set()

    def renew(self) -> bytes:
        """Sign an own record that is newer than all earlier ones: each has a new number."""
        assert self.profile.run is not None
        self.facts = facts = replace(self.facts, reachable=self.reachability.reachable)
        self.key = bucket_key(self.profile.run, self.table.own_bucket(self.now()))
        # Unix milliseconds, so that the numbers increase over restarts. If the clock was set back,
        # the cache on disk or other peers know the last number: see ``learn``.
        wall_ms = int(max(0.0, self.host.wall_time()) * 1000)
        self.sequence = sequence = min(SEQUENCE_MAX, max(self.sequence + 1, wall_ms))
        addresses, ttl_s = list(map(pack, self.addresses)), self.settings.membership.expiry_s
        while True:
            record = replace(facts, addresses=tuple(addresses))
            try:
                self.sealed = seal(
                    record, self.identity, key=self.key, sequence=sequence, ttl_s=ttl_s
                )
                return self.sealed
            except ValueError:
                if len(addresses) > 1:
                    addresses.pop()
                elif facts.versions:
                    facts = replace(facts, versions=())  # a hint: a round names its version itself
                else:
                    raise

    def outdate(self) -> None:
        """Note that a fact changed: the next hello carries a new record."""
        self.sealed = None

    def learn(self, sealed: Sealed) -> bool:
        """Take a record from elsewhere. Says whether it is an own record, newer than the last."""
        if sealed.peer != self.id or sealed.sequence <= self.sequence:
            return False
        self.sequence = sealed.sequence
        return True

    def record(self) -> bytes:
        """The own record to put into a hello; empty for a peer that is no member."""
        if not self.profile.is_member:
            return b""
        return self.sealed if self.sealed is not None else self.renew()

    async def publish(self, sealed: bytes) -> None:
        """Store a record that ``renew`` returned in the directory. A failure is made good at the
        next heartbeat."""
        with contextlib.suppress(DhtError):
            await self.host.directory.publish(self.key, sealed, timeout_s=DIRECTORY_TIMEOUT_S)


class KeptFile:
    """A small file with which the next session of a peer goes on; without a path nothing is kept.

    One that cannot be read or written is reported and otherwise ignored.
    """

    def __init__(self, path: Path | None, what: str, events: Events, *, max_bytes: int) -> None:
        self._path = path
        self._what = what
        self._events = events
        self._max_bytes = max_bytes

    async def read(self, decode: Callable[[bytes], T]) -> T | None:
        """Return the file as ``decode`` reads it, which may raise ``ValueError``; ``None`` if there
        is none."""
        if (path := self._path) is None:
            return None

        def content() -> T:
            with path.open("rb") as file:
                data = file.read(self._max_bytes)
            return decoded(data, decode, self._what)

        try:
            return await asyncio.get_running_loop().run_in_executor(None, content)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            text = f"{self._what} in {path} cannot be read and are not used: {error}"
            self._events.tell("cache_unreadable", text, path=str(path))
            return None

    async def write(self, data: bytes) -> None:
        """Replace the file as a whole or not at all."""
        if self._path is None:
            return
        try:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(None, write_whole, self._path, data)
        except OSError as error:
            text = f"{self._what} cannot be kept in {self._path}: {error.strerror or error}"
            self._events.tell("cache_unwritable", text, path=str(self._path))


async def pause(event: asyncio.Event, pause_s: float) -> None:
    """Wait until the event is set or the pause is over, and clear the event."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(pause_s):
            await event.wait()
    event.clear()
