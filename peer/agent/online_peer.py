"""This peer on line: it has a host, meets the other peers, and answers their questions.

``go_online`` opens host, presence and page, and closes them in reverse order.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import msgspec
from multiaddr import Multiaddr

from averaging.rules.peer_view import PeerView
from averaging.rules.sites import site_name
from dht import addresses as address_rules
from dht import protocol
from dht.bounded_mapping import BoundedMapping, by_age
from dht.errors import DhtError
from dht.guarded_host import GuardedHost
from dht.identity import PeerId, parse_peer_id
from dht.libp2p.hivemind_daemon import DaemonSettings
from dht.libp2p.hivemind_host import HivemindHost, HostSettings
from dht.libp2p.lane.relaying import MEMBERS_ONLY
from dht.libp2p.lane.settings import parse_lane
from dht.membership.admission import Admission, parts_told
from dht.membership.table import Member
from dht.presence.events import Events, PresenceEvent
from dht.presence.presence import Presence
from dht.presence.settings import Profile
from dht.record_keeper import KeeperLimits, RecordKeeper
from dht.records import ContributionCounters
from peer import attestable, description, status
from peer.agent.account import merged_of
from peer.agent.local_peer import (
    JUMP_REFUSED,
    LocalPeer,
    NotAveraging,
)
from peer.agent.meetings import Meetings
from peer.agent.policies import presence_settings
from peer.agent.services import of_every_peer
from peer.bridge.messages import BATCH, SEED
from peer.bridge.settings import PeerSettings
from peer.description import Difference
from peer.errors import ModelMismatch, NotAdmitted
from peer.joining.link import short_link
from peer.rules.ending import seconds_left
from peer.rules.leaving import Departure
from peer.rules.reach import Untested
from peer.rules.releases import outdated
from peer.status import BANNED_MAX, WORDS_MAX, PeerRow, PeerStatus, time_left_s
from peer.storage.address import keep_link, keep_port, kept_port, listen_briefly, with_port
from peer.storage.credentials import DIRECTIVES_FILE, check_admitted
from peer.storage.home import PEERS
from peer.storage.proofs import ProofFolder
from peer.views import agent_page
from peer.views.page_address import PageAddress, PageError, parse_page
from peer.views.pages import Content, serve_pages

logger = logging.getLogger(__name__)

ASK_EVERY_S = 10.0
ASKED_AT_ONCE = 3
SAME_BATCHES = {
    BATCH: "the first batch is the same",
    SEED: "the random seed is the same; it is no matter where the program divides its data itself",
}
SAMPLE_EVERY_S = 1.0
FIGURES_KEPT_EVERY = 10
"""Samples between two times that the figures are written into the folder of the peer."""
STATUS_WITHIN_S = 5.0
DIALLED_WITHIN_S = 10.0
LOSSES_MAX = 1024
GREETED_MAX = 32
"""Limit of keepers that are greeted at once: any member may call itself one."""

ASKED_FOR_OTHERS_S = 2.0
ASKED_FOR_OTHERS_MAX = 16
"""Limit of members that are asked for their status at once, on behalf of other peers."""
PORT_FREE_WITHIN_S = 2.0
KEEPS = KeeperLimits(records_max=8192, bytes_max=8 << 20)
"""Limits of the records that a member keeps for the swarm. Records of other runs are free to make:
at a bootstrap peer's limit, strangers could make each member larger by more than its model."""


@asynccontextmanager
async def go_online(local: LocalPeer) -> AsyncIterator[OnlinePeer]:
    """Take this peer on line. Raises ``NotAdmitted`` if the run does not admit it."""
    seat, settings = local.seat, local.seat.settings
    admission = check_admitted(local.run_file, local.me, seat.credential, seat.role)
    local.enter_phase("connecting", "starting the network daemon", 0.0)
    async with AsyncExitStack() as stack:
        listen = await _listen_as_before(local)
        host = await HivemindHost.open(
            seat.identity, _host_settings(settings, listen), keeper=RecordKeeper(limits=KEEPS)
        )
        stack.push_async_callback(host.close)
        if len(host.listen) == 1 and (port := address_rules.port_of(host.listen[0])):
            keep_port(local.directory, port)
        online = OnlinePeer(local, host, admission)
        await online.serve_questions()
        await online.presence.start()
        stack.push_async_callback(online.presence.close)
        if settings.page is not None:
            await _open_page(online, stack, parse_page(settings.page))
        for service in online.services:
            await service.open(stack)
        local.enter_phase("connecting", "looking for peers", 0.5)
        yield online


async def _listen_as_before(local: LocalPeer) -> tuple[Multiaddr, ...]:
    """The addresses to listen at, with the port of the time before if it is free."""
    wanted = tuple(Multiaddr(text) for text in local.seat.settings.listen)
    port = kept_port(local.directory)
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
    local.event("port_taken", port=port)
    return wanted


def _host_settings(settings: PeerSettings, listen: tuple[Multiaddr, ...]) -> HostSettings:
    seeds = [
        seed for text in settings.seeds if not address_rules.is_relayed(seed := Multiaddr(text))
    ]
    daemon = DaemonSettings(
        listen=listen,
        announce=tuple(Multiaddr(text) for text in settings.announce),
    )
    return HostSettings(
        daemon=daemon,
        relays=tuple(seed for seed in seeds if address_rules.peer_of(seed) is not None),
        lane=parse_lane(settings.lane),
    )


async def _open_page(online: OnlinePeer, stack: AsyncExitStack, address: PageAddress) -> None:
    local = online.local
    pages = serve_pages(
        address,
        checks=lambda: agent_page.checks(online.status()),
        metrics=lambda: agent_page.metrics(online.status()),
        content=Content(
            state=online.page_state,
            events=local.board.search,
            token_file=local.directory / "page.token",
        ),
    )
    try:
        url = await stack.enter_async_context(pages)
    except PageError as error:
        if address.tries == 1:
            raise  # this very address was asked for
        local.event("page_not_served", text=str(error))
    else:
        # Not to the log: the address has the token in it.
        local.delegate.on_event("page", {"url": url})


class OnlinePeer:
    """A peer with a network. ``go_online`` makes it."""

    def __init__(self, local: LocalPeer, host: HivemindHost, admission: Admission) -> None:
        seat, settings = local.seat, local.seat.settings
        self.local = local
        self.host = host
        self.presence = presence = Presence(
            host,
            seat.identity,
            Profile(
                local.run_id,
                role=seat.role,
                name=seat.name,
                site=site_name(settings.site) or "",
                run_file=local.run_file.canonical(),
                credential=seat.credential,
            ),
            replace(
                presence_settings(local.run_file),
                cache_path=local.directory / PEERS,
                directives_path=local.directory / DIRECTIVES_FILE,
            ),
            seeds=[Multiaddr(seed) for seed in settings.seeds],
            events=Events(self._presence_event, self._reachable_changed),
            admission=admission,
        )
        self.proofs = ProofFolder(local.directory, local.run_id)
        for verdict in self.proofs.verdicts():
            admission.convicted[verdict.peer] = verdict.what
        host.keeper.judge = presence.door.judge
        host.lane_refusal = presence.door.refusal
        self.guarded = GuardedHost(host, presence.door.refusal)
        """The host for everything that only peers of the run may use."""
        self._dialled = asyncio.Event()
        """Set when it is known whether other peers can dial this one."""
        self._asking_for_others = 0
        self._kept_link = ""
        self._told_frozen = False
        """A peer with other frozen parameters was reported."""
        self._told_batches = False
        """A peer with the same random seed was reported."""
        self._told_outdated = False
        """This peer's release was found to be older than those of most others."""
        self._banned: asyncio.Queue[tuple[PeerId, str]] = asyncio.Queue()
        self.services = [begin(self) for begin in (*of_every_peer(), *seat.services)]
        self.losses = BoundedMapping[PeerId, tuple[float, float]](
            "losses", LOSSES_MAX, worth=by_age
        )
        """The newest training loss that each other peer told of, and when."""
        self._meetings = Meetings(presence, me=local.me, members=self._dialable_members)
        if host.lane is not None:
            host.lane.relay.judge = self._judge_circuit
            host.lane.relay.meter = local.guest.meter_relayed

    def __repr__(self) -> str:
        return f"OnlinePeer({self.local!r})"

    async def serve_questions(self) -> None:
        """Answer the questions of other peers of the run from now on."""
        host, run = self.guarded, self.local.run_id
        await status.CALL.serve(host, run, self.answer_status)
        await description.TENSORS.serve(host, run, self.answer_description)
        if self.local.good is not None:
            await attestable.CALL.serve(host, run, self.answer_attestable)

    def _presence_event(self, event: PresenceEvent) -> None:
        local, fields = self.local, dict(event.fields)
        peer = fields.get("peer")
        if isinstance(peer, str):
            member = self.presence.table.get(PeerId(peer))
            if member is not None:
                fields["name"] = member.record.name
        local.event(event.name, text=event.text, **fields)
        if event.name == "directive":
            local.follow_directive(self.presence.door.admission.owners_directive)
        if event.name == "not_admitted":
            local.end.hear(
                Departure(event.text, NotAdmitted.exit_code, finished=False, timeout_s=0.0)
            )

    async def _reachable_changed(self, reachable: bool) -> None:
        # First the averager, which cannot fail: the host cannot act while its daemon is down.
        self.local.averaging.set_reachable(self.can_serve)
        self._dialled.set()
        await self.host.set_reachable(reachable)

    async def until_dialled(self) -> None:
        """Wait for the test of reachability, which decides who leads, before the first round.

        A peer that hears of its result in the midst of rounds leads where others lead already.
        """
        if not self._dialled.is_set():
            self.local.enter_phase(self.local.phase, str(Untested()), 0.0)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._dialled.wait(), DIALLED_WITHIN_S)

    def swarm_time(self) -> float:
        """Unix time by the clocks of the swarm, as far as they are known."""
        clock = self.presence.clock
        return self.host.wall_time() + (0.0 if clock is None else clock.offset_s)

    # --- being reached --------------------------------------------------------------------------

    @property
    def can_serve(self) -> bool:
        """Say whether the other peers reach this one, so that it may lead and reduce."""
        return self.presence.reachable is True or self._meetings.complete

    async def meet_for_ever(self) -> None:
        """Open direct connections with the others while nobody can be dialled."""

        def changed() -> None:
            self.refresh_view()
            self.local.averaging.set_reachable(self.can_serve)

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

    def _dialable_members(self) -> Mapping[PeerId, bool | None]:
        followers = set(self.followers())
        return {m.peer: m.reachable for m in self.live_members() if m.peer in followers}

    # --- the other peers ------------------------------------------------------------------------

    def live_members(self) -> Sequence[Member]:
        return self.presence.table.live(asyncio.get_running_loop().time())

    async def greet_keepers(self) -> None:
        """Say hello to the keepers, as this peer leaves: they take no work of one that they do not
        see, and see one that they cannot dial only at its next heartbeat."""
        keepers = [each.peer for each in self.live_members() if each.record.role == "keeper"]
        await self.presence.greet(keepers[:GREETED_MAX])

    def refresh_view(self) -> None:
        """Update ``LocalPeer.view`` from the members that are live now."""
        view, live = self.local.view, {}
        for member in self.live_members():
            live[member.peer] = peer_view(member, met=member.peer in self._meetings.met)
        for peer in view.keys() - live.keys():
            del view[peer]
        view.update(live)
        absent = self.presence.table.absent(asyncio.get_running_loop().time())
        self.local.absent.clear()
        self.local.absent.update(absent)
        self._tell_if_outdated()
        if self.host.lane is not None:
            self.host.lane.relay.set_rate(self.local.guest.relay_bytes_s)
        self.local.notice_company(
            reachable=True if self.can_serve else self.presence.reachable,
            connected=bool(self.presence.connected),
        )

    def _tell_if_outdated(self) -> None:
        """Say once that most of the run's peers have been upgraded, and this one has not."""
        if self._told_outdated:
            return
        text = outdated([member.record for member in self.live_members()])
        if text is not None:
            self._told_outdated = True
            self.local.event("outdated", text=text)

    def may_train(self, peer: PeerId) -> bool:
        """True if the run admits a peer as a learner, and not only as a keeper."""
        admission = self.presence.door.admission
        return admission.refusal(peer, now=self.host.wall_time(), role="learner") is None

    def ban(self, peer: PeerId, what: str) -> None:
        """Have nothing to do with a peer that is proved to have lied."""
        banned, averaging = self.presence.door.admission.convicted, self.local.averaging
        if not isinstance(averaging, NotAveraging):
            for gone in banned.keys() - averaging.audits.convicted.keys():
                del banned[gone]  # its verdict gave way to one that is worth more
        banned[peer] = what
        self.local.view.pop(peer, None)
        self._banned.put_nowait((peer, what))

    async def turn_out_for_ever(self) -> None:
        """Cut off the peers that ``ban`` names."""
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

    def addresses_of(self, peer: PeerId) -> Sequence[Multiaddr]:
        member = self.presence.table.get(peer)
        if member is None:
            return ()
        return [address_rules.with_peer(address, peer) for address in member.addresses]

    def followers(self) -> list[PeerId]:
        """Live peers that want the last versions: keepers, and learners even while they rest."""
        following = {m.peer for m in self.live_members() if m.record.role != "bootstrap"}
        return sorted(following & self.local.view.keys())

    def link(self) -> str:
        """The link for others to join by; empty until this peer knows an address of its own."""
        # Bootstrap peers stay where they are. Then the owner's choice, or that of a link.
        return self._link_by(map(Multiaddr, self.local.seat.settings.seeds))

    def public_link(self) -> str:
        """The link with addresses of hosts alone: bootstrap peers, this peer, and keepers.

        Those of learners are nobody's to publish, unless the run file does. Empty until this peer
        knows an own address.
        """
        keepers = [m.peer for m in self.live_members() if m.record.role == "keeper"]
        known = [address for keeper in keepers for address in self.addresses_of(keeper)[:1]]
        return self._link_by([*self.local.run_file.seed_addresses, *known])

    def _link_by(self, seeds: Iterable[Multiaddr]) -> str:
        own = self.presence.addresses
        if not own:
            return ""
        first = [*self.presence.bootstrap_seeds, *seeds]
        mine = [address_rules.with_peer(address, self.local.me) for address in own]
        return str(short_link(self.local.run_id, seeds=first, own=mine))

    def _keep_link(self) -> None:
        """Keep the link for ``shoal status``."""
        link = self.link()
        if link and link != self._kept_link:
            self._kept_link = link
            keep_link(self.local.directory, link)

    def seconds_left(self) -> float | None:
        """Time until the run's date by the swarm's clock; ``None`` for a run without a date."""
        return seconds_left(self.local.run_now.end, self.presence.clock, now=datetime.now(UTC))

    def update_record(self, *, trains: bool, step_time_s: float | None, merged: float) -> None:
        """Publish what other peers read of this one."""
        stats = self.local.averaging.stats
        self.presence.update(
            trains=trains,
            step_time_s=step_time_s,
            link_bytes_s=self.local.averaging.bytes_per_s or None,
            versions=self.local.versions(),
            counters=ContributionCounters(
                rounds=stats.contributed,
                tokens=int(merged),
                bytes_sent=self.local.guest.sent_bytes,
            ),
        )
        self._keep_link()

    # --- status ---------------------------------------------------------------------------------

    def status(self) -> PeerStatus:
        """All figures of this peer."""
        local, guest = self.local, self.local.guest
        stats, lane = local.averaging.stats, self.host.lane
        directive, goal = local.directive, local.run_now.end.tokens
        level = local.averaging.level()
        status = PeerStatus(
            peer=local.me,
            name=local.seat.name,
            role=local.seat.role,
            phase=local.phase,
            held_out=local.held_out.newest,
            global_tokens=local.merged_tokens(),
            tokens_goal=goal if isinstance(goal, int) else None,
            versions=local.versions(),
            peers=1 + len(local.live_peers),
            rounds=stats.rounds,
            rounds_missed=local.rounds_missed,
            bytes_sent=guest.sent_bytes,
            bytes_received=guest.received_bytes,
            up_s=asyncio.get_running_loop().time() - local.began_at,
            reachable=self.presence.reachable,
            layout=local.layout.hash.hex(),
            frozen=local.description.frozen_hash,
            directive=0 if directive is None else directive.number,
            orders=() if directive is None else tuple(parts_told(directive)),
            merging="" if level is None else f"{level[0]}: {level[1].reason}"[:WORDS_MAX],
            cycle_steps=0 if level is None else level[0].cycle_steps,
            model=local.model,
            founding=local.founding.name,
            ended_at=local.ending.ended_at,
            limits=tuple(words[:WORDS_MAX] for words in guest.words()),
            paths=lane.paths_by_name() if lane is not None else {},
            relayed_bytes=lane.relay.counters["bytes"] if lane is not None else 0,
            alone_until=local.alone_until,
            jumps_judged=local.jumps.total(),
            jumps_refused=local.jumps[JUMP_REFUSED],
            batches=local.batches,
            banned=tuple(sorted(self.presence.door.admission.convicted)[:BANNED_MAX]),
            link=self.link(),
            in_flight=local.in_flight(),
            processor_share=guest.processor_share,
        )
        status = local.delegate.with_training(status)
        return msgspec.structs.replace(status, time_left_s=self._time_left_s(status))

    async def answer_status(self, peer: PeerId, asked: str) -> bytes:
        """Answer another peer's call of ``peer.status``, perhaps about a third peer."""
        about = parse_peer_id(asked) if asked else None
        if about is None or about == self.local.me:
            return status.CALL.encode(self.status().for_others())
        return status.CALL.encode(await self._status_for_another(about))

    async def _status_for_another(self, about: PeerId) -> PeerStatus:
        """Ask a member for its status on behalf of a peer that cannot reach it."""
        if self.presence.table.get(about) is None:
            raise ValueError(f"this peer knows no member {about}")
        if self._asking_for_others >= ASKED_FOR_OTHERS_MAX:
            raise ValueError("this peer asks for too many others at the moment; ask again")
        self._asking_for_others += 1
        try:
            await self.presence.connect(about, timeout_s=ASKED_FOR_OTHERS_S)
            return await status.ask(
                self.host, about, self.local.run_id, timeout_s=ASKED_FOR_OTHERS_S
            )
        finally:
            self._asking_for_others -= 1

    async def statuses(self, peers: Sequence[PeerId]) -> list[PeerStatus]:
        """The status of those of ``peers`` that answer in time."""

        async def ask(peer: PeerId) -> PeerStatus | None:
            try:
                await self.presence.connect(peer, timeout_s=STATUS_WITHIN_S)
                return await status.ask(
                    self.host, peer, self.local.run_id, timeout_s=STATUS_WITHIN_S
                )
            except (DhtError, ValueError) as error:
                logger.info("status_not_had peer=%s reason=%s", peer, error)
                return None

        answers = await asyncio.gather(*(ask(peer) for peer in peers))
        found = [answer for answer in answers if answer is not None]
        foundings = self.local.foundings
        foundings.update((PeerId(each.peer), each.founding) for each in found if each.founding)
        for peer in foundings.keys() - self.local.view.keys() - {each.peer for each in found}:
            del foundings[peer]  # as many as there are live peers
        return found

    async def ask_others(self) -> None:
        """Ask a few peers after the other, for ever, so that the newest held-out loss spreads."""
        turn = 0
        while True:
            await asyncio.sleep(ASK_EVERY_S)
            live = sorted(self.local.view)
            chosen = [live[(turn + index) % len(live)] for index in range(asked_at_once(len(live)))]
            turn += len(chosen)
            for answer in await self.statuses(chosen):
                if answer.directive >= self.local.rollback:
                    self.local.hear_held_out(answer.held_out)
                self._take_loss(answer)
                await self._tell_frozen_difference(answer)
                self._tell_same_batches(answer)

    def _take_loss(self, answer: PeerStatus) -> None:
        """Note the training loss that a peer tells of."""
        self.losses.pop(PeerId(answer.peer), None)
        if answer.loss is not None:
            self.losses[PeerId(answer.peer)] = asyncio.get_running_loop().time(), answer.loss

    # --- the model -----------------------------------------------------------------------------

    async def answer_description(self, peer: PeerId, asked: str) -> bytes:
        """Answer another peer's call of ``peer.description``."""
        return description.answer(self.local.description, asked)

    async def answer_attestable(self, peer: PeerId, asked: str) -> bytes:
        """Answer a call of ``peer.attestable``."""
        assert self.local.good is not None
        kept = await asyncio.to_thread(self.local.good.kept)
        return attestable.CALL.encode(tuple(kept)[-attestable.STATES_MAX :])

    async def differences_to(self, peer: PeerId) -> tuple[Difference, ...]:
        """The tensors that differ here and at ``peer``; empty if it does not say."""
        try:
            theirs = await description.ask(
                self.host, peer, self.local.run_id, timeout_s=STATUS_WITHIN_S
            )
        except (DhtError, ValueError) as error:
            logger.info("description_not_had peer=%s reason=%s", peer, error)
            return ()
        return self.local.description.differences(theirs)

    async def _tell_frozen_difference(self, answer: PeerStatus) -> None:
        """Report the first peer whose frozen parameters are not this peer's."""
        ours = self.local.description.frozen_hash
        if self._told_frozen or not ours or answer.frozen in ("", ours):
            return
        self._told_frozen = True
        found = await self.differences_to(PeerId(answer.peer))
        names = [name for name, _, _ in found[: ModelMismatch.SHOWN]]
        self.local.event(
            "frozen_differs", peer=answer.peer, name=answer.name, parameters=", ".join(names)
        )

    def _tell_same_batches(self, answer: PeerStatus) -> None:
        """Report the first peer whose program trains on the same batches."""
        ours = self.local.batches
        if self._told_batches or not ours or answer.batches != ours:
            return
        self._told_batches = True
        how = SAME_BATCHES.get(ours.partition(" ")[0], "")
        self.local.event("same_batches", peer=answer.peer, name=answer.name, how=how)

    # --- the page -------------------------------------------------------------------------------

    def peer_rows(self, status: PeerStatus) -> list[PeerRow]:
        """All peers in rows for people, the largest contributors first."""
        local, now = self.local, asyncio.get_running_loop().time()
        merged = merged_of(local.states)
        known = agent_page.KnownPeers(self.live_members(), merged, local.offer_outcomes, now)
        return agent_page.peer_rows(status, known, local.board.names)

    def page_state(self) -> Mapping[str, Any]:
        """The content of ``/state.json``."""
        local, status = self.local, self.status()
        return agent_page.content(
            status,
            local.board,
            self.peer_rows(status),
            run_id=local.run_id,
            run_name=local.run_file.name,
            wall_time=time.time(),
        )

    def _time_left_s(self, status: PeerStatus) -> float | None:
        """Time until the run ends at the present speed of all peers; ``None`` if it has no end."""
        goal = status.tokens_goal
        times = [member.record.step_time_s for member in self.live_members()]
        return time_left_s(
            tokens_left=None if goal is None else goal - status.global_tokens,
            step_tokens=status.tokens / status.steps if status.steps else 0.0,
            step_times_s=[status.step_time_s, *(each for each in times if each is not None)],
            date_left_s=self.seconds_left(),
        )

    async def sample(self) -> None:
        """Add points to the page's curve, and keep the figures in the folder, for ever."""
        turn = 0
        while True:
            status = self.status()
            self.local.board.sample(tokens=status.global_tokens, loss=status.loss)
            if turn % FIGURES_KEPT_EVERY == 0:
                await self.local.keep_figures(status.figures())
            turn += 1
            await asyncio.sleep(SAMPLE_EVERY_S)


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
        arrives=record.role == "learner" and not record.trains and record.step_time_s is None,
        worked_at=member.worked_at if record.role == "learner" else None,
        step_time_s=record.step_time_s,
        bytes_per_s=record.link_bytes_s,
        site=record.site or None,
        incarnation=record.incarnation,
        protocol=protocol.common(record.protocol) or protocol.OLDEST,
    )


def asked_at_once(live: int) -> int:
    """Number of live peers to ask in a turn: in a small swarm a quarter, as all soon had theirs."""
    return min(ASKED_AT_ONCE, -(-live // 4))
