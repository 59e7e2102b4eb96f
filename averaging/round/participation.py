"""One peer in one round, from the commit to the end: member, acceptor, reducer, coordinator.

``averaging.round.machine`` explains the protocol. A participation outlives the member's own part in
the round: as long as another peer may still need an acceptor, a merged slice or an answer, up to
``round_s``.

It takes the same inputs as the machine.

A member that no seal can include without its own vote leaves at once when all others have said that
they are not in the round, and ``margin_s`` after the last link broke. Otherwise the only partner of
a vanished peer would stay until the round's deadline. So does a member of a roster most of whose
voters are gone for good, as far as the table of members says.

No reducer keeps a backup of its own slice elsewhere: that would cost half as much traffic again in
a group of two, to save rounds in which only time is lost.
"""

from __future__ import annotations

import math

from averaging import messages
from averaging.history.standing import after_commit, sealed_parents
from averaging.messages import Message
from averaging.round.interface.effects import (
    Apply,
    Enter,
    LeaveOut,
    Merge,
    Reduce,
    Strike,
    Upload,
    Value,
)
from averaging.round.interface.identity import SignedCommit
from averaging.round.interface.inputs import (
    LinkLost,
    MergedArrived,
    Received,
    SliceMerged,
    SliceOutcome,
    Tick,
    UploadArrived,
    UploadFailed,
)
from averaging.round.interface.phase import Stage
from averaging.round.opinions.certificates import link_of
from averaging.round.opinions.fragment import Fragment
from averaging.round.sealing.paxos import BALLOT_MARGINS, Acceptor, BallotPhase, Coordinator
from averaging.round.sealing.seals import (
    VOID,
    all_peers_of,
    is_chosen,
    is_possible,
    is_void,
    may_be_finished,
    owner_of,
)
from averaging.round.sealing.takeover import Takeover
from averaging.round.slices import MemberSlices, Reducer
from averaging.rules.sites import riders_of
from averaging.rules.weights import weights_of
from dht.identity import PeerId

BALLOTS_AHEAD_MAX = 1 << 16
"""Ballots that a voter may have missed in one round: a thousand of each voter of the largest."""


class Participation:
    """One peer's part in one round."""

    def __init__(self, fragment: Fragment, signed: SignedCommit, *, now: float) -> None:
        identity, policy, commit = fragment.identity, fragment.policy, signed.commit
        self._fragment = fragment
        self._emit = fragment.emit
        self._send = fragment.send
        self._note = fragment.note
        self._id = identity
        self._policy = policy
        self._peers = peers = fragment.peers
        self._certificates = fragment.certificates
        self._standing = fragment.standing
        """This peer's standing as it enters the round."""
        self.signed = signed
        self.id = signed.round
        self.commit = commit
        self.entry = commit.index(identity.me)
        self.reducers = list(commit.reducers)
        self.reducer = Reducer(
            (i for i, peer in enumerate(self.reducers) if peer == identity.me),
            norm_ratio_max=identity.norm_ratio_max,
        )
        self._outlying: set[tuple[int, int]] = set()
        self.slices = MemberSlices(len(self.reducers))
        self.acceptor = Acceptor()
        self.takeover = Takeover(identity, commit, peers, now=now)
        self.coordinator: Coordinator | None = None
        """The ballot that this peer coordinates, or was the last to coordinate."""
        self.seal: tuple[int, ...] | None = None
        self.to_apply: Apply | None = None
        self._finished_by: dict[PeerId, messages.Link] = {}
        """The last link of each voter that says that it has finished."""
        self.head: messages.Head | None = None
        """The head of this peer after the round, once it has finished it."""
        self.stage = Stage.UPLOADING
        self._certificate: messages.Sealed | None = None
        """The seal with the votes for it."""
        self._voided: messages.Void | None = None
        self._void_said_by: set[PeerId] = set()
        self.entered_at = now
        self.end_at = now + commit.round_s
        self._resend_at = now + policy.resend_s
        """When reports and questions are sent again, while this peer waits."""
        self._overdue_at = self._in_vain_at = math.inf
        """When merged slices should be here, and when the members that are missing should have been
        heard, while this peer waits."""
        self._fade_at = self._show_at = math.inf
        """Once it is out of the round, or has finished it: when the round ends for all, whatever
        its members on probation do, and when those that have finished get the signatures of the
        others that have."""

    # Facts

    @property
    def is_open(self) -> bool:
        """True while this peer may still finish."""
        return self.stage in (Stage.UPLOADING, Stage.SEALED, Stage.APPLYING)

    @property
    def _waits(self) -> bool:
        """True while this peer needs something of others to finish."""
        return self.stage in (Stage.UPLOADING, Stage.SEALED)

    @property
    def coordinating_peer(self) -> PeerId:
        return self.takeover.coordinating_peer

    @property
    def coordinates(self) -> bool:
        """True while this peer coordinates a ballot."""
        return self.coordinator is not None and not self.coordinator.is_over

    @property
    def _has_vote(self) -> bool:
        return self.entry in self.commit.voters

    def may_contain_own_work(self) -> bool:
        """True if a seal that was chosen can name this peer."""
        return self.entry is not None and (self.seal is None or self.entry in self.seal)

    def reduced(self) -> tuple[tuple[int, ...], tuple[bytes, ...]] | None:
        """Seal and digests of a merge of which this peer has all slices, if it is no member.

        A member takes the outer step; a keeper follows by the slices that it has reduced.
        """
        digests = self.slices.all_digests()
        if self.entry is not None or self.commit.melds or not self.seal:
            return None
        return None if digests is None else (self.seal, digests)

    def may_be_sealed_elsewhere(self) -> bool:
        """True if a seal with this peer's work can be chosen without its knowledge.

        It cannot if this peer is no member; nor if a majority needs all members and this peer has
        accepted no seal, because from now on it accepts none.
        """
        if self.entry is None:
            return False
        if self.seal is not None:
            return self.entry in self.seal
        if self.acceptor.accepted_ballot is not None and self.acceptor.accepted != VOID:
            return True
        absent = self.coordinator.absent if self.coordinator is not None else set()
        others = set(self.commit.voters) - absent - {self.entry}
        return len(others) >= self.commit.majority

    def next_at(self) -> float:
        waits = self._waits
        if not waits and self.coordinator is None:
            return self.end_at
        times = [self.end_at]
        if waits:
            times += [self._resend_at, self._overdue_at, self._in_vain_at]
            times += [self.slices.next_retry_at(), self.takeover.at]
        elif not self.is_open:
            times += [self._fade_at, self._show_at]
        if self.coordinator is not None and (lead_at := self.coordinator.next_at()) is not None:
            times.append(lead_at)
        return min(times)

    # Beginning

    def begin(self, now: float, *, is_leader: bool) -> None:
        self._note(
            "entered",
            members=len(self.commit.members),
            slices=len(self.reducer.slices),
            kind=self.commit.kind,
        )
        self._emit(
            Enter(
                self.id,
                self.commit,
                self.signed.encoded,
                self.signed.signature,
                self.entry,
                tuple(sorted(self.reducer.slices)),
            )
        )
        if is_leader:
            self.coordinator = self._coordinate(0, now)
        if self.entry is not None:
            for index in range(len(self.reducers)):
                self._upload(index)

    def handle(self, given: Received | LinkLost | Tick | SliceOutcome, now: float) -> None:
        """Take one input that concerns this round."""
        match given:
            case Received(sender, messages.Withdraw() as message):
                self._withdrawn(sender, message, now)
            case Received(sender, messages.Join() | messages.Call() as message):
                self._begins_anew(sender, message, now)
            case Received(sender, message):
                if not self._receive(sender, message, now):
                    self._fragment.count("stranger")
            case Tick():
                self._tick(now)
            case LinkLost(peer):
                self._link_lost(peer, now)
            case UploadArrived():
                self._upload_arrived(given)
            case UploadFailed(_, index, reason):
                self._upload_failed(index, reason, now)
            case SliceMerged(_, index, digest):
                self._slice_merged(index, digest, now)
            case MergedArrived():
                self._merged_arrived(given, now)

    def _end(self, reason: str, *, in_doubt: bool, may_be_finished: bool = False) -> None:
        self._fragment.round_ended(
            self.id, reason, in_doubt=in_doubt, may_be_finished=may_be_finished
        )

    def _coordinate(self, ballot: int, now: float) -> Coordinator:
        acceptor = self.acceptor if self._has_vote else None
        return Coordinator(self._fragment, self.signed, ballot, self.reducers, acceptor, now=now)

    def _upload(self, index: int) -> None:
        self._emit(Upload(self.id, index, self.reducers[index], self.may_contain_own_work()))

    def _ask_for_slices(self) -> None:
        """Open streams again that failed, with nothing to send, as the seal is without this peer.

        However often its uploads failed, the slices may come: the version that they make is proved
        by the signatures of those that have it, and each missing one may leave it without proof.
        """
        failed = [index for index in self.slices.tries if self.slices.digests[index] is None]
        for index in sorted(failed):
            self.slices.tries.pop(index)
            self._upload(index)

    # Reports of the owner

    def _upload_arrived(self, arrived: UploadArrived) -> None:
        index, sender, problem = arrived.slice, arrived.sender, arrived.problem
        riders = arrived.riders
        member = self.commit.index(sender)
        if member is None:
            return
        if problem is None:
            # Their uploads come in this bundle or not at all: no need to wait for them.
            self.reducer.missed(index, set(riders_of(self.commit, member)).difference(riders))
        if not self.reducer.arrived(index, member, problem, arrived.norm, riders=riders):
            return
        if problem is not None:
            self._note("upload_refused", peer=sender, slice=index, reason=problem)
        if self.seal is not None:
            self._try_merge(index)
        if not self.reducer.slices[index].merging and self.slices.digests[index] is None:
            self._report(index)

    def _upload_failed(self, index: int, reason: str, now: float) -> None:
        if not self.is_open or self.slices.digests[index] is not None:
            return
        self._note("upload_failed", slice=index, to=self.reducers[index], reason=reason)
        self._send_to_coordinator(messages.Missing(self.commit.fragment, self.id, index))
        self.slices.upload_failed(index, retry_at=now + self._policy.resend_s)

    def _slice_merged(self, index: int, digest: bytes, now: float) -> None:
        if index in self.reducer.slices:
            self._have(index, digest, now)

    def _merged_arrived(self, arrived: MergedArrived, now: float) -> None:
        """A merged slice: the reducer's answer, or, at a reducer, from a member that has it."""
        index, digest = arrived.slice, arrived.digest
        state = self.reducer.slices.get(index)
        if state is not None and state.merging:
            return  # this peer applies what it merges; another reducer may have merged falsely
        self._have(index, digest, now, claimed=arrived.contributors)
        if self.seal is None and self.stage is Stage.UPLOADING:
            # The merged slice has come before the seal: its reducer knows the seal.
            self._send(self.reducers[index], messages.Ask(self.commit.fragment, self.id))

    def _have(
        self, index: int, digest: bytes, now: float, *, claimed: tuple[int, ...] | None = None
    ) -> None:
        if self.slices.take(index, digest, claimed):
            self._try_apply(now)

    def finished(self, head: messages.Head) -> None:
        """``Apply`` is done."""
        assert self.stage is Stage.APPLYING
        self.stage = Stage.FINISHED
        self.head = head
        self.takeover.cancel()
        self._send_to_coordinator(messages.Finished(self.commit.fragment, self.id, head))

    # Messages

    def _receive(self, sender: PeerId, message: Message, now: float) -> bool:
        """Take a message of this round. ``False``: its sender may not send it."""
        member = self.commit.index(sender)
        if member is None and sender not in self.reducers and sender != self.commit.leader:
            return False
        match message:
            case messages.Declined():
                self._declined(sender, message.reason, now, absent=message.absent)
            case messages.Ask():
                self._send_outcome(sender)
            case messages.Reassign():
                return self._reassigned(sender, message, now)
            case messages.Prepare():
                return self._prepare(sender, message, now)
            case messages.Propose():
                return self._proposed(sender, message, now)
            case messages.Sealed():
                return self._sealed(message, now)
            case messages.Forswear():
                return self._forswear(sender, message, now)
            case messages.Forsworn() if self.coordinator is None:
                if sender == self.coordinating_peer and self.stage is Stage.UPLOADING:
                    self.takeover.left(now)
            case messages.Void():
                return self._told_void(sender, message, now)
            case messages.Finished():
                self._member_finished(sender, message.head, now)
            case _ if self.coordinator is not None:
                self._for_coordinator(self.coordinator, sender, message, now)
        return True

    def _for_coordinator(
        self, coordinator: Coordinator, sender: PeerId, message: Message, now: float
    ) -> None:
        member = self.commit.index(sender)
        match message:
            case messages.Report(_, _, index, complete, refused):
                before = coordinator.phase
                coordinator.reported(sender, index, complete, refused, now)
                self._suspect_withholding(coordinator, before, now)
                self._send_outcome(sender)
            case messages.Missing():
                if not self._send_outcome(sender) or coordinator.too_few_have_finished():
                    coordinator.missing(sender, message.slice, now)
            case messages.Promise() if member is not None:
                uploads_until = self.entered_at + self.commit.upload_s
                coordinator.promised(member, message, now, uploads_until=uploads_until)
            case messages.Accepted() if member is not None:
                coordinator.accepted_by(member, message.ballot, message.signature, now)
            case messages.Forsworn():
                coordinator.forsworn_by(sender, message.signature)

    def _suspect_withholding(
        self, coordinator: Coordinator, before: BallotPhase, now: float
    ) -> None:
        """Suspect the reducers that reported without the own upload, which they were sent.

        A reducer can leave out any member, and the seal follows its report. Only the peer that is
        left out knows that it sent its upload, so only that peer can blame the reducer. It then
        names other reducers when it leads.
        """
        if before is not BallotPhase.GATHERING or coordinator.phase is not BallotPhase.PROPOSING:
            return
        for index, complete in sorted(coordinator.complete.items()):
            peer = self.reducers[index]
            sent = self.entry is not None and index not in self.slices.tries
            if sent and self.entry not in complete and not self._peers.is_down(peer, now):
                reason = f"it has not got slice {index} of my upload, which I sent"
                self._emit(Strike("withheld", {"peer": peer, "reason": reason}))

    def _withdrawn(self, sender: PeerId, message: messages.Withdraw, now: float) -> None:
        """A member has withdrawn a join. If it is the one in the roster, the member declines."""
        index = self.commit.index(sender)
        entry = self.commit.members[index] if index is not None else None
        if entry and (entry.join, entry.incarnation) == (message.join, message.incarnation):
            self._declined(sender, "it has withdrawn its join", now, absent=True)

    def _begins_anew(
        self, sender: PeerId, message: messages.Join | messages.Call, now: float
    ) -> None:
        """A member that joins anew for this version, or leads a later attempt at it, has given the
        round up, and its word of that was lost. Of two, the other one waited for its upload until
        the deadline, 36 s, and told it meanwhile that the roster is closed."""
        index = self.commit.index(sender)
        if index is None or message.head.version >= self.commit.version or not self._waits:
            return
        entry = self.commit.members[index]
        if isinstance(message, messages.Call):
            is_later = message.attempt > self._fragment.pacemaker.attempt
        else:
            is_later = (message.incarnation, message.join) > (entry.incarnation, entry.join)
        if is_later:
            self._declined(sender, "it has given this round up", now, absent=False)

    def _declined(self, sender: PeerId, reason: str, now: float, *, absent: bool) -> None:
        if self.coordinator is None:
            return
        self._note("declined_by", peer=sender, reason=reason)
        self.coordinator.declined(sender, reason, now, absent=absent)
        if not self.coordinator.is_over:  # else the coordinator has sent the outcome to all
            self._leave_if_in_vain(now)

    def _send_outcome(self, sender: PeerId) -> bool:
        """Send what is known of the outcome. ``True``: the round is over for the one that asks.

        It is not when this member has given it up: it coordinates a sealed round on, and votes.
        """
        fragment = self.commit.fragment
        if self.stage is Stage.FINISHED:
            assert self.head is not None
            self._send(sender, messages.Finished(fragment, self.id, self.head))
        elif self.stage is Stage.VOID:
            assert self._voided is not None
            self._send(sender, self._voided)
        else:
            if self.stage is Stage.FORSWORN:
                self._send(sender, self._vow())
            elif self.seal:
                assert self._certificate is not None
                self._send(sender, self._certificate)
            return False
        return True

    def _vow(self) -> messages.Forsworn:
        """This member's vow never to finish the round; it has given the round up."""
        head = None if self._standing is None else self._standing.head()
        signature = self._id.sign(messages.vow(self.id))
        return messages.Forsworn(self.commit.fragment, self.id, head, signature)

    def _may_use(self, sender: PeerId, ballot: int) -> bool:
        """True if a ballot is the sender's, and one that a coordinator can have come to: above the
        highest that a message can hold nobody could take over any more."""
        is_near = ballot <= self.acceptor.promised + BALLOTS_AHEAD_MAX
        return is_near and owner_of(ballot, self.commit) == sender

    def _heeds(self, sender: PeerId, ballot: int, now: float) -> bool:
        """True if this peer follows a ballot by now: it does, or the coordinator had its time.

        That holds for another ballot of the coordinator itself: each would give it as much time
        again.
        """
        if ballot <= self.takeover.ballot or sender == self._id.me:
            return True
        coordinator = self.coordinator
        has_failed = coordinator is not None and coordinator.is_over
        is_mine = self.coordinating_peer == self._id.me
        return (is_mine and has_failed) or self.takeover.is_due(now)

    def _reassigned(self, sender: PeerId, message: messages.Reassign, now: float) -> bool:
        if not self._may_use(sender, message.ballot) or message.slice >= len(self.reducers):
            return False
        if message.ballot < self.acceptor.promised or not self._heeds(sender, message.ballot, now):
            return True
        self._follow(message.ballot, now)
        known = self.reducers[message.slice] == message.reducer
        if sender != self._id.me and known:
            return True
        self.reducers[message.slice] = message.reducer
        if message.reducer == self._id.me and self.reducer.take(message.slice):
            self._note("took_slice", slice=message.slice)
            self._emit(Reduce(self.id, message.slice))
            if self.slices.digests[message.slice] is None and self.seal is None:
                self._report(message.slice)
        has_it = self.is_open or self.stage is Stage.FINISHED
        if self.entry is not None and has_it:
            self.slices.tries.pop(message.slice, None)
            if self.slices.digests[message.slice] is None or message.reducer != self._id.me:
                self._upload(message.slice)
        return True

    def _prepare(self, sender: PeerId, message: messages.Prepare, now: float) -> bool:
        if not self._may_use(sender, message.ballot) or not self._has_vote:
            return False
        heeds = self._heeds(sender, message.ballot, now) and self.acceptor.prepare(message.ballot)
        if heeds:
            self._follow(message.ballot, now)
        if self._send_outcome(sender) or not heeds:
            return True
        last = self.acceptor.accepted_ballot, self.acceptor.accepted
        signature = self._id.sign(messages.promise_text(self.id, message.ballot, *last))
        fragment = self.commit.fragment
        self._send(sender, messages.Promise(fragment, self.id, message.ballot, *last, signature))
        self._report_all()  # the next time that it is said again may be too late
        return True

    def _proposed(self, sender: PeerId, message: messages.Propose, now: float) -> bool:
        if not self._may_use(sender, message.ballot) or not self._has_vote:
            return False
        vote = messages.vote(self.id, message.ballot, message.seal)
        signed = sender == self._id.me or self._id.verify(sender, vote, message.signature)
        if not (signed and is_possible(self.commit, message.seal)):
            return False
        if message.ballot < self.acceptor.promised or not self._heeds(sender, message.ballot, now):
            self._send_outcome(sender)
        elif self.acceptor.propose(message.ballot, message.seal):
            self._follow(message.ballot, now)
            signature = self._id.sign(vote)
            accepted = messages.Accepted(self.commit.fragment, self.id, message.ballot, signature)
            self._send(sender, accepted)
        else:
            self._send(sender, self._vow())
        return True

    def _forswear(self, sender: PeerId, message: messages.Forswear, now: float) -> bool:
        if not self._may_use(sender, message.ballot) or self.entry is None:
            return False
        if message.ballot < self.acceptor.promised or not self._heeds(sender, message.ballot, now):
            return True
        if self.stage is Stage.APPLYING or self.stage is Stage.FINISHED:
            if self.head is not None:
                self._send(sender, messages.Finished(self.commit.fragment, self.id, self.head))
            return True
        if self.is_open:
            self._give_up("asked to forswear a lost slice", in_doubt=True)
        self._send(sender, self._vow())
        return True

    def _member_finished(self, sender: PeerId, head: messages.Head, now: float) -> None:
        self._note("heard_finished", peer=sender)
        all_have = self.coordinator is not None and self.coordinator.has_finished(sender)
        newcomer = self.commit.index(sender) in self.commit.on_probation
        if not newcomer:
            self._finished_by[sender] = link_of(head)
        coordinator = self.coordinator if self.commit.on_probation else None
        if coordinator is not None and coordinator.voters_have_finished():
            # A member on probation that never says so does not keep the round for long.
            at = now + self.commit.upload_s + self._policy.margin_s
            self._fade_at = min(at, self._fade_at)
        if self.coordinator is not None and self.commit.melds:
            self._show_at = min(now + self._policy.margin_s, self._show_at)
        if all_have and self.entry is None and self.is_open:
            self.stage = Stage.FINISHED  # this peer only reduced or led
            self.head = head
        if all_have and not self.is_open:
            self._end_for_all(now)
        elif self.stage is Stage.FINISHED and sender == self.coordinating_peer != self._id.me:
            self.end_at = now  # all have finished
        if self._waits and self._others_finished and self._overdue_at == math.inf:
            self._overdue_at = now + self._policy.margin_s + self._policy.resend_s

    @property
    def _others_finished(self) -> bool:
        """True if others have finished: the coordinator says so, or more voters than may all lie.

        One that said so at once had all others leave a round whose uploads took longer.
        """
        told = len(self._finished_by) > len(self.commit.voters) / 3
        return told or self.coordinating_peer in self._finished_by

    def _can_follow(self, now: float) -> bool:
        """True if this peer can take the version of those that have finished.

        Where a reducer had answered half of the members, the others left, and could take nothing
        of the few that had finished: no quorum stood on one version for minutes.
        """
        links = set(self._finished_by.values())
        return any(self._certificates.holds(link, now) for link in links)

    def _end_for_all(self, now: float) -> None:
        """All that count have finished: nobody has to keep the round any longer."""
        for peer in all_peers_of(self.commit, self.reducers):
            if peer != self._id.me and self.head is not None:
                self._send(peer, messages.Finished(self.commit.fragment, self.id, self.head))
        self.end_at = now
        self._show_at = math.inf

    def _show_signatures(self) -> None:
        """Show the others that have finished the signatures of each other, as one member has not
        finished. Each of them soon joins peers that stand elsewhere, and has to prove where it
        stands."""
        self._show_at = math.inf
        if self.coordinator is not None and self.head is not None:
            for peer in sorted(self.coordinator.finished.values()):
                if peer != self._id.me:
                    self._send(peer, messages.Compare(self.commit.fragment, self.head))

    # Sealed, void, over

    def _sealed(self, message: messages.Sealed, now: float) -> bool:
        """The votes of a majority count, whoever shows them."""
        if self.seal is not None:
            return True
        if not is_chosen(self.commit, message, self._id.verify):
            return False
        self._certificate = message
        self._learn_seal(message.seal, now)
        return True

    def _told_void(self, sender: PeerId, message: messages.Void, now: float) -> bool:
        if self.seal is not None and not is_chosen(self.commit, message, self._id.verify):
            return False  # any voter may name a ballot of its own, and a chosen seal stays
        mine = sender == self._id.me and self._found_void(message.ballot)
        if not mine and not is_void(
            self.commit, message, sender, self._void_said_by, self._id.verify
        ):
            return False
        if self.stage in (Stage.UPLOADING, Stage.SEALED, Stage.FORSWORN):
            self._voided = message
        elsewhere = may_be_finished(message) and not self.coordinates
        self._void(message.reason, may_be_finished=elsewhere)
        return True

    def _found_void(self, ballot: int) -> bool:
        """True if this peer has coordinated this ballot, and found that the round is void."""
        coordinator = self.coordinator
        return (
            coordinator is not None
            and (coordinator.ballot, coordinator.value) == (ballot, VOID)
            and not self.coordinates
        )

    def _learn_seal(self, seal: tuple[int, ...], now: float) -> None:
        if self.seal is not None or not self.is_open:
            return
        if seal == VOID or not is_possible(self.commit, seal):
            return
        self.seal = seal
        self.stage = Stage.SEALED
        self._note("learned_seal", contributors=len(seal), mine=self.entry in seal)
        if self.entry is not None and self.entry not in seal:
            self._ask_for_slices()
        self._overdue_at = now + self.commit.upload_s + self._policy.margin_s
        self.takeover.plan(2 * (self.commit.upload_s + self._policy.margin_s), now)
        for index in sorted(self.reducer.slices):
            self._try_merge(index)
        self._try_apply(now)

    def _void(self, reason: str, *, may_be_finished: bool) -> None:
        if self.coordinator is not None:
            self.coordinator.phase = BallotPhase.OVER
        if self.stage in (Stage.FORSWORN, Stage.VOID):
            self.stage = Stage.VOID
            self._end(reason, in_doubt=False, may_be_finished=may_be_finished)
        elif self._waits:
            self.stage = Stage.VOID
            self._note("void", reason=reason)
            self._end(reason, in_doubt=False, may_be_finished=may_be_finished)

    def _leave(self, reason: str, now: float) -> None:
        """Give up this round now; in doubt if it may be sealed with the own contribution."""
        if self._waits:
            self._give_up(reason, in_doubt=self.may_be_sealed_elsewhere())

    def _give_up(self, reason: str, *, in_doubt: bool) -> None:
        in_doubt = in_doubt and self.may_be_sealed_elsewhere()
        if in_doubt:  # it may be told later that the round is void
            self.end_at = max(self.end_at, self._fragment.now + self._policy.doubt_s)
        self.acceptor.forsworn = True
        self.stage = Stage.FORSWORN
        self._note("gave_up", reason=reason, in_doubt=in_doubt)
        self._end(reason, in_doubt=in_doubt)

    def weights(self) -> tuple[float, ...]:
        """The weights of the sealed contributors, in the seal's order."""
        assert self.seal
        return weights_of(self.commit, self.seal)

    def _try_merge(self, index: int) -> None:
        lacks_it = self.slices.digests[index] is None
        if self.seal and lacks_it and self.reducer.can_merge(index, self.seal) and self.is_open:
            state = self.reducer.slices[index]
            state.merging = True
            self._emit(Merge(self.id, index, self.seal, self.weights(), dict(state.bundles)))

    def _try_apply(self, now: float) -> None:
        if self.entry is None or self.stage is not Stage.SEALED:
            return
        digests = self.slices.all_digests()
        if digests is None:
            return
        assert self.seal is not None and self._standing is not None
        if self._standing.lineage not in sealed_parents(self.commit, self.seal):
            self._leave("nobody brought the lineage that I stand on into the meld", now)
            return
        objection = self.slices.objection(self.seal)
        if objection is not None:
            self._leave(objection, now)
            return
        self.stage = Stage.APPLYING
        self._note("applying", contributors=len(self.seal), mine=self.entry in self.seal)
        merged = self.entry in self.seal
        self.to_apply = Apply(
            self.id,
            self.commit,
            self.seal,
            digests,
            self.weights(),
            after_commit(self._standing, self.commit, self.id, self.seal, digests),
            self.commit.members[self.entry].mark if merged else None,
            "all merged slices are here",
        )
        self._emit(self.to_apply)

    # Time and failures

    def _link_lost(self, peer: PeerId, now: float) -> None:
        if peer == self.coordinating_peer and not self.coordinates:
            self.takeover.plan(self._policy.suspect_s, now, sooner=True)
        self._leave_if_in_vain(now)

    def heard(self, peer: PeerId, now: float) -> None:
        self.takeover.heard(peer, self.stage, now)

    def _tick(self, now: float) -> None:
        if self._waits and now >= self.takeover.at:
            self._take_over(now)
        if self.coordinator is not None:
            before = self.coordinator.phase
            self.coordinator.tick(now, i_finished=self.stage in (Stage.APPLYING, Stage.FINISHED))
            self._suspect_withholding(self.coordinator, before, now)
        if self._waits:
            for index in self.slices.to_retry(now):
                if self.entry is not None and self.slices.digests[index] is None:
                    self._upload(index)
            if self._waits and now >= self._resend_at:
                self._resend_at = now + self._policy.resend_s
                self._resend()
            if self._waits and now >= self._overdue_at:
                self._overdue(now)
            self._leave_if_in_vain(now)
        if not self.is_open and now >= self._fade_at:
            self._end_for_all(now)
            self._fade_at = math.inf
        if not self.is_open and now >= self._show_at:
            self._show_signatures()
        if now >= self.end_at and self.is_open and self.stage is not Stage.APPLYING:
            if self.coordinator is not None:
                self.coordinator.note_silent_voters(now)
            self._leave("the round's deadline has come", now)

    def _leave_if_in_vain(self, now: float) -> None:
        """Give up a round that waits for members of whom nothing more will come.

        Where a link broke, or a peer slept, they have ``margin_s`` to be heard again.
        """
        declined = (
            self.coordinator.declined_indices() if self.coordinator is not None else frozenset()
        )
        others = [
            entry.peer
            for index, entry in enumerate(self.commit.members)
            if entry.peer != self._id.me and index not in declined
        ]
        if not others and not declined:
            others = [self.coordinating_peer]  # the only member has a keeper to agree with
        reason = self._vain(others, declined, now)
        if reason is None:
            self._in_vain_at = math.inf
            return
        self._in_vain_at = min(now + self._policy.margin_s, self._in_vain_at)
        if now >= self._in_vain_at or not others:
            self._leave(reason, now)

    def _vain(self, others: list[PeerId], declined: frozenset[int], now: float) -> str | None:
        """The reason why this peer waits in vain; ``None``: it does not.

        Without anybody else it has nobody to agree with, unless giving up would leave a doubt:
        then it gains nothing. And without most of the voters the others cannot seal the round. They
        would be in it until its deadline, and merge nothing with anybody else meanwhile: a swarm
        that lost nine tenths at once stood still for all of ``round_s``. Those that have left in
        order count on it. A keeper that reduces gets no slices itself, and others may wait for its
        own.
        """
        if not self._waits:
            return None
        helps = self.entry is not None or self.coordinates
        agrees = self.stage is Stage.UPLOADING and helps and not self.may_be_sealed_elsewhere()
        if agrees and all(map(self._peers.has_failed, others)):
            return "nobody else of the roster is there any more"
        waits = self.seal is None or self.entry is not None
        if waits and self._peers.is_deserted(self.commit, now, declined):
            return "most of its voters are gone"
        return None

    def _resend(self) -> None:
        self._report_all()
        if self.coordinating_peer != self._id.me:
            self._send(self.coordinating_peer, messages.Ask(self.commit.fragment, self.id))

    def _overdue(self, now: float) -> None:
        """The round is sealed, or another member has finished, and merged slices are missing."""
        if self.entry is None:
            self._overdue_at = math.inf
            return
        left = self._others_finished and self._can_follow(now)
        self._overdue_at = now + self._policy.resend_s + self._policy.margin_s
        for index, digest in enumerate(self.slices.digests):
            if digest is None:
                if self.seal is not None:
                    self._suspect_keeping(index, now)
                if not left:
                    self._send_to_coordinator(
                        messages.Missing(self.commit.fragment, self.id, index)
                    )
        if left:
            self._leave("somebody finished, and my merged slices did not come", now)

    def _suspect_keeping(self, index: int, now: float) -> None:
        """Suspect the reducer of a slice that is overdue, also where it has sent it to others."""
        # Its successors lack its own upload, if it has left with that.
        reducer = self.commit.reducers[index]
        # Slice 0 brings the maps of all lineages, and its reducer may have got a bad one.
        could = not self.commit.melds or index > 0
        if could and reducer != self._id.me and not self._peers.is_down(reducer, now):
            reason = f"it has not sent slice {index}, which it merged"
            self._emit(Strike("withheld", {"peer": reducer, "reason": reason}))

    def _take_over(self, now: float) -> None:
        """Ask for promises. This peer follows its own ballot when others do, and no sooner: until
        then the coordinator before it, which others may hear, has its reports and its vote.

        A ballot without a majority lasts until this peer begins another one: others may have
        promised a higher one to a peer that is gone.
        """
        self.takeover.at = now + self.commit.upload_s + BALLOT_MARGINS * self._policy.margin_s
        tried = 0
        if self.coordinator is not None:
            if not self.coordinator.is_in_vain:
                return
            tried = self.coordinator.ballot
            if self.takeover.all_follow(now):
                self.coordinator.note_silent_voters(now)
        ballot = self.takeover.own_ballot(above=max(self.acceptor.promised, tried))
        self._note("took_over", ballot=ballot, stage=str(self.stage))
        self.coordinator = self._coordinate(ballot, now)

    def _follow(self, ballot: int, now: float) -> None:
        if ballot <= self.takeover.ballot:
            return
        if self.coordinator is not None and self.coordinator.ballot < ballot:
            self.coordinator.outbid(ballot)
        self.takeover.follow(ballot, now)
        self._note("follows", ballot=ballot)

    def _report_all(self) -> None:
        if self.stage is Stage.UPLOADING:
            for index in sorted(self.reducer.slices):
                self._report(index)

    def _report(self, index: int) -> None:
        state = self.reducer.slices[index]
        outlying = self.reducer.outlying(index)
        for member, reason in outlying.items():
            if (index, member) not in self._outlying:
                self._outlying.add((index, member))
                peer = self.commit.members[member].peer
                fields: dict[str, Value] = {"round": self.id.hex(), "peer": peer, "slice": index}
                fields["reason"] = reason
                self._emit(LeaveOut("upload_outlying", fields))
        self._send_to_coordinator(
            messages.Report(
                self.commit.fragment,
                self.id,
                index,
                tuple(sorted(state.complete - outlying.keys())),
                tuple(sorted((state.refused | outlying).items())),
            )
        )

    def _send_to_coordinator(self, message: Message) -> None:
        self._send(self.coordinating_peer, message)
