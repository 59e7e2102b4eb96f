"""Agreeing on the contributors of a round: single-decree Paxos among the voters of its roster.

The value is a **seal**: the roster indices whose contributions are merged, ascending, or nothing at
all, which means that the round is void. ``Acceptor`` is the memory of one voter.
``Coordinator`` is the leader, or the member that took its place. Why this is safe stands in
docs/understand/why-safe.md.

``averaging.round.sealing.seals`` says whose a ballot is. The next in rank begins one when the voter
before it is dead.
"""

from __future__ import annotations

import math
from enum import StrEnum

from averaging.messages import (
    Forswear,
    Prepare,
    Promise,
    Propose,
    Reassign,
    Sealed,
    Void,
    promise_text,
    vote,
    vow,
)
from averaging.round.interface.effects import LeaveOut, Strike
from averaging.round.interface.identity import SignedCommit
from averaging.round.opinions.fragment import Fragment
from averaging.round.sealing.seals import (
    VOID,
    all_peers_of,
    is_backed,
    is_possible,
    owner_of,
)
from averaging.rules.sites import may_still_upload
from dht.identity import PeerId

DEAD = "dead"
"""The reason for a missing member that may come back."""
BALLOT_MARGINS = 4
"""Promises to a later ballot are asked for as long as all uploads may take, and so many
``margin_s``; then its owner begins another one."""
REASSIGNMENTS_MAX = 2
"""Number of times that one slice may change its reducer before the seal, and again after it."""


class Acceptor:
    """The promises and votes of one voter. They end with its incarnation."""

    __slots__ = ("accepted", "accepted_ballot", "forsworn", "promised")

    def __init__(self) -> None:
        self.promised = 0
        self.accepted_ballot: int | None = None
        self.accepted: tuple[int, ...] = VOID
        self.forsworn = False
        """This voter has vowed never to finish the round: it accepts a void seal and no other."""

    def prepare(self, ballot: int) -> bool:
        """Promise to ignore lower ballots. ``False``: a higher one has the promise."""
        if ballot < self.promised:
            return False
        self.promised = ballot
        return True

    def propose(self, ballot: int, seal: tuple[int, ...]) -> bool:
        """Accept a seal. ``False``: a higher ballot has the promise, or the round is forsworn, or
        another seal was accepted in this ballot: two votes in it would prove this voter a liar.
        """
        if ballot < self.promised or (self.forsworn and seal != VOID):
            return False
        if ballot == self.accepted_ballot and seal != self.accepted:
            return False
        self.promised = ballot
        self.accepted_ballot = ballot
        self.accepted = seal
        return True


class BallotPhase(StrEnum):
    """The progress of a coordinator with its ballot."""

    PREPARING = "preparing"
    GATHERING = "gathering"
    PROPOSING = "proposing"
    SEALED = "sealed"
    FORSWEARING = "forswearing"
    OVER = "over"


_CHOSEN = (BallotPhase.SEALED, BallotPhase.FORSWEARING, BallotPhase.OVER)
"""A seal was chosen, or the round is over."""


class Coordinator:
    """Brings a round to its end by one ballot: gathers reports, seals, replaces dead reducers.

    It proposes the members whose uploads all reducers have, but for those that it refuses itself:
    they stay members, vote, get the new version and offer the same work to the next round, as after
    an upload that came too late. So a peer that one leader suspects wrongly waits for another one.
    Leaving whom it likes out of a seal is in any coordinator's power, as in any reducer's.

    A message to its own peer is sent and received like any other. But its own acceptor takes what
    it proposes before anybody hears of it: a proposal is signed like a vote, and would show that
    its author lied when it promises another coordinator later to have accepted nothing.
    """

    def __init__(
        self,
        fragment: Fragment,
        signed: SignedCommit,
        ballot: int,
        reducers: list[PeerId],
        acceptor: Acceptor | None,
        *,
        now: float,
    ) -> None:
        """``reducers``: shared with the participation that this coordinator belongs to.
        ``acceptor``: its own vote; ``None``: it has none.
        """
        commit, policy = signed.commit, fragment.policy
        self._fragment = fragment
        self._id = fragment.identity
        self._is_down = fragment.peers.is_down
        self._send = fragment.send
        self._note = fragment.note
        self._acceptor = acceptor
        self._policy = policy
        self.round = signed.round
        self.commit = commit
        self.ballot = ballot
        self.reducers = reducers
        self._members = range(len(commit.members))
        self.complete: dict[int, set[int]] = {}
        self.refused: dict[int, dict[int, str]] = {}
        self.gone: dict[int, str] = {}
        self.absent: set[int] = set()
        self.promises: dict[int, Promise] = {}
        self.accepted: dict[int, bytes] = {}
        """Votes for the proposed seal, by roster index."""
        self.forsworn: dict[int, bytes] = {}
        """Vows never to finish the round, by roster index."""
        self.finished: dict[int, PeerId] = {}
        self.reassigned: dict[int, int] = {}
        self.stuck: set[int] = set()
        self._slices_due_at = math.inf
        self._patient_until: dict[int, float] = {}
        """Time that a slice's new reducer has to merge it."""
        self.value: tuple[int, ...] | None = None
        self.why = ""
        self.began_at = now
        self._newcomers_until: float | None = None
        """Deadline for uploads of members on probation; ``None``: the others have not all done."""
        self.phase = BallotPhase.PREPARING if ballot else BallotPhase.GATHERING
        self.resend_at = now + policy.resend_s
        self.deadline = now + commit.upload_s + (BALLOT_MARGINS if ballot else 1) * policy.margin_s
        if ballot:
            self._note("ballot_started", ballot=ballot)
            self._send_prepare()

    @property
    def is_over(self) -> bool:
        return self.phase is BallotPhase.OVER

    @property
    def is_in_vain(self) -> bool:
        """True while no majority of the voters has answered, and when another ballot has them."""
        return self.phase in (BallotPhase.PREPARING, BallotPhase.PROPOSING, BallotPhase.OVER)

    # Messages

    def promised(self, sender: int, promise: Promise, now: float, *, uploads_until: float) -> None:
        """A voter follows this ballot. ``uploads_until``: the deadline of all uploads, whoever
        coordinates: another ballot does not give them their time once more."""
        if promise.ballot != self.ballot or sender not in self.commit.voters:
            return
        if not (self._can_be_true(promise) and self._is_signed(sender, promise)):
            self._note("false_promise", peer=self.commit.members[sender].peer)
            return
        if self.phase is BallotPhase.PREPARING:
            self.promises[sender] = promise
            if len(self.promises) >= self.commit.majority:
                self._begin_ballot(uploads_until, now)
            elif self._completes_majority:
                self._send(self._id.me, Prepare(self.commit.fragment, self.round, self.ballot))

    def _is_signed(self, sender: int, promise: Promise) -> bool:
        """True if a voter has signed its promise."""
        peer = self.commit.members[sender].peer
        said = promise_text(self.round, promise.ballot, promise.accepted_ballot, promise.accepted)
        return self._id.verify(peer, said, promise.signature)

    def _can_be_true(self, promise: Promise) -> bool:
        """True if a voter can have accepted what it says. The highest accepted ballot decides: an
        invention would stand in the way of the round, here and in all later ballots."""
        last = promise.accepted_ballot
        if last is None:
            return True
        return last <= promise.ballot and is_possible(self.commit, promise.accepted)

    def _begin_ballot(self, uploads_until: float, now: float) -> None:
        """A majority follows this ballot: continue with its accepted seal, or gather reports."""
        accepted = [p for _, p in sorted(self.promises.items()) if p.accepted_ballot is not None]
        if accepted:
            best = max(accepted, key=lambda promise: promise.accepted_ballot or 0)
            self._note("ballot_continues_seal", ballot=self.ballot, void=not best.accepted)
            self._propose(best.accepted, "a majority holds an accepted seal", now)
            return
        self._note("ballot_gathers", ballot=self.ballot)
        self.phase = BallotPhase.GATHERING
        self.began_at = now
        self.deadline = max(uploads_until, now) + self._policy.margin_s
        self.consider(now)

    def reported(
        self,
        reducer: PeerId,
        slice_index: int,
        complete: tuple[int, ...],
        refused: tuple[tuple[int, str], ...],
        now: float,
    ) -> None:
        """The word of a slice's reducer, and of nobody else, about members of the round."""
        if slice_index >= len(self.reducers) or self.reducers[slice_index] != reducer:
            return
        if self.phase is BallotPhase.SEALED and self._is_lost(complete, now):
            self.deadline = min(self.deadline, now + self._policy.margin_s)
        if self.phase not in (BallotPhase.PREPARING, BallotPhase.GATHERING):
            return
        self.complete[slice_index] = set(complete).intersection(self._members)
        self.refused[slice_index] = {i: reason for i, reason in refused if i in self._members}
        self.consider(now)

    def declined(self, peer: PeerId, reason: str, now: float, *, absent: bool) -> None:
        """A member or reducer says that the commit does not hold for it.

        A member that was ``absent`` from the start has accepted nothing, under no ballot, and never
        will. When the others are no majority, no seal was or can be chosen: the round is void, and
        no vote is needed for that.
        """
        index = self.commit.index(peer)
        if index is not None:
            self.gone[index] = reason
            if absent:
                self.absent.add(index)
        voters = self.commit.voters
        away = self.absent.intersection(voters)
        if len(voters) - len(away) < self.commit.majority and self.phase not in _CHOSEN:
            refused = f"{len(away)} of {len(voters)} voters refused its commit"
            self._give_up(f"{refused}, so its work is offered again")
        elif self.phase is BallotPhase.GATHERING:
            for slice_index, reducer in enumerate(self.reducers):
                if reducer == peer:
                    self._reassign(slice_index, f"{peer} declined: {reason}", now)
            self.consider(now)

    def accepted_by(self, sender: int, ballot: int, signature: bytes, now: float) -> None:
        """A voter accepted the proposed seal."""
        if self.phase is not BallotPhase.PROPOSING or ballot != self.ballot:
            return
        if sender not in self.commit.voters:
            return
        assert self.value is not None
        said = vote(self.round, ballot, self.value)
        if not self._id.verify(self.commit.members[sender].peer, said, signature):
            self._note("false_vote", peer=self.commit.members[sender].peer)
            return
        self.accepted[sender] = signature
        if len(self.accepted) < self.commit.majority:
            return
        self.resend_at = now + self._policy.resend_s
        self._note(
            "sealed" if self.value else "sealed_void",
            ballot=self.ballot,
            contributors=len(self.value),
            reason=self.why,
        )
        if self.value:
            self.phase = BallotPhase.SEALED
            self._slices_due_at = now + self.commit.upload_s + self._policy.margin_s
            self.deadline = now + 2 * (self.commit.upload_s + self._policy.margin_s)
        else:
            self.phase = BallotPhase.OVER
        for peer in all_peers_of(self.commit, self.reducers):
            if self.value:
                self._send(peer, self._sealed())
            else:
                self._send(peer, self._void())

    def outbid(self, promised: int) -> None:
        """Another member has taken over with a higher ballot: stop."""
        if promised > self.ballot and self.phase not in (BallotPhase.SEALED, BallotPhase.OVER):
            self._note("outbid", ballot=self.ballot, promised=promised)
            self.phase = BallotPhase.OVER

    def missing(self, sender: PeerId, slice_index: int, now: float) -> None:
        """A member cannot upload a slice, or does not get it back merged."""
        if slice_index >= len(self.reducers):
            return
        if self.phase is BallotPhase.GATHERING:
            reducer = self.reducers[slice_index]
            if self._is_down(reducer, now):
                self._reassign(slice_index, f"{reducer} is dead", now)
        elif self.phase is BallotPhase.SEALED:
            reducer = self.reducers[slice_index]
            self._send(sender, self._sealed())
            # Before the slice is due, one member's line may have broken, or it says so in vain: all
            # would send the slice again. And all members miss what one reducer has not sent: those
            # that say so a moment later do not mean the new one.
            due_at = self._slices_due_at
            due_at = max(due_at, self._patient_until.get(slice_index, due_at))
            waited = slice_index in self.stuck and now >= due_at
            declined = self.commit.index(reducer) in self.declined_indices()
            if declined or waited or self._is_down(reducer, now):
                self._reassign(slice_index, f"{reducer} does not answer", now)
            self.stuck.add(slice_index)

    def has_finished(self, peer: PeerId) -> bool:
        """A member has the new version. ``True`` when all members have it or are gone."""
        index = self.commit.index(peer)
        if index is not None:
            if self.phase is BallotPhase.FORSWEARING and index not in self.finished:
                self.phase = BallotPhase.SEALED  # it can send what is missing
            self.finished[index] = peer
        return len(self.finished.keys() | self.gone.keys()) >= len(self.commit.members)

    def too_few_have_finished(self) -> bool:
        """True if the others may not be able to take the new version of those that have it."""
        return len(self.finished.keys() & set(self.commit.voters)) < self.commit.majority

    def voters_have_finished(self) -> bool:
        """True if all voters have the new version or are gone."""
        return (self.finished.keys() | self.gone.keys()).issuperset(self.commit.voters)

    def forsworn_by(self, peer: PeerId, signature: bytes) -> None:
        """A voter will never finish this round. A majority of vows voids it."""
        index = self.commit.index(peer)
        if index not in self.commit.voters or self.phase is not BallotPhase.FORSWEARING:
            return
        if not self._id.verify(peer, vow(self.round), signature):
            self._note("false_vote", peer=peer)
            return
        self.forsworn[index] = signature
        if len(self.forsworn) < self.commit.majority:
            return
        self.phase = BallotPhase.OVER
        self.value = VOID
        self.why = "a slice is lost and a majority forswore the round"
        self._note("forsworn_void", ballot=self.ballot)
        for other in all_peers_of(self.commit, self.reducers):
            self._send(other, self._void())

    # Time

    def tick(self, now: float, *, i_finished: bool) -> None:
        if self.is_over:
            return
        if now >= self.deadline:
            self._deadline(now, i_finished=i_finished)
        if now >= self.resend_at:
            self.resend_at = now + self._policy.resend_s
            self._resend(now)

    def next_at(self) -> float | None:
        return None if self.is_over else min(self.deadline, self.resend_at)

    def _deadline(self, now: float, *, i_finished: bool) -> None:
        match self.phase:
            case BallotPhase.PREPARING:
                self.phase = BallotPhase.OVER
            case BallotPhase.GATHERING:
                self._end_gathering(now)
            case BallotPhase.SEALED:
                self._look_for_lost_slices(now, i_finished=i_finished)
            case BallotPhase.FORSWEARING:
                self.deadline = now + self.commit.upload_s

    def _end_gathering(self, now: float) -> None:
        """Seal what is here, or have the slices of silent reducers reduced by others first."""
        silent = [s for s in range(len(self.reducers)) if s not in self.complete]
        for slice_index in silent:
            self._note_withheld(self.reducers[slice_index], "its report as a reducer", now)
        if silent and all(self.reassigned.get(s, 0) < REASSIGNMENTS_MAX for s in silent):
            self.deadline = now + self.commit.upload_s + self._policy.margin_s
            for slice_index in silent:
                self._reassign(slice_index, f"{self.reducers[slice_index]} is silent", now)
        if now >= self.deadline:
            self._seal("the upload deadline has come", now)

    def _look_for_lost_slices(self, now: float, *, i_finished: bool) -> None:
        """Ask all to forswear a sealed round if no member can send the missing slices."""
        self.deadline = now + self.commit.upload_s
        # Finished members have been asked to reduce the missing slices.
        unfinished = set(self.commit.voters).difference(self.finished)
        if self.stuck and not i_finished and len(unfinished) >= self.commit.majority:
            self._note("forswearing", ballot=self.ballot, slices=len(self.stuck))
            self.phase = BallotPhase.FORSWEARING
            self._send_forswear()

    def note_silent_voters(self, now: float) -> None:
        """Note the voters that have not answered a ballot which ends without a majority."""
        if self.phase not in (BallotPhase.PREPARING, BallotPhase.PROPOSING):
            return
        self._note("ballot_without_majority", ballot=self.ballot, promises=len(self.promises))
        answered = self.promises if self.phase is BallotPhase.PREPARING else self.accepted
        for index in self.commit.voters:
            if index not in answered and index not in self.gone:
                self._note_withheld(self.commit.members[index].peer, "its vote", now)

    def _note_withheld(self, peer: PeerId, what: str, now: float) -> None:
        if peer != owner_of(self.ballot, self.commit) and not self._is_down(peer, now):
            fields = {"peer": peer, "reason": f"it has not sent {what}"}
            self._fragment.emit(Strike("withheld", fields))

    def _resend(self, now: float) -> None:
        match self.phase:
            case BallotPhase.PREPARING:
                self._send_prepare()
            case BallotPhase.GATHERING:
                self._gather_again(now)
            case BallotPhase.PROPOSING:
                self._send_propose()
            case BallotPhase.SEALED:
                self._show_seal_again(now)
            case BallotPhase.FORSWEARING:
                self._send_forswear()

    def _gather_again(self, now: float) -> None:
        for slice_index, reducer in enumerate(self.reducers):
            if self._is_down(reducer, now):
                self._reassign(slice_index, f"{reducer} is dead", now)
            elif self.reassigned.get(slice_index):
                self._send_reassigned(slice_index)
        for index, entry in enumerate(self.commit.members):
            if self._is_down(entry.peer, now):
                self.gone.setdefault(index, DEAD)
            elif self.gone.get(index) == DEAD:
                del self.gone[index]
        self.consider(now)

    def _show_seal_again(self, now: float) -> None:
        for slice_index, reducer in enumerate(self.reducers):
            if self._is_down(reducer, now) and len(self.finished) < len(self.commit.members):
                self.stuck.add(slice_index)
                self._reassign(slice_index, f"{reducer} is dead", now)
        for peer in all_peers_of(self.commit, self.reducers):
            if peer not in self.finished.values():
                self._send(peer, self._sealed())

    # Decisions

    def _give_up(self, why: str) -> None:
        self.phase = BallotPhase.OVER
        self.value = VOID
        self.why = why
        self._note("no_majority_left", ballot=self.ballot, reason=why)
        for peer in all_peers_of(self.commit, self.reducers):
            self._send(peer, self._void())

    def consider(self, now: float) -> None:
        """Propose a seal as soon as no more uploads can complete."""
        if self.phase is not BallotPhase.GATHERING:
            return
        waiting = may_still_upload(self.commit, self.gone)
        if not self._are_settled(waiting.intersection(self.commit.voters)):
            return
        if self._are_settled(waiting):
            self._seal("every upload is settled", now)
        elif self._newcomers_until is None:
            # They get as much time again as the others took.
            took_s = now - self.began_at
            self._newcomers_until = now + max(took_s, self._policy.resend_s)
        elif now >= self._newcomers_until:
            self._seal("every upload but those of members on probation is settled", now)

    def _are_settled(self, members: set[int]) -> bool:
        """True if every reducer has these members' uploads, or has refused them."""
        return all(
            index in self.complete
            and not members.difference(self.complete[index], self.refused.get(index, ()))
            for index in range(len(self.reducers))
        )

    def declined_indices(self) -> frozenset[int]:
        """Members that said that the commit does not hold for them."""
        return frozenset(index for index, why in self.gone.items() if why != DEAD)

    def _is_lost(self, complete: tuple[int, ...], now: float) -> bool:
        """True if the uploads that the new reducer of a sealed slice lacks went with the dead."""
        lacking = set(self._members).difference(complete)
        gone = all(self._is_down(self.commit.members[index].peer, now) for index in lacking)
        return gone and not lacking.isdisjoint(self.value or VOID)

    def _replace_obstructors(self, now: float) -> bool:
        """Give to others the slices whose reducers alone lack most uploads. ``True``: some were.

        All other reducers have these uploads, and the seal follows the reducer that has the fewest:
        one that reported none made void every round that it reduced in. Its slice takes time once
        more, and the work of the members does not wait for a round without it.
        """
        replaced = False
        for slice_index, complete in sorted(self.complete.items()):
            reducer = self.reducers[slice_index]
            others = [
                self.complete.get(index, set())
                for index, peer in enumerate(self.reducers)
                if peer != reducer
            ]
            elsewhere = set(self._members).intersection(*others) if others else set()
            lacks = elsewhere - complete
            if len(lacks) < 2 or 2 * len(lacks) < len(elsewhere):
                continue
            self._note_withheld(reducer, "uploads that all other reducers have", now)
            self._reassign(slice_index, f"{reducer} lacks what all others have", now)
            replaced = replaced or slice_index not in self.complete
        return replaced

    def _seal(self, why: str, now: float) -> None:
        if self._replace_obstructors(now):
            return
        everywhere = set(self._members)
        for slice_index in range(len(self.reducers)):
            everywhere &= self.complete.get(slice_index, set())
        left_out = self._left_out(everywhere)
        seal = tuple(sorted(everywhere - left_out))
        # A member whose upload was refused must not cost the others their round.
        bad = left_out.union(*self.refused.values())
        if not is_backed(self.commit, seal) or (
            len(bad.union(seal)) < self.commit.contributors_min
        ):
            wanted = self.commit.contributors_min
            why = f"{why}; {len(seal)} of {wanted} contributors complete"
            seal = VOID
        self._propose(seal, why, now)

    def _left_out(self, complete: set[int]) -> set[int]:
        """The members that this peer refuses; all of a bundle, by the one that carries it."""
        found, members = set(), self.commit.members
        for index in sorted(complete):
            delegate = members[index].delegate
            reason = self._id.refuses(members[index if delegate is None else delegate].peer)
            if reason is not None:
                found.add(index)
                fields = {"round": self.round.hex(), "peer": members[index].peer, "reason": reason}
                self._fragment.emit(LeaveOut("not_proposed", fields))
        return found

    def _propose(self, seal: tuple[int, ...], why: str, now: float) -> None:
        if self._acceptor is not None and not self._acceptor.propose(self.ballot, seal):
            # It has given the round up, as all hear that ask it: the next in rank takes over.
            self.phase = BallotPhase.OVER
            return
        self.phase = BallotPhase.PROPOSING
        self.value = seal
        self.why = why
        self.deadline = math.inf  # acceptors are asked until the end
        self.resend_at = now + self._policy.resend_s
        self._send_propose()

    def _reassign(self, slice_index: int, why: str, now: float) -> None:
        count = self.reassigned.get(slice_index, 0)
        limit = REASSIGNMENTS_MAX * (2 if self.phase is BallotPhase.SEALED else 1)
        before = self.reducers[slice_index]
        candidates = [
            entry.peer
            for index, entry in enumerate(self.commit.members)
            if entry.reachable
            and entry.peer != before
            and index not in self.gone
            and not self._is_down(entry.peer, now)
        ]
        if count >= limit or not candidates:
            return
        worked = [peer for peer in candidates if self.commit.index(peer) in self.commit.voters]
        # Who has finished has the merged slice.
        candidates = [p for p in worked if p in self.finished.values()] or worked or candidates
        # The next in rank after the failed one, so that several lost slices are spread.
        index = self.commit.index(before)
        later = [p for p in candidates if (self.commit.index(p) or 0) > (index or 0)]
        chosen = (later or candidates)[0]
        self.reassigned[slice_index] = count + 1
        self.reducers[slice_index] = chosen
        self._patient_until[slice_index] = now + self.commit.upload_s
        self.complete.pop(slice_index, None)
        self.refused.pop(slice_index, None)
        self._note("reassigned", slice=slice_index, to=chosen, reason=why, phase=str(self.phase))
        if self.phase is BallotPhase.GATHERING:
            self.deadline = max(self.deadline, now + self.commit.upload_s)
        self._send_reassigned(slice_index)

    # Messages to send

    @property
    def _completes_majority(self) -> bool:
        """True if this peer's own promise is all that is missing: it goes over last."""
        return len(self.promises) + 1 >= self.commit.majority

    def _send_prepare(self) -> None:
        for index in self.commit.voters:
            peer = self.commit.members[index].peer
            if index not in self.promises and (peer != self._id.me or self._completes_majority):
                self._send(peer, Prepare(self.commit.fragment, self.round, self.ballot))

    def _send_propose(self) -> None:
        assert self.value is not None
        signature = self._id.sign(vote(self.round, self.ballot, self.value))
        message = Propose(self.commit.fragment, self.round, self.ballot, self.value, signature)
        for index in self.commit.voters:
            if index not in self.accepted:
                self._send(self.commit.members[index].peer, message)

    def _send_reassigned(self, slice_index: int) -> None:
        reducer = self.reducers[slice_index]
        message = Reassign(self.commit.fragment, self.round, self.ballot, slice_index, reducer)
        for peer in all_peers_of(self.commit, self.reducers):
            self._send(peer, message)

    def _send_forswear(self) -> None:
        for index, entry in enumerate(self.commit.members):
            if index not in self.forsworn:
                self._send(entry.peer, Forswear(self.commit.fragment, self.round, self.ballot))

    def _sealed(self) -> Sealed:
        assert self.value
        votes = tuple(sorted(self.accepted.items()))
        return Sealed(self.commit.fragment, self.round, self.ballot, self.value, votes)

    def _void(self) -> Void:
        forsworn = len(self.forsworn) >= self.commit.majority
        # Those who accepted a seal that was then forsworn did not vote for the empty one.
        signed = self.forsworn if forsworn else self.accepted
        votes = tuple(sorted(signed.items())) if len(signed) >= self.commit.majority else ()
        why = self.why[:300]
        return Void(self.commit.fragment, self.round, why, forsworn, self.ballot, votes)
