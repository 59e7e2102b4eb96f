"""Presence of one peer in a run: it finds the members, and the members find it.

``Presence`` puts the parts of this room together and runs their loops. It works over any ``Host``.
No failure of the network ends it: it reports through ``on_event``, and tries again.

A bootstrap peer is present without a run: it sends no heartbeats, and keeps a table of each run
whose members say hello, so that it can introduce them. An observer is present in a run without
being a member of it: it publishes nothing and appears in no table, but reads the directory and says
hello like a member.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from msgspec.structs import replace
from multiaddr import Multiaddr

from dht.addresses import deduplicate, is_dialable, is_loopback, pack, peer_of, rank, without_peer
from dht.errors import HostClosed
from dht.host import Host
from dht.identity import Identity, PeerId
from dht.limits import Rate
from dht.membership.admission import Admission, Terms
from dht.membership.hello import ClockEstimate
from dht.membership.seeds import Seed
from dht.membership.table import PeerTable
from dht.presence.dial_back import DialBacks, ReachabilityChecks
from dht.presence.dialler import Dialler
from dht.presence.door import Door
from dht.presence.greeting import Greeting
from dht.presence.intake import BucketReading, Intake, Misfit
from dht.presence.run_files import RunFiles
from dht.presence.seeking import KeptPeers, Seeking
from dht.presence.this_peer import (
    GOODBYE_TIMEOUT_S,
    Events,
    PresenceSettings,
    Profile,
    ThisPeer,
    pause,
)
from dht.protocol import RELEASE
from dht.records import ADDRESS_MAX_BYTES, ADDRESSES_MAX, PeerRecord


class Presence:
    """One peer's presence in a run, or at a bootstrap peer in every run.

    Call ``start``, then ``leave`` (which tells the others) and ``close``. The host is the
    caller's: it is neither opened nor closed here.
    """

    def __init__(
        self,
        host: Host,
        identity: Identity,
        profile: Profile,
        settings: PresenceSettings | None = None,
        *,
        seeds: Sequence[Multiaddr] = (),
        rng: np.random.Generator | None = None,
        events: Events | None = None,
        admission: Admission | None = None,
    ) -> None:
        """``events``: what its owner is told; ``admission``: who may take part in the run; unset:
        everybody.
        """
        if host.peer_id != identity.peer_id:
            raise ValueError(f"identity is {identity.peer_id}; the host is {host.peer_id}")
        self.profile = profile
        self.settings = settings = settings or PresenceSettings()
        self._seeds = tuple(seeds)
        rng = rng if rng is not None else np.random.default_rng()
        facts = PeerRecord(
            protocol=settings.protocol_versions,
            role=profile.role,
            incarnation=int(rng.integers(1, 2**62)),
            name=profile.name,
            site=profile.site,
            credential=profile.credential,
            release=RELEASE,
        )
        self.table = table = PeerTable(profile.run, identity.peer_id, settings.membership)
        """The other members of this peer's run; at a bootstrap peer the members of all runs."""

        events = events or Events()
        self._this = this = ThisPeer(host, identity, profile, settings, rng, facts, table, events)
        this.seed_peers = frozenset(peer for seed in seeds if (peer := peer_of(seed)) is not None)
        self.stats = this.stats
        self._kept = KeptPeers(settings.cache_path, profile.run, events=events)
        self._dialler = Dialler(this)
        table.network_of = self._dialler.network_of
        dial_backs = Rate[PeerId].in_a_minute(max(1, settings.calls_per_minute // 10))
        self._dial_backs = DialBacks(this, self._dialler, dial_backs)
        self._checks = ReachabilityChecks(this, self._dialler)
        self._intake = Intake(this, self._checks)
        self.misfits: Mapping[PeerId, Misfit] = self._intake.misfits
        """Peers that turned out to be of another run, or to speak no protocol of this peer's."""

        budget = Rate[PeerId].in_a_minute(settings.calls_per_minute)
        self._door: Door | None = None
        if profile.run is not None:
            self._door = Door(
                this,
                self._dialler,
                admission or Admission(Terms(profile.run)),
                Rate.in_a_minute(settings.calls_per_minute),
            )
            table.judge = self._door.judge
        self._run_files = RunFiles(this, self._dialler, budget)
        self._buckets = BucketReading(this, self._intake)
        self._greeting = Greeting(this, self._dialler, self._intake, budget)
        self._seeking = Seeking(
            this, self._dialler, self._greeting, self._checks, on_connected=self._met_a_seed
        )
        self._task: asyncio.Task[None] | None = None

    # --- what is known ---------------------------------------------------------------------

    @property
    def door(self) -> Door:
        """The admission of this peer's run. Raises ``ValueError`` at a bootstrap peer."""
        if self._door is None:
            raise ValueError("a bootstrap peer has no run of its own")
        return self._door

    @property
    def reachable(self) -> bool | None:
        """Say whether others can dial this peer; ``None``: not known yet."""
        return self._this.reachability.reachable

    @property
    def reachability_reason(self) -> str:
        """The evidence for ``reachable``, for a human."""
        return self._this.reachability.reason

    @property
    def addresses(self) -> tuple[Multiaddr, ...]:
        """The addresses announced, best first, without the peer id."""
        return self._this.addresses

    @property
    def clock(self) -> ClockEstimate | None:
        """Difference to the clocks of the swarm; ``None`` before any peer was asked."""
        return self._greeting.clock

    @property
    def seeds(self) -> list[tuple[Seed, bool]]:
        """The seeds that this peer was given, and whether the peer of each is connected."""
        return self._seeking.given

    @property
    def bootstrap_seeds(self) -> tuple[Multiaddr, ...]:
        """The seeds that have answered as bootstrap peers, which stay where they are."""
        known = self._greeting.bootstrap_peers
        return tuple(seed for seed in self._seeds if peer_of(seed) in known)

    @property
    def connected(self) -> frozenset[PeerId]:
        """The connected peers, as of the last look."""
        return frozenset(self._dialler.connected)

    # --- life ------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin. Returns at once, whether or not another peer can be found."""
        assert self._task is None, "a presence is started once"
        self._buckets.unsettle()
        self._seeking.add(self._seeds, "seed")
        self._this.host.directory.set_seeds(self._this.seed_peers)
        kept = await self._kept.load()
        if kept is not None:
            self._this.sequence = max(self._this.sequence, kept.sequence)
            self._seeking.add(kept.usable(), "cached")
        if self._door is not None:
            await self._door.open()
        await self._greeting.serve()
        await self._dial_backs.serve()
        await self._checks.serve()
        await self._run_files.serve()
        self._task = asyncio.create_task(self._live(), name=f"presence of {self._this.id}")

    async def watch(self) -> None:
        """Return once this presence was stopped. Raises the exception that ended it, if any."""
        assert self._task is not None, "started before watched"
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.result()

    async def leave(self) -> None:
        """Stop, and tell the others within ``GOODBYE_TIMEOUT_S``: they forget this peer at once."""
        await self._stop()
        this = self._this
        if this.facts.leaving or not self.profile.is_member:
            return
        this.facts = replace(this.facts, leaving=True)
        sealed = this.renew()
        # A peer that does not hear it in time notices the silence.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_TIMEOUT_S):
                async with asyncio.TaskGroup() as group:
                    group.create_task(this.publish(sealed))
                    group.create_task(self._greeting.say_goodbye(sealed))

    async def close(self) -> None:
        """Stop without telling the others, and keep the peers met for the next session."""
        await self._stop()
        await self._kept.save(self.table, self._this.sequence)

    async def _stop(self) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await self.watch()

    async def _live(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._beat_for_ever())
            group.create_task(self._seeking.run(group))
            if self._door is not None:
                group.create_task(self._door.run())
            if not self.profile.observes:
                group.create_task(self._checks.run())

    # --- calls of the owner ----------------------------------------------------------------

    @property
    def facts(self) -> PeerRecord:
        """The content of the own record, but for the addresses.

        The others learn a change at the next heartbeat, which comes at once for one of ``trains``.
        """
        return self._this.facts

    @facts.setter
    def facts(self, facts: PeerRecord) -> None:
        this = self._this
        before, this.facts = this.facts, facts
        if facts.trains != before.trains:
            this.hurry()  # no round should wait for a peer that has stopped
        this.outdate()

    def go_by_clocks_of(self, has_worked: Callable[[PeerId], bool]) -> None:
        """Set whose clocks count before those of other members."""
        self._greeting.has_worked = has_worked

    async def connect(self, peer: PeerId, *, timeout_s: float) -> None:
        """Make sure that a peer is connected, by the addresses in its record.

        Raises ``PeerUnreachable`` or ``HostClosed``.
        """
        await self._dialler.connect(peer, timeout_s=timeout_s)

    def addresses_to_dial(self, peer: PeerId) -> Sequence[Multiaddr]:
        """The addresses of a member's record that may be dialled now. They count as dialled."""
        return self._dialler.addresses_to_dial(peer)

    async def greet(self, peers: Sequence[PeerId]) -> None:
        """Say hello to these peers now: they know then that this one is alive, and its record."""
        await self._greeting.greet(peers)

    async def check_reachability(self) -> None:
        """Ask for dial-backs now. Only the owner of an observer has to call this."""
        await self._checks.look()
        await self._checks.check()

    async def fetch_run_file(self, matches: Callable[[bytes], bool], *, timeout_s: float) -> bytes:
        """The run file, from any peer that has it.

        ``matches`` says whether the hash of the content is the run id. Raises
        ``RunFileUnavailable``, which has the answer of each peer asked.
        """

        def peers() -> list[PeerId]:
            members = [member.peer for member in self.table.live(self._this.now())]
            connected = self._dialler.connected
            # Connected peers first: the others may be out of reach.
            return [*sorted(connected), *(p for p in members if p not in connected)]

        return await self._run_files.fetch(peers, matches, timeout_s=timeout_s)

    # --- heartbeats ------------------------------------------------------------------------

    async def _beat_for_ever(self) -> None:
        heartbeat_s = self.settings.membership.heartbeat_s
        while True:
            await self._beat()
            # Jitter, or peers that were started together would call each other all at once.
            jitter = 0.9 + 0.2 * self._this.rng.random()
            await pause(self._this.wanted, heartbeat_s * jitter)

    async def _beat(self) -> None:
        this = self._this
        this.stats.heartbeats += 1
        with contextlib.suppress(HostClosed):  # its daemon is being restarted
            await self._refresh()
        async with asyncio.TaskGroup() as group:
            if self.profile.run is not None:
                group.create_task(self._buckets.read(self.profile.run))
            if self.profile.is_member:
                group.create_task(this.publish(this.renew()))
            group.create_task(self._greeting.greet(self._greeting.peers_to_greet()))
        await self._greeting.greet(self._greeting.contacts_to_make())
        self._intake.report_changes()
        now = this.now()
        this.table.forget(now)
        await self._kept.save(this.table, this.sequence, if_due=True)

    async def _refresh(self) -> None:
        """Look at the own addresses and connections. Raises ``HostClosed``."""
        addresses = await self._this.host.addresses()
        await self._checks.look()
        usable = [without_peer(address) for address in addresses if is_dialable(address)]
        # Others would dial their own machine. One on this machine has the other addresses as well.
        outward = [address for address in usable if not is_loopback(address)]
        named = rank(deduplicate(outward or usable))
        fitting = [address for address in named if len(pack(address)) <= ADDRESS_MAX_BYTES]
        announced = tuple(fitting[:ADDRESSES_MAX])
        if announced != self._this.addresses:
            self._this.addresses = announced
            self._this.outdate()
        self._checks.announce(announced)

    def _met_a_seed(self) -> None:
        """Look again at once: the directory has a peer to ask, and a peer could dial back."""
        self._buckets.unsettle()
        self._this.hurry()
        self._checks.wanted.set()
