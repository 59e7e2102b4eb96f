"""The network of one peer: its host, its presence in the run, and the other peers.

``open_host`` opens the host and has it closed. What is asked and answered is in
``peer.agent.questions``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import NamedTuple

from multiaddr import Multiaddr

from averaging.rules.peer_view import PeerView
from averaging.rules.sites import site_name
from dht import addresses as address_rules
from dht import protocol
from dht.errors import DhtError
from dht.identity import PeerId
from dht.libp2p.hivemind_host import HivemindHost, HostSettings
from dht.libp2p.lane.connection import parse_lane
from dht.libp2p.lane.lane import Lane
from dht.libp2p.lane.relaying import MEMBERS_ONLY
from dht.membership.admission import Admission
from dht.membership.table import Member
from dht.presence.presence import Presence
from dht.presence.this_peer import Events, PresenceEvent, Profile
from dht.record_keeper import KeeperLimits, RecordKeeper
from dht.wrapped_host import GuardedHost
from peer import status
from peer.agent.policies import presence_settings
from peer.agent.services import Seat
from peer.bridge.settings import PeerSettings
from peer.guest.enforcement import Guest
from peer.joining.link import short_link
from peer.rules.others import hubs, to_meet
from peer.status import PeerStatus
from peer.storage.address import keep_port, kept_port, listen_briefly, with_port
from peer.storage.credentials import DIRECTIVES_FILE
from peer.storage.home import PEERS
from peer.storage.proofs import ProofFolder

logger = logging.getLogger(__name__)

STATUS_WITHIN_S = 5.0
DIALLED_WITHIN_S = 10.0
GREETED_MAX = 32
"""Limit of keepers that are greeted at once: any member may call itself one."""

PORT_FREE_WITHIN_S = 2.0
MEET_EVERY_S = 3.0
CONNECT_WITHIN_S = 10.0
AT_ONCE = 4
KEEPS = KeeperLimits(records_max=8192, bytes_max=8 << 20)
"""Limits of the records that a member keeps for the swarm. Records of other runs are free to make:
at a bootstrap peer's limit, strangers could make each member larger by more than its model."""


async def open_host(
    seat: Seat, stack: AsyncExitStack, *, tell_taken: Callable[[int], None]
) -> HivemindHost:
    """The host of a peer; ``stack`` closes it. ``tell_taken(port)``: its last port is not free."""
    listen = await _listen_as_before(seat, tell_taken)
    host = await HivemindHost.open(
        seat.identity, _host_settings(seat.settings, listen), keeper=RecordKeeper(limits=KEEPS)
    )
    stack.push_async_callback(host.close)
    if len(host.listen) == 1 and (port := address_rules.port_of(host.listen[0])):
        keep_port(seat.directory, port)
    return host


async def _listen_as_before(seat: Seat, tell_taken: Callable[[int], None]) -> tuple[Multiaddr, ...]:
    """The addresses to listen at, with the port of the time before if it is free."""
    wanted = tuple(Multiaddr(text) for text in seat.settings.listen)
    port = kept_port(seat.directory)
    if port is None or (kept := with_port(wanted, port)) == wanted:
        return wanted
    deadline = asyncio.get_running_loop().time() + PORT_FREE_WITHIN_S
    while True:
        try:
            listen_briefly(kept[0])
        except OSError:
            if asyncio.get_running_loop().time() > deadline:
                break
            await asyncio.sleep(0.1)  # the daemon of a killed agent is just ending
        else:
            return kept
    tell_taken(port)
    return wanted


def _host_settings(settings: PeerSettings, listen: tuple[Multiaddr, ...]) -> HostSettings:
    seeds = [
        seed for text in settings.seeds if not address_rules.is_relayed(seed := Multiaddr(text))
    ]
    return HostSettings(
        listen=listen,
        announce=tuple(Multiaddr(text) for text in settings.announce),
        relays=tuple(seed for seed in seeds if address_rules.peer_of(seed) is not None),
        lane=parse_lane(settings.lane),
    )


class Meetings:
    """The peers with which direct connections could be opened, and those with which not.

    While a member of the run can be dialled, nothing is done here: it leads and reduces, and the
    others need no connections with each other. Otherwise this peer opens direct connections with
    all others (``dht.libp2p.lane.punching``), and counts as reachable if none of them fails. A peer
    whose router lets no connection with some other one through does not lead: that one could not
    follow it. In a large run only some peers are met by everybody, and lead
    (``peer.rules.others.hubs``).
    """

    def __init__(
        self,
        presence: Presence,
        *,
        me: PeerId,
        members: Callable[[], Mapping[PeerId, bool | None]],
        counts: Callable[[PeerId], bool],
    ) -> None:
        """``members``: the other live members, and whether they can be dialled. One that does not
        count is looked at where none does: its record says what its author likes."""
        self._me = me
        self._is_hub = False
        self.met: dict[PeerId, bool] = {}
        """Peers that were met, and whether a direct connection with each could be opened."""
        self._presence = presence
        self._members = members
        self._counts = counts

    def __repr__(self) -> str:
        return f"Meetings({self.met})"

    @property
    def complete(self) -> bool:
        """Say whether the others reach this peer although it cannot be dialled."""
        return self._is_hub and bool(self.met) and all(self.met.values())

    async def run(self, lane: Lane, changed: Callable[[], None]) -> None:
        """Meet the others for ever. ``changed`` is called after every change."""
        while True:
            before = dict(self.met), self._is_hub
            everybody = self._members()
            members = {p: each for p, each in everybody.items() if self._counts(p)} or everybody
            wanted = to_meet(self._presence.reachable, members, me=self._me)
            self._is_hub = self._me in hubs((self._me, *members))
            self.met = {peer: met for peer, met in self.met.items() if peer in wanted}
            turns = asyncio.Semaphore(AT_ONCE)
            async with asyncio.TaskGroup() as group:
                for peer in sorted(wanted):
                    group.create_task(self._meet(peer, lane, turns))
            if (self.met, self._is_hub) != before:
                changed()
            await asyncio.sleep(MEET_EVERY_S)

    async def _meet(self, peer: PeerId, lane: Lane, turns: asyncio.Semaphore) -> None:
        """Make sure of a direct connection, unless that failed lately."""
        if lane.is_doubted(peer) or lane.has_connection(peer):
            self.met[peer] = not lane.is_doubted(peer)
            return
        async with turns:
            try:
                await self._presence.connect(peer, timeout_s=CONNECT_WITHIN_S)
                reason = await lane.reach(peer)
            except DhtError as error:
                reason = str(error)
        if reason is not None:
            logger.info("not_met peer=%s reason=%s", peer, reason)
        self.met[peer] = reason is None


class Told(NamedTuple):
    """The part of a peer's status that is kept: a peer may send a status of any size."""

    at: float
    founding: str
    """The name of the founding that it stands on; empty: it has no state."""
    steps: int
    loss: float | None


class Network:
    """A peer's host, its presence on it, and the other peers, as far as they are known."""

    def __init__(
        self,
        seat: Seat,
        host: HivemindHost,
        admission: Admission,
        guest: Guest,
        *,
        view: dict[PeerId, PeerView],
        absent: dict[PeerId, float | None],
        on_event: Callable[[PresenceEvent], None],
    ) -> None:
        """``view`` and ``absent``: the peers as averaging sees them, which ``refresh`` updates."""
        self.host = host
        self.presence = presence = Presence(
            host,
            seat.identity,
            Profile(
                seat.run.run_id,
                role=seat.role,
                name=seat.name,
                site=site_name(seat.settings.site) or "",
                run_file=seat.run.canonical(),
                credential=seat.credential,
            ),
            replace(
                presence_settings(seat.run),
                cache_path=seat.directory / PEERS,
                directives_path=seat.directory / DIRECTIVES_FILE,
            ),
            seeds=[Multiaddr(seed) for seed in seat.settings.seeds],
            events=Events(on_event, self._reachable_changed, self._record_came),
            admission=admission,
        )
        self.proofs = ProofFolder(seat.directory, seat.run.run_id)
        for verdict in self.proofs.verdicts():
            admission.convicted[verdict.peer] = verdict.what
        host.keeper.judge = presence.door.judge
        host.lane_refusal = presence.door.refusal
        self.guarded = GuardedHost(host, presence.door.refusal)
        """The host for everything that only peers of the run may use."""
        self.dialled = asyncio.Event()
        """Set when it is known whether other peers can dial this one."""
        self.told: dict[PeerId, Told] = {}
        """The last words of live peers about themselves."""
        self._seat = seat
        self._guest = guest
        self._view = view
        self._absent = absent
        self._followed = ""
        self._banned: asyncio.Queue[tuple[PeerId, str]] = asyncio.Queue()
        self.on_serves: Callable[[bool], None] = lambda serves: None
        """Hears whether the other peers reach this one now, so that it may lead and reduce."""
        self.counts: Callable[[PeerId], bool] = lambda peer: True
        """True if what a member says of itself counts."""
        self._meetings = Meetings(
            presence, me=seat.me, members=self._dialable_members, counts=self._counts
        )
        if host.lane is not None:
            host.lane.relay.judge = self._judge_circuit
            host.lane.relay.meter = guest.meter_relayed

    def __repr__(self) -> str:
        return f"Network({self.presence!r})"

    # --- being reached --------------------------------------------------------------------------

    @property
    def can_serve(self) -> bool:
        """Say whether the other peers reach this one, so that it may lead and reduce."""
        return self.presence.reachable is True or self._meetings.complete

    async def _reachable_changed(self, reachable: bool) -> None:
        # First the averager, which cannot fail: the host cannot act while its daemon is down.
        self.on_serves(self.can_serve)
        self.dialled.set()
        await self.host.set_reachable(reachable)

    async def until_dialled(self) -> None:
        """Wait for the test of reachability, which decides who leads, before the first round.

        A peer that hears of its result in the midst of rounds leads where others lead already.
        """
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.dialled.wait(), DIALLED_WITHIN_S)

    async def meet(self) -> None:
        """Open direct connections with the others while nobody can be dialled, for ever."""

        def changed() -> None:
            self.refresh()
            self.on_serves(self.can_serve)

        if self.host.lane is not None:
            await self._meetings.run(self.host.lane, changed)

    async def _judge_circuit(self, peer: PeerId, other: PeerId) -> str | None:
        """Reason why nothing is relayed between two peers; ``None`` for members of the run."""
        for end in (peer, other):
            if self.presence.table.get(end) is None:
                return f"{MEMBERS_ONLY}, and {end} is none"
            if (reason := await self.presence.door.refusal(end)) is not None:
                return reason
        return None

    def _counts(self, peer: PeerId) -> bool:
        return self.counts(peer)

    def _dialable_members(self) -> Mapping[PeerId, bool | None]:
        followers = set(self.followers())
        return {m.peer: m.reachable for m in self.live_members() if m.peer in followers}

    # --- the other peers ------------------------------------------------------------------------

    def live_members(self) -> Sequence[Member]:
        return self.presence.table.live(asyncio.get_running_loop().time())

    def keepers(self) -> list[PeerId]:
        return [member.peer for member in self.live_members() if member.record.role == "keeper"]

    def followers(self) -> list[PeerId]:
        """Live peers that want the last versions: keepers, and learners even while they rest."""
        following = {m.peer for m in self.live_members() if m.record.role != "bootstrap"}
        return sorted(following & self._view.keys())

    async def greet_keepers(self) -> None:
        """Say hello to the keepers, as this peer leaves: they take no work of one that they do not
        see, and see one that they cannot dial only at its next heartbeat."""
        await self.presence.greet(self.keepers()[:GREETED_MAX])

    def _record_came(self, member: Member) -> None:
        """Update the view of one member at once: a round may wait for one that begins to train."""
        if self.presence.table.is_live(member.peer, asyncio.get_running_loop().time()):
            self._view[member.peer] = peer_view(
                member, met=self._meetings.met.get(member.peer, False)
            )
        else:
            self._view.pop(member.peer, None)

    def refresh(self) -> None:
        """Update the view from the members that are live now."""
        view, met = self._view, self._meetings.met
        members = self.live_members()
        live = {each.peer: peer_view(each, met=met.get(each.peer, False)) for each in members}
        for peer in view.keys() - live.keys():
            del view[peer]
        view.update(live)
        absent = self.presence.table.absent(asyncio.get_running_loop().time())
        self._absent.clear()
        self._absent.update(absent)
        if self.host.lane is not None:
            self.host.lane.relay.set_rate(self._guest.relay_bytes_s)

    def may_train(self, peer: PeerId) -> bool:
        """True if the run admits a peer as a learner, and not only as a keeper."""
        admission = self.presence.door.admission
        return admission.refusal(peer, now=self.host.wall_time(), role="learner") is None

    def ban(self, peer: PeerId, what: str) -> None:
        """Have nothing to do with a peer that is proved to have lied."""
        self.presence.door.admission.convicted[peer] = what
        self._view.pop(peer, None)
        self._banned.put_nowait((peer, what))

    async def drop_banned(self) -> None:
        """Cut off the peers that ``ban`` names, for ever."""
        while True:
            peer, what = await self._banned.get()
            await self.presence.door.ban(peer, what)

    def take_directive(self, data: bytes) -> bool:
        """Take a directive from another peer. ``False``: this peer follows a newer one."""
        refused = self.presence.door.take([data]) if data else "it knows none"
        return not refused or not self.presence.door.admission.is_outdated(data)

    def directives(self) -> tuple[bytes, ...]:
        """The directives in force, for the checkpoint."""
        return self.presence.door.admission.to_pass_on(self.host.wall_time())

    def is_vouched_for(self, peer: PeerId) -> bool:
        """True if a peer is the run's owner or one of its delegates."""
        return self.presence.door.admission.vouches_for(peer, now=self.host.wall_time())

    async def statuses(
        self,
        peers: Sequence[PeerId],
        *,
        enough: Callable[[Sequence[PeerStatus]], bool] = lambda answers: False,
    ) -> list[PeerStatus]:
        """The status of those of ``peers`` that answer in time, or until there are ``enough``."""

        async def ask(peer: PeerId) -> PeerStatus | None:
            try:
                await self.presence.connect(peer, timeout_s=STATUS_WITHIN_S)
                return await status.ask(
                    self.host, peer, self._seat.run.run_id, timeout_s=STATUS_WITHIN_S
                )
            except (DhtError, ValueError) as error:
                logger.info("status_not_had peer=%s reason=%s", peer, error)
                return None

        asking = [asyncio.ensure_future(ask(peer)) for peer in peers]
        answers: list[PeerStatus] = []
        try:
            for each in asyncio.as_completed(asking):
                await each
                done = [each.result() for each in asking if each.done()]
                answers = [answer for answer in done if answer is not None]
                if enough(answers):
                    break
        finally:
            for left in asking:
                left.cancel()
        now = asyncio.get_running_loop().time()
        new = {
            PeerId(each.peer): Told(now, each.founding, each.steps, each.loss) for each in answers
        }
        for peer in self.told.keys() - self._view.keys():
            del self.told[peer]  # as many as there are live peers
        self.told.update(new)
        return answers

    def follow(self, founding: str) -> None:
        """Begin with the states of this founding of the run, if it is known."""
        self._followed = founding

    def is_followed(self, peer: PeerId) -> bool:
        """True unless a peer is known to stand on another founding than the one to begin with."""
        told = self.told.get(peer)
        return not self._followed or told is None or told.founding in ("", self._followed)

    # --- links ----------------------------------------------------------------------------------

    def link(self) -> str:
        """The link for others to join by; empty until this peer knows an address of its own."""
        # Bootstrap peers stay where they are. Then the owner's choice, or that of a link.
        return self.link_by(map(Multiaddr, self._seat.settings.seeds))

    def link_by(self, seeds: Iterable[Multiaddr]) -> str:
        """The same with other addresses besides those of bootstrap peers and of this peer."""
        own = self.presence.addresses
        if not own:
            return ""
        first = [*self.presence.bootstrap_seeds, *seeds]
        mine = [address_rules.with_peer(address, self._seat.me) for address in own]
        return str(short_link(self._seat.run.run_id, seeds=first, own=mine))


def peer_view(member: Member, *, met: bool = False) -> PeerView:
    """A member of the run as averaging sees it.

    ``met``: it cannot be dialled, and there is a direct connection with it all the same.
    """
    record = member.record
    return PeerView(
        first_seen=member.first_seen,
        heard_at=max(member.record_seen_at, member.heard_at or member.record_seen_at),
        failed_at=member.failed_at,
        # Unknown counts as not reachable: an unreachable leader would lead in vain.
        reachable=met or record.reachable is True,
        trains=record.trains,
        keeps=record.role == "keeper",
        # One that has trained and rests has the run's state: its signatures count for newcomers.
        arrives=record.arrives,
        worked_at=member.worked_at if record.role == "learner" else None,
        step_time_s=record.step_time_s,
        bytes_per_s=record.link_bytes_s,
        site=record.site or None,
        protocol=protocol.common(record.protocol) or protocol.OLDEST,
    )
