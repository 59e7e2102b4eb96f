"""The remains of a round at one peer: a contribution in doubt, or its word about the outcome.

A contribution is **in doubt** if it may be merged where this peer cannot see it. ``Doubting`` asks
the roster until one of these tells: a standing by its ``merged``, a void round, a majority that has
forsworn the round, or the deadline after ``doubt_s``. The deadline comes sooner where most are
gone and the rest of the roster has forsworn the round: nobody is left to wait for. A peer in doubt
joins nothing.

In a swarm of several groups a doubt ends with the work counted as merged elsewhere, and the lighter
side of a fork does not offer again what others carry on with: a state that lacks some work does not
prove that no other state has it. Otherwise work was merged twice (storms of several groups, seeds
18, 64, 7079, 7319, 201069). The price: work on a lighter side, or in a round that a majority gave
up and nobody finished, can be lost.

One group may become one of several, when a partition ends. Work that this peer offers again is
**open** until a standing covers it, where nobody could tell of the round that had it, or where it
was merged on the side of a fork that this peer has left: if several groups are seen before, it
counts as merged elsewhere as well (storms 56434 and 77874 with liars). A meld may bring in the side
with that work (storm 20380), so a peer with open work declines it: the version that the others make
without it tells. Where the second such meld leaves the work open, it counts as merged.

**Outcomes** are a peer's word about rounds that it does not keep any more. Of a round that it has
never known it needs no memory to say that it will never be in it: the roster names a join that the
peer has made, and joined another leader since, or none, with a number of its own
(``averaging.round.gathering.objections``).
"""

from __future__ import annotations

from dataclasses import dataclass

from averaging import messages
from averaging.history.standing import Standing
from averaging.messages import Commit, Head, Message
from averaging.round.interface.effects import GiveUp, Presume
from averaging.round.opinions.fragment import Fragment
from dht.bounded_mapping import BoundedMapping, by_age
from dht.identity import PeerId

ASK_INTERVAL_MAX_S = 30.0


@dataclass(slots=True)
class Doubt:
    """A contribution in doubt, and when to ask and to stop asking."""

    round: bytes
    commit: Commit
    mark: int
    several_groups: bool
    """The round was one of several groups' (or may have been): a member that finished it did so
    on a lineage of its own, however few peers are in sight by now."""
    ends_at: float
    ask_at: float
    wait_s: float
    forsworn: set[PeerId]
    deserted_at: float | None = None
    """Time since which most voters are gone, and all others that are left have vowed."""


class Doubting:
    """One peer as one that may be in doubt."""

    __slots__ = ("_declined_melds", "_fragment", "_id", "_open_mark", "_peers", "_policy", "doubt")

    def __init__(self, fragment: Fragment) -> None:
        self._fragment = fragment
        self._id = fragment.identity
        self._policy = fragment.policy
        self._peers = fragment.peers
        self.doubt: Doubt | None = None
        self._open_mark: int | None = None
        """The own step up to which others may go on with work that this peer offers again."""
        self._declined_melds = 0
        """Melds that were declined since that work is open."""

    def is_about(self, round_id: bytes) -> bool:
        return self.doubt is not None and self.doubt.round == round_id

    def begin(
        self, round_id: bytes, commit: Commit, mark: int, now: float, *, several_groups: bool
    ) -> None:
        self.doubt = Doubt(
            round=round_id,
            commit=commit,
            mark=mark,
            several_groups=several_groups,
            ends_at=now + self._policy.doubt_s,
            ask_at=now + self._policy.resend_s,
            wait_s=self._policy.resend_s,
            forsworn={self._id.me},
        )

    def leave_open(self, mark: int) -> None:
        """The own work is offered again, though others may go on with it."""
        self._open_mark, self._declined_melds = mark, 0

    def presume_open(self, now: float) -> None:
        """Before this peer offers anything: open work may have to count as merged elsewhere."""
        mark = self._open_mark
        if mark is None:
            return
        several_groups = self._peers.has_several_groups(now)
        if several_groups or self._declined_melds > 1:
            self._open_mark = None
            where = "in one of several groups" if several_groups else "on a side that was melded"
            self._note_presumed(mark, f"it may be merged {where}")

    def objection_to_meld(self) -> str | None:
        """The reason to be in no round that melds: it could merge open work a second time."""
        if self._open_mark is None:
            return None
        self._declined_melds += 1
        return "my work may be in another of its parents"

    def next_at(self) -> float | None:
        doubt = self.doubt
        if doubt is None:
            return None
        at = min(doubt.ask_at, doubt.ends_at)
        return at if doubt.deserted_at is None else min(at, self._deserted_until(doubt))

    def standing_changed(self, standing: Standing) -> None:
        """This peer stands elsewhere now, and its work merged there ends the doubt."""
        mark = self._open_mark
        if mark is not None and standing.merged.covers(self._id.me, self._id.incarnation, mark):
            self._open_mark = None
        doubt, self.doubt = self.doubt, None
        if doubt is not None:
            covered = standing.merged.covers(self._id.me, self._id.incarnation, doubt.mark)
            self._fragment.note("doubt_told", merged=covered)

    def tick(self, now: float) -> None:
        doubt = self.doubt
        if doubt is None:
            return
        self._look_who_is_left(doubt, now)
        if now >= doubt.ends_at:
            self._end_unanswered(doubt, "nobody could tell in time", now)
        elif doubt.deserted_at is not None and now >= self._deserted_until(doubt):
            self._end_unanswered(doubt, "those who could tell are gone", now)
        elif now >= doubt.ask_at:
            doubt.wait_s = min(ASK_INTERVAL_MAX_S, 2 * doubt.wait_s)
            doubt.ask_at = now + doubt.wait_s
            for entry in doubt.commit.members:
                if entry.peer not in doubt.forsworn:
                    self._fragment.send(entry.peer, messages.Ask(self._id.fragment, doubt.round))

    def _deserted_until(self, doubt: Doubt) -> float:
        assert doubt.deserted_at is not None
        return doubt.deserted_at + self._policy.margin_s

    def _look_who_is_left(self, doubt: Doubt, now: float) -> None:
        """Note since when nobody is left to wait for: those that may know are gone."""
        silent = [entry.peer for entry in doubt.commit.members if entry.peer not in doubt.forsworn]
        if not self._peers.is_deserted(doubt.commit, now) or not all(
            self._peers.is_gone(peer, now) for peer in silent
        ):
            doubt.deserted_at = None
        elif doubt.deserted_at is None:
            doubt.deserted_at = now

    def _end_unanswered(self, doubt: Doubt, reason: str, now: float) -> None:
        if self._has_several_groups(doubt, now):
            self._presume(doubt, reason)
        else:
            self.leave_open(doubt.mark)
            self._settle(doubt, reason)

    def is_answered_by(self, sender: PeerId, round_id: bytes) -> bool:
        """True if this peer may say how the round in doubt ended: its voters may."""
        doubt = self.doubt
        if doubt is None or doubt.round != round_id:
            return False
        return doubt.commit.index(sender) in doubt.commit.voters

    def receive(self, sender: PeerId, message: Message, now: float) -> None:
        """A member has said something about the round in doubt.

        The head in ``Finished`` and ``Forsworn`` was compared before, and nothing came of it. That
        the round is void is the participation's to judge, which is kept for as long.
        """
        doubt = self.doubt
        if doubt is None:
            return
        match message:
            case messages.Finished() if self._has_several_groups(doubt, now):
                self._presume(doubt, f"{sender} has finished it, on a lineage of its own")
            case messages.Forsworn():
                self._forsworn_by(sender, message, doubt, now)

    def _forsworn_by(
        self, sender: PeerId, message: messages.Forsworn, doubt: Doubt, now: float
    ) -> None:
        several = self._has_several_groups(doubt, now)
        if several and message.head and message.head.version >= doubt.commit.version:
            return  # an earlier incarnation of it may have finished
        if not self._id.verify(sender, messages.vow(doubt.round), message.signature):
            return
        doubt.forsworn.add(sender)
        self._look_who_is_left(doubt, now)
        commit = doubt.commit
        vowed = sum(commit.members[index].peer in doubt.forsworn for index in commit.voters)
        if len(doubt.forsworn) == len(commit.members):
            self._settle(doubt, "everybody has forsworn the round")
        elif vowed >= commit.majority:
            self.void("a majority has forsworn the round", now, may_be_finished=True)

    def presumed(self, now: float) -> int | None:
        """The own step up to which work in doubt counts as merged, whatever a new state says.

        In a swarm of several groups the state that this peer fetches is one of many: that it lacks
        the work does not mean that all others lack it, and sooner or later they are all melded.
        """
        if self.doubt is None or not self._has_several_groups(self.doubt, now):
            return None
        return self.doubt.mark

    def _has_several_groups(self, doubt: Doubt, now: float) -> bool:
        return doubt.several_groups or self._peers.has_several_groups(now)

    def void(self, reason: str, now: float, *, may_be_finished: bool) -> None:
        """A majority will never finish the round; no member has, unless it was sealed before.

        In one group that would be a fork, to be melded or rebased like any other. In several
        groups, a member that has finished goes on beside this peer: the rest of the roster has a
        moment to say so.
        """
        doubt = self.doubt
        if doubt is None:
            return
        if may_be_finished and self._has_several_groups(doubt, now):
            if now + self._policy.margin_s < doubt.ends_at:
                doubt.ends_at = now + self._policy.margin_s
                doubt.ask_at = now
            return
        if may_be_finished:
            self.leave_open(doubt.mark)
        self._settle(doubt, reason)

    def _settle(self, doubt: Doubt, reason: str) -> None:
        self.doubt = None
        self._fragment.note("settled", reason=reason)
        self._fragment.emit(GiveUp(None, reason, False))

    def _presume(self, doubt: Doubt, reason: str) -> None:
        self.doubt = None
        self._note_presumed(doubt.mark, reason)

    def _note_presumed(self, mark: int, reason: str) -> None:
        self._fragment.note("presumed", reason=reason)
        self._fragment.emit(Presume(mark))


OUTCOMES_MAX = 64


class Outcomes:
    """Rounds that are over here, the oldest forgotten first."""

    __slots__ = ("_heads", "_not_entered")

    def __init__(self) -> None:
        self._heads = BoundedMapping[bytes, Head | None](
            "outcomes of rounds", OUTCOMES_MAX, worth=by_age
        )
        """The head after each round; ``None``: not finished by this incarnation, and never."""
        self._not_entered = BoundedMapping[bytes, None](
            "rounds not entered", OUTCOMES_MAX, worth=by_age
        )
        """Rounds that this incarnation has never entered and never will, though their rosters name
        it: it is known to have accepted no seal."""

    def __contains__(self, round_id: bytes) -> bool:
        return round_id in self._heads or round_id in self._not_entered

    def head(self, round_id: bytes) -> Head | None:
        """The head of this peer after a round; ``None``: it has not finished it."""
        return self._heads.get(round_id)

    def finish(self, round_id: bytes, head: Head) -> None:
        self._heads[round_id] = head

    def forget(self, round_id: bytes, head: Head | None) -> None:
        """A round is kept no longer. ``head``: this peer's after it, if it has finished it."""
        if round_id not in self._heads:
            self._heads[round_id] = head

    def decline(self, round_id: bytes, *, names_this_machine: bool) -> bool:
        """Never enter a round whose commit does not hold. Returns whether the peer is absent.

        It is if it has never been in the round: only the machine that a roster names can have been.
        """
        absent = names_this_machine and round_id not in self._heads
        if absent:
            self._not_entered[round_id] = None
        return absent

    def is_absent(self, round_id: bytes) -> bool:
        """True if the roster of a round names this peer, which has never been in it."""
        return round_id in self._not_entered
