"""One peer of a run on line, whoever trains there or nobody: what agents and keepers share.

A station has the host, the presence and the averager, keeps the checkpoints and the event log,
tells others how it stands, and finds out when the run is over. Where its first states come from,
and what becomes of new versions, is its owner's business (``peer.agent.agent``,
``peer.agent.keeper``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

from multiaddr import Multiaddr

from averaging import messages as said
from averaging.history.standing import Standing
from averaging.history.state import FragmentState
from averaging.live.averager import Averager
from averaging.numbers.layout import Layout
from averaging.round.phase import Phase
from averaging.rules.grouping import PeerView
from dht import addresses as address_rules
from dht.errors import DhtError
from dht.identity import Identity, PeerId
from dht.libp2p.hivemind_daemon import DaemonSettings
from dht.libp2p.hivemind_host import HivemindHost, HostSettings
from dht.libp2p.lane import parse_lane
from dht.membership.table import Member
from dht.presence.events import PresenceEvent
from dht.presence.presence import Presence
from dht.presence.settings import Profile
from dht.records import ContributionCounters, Role
from peer.agent.account import global_tokens, merged_of
from peer.agent.policies import admitted_peers, presence_settings
from peer.errors import DiskFull, PeerError, RunRefused
from peer.guest.enforcement import Guest, trim_log
from peer.joining.link import Link
from peer.rules.ending import Ending, LastRounds, seconds_left, who_differs
from peer.rules.held_out import HeldOutLoss
from peer.run_file.run_file import RunFile
from peer.status import PROTOCOL as STATUS_PROTOCOL
from peer.status import TEXT_MAX, HeldOut, Status
from peer.status import ask as ask_status
from peer.status import encode as encode_status
from peer.storage.checkpoint import CheckpointFolder
from peer.storage.outer_state import export, model_name, save_outer
from peer.views import agent_page
from peer.views.board import Board
from peer.views.event_log import EventLog
from peer.views.explain import Names
from peer.views.explain import told as told_in_words
from peer.views.pages import Content, PageAddress, PageError, parse_page, serve_pages

logger = logging.getLogger(__name__)

T = TypeVar("T")

SAVE_EVERY_S = 60.0
"""Between two checkpoints; more when saving takes long. Peers have the state as well."""

SAVE_FIRST_S = 2.0
OBEY_EVERY_S = 0.25
ASK_EVERY_S = 10.0
SAMPLE_EVERY_S = 1.0
ASKED_LAST = 32
DIALLED_WITHIN_S = 6.0
LAST_ROUND_S = 30.0
LINK_SEEDS_MAX = 8
KEEP_HOUSE_EVERY_S = 15.0
CLOCKS_DIFFER_S = 1.0
"""By so much around the run's date: a peer answers calls before it, and calls after it."""

AGREED_TIMES = 2
"""How often in a row a peer must see the others where it stands, before it goes."""

NOT_MERGED_EVENTS = frozenset(("no_quorum", "too_late", "turned_away", "gave_up"))
"""An offer of this peer's came to nothing before there was a round."""

LAST_OFFERS_MAX = 1024
"""Peers of which is remembered what became of their last offer."""

TOLD_EVENTS = frozenset(
    (
        "state_adopted",
        "state_fetched",
        "catch_up_failed",
        "fetch_failed",
        "discarded",
        "not_finite",
        "not_a_commit",
        "refused",
    )
)
"""What averaging tells that a trainer may want to hear, besides rounds."""

PHASES = {
    Phase.WANTED: "being copied",
    Phase.JOINING: "waiting for peers",
    Phase.PROMISED: "waiting for peers",
    Phase.ENTERED: "exchanging",
    Phase.CATCHING: "catching up",
    Phase.FOLDING: "folding",
}
"""What goes on, for people."""

PhaseName = Literal["connecting", "fetching", "founding", "ready", "leaving"]
Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StationSettings:
    """Who this peer is and where it is to be found. The rest is the run file's."""

    run: RunFile
    identity: Identity
    directory: Path
    name: str
    role: Role
    seeds: tuple[str, ...]
    listen: tuple[str, ...]
    announce: tuple[str, ...]
    page: str | None
    """Where to serve the local page: HOST:PORT, or ``auto``."""
    site: str | None = None
    """Who says the same is near (``averaging.rules.sites``)."""
    lane: str = "auto"
    """Where to listen for the direct lane (``dht.libp2p.lane.parse_lane``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerPart:
    """What a peer's own trainer adds to how it stands. A keeper has none."""

    steps: int = 0
    tokens: int = 0
    step_time_s: float = 0.0
    loss: float | None = None
    blocked_s: float = 0.0
    staleness: int = 0
    pending_tokens: int = 0
    fates: Mapping[str, float] = field(default_factory=dict)
    rest: str | None = None
    """Why it makes no steps for now."""


class Owner:
    """What a station asks and tells of its owner. These answers are those of nobody."""

    def trainer_part(self) -> TrainerPart:
        return TrainerPart()

    def ledger(self) -> Mapping[str, Any] | None:
        """For the checkpoint."""
        return None

    def told(self, name: str, fields: Fields) -> None:
        """An event that a person may want to hear of."""

    def told_phase(self, name: PhaseName, text: str, done: float) -> None:
        """The station entered a phase."""

    def round_ended(self, fields: Fields) -> None:
        """A round of this peer's is over, one way or the other."""


class Station:
    """One peer's life on line in one run."""

    def __init__(
        self, settings: StationSettings, layout: Layout, owner: Owner, guest: Guest
    ) -> None:
        loop = asyncio.get_running_loop()
        self.settings = settings
        self.guest = guest
        self.layout = layout
        self.run_file = settings.run
        self.run_id = settings.run.run_id
        self.directory = settings.directory
        self.me = settings.identity.peer_id
        self.board = Board(Names({self.me: settings.name}))
        self.log = EventLog(
            settings.directory / "events.jsonl",
            heard=self.board.note,
            owner={
                "peer": self.me,
                "name": settings.name,
                "role": settings.role,
                "run": self.run_id,
                "run_name": self.run_file.name,
            },
        )
        self.folder = CheckpointFolder(
            settings.directory / "outer", allowed_bytes=lambda: guest.disk.outer
        )
        self._trainers_folder = CheckpointFolder(
            settings.directory / "inner", allowed_bytes=lambda: guest.disk.inner
        )
        self.view: dict[PeerId, PeerView] = {}
        self.phase: PhaseName = "connecting"
        self.rounds_missed = 0
        self.closed: set[int] = set()
        """Fragments of which nothing is offered any more."""
        self.ending: asyncio.Future[Ending] = loop.create_future()
        self.held_out = HeldOutLoss(self.run_id, self.me, self.run_file.evaluation.every_versions)
        self._owner = owner
        self._began_at = loop.time()
        self._dialled = asyncio.Event()
        """Whether others can dial this peer is known."""
        self._last_rounds: LastRounds | None = None
        self._apart = ""
        """Who ended the run elsewhere, and how."""
        self.last_offers: OrderedDict[PeerId, str] = OrderedDict()
        """What became of the peers' last offers, as this peer's rounds tell."""
        self._is_alone = False
        self._not_saved = ""
        """Why the last checkpoint could not be written."""
        # Set by open() and take_part().
        self.host: HivemindHost
        self.presence: Presence
        self.averager: Averager

    def __repr__(self) -> str:
        return f"Station({self.me}, run={self.run_id[:8]}, phase={self.phase})"

    # --- life -----------------------------------------------------------------------------------

    async def open(self, stack: AsyncExitStack) -> None:
        """Go on line. ``stack`` takes this peer off it again."""
        settings = self.settings
        admitted = admitted_peers(self.run_file)
        if admitted is not None and self.me not in admitted:
            raise RunRefused("this peer", self.me, f"a list of {len(admitted)} peers without it")
        self.tell_phase("connecting", "starting the network daemon", 0.0)
        self.host = await HivemindHost.open(
            settings.identity,
            HostSettings(
                daemon=DaemonSettings(
                    listen=tuple(Multiaddr(text) for text in settings.listen),
                    announce=tuple(Multiaddr(text) for text in settings.announce),
                ),
                lane=parse_lane(settings.lane),
            ),
        )
        stack.push_async_callback(self.host.close)
        self.presence = Presence(
            self.host,
            settings.identity,
            Profile(
                self.run_id,
                role=settings.role,
                name=settings.name,
                site=settings.site or "",
                run_file=self.run_file.canonical(),
            ),
            replace(presence_settings(self.run_file), cache_path=self.directory / "peers.json"),
            seeds=[Multiaddr(seed) for seed in settings.seeds],
            on_event=self._presence_event,
            on_reachable=self._reachable_changed,
        )
        await self.host.serve_calls(STATUS_PROTOCOL, self._answer_status, request_max_bytes=128)
        await self.presence.start()
        stack.push_async_callback(self.presence.close)
        if settings.page is not None:
            await self._open_page(stack, parse_page(settings.page))
        self.tell_phase("connecting", "looking for peers", 0.5)

    async def _open_page(self, stack: AsyncExitStack, address: PageAddress) -> None:
        pages = serve_pages(
            address,
            checks=lambda: agent_page.checks(self.status()),
            metrics=lambda: agent_page.figures(self.status()),
            content=Content(
                state=self._page_state,
                events=self.board.search,
                token_file=self.directory / "page.token",
            ),
        )
        try:
            url = await stack.enter_async_context(pages)
        except PageError as error:
            if address.tries == 1:
                raise  # somebody wanted it there
            self.event("page_not_served", text=str(error))
        else:
            self._owner.told("page", {"url": url})  # not to the log: the token is in it

    def others(self) -> list[Mapping[str, Any]]:
        """The other peers as people see them, the largest contributors first."""
        now = asyncio.get_running_loop().time()
        rows = agent_page.peer_rows(
            self.status(),
            self.presence.table.live(now),
            merged_of(self.states),
            self.board.names,
            self.last_offers,
            now=now,
        )
        return [row for row in rows if not row["you"]]

    def _page_state(self) -> Mapping[str, Any]:
        now = asyncio.get_running_loop().time()
        goal, part = self.run_file.end.tokens, self._owner.trainer_part()
        return agent_page.content(
            self.status(),
            self.board,
            rest=part.rest,
            limits=self.guest.words(),
            run_id=self.run_id,
            run_name=self.run_file.name,
            tokens_goal=goal if isinstance(goal, int) else None,
            link=str(self.link()),
            members=self.presence.table.live(now),
            merged=merged_of(self.states),
            last_offers=self.last_offers,
            in_flight=self.in_flight(),
            now=now,
            wall_time=time.time(),
        )

    async def take_part(
        self,
        averager: Averager,
        tasks: asyncio.TaskGroup,
        also: Mapping[str, Coroutine[Any, Any, None]],
        *,
        until_taken_in: Callable[[float], Awaitable[None]] | None = None,
    ) -> Ending:
        """From the first states to the goodbye. ``also``: the owner's own tasks, ended with it."""
        self.averager = averager
        self._tell_averager_whether_reachable()  # it was built before, or is known since
        coroutines: dict[str, Coroutine[Any, Any, None]] = {
            "averager": averager.run(),
            "save": self._save_for_ever(),
            "ask others": self._ask_others(),
            "watch presence": self.presence.watch(),
            "look at the end": self._look_at_the_end(),
            "keep house": self._keep_house(),
            **also,
        }
        if self.settings.page is not None:
            coroutines["sample"] = self._sample_for_ever()
        work = [tasks.create_task(each, name=name) for name, each in coroutines.items()]
        try:
            ending = await self.ending
            self.tell_phase("leaving", ending.reason, 0.0)
            if ending.finished:
                await self._until_others_agree(ending.timeout_s)
            if not await averager.drain(timeout_s=0.6 * ending.timeout_s):
                self.event("drain_cut_short", in_flight=averager.in_flight)
            if ending.timeout_s > 0 and until_taken_in is not None:
                await until_taken_in(min(2.0, 0.2 * ending.timeout_s))
        finally:
            for task in work:
                task.cancel()
        await asyncio.wait(work)
        await self._save()
        if ending.finished:
            await self._export()
        with contextlib.suppress(DhtError):
            await self.presence.leave()
        return ending

    def end(self, reason: str, exit_code: int, *, finished: bool, timeout_s: float) -> None:
        """Leave. The first reason counts."""
        if not self.ending.done():
            self.ending.set_result(Ending(reason, exit_code, finished, timeout_s))

    async def leave_when_asked(self, timeout_s: float) -> None:
        """End once the machine's owner wants it (``shoal leave``), whatever goes on here."""
        while not self.guest.must_leave:
            self.guest.look()
            await asyncio.sleep(OBEY_EVERY_S)
        self.end("its owner asked it to leave", 0, finished=False, timeout_s=timeout_s)

    async def unless_ending(self, work: Coroutine[Any, Any, T]) -> T | None:
        """What ``work`` returns; ``None`` once this peer is to leave, whatever it waits for."""
        working = asyncio.ensure_future(work)
        try:
            await asyncio.wait((working, self.ending), return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            working.cancel()
            await asyncio.wait((working,))

    async def until_dialled(self) -> None:
        """Finding out whether this peer can be dialled may cut connections: bulk waits for it."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._dialled.wait(), DIALLED_WITHIN_S)

    # --- what happens ---------------------------------------------------------------------------

    def event(self, name: str, /, **fields: Any) -> None:
        """To the log, and to the owner."""
        self.log.write(name, fields)
        self._owner.told(name, fields)

    def tell_phase(self, phase: PhaseName, text: str, done: float) -> None:
        self.phase = phase
        self.log.write("phase", {"name": phase, "text": text})
        self._owner.told_phase(phase, text, done)

    def _presence_event(self, event: PresenceEvent) -> None:
        fields = dict(event.fields)
        peer = fields.get("peer")
        if isinstance(peer, str):
            member = self.presence.table.get(PeerId(peer))
            if member is not None:
                fields["name"] = member.record.name
        self.event(event.name, text=event.text, **fields)

    def averager_event(self, name: str, fields: Fields) -> None:
        """What the averager notes: for the log, and some of it for the owner."""
        if name == "round":
            self._round_ended(fields)
        elif name == "alone":
            # Every fragment finds out at each of its turns, and tells nothing new.
            if not self._is_alone:
                self._is_alone = True
                self.event(name, text="nobody else trains here now; training goes on alone")
        elif name in TOLD_EVENTS:
            self.event(name, **fields)
        else:
            # What a machine notes at every turn is for whoever reads the whole log.
            self.log.write(name, fields)
            if name in NOT_MERGED_EVENTS:
                why = told_in_words({**fields, "event": name}, self.board.names)
                self._owner.told("not_merged", {"fragment": fields["fragment"], "reason": why})
        if name == "void" and self._last_rounds is not None:
            self._last_rounds.came_to_nothing(fields["fragment"])

    def _round_ended(self, fields: Fields) -> None:
        contributed = self.me in fields["contributors"]
        if not contributed:
            self.rounds_missed += 1
        self.log.write("round", {**fields, "contributed": contributed})
        self._owner.round_ended({**fields, "contributed": contributed})
        if fields["outcome"] == "finished":
            self.check_the_end()  # at once: no version must follow the final one
            where = f"{fields['fragment']}/{fields['version']}"
            for peer in fields["contributors"]:
                self._remember_offer(peer, f"merged {where}")
            for peer, why in fields["left_out"].items():
                self._remember_offer(peer, f"left out {where}: {self.board.names.within(why)}")

    def _remember_offer(self, peer: PeerId, fate: str) -> None:
        self.last_offers[peer] = fate
        self.last_offers.move_to_end(peer)
        if len(self.last_offers) > LAST_OFFERS_MAX:
            self.last_offers.popitem(last=False)

    def in_flight(self) -> tuple[str, ...]:
        """Fragments, and what is done about them just now, in words."""
        found: dict[str, list[str]] = {}
        for index, phase in enumerate(self.averager.phases if hasattr(self, "averager") else ()):
            if phase in PHASES:
                found.setdefault(PHASES[phase], []).append(str(index))
        return tuple(f"{' and '.join(each)} {words}" for words, each in found.items())

    async def _reachable_changed(self, reachable: bool) -> None:
        self._dialled.set()
        # First, as it cannot fail: the host cannot act upon it while its daemon is down.
        self._tell_averager_whether_reachable()
        await self.host.set_reachable(reachable)

    def _tell_averager_whether_reachable(self) -> None:
        """What presence knows now, not what it once told. Not known yet is not yet."""
        if hasattr(self, "averager"):
            self.averager.set_reachable(self.presence.reachable is True)

    # --- what is known --------------------------------------------------------------------------

    def refresh_view(self) -> None:
        """The peers as averaging wants to see them; the mapping stays the same object."""
        now = asyncio.get_running_loop().time()
        live = {}
        admitted = admitted_peers(self.run_file)
        for member in self.presence.table.live(now):
            if admitted is not None and member.peer not in admitted:
                continue
            live[member.peer] = peer_view(member)
        for peer in self.view.keys() - live.keys():
            del self.view[peer]
        self.view.update(live)
        self.see_company()

    def see_company(self) -> None:
        """Somebody trains with this peer again: being alone the next time is news again."""
        if self._is_alone and self.others_who_train():
            self._is_alone = False

    def addresses_of(self, peer: PeerId) -> Sequence[Multiaddr]:
        member = self.presence.table.get(peer)
        if member is None:
            return ()
        return [address_rules.with_peer(address, peer) for address in member.addresses]

    @property
    def states(self) -> tuple[FragmentState | None, ...]:
        return self.averager.states if hasattr(self, "averager") else ()

    def versions(self) -> tuple[int, ...]:
        """Of all fragments; empty before there is a state of each."""
        states = [state for state in self.states if state is not None]
        return tuple(s.version for s in states) if len(states) == len(self.layout.fragments) else ()

    @property
    def model(self) -> str:
        """The name of the parameters; empty before there is a state of each fragment."""
        return model_name(s for s in self.states if s is not None) if self.versions() else ""

    @property
    def live_peers(self) -> list[PeerView]:
        now = asyncio.get_running_loop().time()
        return [seen for seen in self.view.values() if seen.is_live(now)]

    def others_who_train(self) -> list[PeerId]:
        now = asyncio.get_running_loop().time()
        return [p for p, seen in sorted(self.view.items()) if seen.trains and seen.is_live(now)]

    def _others_who_follow(self) -> list[PeerId]:
        """Who wants the last versions: keepers, and learners even while they do not train."""
        members = self.presence.table.live(asyncio.get_running_loop().time())
        following = {m.peer for m in members if m.record.role != "bootstrap"}
        return sorted(following & self.view.keys())

    def link(self) -> Link:
        """What others paste to join."""
        own = [address_rules.with_peer(a, self.me) for a in self.presence.addresses[:2]]
        seeds = [Multiaddr(seed) for seed in self.settings.seeds]
        room = LINK_SEEDS_MAX - len(own)
        return Link(self.run_id, tuple(dict.fromkeys([*seeds[:room], *own])))

    def update_record(self, *, trains: bool, step_time_s: float | None, merged: float) -> None:
        """What others read of this peer."""
        stats = self.averager.stats
        self.presence.update(
            trains=trains,
            step_time_s=step_time_s,
            versions=self.versions(),
            counters=ContributionCounters(
                rounds=stats.contributed,
                tokens=int(merged),
                bytes_sent=stats.sent_bytes,
            ),
        )

    # --- status and held-out loss ---------------------------------------------------------------

    def status(self) -> Status:
        part = self._owner.trainer_part()
        stats = self.averager.stats if hasattr(self, "averager") else None
        return Status(
            peer=self.me,
            name=self.settings.name,
            role=self.settings.role,
            phase=self.phase,
            steps=part.steps,
            tokens=part.tokens,
            step_time_s=part.step_time_s,
            loss=part.loss,
            held_out=self.held_out.newest,
            global_tokens=global_tokens(self.states),
            versions=self.versions(),
            staleness=part.staleness,
            peers=1 + len(self.live_peers),
            fates=dict(part.fates),
            rounds=stats.rounds if stats else 0,
            rounds_missed=self.rounds_missed,
            bytes_sent=stats.sent_bytes if stats else 0,
            bytes_received=stats.received_bytes if stats else 0,
            blocked_s=part.blocked_s,
            up_s=asyncio.get_running_loop().time() - self._began_at,
            reachable=self.presence.reachable,
            layout=self.layout.hash.hex(),
            model=self.model,
            rest=part.rest and part.rest[:TEXT_MAX],
            limits=tuple(words[:TEXT_MAX] for words in self.guest.words()),
        )

    async def _answer_status(self, peer: PeerId, request: bytes) -> bytes:
        if request != self.run_id.encode():
            raise ValueError(f"this peer is in run {self.run_id}, not {request[:64]!r}")
        return encode_status(self.status())

    async def statuses(self, peers: Sequence[PeerId]) -> list[Status]:
        """Ask these peers how they are; whoever does not answer is left out."""

        async def ask(peer: PeerId) -> Status | None:
            try:
                await self.presence.connect(peer, timeout_s=5.0)
                return await ask_status(self.host, peer, self.run_id, timeout_s=5.0)
            except (DhtError, ValueError) as error:
                logger.info("status_not_had peer=%s reason=%s", peer, error)
                return None

        answers = await asyncio.gather(*(ask(peer) for peer in peers))
        return [answer for answer in answers if answer is not None]

    async def _sample_for_ever(self) -> None:
        """For the page's curve."""
        while True:
            part = self._owner.trainer_part()
            self.board.sample(tokens=global_tokens(self.states), loss=part.loss)
            await asyncio.sleep(SAMPLE_EVERY_S)

    async def _ask_others(self) -> None:
        """A few peers, in turns: the newest held-out loss gets around."""
        turn = 0
        while True:
            await asyncio.sleep(ASK_EVERY_S)
            live = sorted(self.view)
            chosen = [live[(turn + index) % len(live)] for index in range(min(3, len(live)))]
            turn += len(chosen)
            for answer in await self.statuses(chosen):
                self.take_held_out(answer.held_out)

    def take_held_out(self, measured: HeldOut | None) -> None:
        if measured is not None and self.held_out.heard(measured):
            self.event("measured", version=measured.version, loss=measured.loss, peer=measured.peer)

    # --- keeping it -----------------------------------------------------------------------------

    async def _save_for_ever(self) -> None:
        pause_s = SAVE_FIRST_S
        while True:
            await asyncio.sleep(pause_s)
            began = time.monotonic()
            await self._save()
            pause_s = max(SAVE_EVERY_S, 20 * (time.monotonic() - began))

    async def _save(self) -> None:
        """Write a checkpoint, once there is a state of every fragment."""
        try:
            async with self.averager.pinned() as pinned:
                ledger = self._owner.ledger()  # of these states
                states = [state for state in pinned if state is not None]
                if len(states) < len(self.layout.fragments):
                    return
                path = await asyncio.to_thread(
                    save_outer,
                    self.folder,
                    run=self.run_file,
                    layout=self.layout,
                    states=states,
                    ledger=ledger,
                )
        except DiskFull as error:
            self._tell_not_saved("disk_full", str(error), needed_bytes=error.needed_bytes)
        except OSError as error:
            self._tell_not_saved("checkpoint_failed", f"{self.folder.folder}: {error}")
        else:
            self._not_saved = ""
            versions = [state.version for state in states]
            self.log.write("checkpoint", {"path": path, "versions": versions})

    def _tell_not_saved(self, name: str, text: str, **fields: Any) -> None:
        """Once: it is tried again every minute."""
        if not self._not_saved:
            self.event(name, text=text, **fields)
        self._not_saved = text

    async def _keep_house(self) -> None:
        """Logs stay within bounds, and what is allowed no more is dropped, also while running."""
        while True:
            allowed = self.guest.disk.logs
            self.log.keep_within(allowed and allowed / 2)
            await asyncio.to_thread(trim_log, self.directory / "agent.log", allowed and allowed / 2)
            await asyncio.to_thread(self.folder.prune)
            await asyncio.to_thread(self._trainers_folder.prune)
            await asyncio.sleep(KEEP_HOUSE_EVERY_S)

    async def _export(self) -> None:
        out = self.directory / "model.safetensors"
        try:
            await asyncio.to_thread(export, self.folder, out, apart=self._apart)
        except (PeerError, OSError) as error:
            self.event("export_failed", text=str(error))
        else:
            self.event("exported", path=str(out), versions=list(self.versions()), model=self.model)

    # --- the end --------------------------------------------------------------------------------

    def check_the_end(self) -> None:
        """Whether the run has used its tokens. A run's date has ``_look_at_the_end``."""
        if self.phase != "ready" or self.ending.done():
            return
        self.closed |= self.averager.final_fragments
        if self._last_rounds is None and len(self.closed) == len(self.layout.fragments):
            self.end("the run has used its tokens", 0, finished=True, timeout_s=LAST_ROUND_S)

    async def _look_at_the_end(self) -> None:
        while not self.ending.done():
            self.check_the_end()
            left_s = seconds_left(self.run_file.end, self.presence.clock, now=datetime.now(UTC))
            if left_s is not None and self.phase == "ready":
                if left_s <= CLOCKS_DIFFER_S and self._last_rounds is None:
                    self._last_rounds = LastRounds(self.versions())
                    self.averager.answer_every_call()
                    self.averager.gather_everybody()
                if left_s <= -CLOCKS_DIFFER_S and self._last_rounds is not None:
                    await self._make_last_rounds(self._last_rounds)
                    self.end(
                        "the run has reached its date", 0, finished=True, timeout_s=LAST_ROUND_S
                    )
            await asyncio.sleep(0.25)

    async def _make_last_rounds(self, rounds: LastRounds) -> None:
        """Every fragment once more with whoever is there; then nothing more of it is offered."""
        loop = asyncio.get_running_loop()
        rules = self.run_file.rounds
        deadline = loop.time() + min(rules.round_deadline_s, rules.quorum_deadline_s + LAST_ROUND_S)
        self.event("last_round", versions=list(rounds.versions), peers=len(self.others_who_train()))
        while self.averager.port is not None and loop.time() < deadline:
            missing = rounds.missing(self.versions())
            if not missing or not await self._somebody_trains_on():
                break
            self.averager.make_due(missing)
            await asyncio.sleep(0.5)
        self.closed |= set(range(len(self.layout.fragments)))
        # What was called for just before must not make another version after the others have gone:
        # who hears that this peer leaves goes by the versions that it has then.
        await self.averager.drain(timeout_s=max(1.0, deadline - loop.time()))

    async def _somebody_trains_on(self) -> bool:
        """Whether any of the others could still make a round with this peer."""
        answers = await self.statuses(self.others_who_train()[:ASKED_LAST])
        return any(answer.phase == "ready" for answer in answers)

    async def _until_others_agree(self, timeout_s: float) -> None:
        """Stay while somebody may still need versions of this peer, or this peer theirs."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        by_date = self._last_rounds is not None or self.averager.closed_ranks
        agreed = 0
        waiting: list[str] = []
        while agreed < AGREED_TIMES and loop.time() < deadline:
            self.refresh_view()
            answers = await self.statuses(self._others_who_follow()[:ASKED_LAST])
            waiting = who_differs(self.versions(), answers, by_date=by_date, model=self.model)
            if self.averager.in_flight:
                waiting.append("a round is under way")
            agreed = 0 if waiting else agreed + 1
            if not answers or (agreed and not by_date):
                return
            self._show_standing(PeerId(answer.peer) for answer in answers)
            await asyncio.sleep(1.0)
        if waiting:
            self._apart = "; ".join(waiting)
            versions = list(self.versions())
            self.event("left_apart", text=self._apart, versions=versions, model=self.model)

    def _show_standing(self, peers: Iterable[PeerId]) -> None:
        """Who is behind is told so, and catches up; who is ahead tells this peer."""
        for peer in peers:
            for state in self.states:
                if state is not None:
                    compare = said.Compare(state.fragment, Standing.of(state).head())
                    self.averager.transport.send(peer, said.encode(compare))


def peer_view(member: Member) -> PeerView:
    """A member of the run as averaging wants to see it."""
    record = member.record
    return PeerView(
        first_seen=member.first_seen,
        heard_at=max(member.record_seen_at, member.heard_at or member.record_seen_at),
        failed_at=member.failed_at,
        # Not known yet is not yet: whoever nobody can dial would lead in vain.
        reachable=record.reachable is True,
        trains=record.trains,
        arrives=record.role == "learner" and not record.trains,
        step_time_s=record.step_time_s,
        bytes_per_s=record.link_bytes_s,
        site=record.site or None,
    )
