"""One peer of a run: what it knows of itself, of the run and of the others.

``peer.agent.life`` takes it through its run. It is the same for an agent, which trains beside a
program, and for a keeper: they differ by their ``Role`` and their services.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from averaging.history.state import FragmentState, value_bytes
from averaging.live.averager import Averager
from averaging.live.states.state_files import StateFiles, working_bytes
from averaging.numbers.arrays import Float32s, uninitialised_floats
from averaging.numbers.layout import Layout
from averaging.rules.peer_view import PeerView
from dht.bounded_mapping import BoundedMapping, by_age
from dht.identity import PeerId
from dht.limits import Rate
from dht.membership.credentials import Directive
from dht.presence.this_peer import PresenceEvent
from dht.records import ContributionCounters, pack_versions
from peer.agent.network import Network
from peer.agent.owners_orders import OwnersOrders
from peer.agent.services import EndOfRun, Fields, Role, Seat, Service
from peer.description import Description, tensors_of
from peer.errors import NotAdmitted
from peer.events.board import Board
from peer.events.names import Names
from peer.events.table import REPORTED, audience_of, in_story
from peer.guest.enforcement import Guest
from peer.guest.machine import place_of_state
from peer.joining.link import is_news, tell_link
from peer.rules.ending import LAST_ROUND_S, CameToNothing, Ending, Heard, Merged, seconds_left
from peer.rules.leaving import Departure, LastOffers
from peer.rules.others import Founding, HeldOutLoss, Reach, nobody_reduces
from peer.status import (
    HeldOut,
    PeerStatus,
    merges_alone_from,
)
from peer.storage.address import keep_link
from peer.storage.checkpoint import CheckpointFolder
from peer.storage.earlier import KeptState, load_last_seen, save_state
from peer.storage.good_states import GoodStates
from peer.storage.home import GOOD, OUTER
from peer.storage.outer_state import (
    OuterState,
    founding_name,
    global_tokens,
    load_outer,
    model_name,
)
from peer.views.event_log import EventLog

OBEY_EVERY_S = 0.25
PEERS_REMEMBERED_MAX = 1024
"""Number of peers of whom something is remembered."""

JUMP_REFUSED = "jump_refused"
JUMPS_JUDGED = frozenset(("jump_measured", JUMP_REFUSED, "jump_allowed"))
"""Verdicts of the loss gate (``averaging.guard.loss_gate``)."""

NOT_MERGED_EVENTS = frozenset(("no_quorum", "too_late", "turned_away", "gave_up"))
"""Events of averaging by which an offer of this peer failed before there was a round."""


TEXTS = ("reason", "text")
"""Fields of events that are texts for people."""

PhaseName = Literal["connecting", "waiting", "fetching", "founding", "ready", "leaving"]


class Peer:
    """One peer of a run. It has no network until it is on line, and no averager until it is in."""

    network: Network
    """There from the moment at which the peer is on line."""

    def __init__(self, seat: Seat, layout: Layout, guest: Guest, role: Role) -> None:
        loop = asyncio.get_running_loop()
        self.seat = seat
        self.layout = layout
        self.description = Description.of(tensors_of(layout), seat.frozen)
        self.guest = guest
        self.role = role
        self.services: list[Service] = []
        self.run_file = seat.run
        self.run_id = seat.run.run_id
        self.directory = seat.directory
        self.me = seat.me
        self.board = Board(Names({self.me: seat.name}))
        self.log = EventLog(
            seat.directory / "events.jsonl",
            heard=self.board.note,
            owner={
                "peer": self.me,
                "name": seat.name,
                "role": seat.role,
                "run": self.run_id,
                "run_name": self.run_file.name,
            },
        )
        mu = seat.run.outer.momentum
        size = value_bytes(mu) * layout.size
        place = place_of_state(seat.settings.state_on_disk, size, seat.directory)
        self.state_files: StateFiles | None = None
        """Memory of the states; ``None``: that of the process."""
        if place.on_disk:
            largest = max(fragment.size for fragment in layout.fragments)
            self.state_files = files = StateFiles(
                seat.directory,
                allowed_bytes=lambda: guest.disk.state,
                working_bytes_max=working_bytes(largest, mu),
            )
            guest.state_bytes = lambda: files.used_bytes
        self._state_place = place.text
        self.good: GoodStates | None = None
        """Earlier states, in a run whose owner may take it back to them."""
        if seat.run.policy.owner is not None:
            self.good = GoodStates(
                seat.directory / GOOD, layout, mu, allowed_bytes=lambda: guest.disk.outer
            )
        self.owner = OwnersOrders(
            run=seat.run, fragments=len(layout.fragments), good=self.good, versions=self.versions
        )
        self.folder = CheckpointFolder(seat.directory / OUTER, allowed_bytes=self._checkpoint_bytes)
        self.view: dict[PeerId, PeerView] = {}
        """The live peers as averaging sees them. It stays the same object."""
        self.absent: dict[PeerId, float | None] = {}
        """The peers that are not live (``PeerTable.absent``). It stays the same object."""
        self.phase: PhaseName = "connecting"
        self._phase_text = ""
        self._state = KeptState(self.phase, "", 0.0)
        self.averager: Averager | None = None
        """There from the moment at which the peer has its first states, or looks for them."""
        self.rounds_missed = 0
        self.jumps: Counter[str] = Counter()
        """Verdicts of the loss gate, by the name of their event."""
        self.offer_outcomes = BoundedMapping[PeerId, str](
            "outcomes of offers", PEERS_REMEMBERED_MAX, worth=by_age
        )
        """The outcome of each peer's last offer, as this peer's rounds showed it."""
        seen = load_last_seen(seat.directory, seat.run.run_id)
        rounds = seat.run.rounds
        self.ending = Ending(
            fragments=len(layout.fragments),
            learns=seat.role == "learner",
            stays=seat.stays,
            last_round_s=min(rounds.round_deadline_s, rounds.quorum_deadline_s + LAST_ROUND_S),
            ended_at=None if seen is None else seen.ended_at,
        )
        self.end = EndOfRun(self.ending)
        self.apart = BoundedMapping[PeerId, None]("peers apart", PEERS_REMEMBERED_MAX, worth=by_age)
        """Peers whose history was founded apart from this peer's: one side has to give way."""
        self.batches = ""
        """Digest of the random seed by which its program draws batches; empty if unknown."""
        self.held_out = HeldOutLoss(self.run_id, self.me, self.run_file.evaluation.every_versions)
        self.began_at = loop.time()
        self._merged_tokens = 0
        self._is_alone = False
        self._failures = Repeats()
        self._lines = Rate[str].in_a_minute(LINES_PER_MINUTE)
        self._reach = Reach()
        self.link_told: str | None = None
        """The link that people were told last."""
        self._link_kept = ""

    def __repr__(self) -> str:
        return f"Peer({self.me}, run={self.run_id[:8]}, phase={self.phase})"

    def floats(self, count: int) -> Float32s:
        """Memory for a vector of a state."""
        if self.state_files is not None:
            return self.state_files.floats(count)
        return uninitialised_floats(count)

    def load_checkpoint(self) -> OuterState | None:
        """The newest usable checkpoint of this run. Raises ``FolderOfAnotherRun``."""
        return load_outer(
            self.folder, run_id=self.run_id, layout_hash=self.layout.hash, floats=self.floats
        )

    def tell_place_of_state(self) -> None:
        """Report where the state is kept, if that is not the usual place."""
        if self._state_place:
            self.event("state_place", text=self._state_place)

    # --- the end --------------------------------------------------------------------------------

    def offer_before_leaving(self) -> LastOffers:
        """Offer the trainer's work now, and tell what of it is not merged yet."""
        averager = self.averager
        assert averager is not None, "what is offered was trained from the first states on"
        return LastOffers(
            encoded_bytes=averager.offer_before_leaving(),
            bytes_per_s=averager.bytes_per_s,
            company_s=averager.company_s(),
        )

    async def leave_when_asked(self, timeout_s: float, *, patience_s: float = 0.0) -> None:
        """Leave when the machine's owner asks for it (``shoal leave``), in whatever phase."""
        while not self.guest.must_leave:
            self.guest.look()
            await asyncio.sleep(OBEY_EVERY_S)
        asked = "its owner asked it to leave"
        self.end.hear(
            Departure(asked, 0, finished=False, timeout_s=timeout_s, patience_s=patience_s)
        )

    # --- the orders of the run's owner -----------------------------------------------------------

    def note_rollback(self) -> None:
        """The run was taken back: its end, and the counts towards its end, are void."""
        self.end.hear(Heard.TAKEN_BACK)
        self._merged_tokens = 0
        # Later measurements are not of this run any more, and their versions are made anew.
        self.held_out = HeldOutLoss(self.run_id, self.me, self.run_file.evaluation.every_versions)
        self.owner.gone_back = self.owner.rollback

    def _checkpoint_bytes(self) -> float | None:
        allowed = self.guest.disk.outer
        if allowed is None or self.good is None:
            return allowed
        return allowed - self.good.used_bytes

    def follow_directive(self, directive: Directive | None) -> None:
        """Follow the newest directive of the run's owner from now on."""
        orders = self.owner.follow(directive)
        if orders is not None and self.averager is not None:
            self.averager.follow(orders)

    # --- events ---------------------------------------------------------------------------------

    def event(self, name: str, /, **fields: Any) -> None:
        """Report an event to the log, and to those who tell it people."""
        self.log.write(name, fields)
        # People know peers by name; the log keeps their ids.
        shown = {
            key: self.board.names.within(text)
            for key in TEXTS
            if isinstance(text := fields.get(key), str)
        }
        self.tell(name, {**fields, **shown})

    def tell(self, name: str, fields: Fields) -> None:
        """Report an event to the role and the services, and not to the log."""
        for service in self.services:
            service.note(name, fields)
        self.role.note(name, fields)

    def _is_flood(self, name: str, fields: Fields) -> bool:
        """True if too many such lines were told of a peer, or of all that do not count."""
        if name not in CAUSED_BY_ANYBODY:
            return False
        peer, averager = fields["peer"], self.averager
        author = peer if averager is not None and averager.is_established(peer) else ""
        return not self._lines.spend(author, time.monotonic())

    def hear_presence(self, event: PresenceEvent) -> None:
        """Report what has happened among the peers of the run, and do what follows from it."""
        fields = dict(event.fields)
        peer = fields.get("peer")
        if isinstance(peer, str):
            member = self.network.presence.table.get(PeerId(peer))
            if member is not None:
                fields["name"] = member.record.name
                self.board.names.learn(peer, member.record.name)
        if self._is_flood(event.name, fields):
            return
        self.event(event.name, text=event.text, **fields)
        if event.name == "directive":
            self.follow_directive(self.network.presence.door.admission.owners_directive)
        if event.name == "not_admitted":
            self.end.hear(
                Departure(event.text, NotAdmitted.exit_code, finished=False, timeout_s=0.0)
            )

    def enter_phase(self, phase: PhaseName, text: str, done: float) -> None:
        self.phase, self._phase_text = phase, text
        self.keep_state(text)
        self.log.write("phase", {"name": phase, "text": text})
        if phase == "ready":
            self.end.hear(Heard.ARRIVED)
        self.tell("phase", {"name": phase, "text": text, "done": done})

    def keep_state(self, text: str | None = None) -> None:
        """Write what this peer does into its folder; ``None``: what its phase says."""
        text = text or self._phase_text
        self._state = msgspec.structs.replace(
            self._state, name=self.phase, text=text, at=time.time()
        )
        self._save_state()

    async def keep_figures(self, figures: Mapping[str, Any]) -> None:
        """Write this peer's figures into its folder."""
        self._state = msgspec.structs.replace(self._state, figures=figures, figures_at=time.time())
        await asyncio.to_thread(self._save_state)

    def _save_state(self) -> None:
        with contextlib.suppress(OSError):  # only `shoal status` misses it
            save_state(self.directory, self._state)

    def averager_event(self, name: str, fields: Fields) -> None:
        """Report an event of the averager to the log, and some of them to people."""
        if self._is_flood(name, fields):
            return
        if name == "state_adopted":
            # The rounds of rosters that closed without this peer: no other event tells of them.
            self.rounds_missed += fields["missed"]
        if name in JUMPS_JUDGED:
            self.jumps[name] += 1
        if name == "round":
            self._round_ended(fields)
        elif name == "fetch_failed":
            self._could_not_fetch(fields)
        elif name == "founded_apart":
            self._met_another_founding(fields)
        elif name == "alone":
            # Every fragment notes this at each of its rounds; only the first one is news, and not
            # while another peer is about to train.
            if not self._is_alone and not any(seen.arrives for seen in self.live_peers):
                self._is_alone = True
                merges = ""
                if (until := self.alone_until) is not None:
                    merges = f", and {merges_alone_from(until)}"
                self.event(
                    "alone", text=f"nobody else trains here now; training goes on alone{merges}"
                )
        elif audience_of(name) & REPORTED:
            self.event(name, **fields)
        else:
            self.log.write(name, fields)
            if name in NOT_MERGED_EVENTS:
                why = in_story({**fields, "event": name}, self.board.names)
                self.tell("not_merged", {"fragment": fields["fragment"], "reason": why})
        if name == "folded":
            self._made_version(fields["fragment"], fields["version"])
        if name == "void":
            self.end.hear(CameToNothing(fields["fragment"]))

    def _could_not_fetch(self, fields: Fields) -> None:
        """Report why a state was not had, or not taken, once: every fragment has the same reason.

        Whoever waits for the first state reads it in what this peer does, too.
        """
        reason = fields["reason"]
        if not self._failures.is_due(reason.partition(": ")[2], now=time.monotonic()):
            self.log.write("fetch_failed", fields)
            return
        self.event("fetch_failed", **fields)
        if self.phase == "fetching":
            text = f"downloading the state of the run: {self.board.names.within(reason)}"
            self.enter_phase("fetching", f"{text}; trying again", 0.0)

    def _met_another_founding(self, fields: Fields) -> None:
        """Report a peer with another history once, whichever fragment it was found out at."""
        peer = fields["peer"]
        if peer not in self.apart:
            self.apart[peer] = None
            self.event("founded_apart", **fields, name=self.board.names.within(peer))

    def _round_ended(self, fields: Fields) -> None:
        contributed = self.me in fields["contributors"]
        finished = fields["outcome"] == "finished"
        if finished and not contributed:
            self.rounds_missed += 1  # one that was given up here is made up for, or void
        sent_for = dict(self.guest.up.sent_for)
        self.log.write("round", {**fields, "contributed": contributed, "sent_for": sent_for})
        self.role.on_round({**fields, "contributed": contributed})
        if finished:
            self._made_version(fields["fragment"], fields["version"])
            end = self.owner.orders.end
            by_owner = end is not None and end.version is not None
            final = () if self.averager is None else self.averager.final_fragments
            self.end.hear(Merged(frozenset(final), by_owner))
            where = f"fragment {fields['fragment']}"
            for peer in fields["contributors"]:
                self._remember_offer(peer, f"merged, {where}")
            for peer, why in fields["left_out"].items():
                self._remember_offer(peer, f"left out, {where}: {self.board.names.within(why)}")

    def _made_version(self, fragment: int, version: int) -> None:
        """This peer has made a version, in a round or alone.

        Keys that have never worked measure nothing, and would have most of the turns.
        """
        averager = self.averager
        able = (
            peer
            for peer in self.others_who_train()
            if averager is None or averager.is_established(peer)
        )
        if fragment == 0 and self.held_out.is_my_turn(version, able):
            self.role.on_turn_to_measure(version, self.merged_tokens())

    def _remember_offer(self, peer: PeerId, outcome: str) -> None:
        self.offer_outcomes.pop(peer, None)  # its entry becomes the youngest
        self.offer_outcomes[peer] = outcome

    def take_held_out(self, measured: HeldOut) -> None:
        """Note a measurement of the held-out loss, and report it if it is the newest."""
        if self.held_out.heard(measured):
            where = {"version": measured.version, "tokens": measured.tokens}
            self.event("measured", **where, loss=measured.loss, peer=measured.peer)

    # --- states and peers -----------------------------------------------------------------------

    @property
    def states(self) -> tuple[FragmentState | None, ...]:
        return () if self.averager is None else self.averager.states

    def versions(self) -> tuple[int, ...]:
        """The version of each fragment; empty until there is a state of every one."""
        states = [state for state in self.states if state is not None]
        return tuple(s.version for s in states) if len(states) == len(self.layout.fragments) else ()

    def merged_tokens(self) -> int:
        """Merged tokens of all peers, for people: the most that was ever in the states.

        A peer on the lighter side of a fork takes a state with fewer.
        """
        self._merged_tokens = max(self._merged_tokens, global_tokens(self.states))
        return self._merged_tokens

    @property
    def model(self) -> str:
        """The name of the parameters; empty until there is a state of every fragment."""
        return model_name(s for s in self.states if s is not None) if self.versions() else ""

    @property
    def founding(self) -> Founding:
        """The founding of the run that the states go back to, and its weight."""
        states = [state for state in self.states if state is not None]
        name = founding_name(states) if self.versions() else ""
        return Founding(global_tokens(states), name)

    @property
    def alone_until(self) -> float | None:
        """Unix time from which this peer merges by itself; ``None``: it does, or others train."""
        until = None if self.averager is None else self.averager.alone_until
        if until is None:
            return None
        return time.time() + until - asyncio.get_running_loop().time()

    @property
    def live_peers(self) -> list[PeerView]:
        """The other live peers."""
        now = asyncio.get_running_loop().time()
        return [seen for seen in self.view.values() if seen.is_live(now)]

    def others_who_train(self) -> list[PeerId]:
        now = asyncio.get_running_loop().time()
        return [p for p, seen in sorted(self.view.items()) if seen.trains and seen.is_live(now)]

    def refresh_view(self) -> None:
        """Look at who is here now, and report what people have to know about it."""
        network = self.network
        network.refresh()
        self.notice_company(reachable=True if network.can_serve else network.presence.reachable)

    def notice_company(self, *, reachable: bool | None) -> None:
        """Take note of who is here now, and report what the owner has to know about it.

        ``reachable``: whether others can dial this peer.
        """
        if self.others_who_train():
            self._is_alone = False  # ``alone`` is reported again the next time
        if self.phase not in ("fetching", "ready"):
            return
        learners = sum(seen.trains or seen.arrives for seen in self.live_peers)
        if self._reach.look(
            reachable,
            learners=learners,
            reachable=sum(seen.reachable for seen in self.live_peers),
            now=asyncio.get_running_loop().time(),
        ):
            self.event("nobody_reduces", text=nobody_reduces(1 + learners), peers=1 + learners)

    def tell_link(self) -> None:
        """Keep the link for ``shoal status``, and tell it unless the one told before is as good."""
        link = self.network.link()
        if not link or link == self._link_kept:
            return
        self._link_kept = link
        keep_link(self.directory, link)
        if is_news(link, self.link_told):
            self.link_told = link
            tell_link(link, self.run_file, self.tell)

    def ban(self, peer: PeerId, what: str) -> None:
        """Have nothing to do with a peer that is proved to have lied."""
        banned = self.network.presence.door.admission.convicted
        if self.averager is not None:
            for gone in banned.keys() - set(self.averager.guard.convicted):
                del banned[gone]  # its verdict gave way to one that is worth more
        self.network.ban(peer, what)

    async def ask_others(self, peers: Sequence[PeerId]) -> list[PeerStatus]:
        """The status of those of ``peers`` that answer in time, of which this peer takes note."""
        answers = await self.network.statuses(peers)
        for answer in answers:
            self.hear_status(answer)
        return answers

    def hear_status(self, answer: PeerStatus) -> None:
        """Take another peer's word on the held-out loss after tokens that are merged here, too.

        One that claims tokens of the far future would be the newest for ever.
        """
        told, known = answer.held_out, answer.directive >= self.owner.rollback
        if told is not None and known and self.versions() and told.tokens <= self.merged_tokens():
            self.take_held_out(told)

    # --- what it tells of itself ----------------------------------------------------------------

    def seconds_left(self) -> float | None:
        """Time until the run's date by the swarm's clock; ``None`` for a run without a date."""
        end, clock = self.owner.run_now.end, self.network.presence.clock
        return seconds_left(end, clock, now=datetime.now(UTC))

    def update_record(self, *, trains: bool, step_time_s: float | None, merged: float) -> None:
        """Publish what other peers read of this one."""
        averager = self.averager
        assert averager is not None, "it publishes itself from its first states on"
        presence = self.network.presence
        presence.facts = msgspec.structs.replace(
            presence.facts,
            trains=trains,
            step_time_s=step_time_s,
            link_bytes_s=averager.bytes_per_s or None,
            versions=pack_versions(self.versions()),
            counters=ContributionCounters(
                rounds=averager.stats.contributed,
                tokens=int(merged),
                bytes_sent=self.guest.sent_bytes,
            ),
        )


PAUSE_FIRST_S = 60.0
PAUSE_MAX_S = 3600.0

SENTENCES_MAX = 64
"""Those that may be told again first are forgotten beyond it, and told anew."""

LINES_PER_MINUTE = 240
"""Lines of the event log that a peer which counts may cause in a minute, and all others together.
Keys cost nothing, and the log forgets its first lines: one key filled it within ten minutes."""

CAUSED_BY_ANYBODY = frozenset(
    ("refused", "link_lost", "peer_joined", "peer_left", "peer_lost", "hello_refused", "other_run")
)


class Repeats:
    """Sentences that come again and again: told once, then after pauses that double."""

    def __init__(self) -> None:
        self._told = BoundedMapping[str, tuple[float, float]](
            "sentences told", SENTENCES_MAX, worth=lambda _, told: told[0]
        )
        """Time at which each may be told again, and the pause after that."""

    def is_due(self, sentence: str, *, now: float) -> bool:
        """``True`` if the sentence is to be told, which is then noted."""
        again_at, pause_s = self._told.get(sentence, (now, PAUSE_FIRST_S))
        if now < again_at:
            return False
        self._told[sentence] = now + pause_s, min(PAUSE_MAX_S, 2 * pause_s)
        return True
