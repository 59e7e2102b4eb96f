"""This peer as it is before it has a network: settings, folder, log, and why it is to end.

``LocalPeer`` is the first of three stages. ``peer.agent.online_peer`` adds the network,
``peer.agent.active_peer`` adds the states of the run and averaging. An agent has all three beside a
trainer, a keeper without one. Each of them is the ``Delegate`` of its peer.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from averaging.errors import CodecsNotCompiled
from averaging.history.attested import grew_from
from averaging.history.state import FragmentState
from averaging.live.averager import Averager
from averaging.live.compiling import COMPILE_FROM_VALUES, can_compile, use_compiled_codecs
from averaging.live.settings import AveragerStats
from averaging.live.slices.watch import Watch
from averaging.live.states.state_files import StateFiles, working_bytes
from averaging.numbers.arrays import Float32s, uninitialised_floats
from averaging.numbers.layout import Layout
from averaging.round.interface.phase import Phase as RoundPhase
from averaging.rules.orders import RoundOrders
from averaging.rules.peer_view import PeerView
from dht.bounded_mapping import BoundedMapping, by_age
from dht.identity import Identity, PeerId
from dht.membership.credentials import Directive, Refused, read_directive
from dht.membership.orders import NONE, Orders, Root, Value, settings_at
from dht.records import Role
from peer.agent.account import global_tokens
from peer.agent.end_of_run import EndOfRun
from peer.agent.policies import round_orders
from peer.agent.services import Begin
from peer.bridge.settings import PeerSettings, default_name
from peer.description import Described, Description, Kinds
from peer.events.board import Board
from peer.events.names import Names
from peer.events.table import REPORTED, audience_of, in_story
from peer.guest.enforcement import Guest
from peer.guest.state_place import place_of_state
from peer.quantities import listed
from peer.rules.amendments import effective
from peer.rules.ending import LAST_ROUND_S, CameToNothing, Ending, Heard, Merged
from peer.rules.foundings import Founding
from peer.rules.held_out import HeldOutLoss
from peer.rules.leaving import Departure, LastOffers
from peer.rules.reach import Reach, Untested
from peer.run_file.sections import RunFile
from peer.status import HeldOut, PeerStatus, merges_alone_from
from peer.storage.checkpoint import CheckpointFolder
from peer.storage.good_states import GoodStates
from peer.storage.home import GOOD, OUTER
from peer.storage.last_seen import State, load_last_seen, save_state
from peer.storage.outer_state import OuterState, founding_name, load_outer, model_name
from peer.views.event_log import EventLog

T = TypeVar("T")

OBEY_EVERY_S = 0.25
PEERS_REMEMBERED_MAX = 1024
"""Number of peers of whom something is remembered."""

JUMP_REFUSED = "jump_refused"
JUMPS_JUDGED = frozenset(("jump_measured", JUMP_REFUSED, "jump_allowed"))
"""Verdicts of the loss gate (``averaging.live.checks.loss_gate``)."""

NOT_MERGED_EVENTS = frozenset(("no_quorum", "too_late", "turned_away", "gave_up"))
"""Events of averaging by which an offer of this peer failed before there was a round."""


WORK_IN_PROGRESS = {
    RoundPhase.WANTED: "being copied",
    RoundPhase.JOINING: "waiting for peers",
    RoundPhase.PROMISED: "waiting for peers",
    RoundPhase.ENTERED: "exchanging",
    RoundPhase.CATCHING: "catching up",
    RoundPhase.FOLDING: "folding",
}
"""Descriptions for people of what averaging does about a fragment."""

FRAGMENTS_NAMED = 6
"""Largest number of fragments at the same work that are named; the rest are counted."""

TEXTS = ("reason", "text")
"""Fields of events that are texts for people."""

PhaseName = Literal["connecting", "waiting", "fetching", "founding", "ready", "leaving"]
Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Who takes part in which run, and how."""

    run: RunFile
    identity: Identity
    directory: Path
    settings: PeerSettings
    role: Role
    credential: bytes = b""
    """Proof that the run admits this peer (``dht.membership.credentials``)."""
    stays: bool = False
    """True if the peer serves the state and the history of the run after its end, too."""
    frozen: tuple[Described, ...] | None = None
    """The trainer's parameters that are not exchanged; ``None`` if they are not known."""
    services: tuple[Begin, ...] = ()
    """What this peer does besides, on line."""
    watch: Watch = field(default_factory=Watch)
    """Sees what the averager does, and may change it: for tests."""

    @property
    def name(self) -> str:
        return self.settings.name or default_name(self.identity.peer_id)


class Delegate:
    """The agent or keeper that a peer belongs to, as the peer sees it. This one does nothing."""

    def with_training(self, status: PeerStatus) -> PeerStatus:
        """The status of this peer with what its own trainer decides."""
        return status

    def pending_tokens(self) -> int:
        """Tokens of the trainer that are not merged yet."""
        return 0

    def ledger(self) -> Mapping[str, Any] | None:
        """The trainer's ledger, for the checkpoint."""
        return None

    def on_event(self, name: str, fields: Fields) -> None:
        """An event happened that a person may want to hear of."""

    def on_phase(self, name: PhaseName, text: str, done: float) -> None:
        """The peer entered a phase."""

    def on_round(self, fields: Fields) -> None:
        """A round of this peer has ended, with or without a result."""

    def on_turn_to_measure(self, version: int, tokens: int) -> None:
        """It is this peer's turn to measure the held-out loss of the run.

        ``version`` of the first fragment, ``tokens`` of the run.
        """


class NotAveraging:
    """Stands for the averager of a peer that has no states yet."""

    states: tuple[FragmentState | None, ...] = ()
    phases: tuple[RoundPhase, ...] = ()
    final_fragments: frozenset[int] = frozenset()
    in_flight = 0
    alone_until: float | None = None
    bytes_per_s = 0.0
    stats = AveragerStats()

    def look(self) -> None: ...

    def level(self) -> None: ...

    def make_due(self, fragments: Iterable[int]) -> None: ...

    def offer_before_leaving(self) -> int:
        return 0

    def company_s(self) -> float:
        return 0.0

    def stay(self) -> None: ...

    def set_reachable(self, reachable: bool) -> None: ...

    def follow(self, orders: RoundOrders) -> None: ...


class LocalPeer:
    """One peer of a run, without its network."""

    def __init__(self, seat: Seat, layout: Layout, delegate: Delegate, guest: Guest) -> None:
        loop = asyncio.get_running_loop()
        self.seat = seat
        self.layout = layout
        self.description = Description.of(layout.specs, seat.frozen, Kinds.of(layout))
        self.delegate = delegate
        self.guest = guest
        self.run_file = seat.run
        self.run_id = seat.run.run_id
        self.directory = seat.directory
        self.directive: Directive | None = None
        """The directive of the run's owner that this peer follows."""
        self.gone_back = 0
        """The directive that took this peer back last, while it was running; 0: none."""
        self.paused: str | None = None
        """Reason why its owner has paused the run; ``None``: it goes on."""
        self._amended: tuple[tuple[Directive | None, int], RunFile] = (None, 0), seat.run
        self.me = seat.identity.peer_id
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
        place = place_of_state(seat.settings.state_on_disk, layout.size, seat.directory)
        self.state_files: StateFiles | None = None
        """Memory of the states; ``None``: that of the process."""
        if place.on_disk:
            largest = max(fragment.size for fragment in layout.fragments)
            self.state_files = files = StateFiles(
                seat.directory,
                allowed_bytes=lambda: guest.disk.state,
                working_bytes_max=working_bytes(largest),
            )
            guest.state_bytes = lambda: files.used_bytes
        self._state_place = place.text
        self.good: GoodStates | None = None
        """Earlier states, in a run whose owner may take it back to them."""
        if seat.run.policy.owner is not None:
            self.good = GoodStates(
                seat.directory / GOOD, layout, allowed_bytes=lambda: guest.disk.outer
            )
        self.folder = CheckpointFolder(seat.directory / OUTER, allowed_bytes=self._checkpoint_bytes)
        self.view: dict[PeerId, PeerView] = {}
        """The live peers as averaging sees them. It stays the same object."""
        self.absent: dict[PeerId, float | None] = {}
        """The peers that are not live (``PeerTable.absent``). It stays the same object."""
        self.phase: PhaseName = "connecting"
        self._phase_text = ""
        self._state = State(self.phase, "", 0.0)
        self.averaging: Averager | NotAveraging = NotAveraging()
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

        self.foundings: dict[PeerId, str] = {}
        """The names of the foundings that other peers stand on, as they say."""
        self._followed = ""
        self.held_out = HeldOutLoss(self.run_id, self.me, self.run_file.evaluation.every_versions)
        self.began_at = loop.time()
        self._merged_tokens = 0
        self._is_alone = False
        self._failures = Repeats()
        self._reach = Reach()

    def __repr__(self) -> str:
        return f"LocalPeer({self.me}, run={self.run_id[:8]}, phase={self.phase})"

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

    async def compile_codecs(self) -> None:
        """Take compiled codecs into use if the compiler is installed and the model is large."""
        values = sum(fragment.size for fragment in self.layout.fragments)
        if values < COMPILE_FROM_VALUES or not can_compile():
            return
        began = asyncio.get_running_loop().time()
        try:
            await use_compiled_codecs()
        except CodecsNotCompiled as error:
            self.event("codecs_not_compiled", reason=error.reason)
        else:
            took_s = asyncio.get_running_loop().time() - began
            self.event("codecs_compiled", took_s=took_s)

    # --- the end --------------------------------------------------------------------------------

    def offer_before_leaving(self) -> LastOffers:
        """Offer the trainer's work now, and tell what of it is not merged yet."""
        averaging = self.averaging
        return LastOffers(
            encoded_bytes=averaging.offer_before_leaving(),
            bytes_per_s=averaging.bytes_per_s,
            company_s=averaging.company_s(),
        )

    @asynccontextmanager
    async def watched(self, *also: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.TaskGroup]:
        """A group for the tasks of this peer. Some of them run from its first moment on: ``also``,
        which hear whether it is to leave, and what every peer does from then on."""
        first = (*also, self.compile_codecs(), self.guest.watch_machine())
        async with asyncio.TaskGroup() as tasks:
            helpers = [tasks.create_task(work) for work in first]
            try:
                yield tasks
            finally:
                for helper in helpers:
                    helper.cancel()

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

    @property
    def orders(self) -> Orders:
        return NONE if self.directive is None else self.directive.orders

    @property
    def run_now(self) -> RunFile:
        """The run file with the amendments that every fragment of this peer has come to."""
        key = self.directive, self._next_version
        if key != self._amended[0]:
            self._amended = key, effective(self.run_file, self.orders, key[1])
        return self._amended[1]

    @property
    def amended(self) -> dict[str, Value]:
        """The settings that differ from the run file's for this peer's trainer."""
        return settings_at(self.orders, self._next_version)

    @property
    def _next_version(self) -> int:
        """The version that the fragment which is least far makes next."""
        return 1 + min(self.versions(), default=0)

    @property
    def rollback(self) -> int:
        """The directive that took the run back to the states it goes on from; 0: none."""
        return 0 if self.orders.rollback is None else self.orders.rollback.number

    @property
    def root_links(self) -> tuple[Root, ...]:
        """The states that every history grows out of after a rollback, one for each fragment."""
        return () if self.orders.rollback is None else self.orders.rollback.roots

    def are_taken_back(
        self, states: Iterable[FragmentState | None], *, if_unknown: bool = False
    ) -> bool:
        """True if the run's owner has taken back the history of one of these states.

        ``if_unknown``: the answer for states whose chains do not reach back so far.
        """
        roots = dict(enumerate(self.root_links))
        for state in states:
            if state is None or (root := roots.get(state.fragment)) is None:
                continue
            grew = grew_from(state.chain, root.version, root.lineage)
            if grew is False or (grew is None and if_unknown):
                return True
        return False

    def was_taken_back(self, outer: OuterState) -> bool:
        """True if the run's owner has taken back the history of a checkpoint.

        Where its chains do not reach back so far, it is of the time before the rollback unless its
        peer had heard of that.
        """
        heard = self.rollback in map(self._rollback_of, outer.directives)
        return self.are_taken_back(outer.states, if_unknown=not heard)

    def _rollback_of(self, data: bytes) -> int | None:
        """The directive that took the run back, as this one tells; ``None`` if it tells of none."""
        owner = self.run_file.policy.owner
        if owner is None:
            return None
        directive = read_directive(data, run=self.run_id, owner=PeerId(owner))
        if isinstance(directive, Refused) or directive.orders.rollback is None:
            return None
        return directive.orders.rollback.number

    def roots(self) -> list[FragmentState | None]:
        """The states that a rollback goes on from, as far as they are kept here.

        Later ones are forgotten, or the run's owner might attest one of them.
        """
        assert self.good is not None, "a run without an owner is never taken back"
        self.good.pin(self.orders.attested)
        found = self.good.roots(self.orders)
        self.good.forget_recent()
        return found

    def came_back(self) -> None:
        """The run was taken back: its end, and the counts towards its end, are void."""
        self.end.hear(Heard.TAKEN_BACK)
        self._merged_tokens = 0
        # Later measurements are not of this run any more, and their versions are made anew.
        self.held_out = HeldOutLoss(self.run_id, self.me, self.run_file.evaluation.every_versions)
        self.gone_back = self.rollback

    def _checkpoint_bytes(self) -> float | None:
        allowed = self.guest.disk.outer
        if allowed is None or self.good is None:
            return allowed
        return allowed - self.good.used_bytes

    def round_orders(self) -> RoundOrders:
        return round_orders(self.run_file, self.directive, fragments=len(self.layout.fragments))

    def follow_directive(self, directive: Directive | None) -> None:
        """Follow the newest directive of the run's owner from now on."""
        if directive != self.directive:
            self.directive = directive
            orders = self.round_orders()
            self.paused = orders.paused
            self.averaging.follow(orders)

    # --- events ---------------------------------------------------------------------------------

    def event(self, name: str, /, **fields: Any) -> None:
        """Report an event to the log and to the delegate."""
        self.log.write(name, fields)
        # People know peers by name; the log keeps their ids.
        shown = {
            key: self.board.names.within(text)
            for key in TEXTS
            if isinstance(text := fields.get(key), str)
        }
        self.delegate.on_event(name, {**fields, **shown})

    def enter_phase(self, phase: PhaseName, text: str, done: float) -> None:
        self.phase, self._phase_text = phase, text
        self.keep_state(text)
        self.log.write("phase", {"name": phase, "text": text})
        if phase == "ready":
            self.end.hear(Heard.ARRIVED)
        self.delegate.on_phase(phase, text, done)

    def keep_state(self, text: str | None = None) -> None:
        """Write what this peer does into its folder; ``None``: what its phase says."""
        text = text or self._phase_text
        self._state = State(self.phase, text, time.time(), self._state.figures)
        self._save_state()

    async def keep_figures(self, figures: Mapping[str, Any]) -> None:
        """Write this peer's figures into its folder."""
        self._state = msgspec.structs.replace(self._state, figures=figures)
        await asyncio.to_thread(self._save_state)

    def _save_state(self) -> None:
        with contextlib.suppress(OSError):  # only `shoal status` misses it
            save_state(self.directory, self._state)

    def averager_event(self, name: str, fields: Fields) -> None:
        """Report an event of the averager to the log, and some of them to the delegate."""
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
                self.delegate.on_event(
                    "not_merged", {"fragment": fields["fragment"], "reason": why}
                )
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
        self.delegate.on_round({**fields, "contributed": contributed})
        if finished:
            self._made_version(fields["fragment"], fields["version"])
            end = self.orders.end
            by_owner = end is not None and end.version is not None
            self.end.hear(Merged(self.averaging.final_fragments, by_owner))
            where = f"fragment {fields['fragment']}"
            for peer in fields["contributors"]:
                self._remember_offer(peer, f"merged, {where}")
            for peer, why in fields["left_out"].items():
                self._remember_offer(peer, f"left out, {where}: {self.board.names.within(why)}")

    def _made_version(self, fragment: int, version: int) -> None:
        """This peer has made a version, in a round or alone."""
        if fragment == 0 and self.held_out.is_my_turn(version, self.others_who_train()):
            self.delegate.on_turn_to_measure(version, self.merged_tokens())

    def _remember_offer(self, peer: PeerId, outcome: str) -> None:
        self.offer_outcomes.pop(peer, None)  # its entry becomes the youngest
        self.offer_outcomes[peer] = outcome

    def take_held_out(self, measured: HeldOut | None) -> None:
        """Note a measurement of the held-out loss, and report it if it is the newest."""
        if measured is not None and self.held_out.heard(measured):
            where = {"version": measured.version, "tokens": measured.tokens}
            self.event("measured", **where, loss=measured.loss, peer=measured.peer)

    def hear_held_out(self, measured: HeldOut | None) -> None:
        """Take another peer's word on the held-out loss after tokens that are merged here, too.

        One that claims tokens of the far future would be the newest for ever.
        """
        if measured is not None and self.versions() and measured.tokens <= self.merged_tokens():
            self.take_held_out(measured)

    # --- states and peers -----------------------------------------------------------------------

    @property
    def states(self) -> tuple[FragmentState | None, ...]:
        return self.averaging.states

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

    def follow(self, founding: str) -> None:
        """Begin with the states of this founding of the run, if it is known."""
        self._followed = founding

    def is_followed(self, peer: PeerId) -> bool:
        """True unless a peer is known to stand on another founding than the one to begin with."""
        return self.foundings.get(peer, self._followed) == self._followed or not self._followed

    def in_flight(self) -> tuple[str, ...]:
        """The work in progress, in words: ``fragments 0 and 2 exchanging``."""
        found: dict[str, list[str]] = {}
        for index, phase in enumerate(self.averaging.phases):
            if phase in WORK_IN_PROGRESS:
                found.setdefault(WORK_IN_PROGRESS[phase], []).append(str(index))
        return tuple(
            f"fragment{'s' * (len(each) > 1)} {listed(each, most=FRAGMENTS_NAMED)} {words}"
            for words, each in found.items()
        )

    @property
    def alone_until(self) -> float | None:
        """Unix time from which this peer merges by itself; ``None``: it does, or others train."""
        until = self.averaging.alone_until
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

    def notice_company(self, *, reachable: bool | None, connected: bool) -> None:
        """Take note of who is here now, and report what the owner has to know about it.

        ``reachable``: whether others can dial this peer. ``connected``: it has met another one.
        """
        if self.others_who_train():
            self._is_alone = False  # ``alone`` is reported again the next time
        if self.phase not in ("fetching", "ready"):
            return
        news = self._reach.look(
            reachable,
            connected=connected,
            learners=sum(seen.trains or seen.arrives for seen in self.live_peers),
            reachable=sum(seen.reachable for seen in self.live_peers),
            now=asyncio.get_running_loop().time(),
        )
        if isinstance(news, Untested):
            self.event("untested", text=str(news))
        elif news is not None:
            self.event("nobody_reduces", text=str(news), peers=news.peers)


PAUSE_FIRST_S = 60.0
PAUSE_MAX_S = 3600.0

SENTENCES_MAX = 64
"""Those that may be told again first are forgotten beyond it, and told anew."""


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
