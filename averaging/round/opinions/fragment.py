"""One fragment at one peer: what all parts of its round machine share.

A part reads the facts here, changes what is its own, and has effects carried out in the order in
which it wants them. Parts call one another. Imports go one way all the same, from
``averaging.round.gathering.leading`` down to ``averaging.round.opinions``: what a part needs of
those above it is an abstract method here, and the machine is the one that has them.

One of the facts is the roster that this peer has open as a leader (``OpenRoster``).
``averaging.rules.quorum`` decides when it closes, ``averaging.rules.grouping`` who may be in it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping

import msgspec

from averaging import messages
from averaging.history.lineage import Lineage
from averaging.history.standing import Standing
from averaging.messages import Committed, Head, Join, Message
from averaging.round.interface.effects import Effect, Note, Send, Value
from averaging.round.interface.identity import Circumstances, Identity, SignedCommit
from averaging.round.interface.phase import Phase
from averaging.round.opinions.certificates import Certificates
from averaging.round.opinions.ending import Ending
from averaging.round.opinions.neighbourhood import Neighbourhood
from averaging.round.opinions.pace import Pace
from averaging.round.opinions.pacemaker import Pacemaker
from averaging.rules.electors import Electors
from averaging.rules.peer_view import PeerView
from averaging.rules.quorum import Turnout
from dht.identity import PeerId


class Fragment(ABC):
    """The facts of a round machine, its opinions, and the effects that it wants."""

    def __init__(
        self,
        identity: Identity,
        circumstances: Circumstances,
        *,
        view: Mapping[PeerId, PeerView],
        standing: Standing | None,
        electors: Electors | None,
        step: int,
        now: float,
    ) -> None:
        version = standing.version if standing else 0
        self.identity = identity
        self.policy = identity.policy
        self.now = now
        """Time of the input that is being taken."""
        self.peers = Neighbourhood(identity, circumstances, view, now=now, electors=electors)
        """The other peers as this one sees them. The owner may replace ``view`` and ``crowd``."""
        self.pacemaker = Pacemaker(identity, self.peers)
        self.certificates = Certificates(identity, self.peers, standing)
        self.pace = Pace(identity, self.peers, step=step, version=version + 1)
        self.ending = Ending(
            identity, self.peers, self.pace, self.certificates, lambda: self.next_version
        )
        self.phase = Phase.IDLE
        self.phase_until = math.inf
        """Time until which the phase waits: for the learner's answer to ``TakeSnapshot``, for the
        leader's next message, or for the end of ``Fold`` or of ``CatchUp``."""
        self.counters: Counter[str] = Counter()
        self.effects: list[Effect] = []
        """Those of the input that is being taken, in their order."""
        self.own_messages: deque[Message] = deque()
        """Messages of this peer to itself, to be taken before the next input."""
        self.open_roster: OpenRoster | None = None
        """The roster that this peer has open as a leader."""
        self.peers.closed_version = version
        self.shown_version = version
        """The newest version of a certified head that another peer showed."""
        self.fresh_version = version
        """The version at which the pending work began."""
        self.fresh_at = now

    @property
    def standing(self) -> Standing | None:
        """This peer's standing; ``None`` until it has fetched its first state."""
        return self.certificates.standing

    @property
    def here(self) -> Standing:
        """The standing of a peer that has one: without it no peer leads or joins."""
        standing = self.certificates.standing
        assert standing is not None
        return standing

    @property
    def next_version(self) -> int:
        return 1 + (
            self.standing.version if self.standing is not None else self.peers.closed_version
        )

    def goes_to(self, phase: Phase, *, until: float = math.inf) -> None:
        self.phase, self.phase_until = phase, until

    # Effects

    def emit(self, effect: Effect) -> None:
        self.effects.append(effect)

    def note(self, event: str, **fields: Value) -> None:
        self.effects.append(Note(event, fields))

    def count(self, counter: str) -> None:
        self.counters[counter] += 1

    def send(self, to: PeerId, message: Message) -> None:
        """Send a message, with the signatures and certificates that its receiver needs."""
        if to == self.identity.me:
            self.own_messages.append(message)
            return
        if isinstance(message, Committed) and self.identity.book.must_tell(to):
            self.tell_directive(to)
        head: Head | None = getattr(message, "head", None)
        if head is not None:
            goal = self.ending.goal
            if goal is not None and goal.is_reached_by(head):
                shown = self.certificates.show(head, self.now)
            else:
                shown = self.certificates.show_in(message, head, self.now)
            message = msgspec.structs.replace(message, head=shown)
        if isinstance(message, Committed):
            message = self.certificates.beside(message, to, self.now)
        self.effects.append(Send(to, message))

    def show_standing(self, peer: PeerId) -> None:
        """Show a peer where this one stands: the one that is behind, or lighter, gives way."""
        self.send(peer, messages.Compare(self.identity.fragment, self.here.head()))

    def tell_behind(self, peer: PeerId, lineage: Lineage) -> None:
        """Tell a peer that its lineage is in this one's chain."""
        self.send(peer, messages.Behind(self.identity.fragment, self.here.head(), lineage))

    def tell_directive(self, to: PeerId) -> None:
        """Send the owner's directive to a peer; one that knows a newer one answers with it."""
        orders = self.identity.book.orders
        self.send(to, messages.Directed(self.identity.fragment, orders.encoded))

    # Facts that change in more than one part

    def take_back_own_join(self) -> None:
        """Remove the own join from the open roster. A roster without joins is dropped: this peer
        would join itself in it whenever it is due, and pass when others call."""
        if self.open_roster is not None:
            self.open_roster.joins.pop(self.identity.me, None)
            self.drop_empty_roster()

    def drop_empty_roster(self) -> None:
        roster = self.open_roster
        if roster is not None and not roster.joins:
            self.open_roster = None

    def roster_closed(self, version: int, level: int | None) -> None:
        """A roster of this version closed, with or without this peer: start a cycle.

        ``level``: of its round; ``None``: it is not known, and remains as it was.
        """
        if level is not None and version >= self.peers.closed_version:
            before, after = self.pace.level, self.pace.take_level(level)
            if before != after:
                self.note("level", level=str(after), before=str(before))
                self.consider_line()
        self.peers.closed_version = max(self.peers.closed_version, version)
        self.pace.start_cycle(self.now)

    def consider_line(self) -> None:
        """The line has become faster or slower, or its load has: take part in more versions or in
        fewer, and ask for smaller rounds or for larger ones."""
        need = self.pace.need_of_line(self.identity.encoded_bytes, self.now)
        if need is not None:
            level = str(self.pace.levels[need.level])
            self.note("line_needs", level=level, reason=need.reason)
        every = self.pace.versions_of_line(self.identity.encoded_bytes, self.now)
        if every is not None:
            self.note("takes_part", every=every.versions, reason=every.reason)

    # What takes the whole machine

    @property
    @abstractmethod
    def under_way(self) -> SignedCommit | None:
        """The open round that this peer is a member of, else one that it leads for others."""

    @abstractmethod
    def stand(self, standing: Standing, *, fresh: bool) -> None:
        """Move to another standing. ``fresh``: the work up to the last offer is contained in it."""

    @abstractmethod
    def attempt_failed(self) -> None:
        """The attempt ended without a version: be due again a part of a cycle later."""

    @abstractmethod
    def leave_own_roster(self) -> None:
        """The attempt is over: take back the own join, pass, and see whether the roster closes."""

    @abstractmethod
    def enter_own_round(self, signed: SignedCommit) -> None:
        """The open roster has closed: take part in its round as the leader."""

    @abstractmethod
    def round_ended(
        self, round_id: bytes, reason: str, *, in_doubt: bool, may_be_finished: bool
    ) -> None:
        """The own part in a round is over without a new version.

        ``may_be_finished``: some member may have finished the round, though this peer never will.
        """


class OpenRoster:
    """The peers that have been called, have joined, wait or pass."""

    def __init__(
        self, group: tuple[PeerId, ...], *, decide_at: float, search_at: float, now: float
    ) -> None:
        self.group = group
        """The peers that are expected."""
        self.joins: dict[PeerId, Join] = {}
        self.passed: set[PeerId] = set()
        self.called: dict[PeerId, float] = {}
        """Time at which each of the others was called first, or again after it had passed."""
        self.coming: dict[PeerId, float] = {}
        """Time by which each peer should be here, or say again that it comes, that said so."""
        self.is_hurried = False
        """A peer that joined is about to leave: the others are called to come at once."""
        self.opened_at = self.joined_at = now
        """``joined_at``: when the last of them joined."""
        self.quorum_at: float | None = None
        self.decide_at = decide_at
        """Time of the next decision whether to close."""
        self.search_at = search_at
        """Time of the next search for peers that have come into sight."""

    def turnout(
        self,
        live: Callable[[PeerId], bool],
        *,
        room: int,
        answer_s: float,
        keeper: bool = False,
        on_probation: Collection[PeerId] = (),
    ) -> Turnout:
        """The facts by which a roster closes.

        ``room``: number of members that fit. With members from other groups among them, not all of
        the group fit. ``answer_s``: time that a peer has to answer a call. ``keeper``: there is
        one. ``on_probation``: peers that do not count.
        """
        newcomers = self.joins.keys() & on_probation
        joined = self.joins.keys() - newcomers
        in_sight = {peer for peer in self.group if peer in joined or live(peer)} | joined
        expected = {
            peer: self.coming[peer] if peer in self.coming else self.called[peer] + answer_s
            for peer in in_sight - joined - newcomers - self.passed
            if peer in self.coming or peer in self.called
        }
        late = expected.keys() & on_probation
        in_sight -= set(on_probation)
        return Turnout(
            live=min(len(in_sight), max(room, len(joined))),
            joined=len(joined),
            passed=len((self.passed & in_sight) - joined),
            opened_at=self.opened_at,
            quorum_at=self.quorum_at,
            expected_until=max((expected[peer] for peer in expected.keys() - late), default=None),
            newcomers=len(newcomers),
            newcomers_until=(self.quorum_at or 0.0) + answer_s if late else None,
            to_keeper=keeper and all(join.leaves for join in self.joins.values()),
        )
