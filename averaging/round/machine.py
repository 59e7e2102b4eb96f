"""The round of one fragment as one peer lives it: a machine without clock, sockets or numbers.

``FragmentRounds`` takes inputs (messages, what the learner offers, what became of uploads, time)
and returns effects (``averaging.round.effects``). It holds no number of the model. One machine per
fragment and peer plays every part: member, leader, reducer, acceptor, successor.
``averaging.live.averager`` and the simulator run the same machine.

**Before the commit** (``averaging.round.joining``, ``averaging.round.leading``,
``averaging.round.roster``, ``averaging.round.catching_up``)

    IDLE      nothing under way. Due, or called with enough steps: ``TakeSnapshot`` -> WANTED
    WANTED    the learner was asked. ``offered`` -> JOINING (or FOLDING, when alone)
    JOINING   ``Join`` sent to the leader I believe in. ``Noted`` -> PROMISED; ``Redirect`` -> the
              other one; silence or a broken link -> once more, then the next in rank, and so
              for all my fragments if nobody but it is silent (``averaging.round.silence``)
              (a leader with whom it always comes to nothing at one version is passed over)
    PROMISED  to this leader and nobody else, until I ``Withdraw`` or hear ``Committed``,
              ``NoQuorum`` or ``Closed``. Another who calls is told ``Pass``, or joined instead
              (after ``Withdraw``) if its name ranks first
    ENTERED   a commit that names me holds for me: a ``Participation`` is under way
    CATCHING  behind or apart-and-light: the owner fetches; nothing is joined meanwhile
    FOLDING   alone: the owner makes the learner's parameters the state

Whoever receives a ``Join`` and finds that it is the first in rank leads: it answers ``Noted``,
calls the live peers of the group, and whoever comes into sight while the roster is open, and closes
by ``averaging.rules.quorum``. It needs no state for this. A ``Join`` from behind is answered
``Behind`` by anybody; one from ahead is held while the leader itself catches up; one from another
lineage is told to compare (the light side rebases) or taken for a mix. Two leaders that meet settle
it by rank: the lower one, called, sends its members on; if it is the lower one that calls, the
higher one calls back.

**From the commit on** (``averaging.round.participation``, ``averaging.round.reducer``,
``averaging.round.paxos``, and ``averaging.round.doubt`` when it ends in doubt)

    UPLOADING -> SEALED -> APPLYING -> FINISHED
        |           |
        +-----------+--> VOID (decided) or FORSWORN (given up: in doubt, or behind, or pending)

The commit is signed and never changes; its digest is the round's name. Members upload each slice to
its reducer, reducers report to the coordinator (the leader at first) who is complete, the
coordinator proposes as contributors those whom all reducers have, a majority of the roster accepts:
sealed. Reducers merge, members read the merged slices off the streams of their own uploads, and
apply.

**Who may say what.** A ballot belongs to one peer (``sealing.owner_of``); ``Prepare``, ``Propose``,
``Reassign`` and ``Forswear`` count only from its owner, and not below a promise. Everything about a
round counts only from its roster, its reducers and its leader. The rest is counted and dropped. All
messages may be lost, repeated or late: whatever matters is said again every ``resend_s`` until it
is answered or its deadline comes, and saying it twice changes nothing.

**Why it is safe**

1. *One seal.* The seal is single-decree Paxos among the roster. Ballot 0 is the leader's alone,
   and a leader that restarted is another incarnation that knows nothing of the round; so is an
   acceptor: it answers ``Declined`` and never votes again. Any later ballot asks a majority first
   and continues with the accepted seal of the highest ballot, so once a majority has accepted a
   seal no other can be chosen. "Void" is a seal like any other (an empty one): when it is chosen
   nobody can ever finish. It also is when so many members were absent from the start, as the
   incarnation that the roster names, that no majority of acceptors is left.
2. *All slices or none.* A seal names contributors whose uploads every reducer of the time had in
   full. The merged slice is a pure function of commit, seal and uploads. Who lacks one slice does
   not apply any.
3. *Same bytes.* The lineage hashes commit, seal and the digests of the merged slices: who got
   other bytes is apart at once, never silently different.
4. *Once per lineage.* A contribution is (mark, incarnation) in the commit, and ``merged`` moves
   with the version. A peer is in one round at a time; it offers work again only when it knows
   that the work is not in the lineage it follows: the round was void, or a majority forswore it,
   or the seal is known and leaves it out, or it never can be sealed without its own vote. Until
   then it is **in doubt**, asks the roster how it ended (``Ask``), and joins nothing. Whatever
   state it adopts meanwhile tells by its ``merged``.
5. *Lost slices.* A reducer that dies after the seal, being itself a contributor, takes its own
   upload of that slice along. Who has the merged slice hands it to the successor; if nobody has,
   the coordinator asks all to *forswear*, and a majority of vows ends the round as void for the
   living. Somebody among the others may have finished: that is a fork, apart from then on, to be
   rebased or mixed like any other; it cannot reach the lineage of those who vowed. The same
   holds for a doubt that ends after ``doubt_s`` without an answer. (A reducer could keep a copy
   of its own slice at its successor. That costs 1/n of the encoded fragment per round, half as
   much again in a group of two, to save a round in which nothing but time is lost, in the second
   between seal and answer. It is not done.)
6. *Two peers.* A majority of two is two: if I have not accepted the seal it cannot be chosen, so
   the death of the other leaves no doubt, and I leave the round at once; if I have, it does.

**Several groups.** With more peers than one group holds, lineages part at every round, and
``averaging.rules.mixing`` says what then: rounds **meld**. Members differ in their parents, all of
them contribute, and the new lineage grows out of those that a contributor stands on; who stands on
another leaves with its work pending. Four things above hold with a difference. Who is behind by a
version or two joins as it is. Peers are dealt, and ranked, by the newest version of which they
heard a closing. The lighter side that rebases does not offer again what others go on with. And a
doubt that ends without the own lineage telling counts the work as merged, elsewhere (``Presume``):
a state that lacks it says nothing about the others, and sooner or later all are mixed. Nor does a
majority that forswore: unless everybody did, somebody may have finished and go on. Whether a round
was one of several is remembered of it (``dealt_version``): a partition may hide the others later.

**The end.** With the run's tokens in a version of one group nothing more is offered. Several
groups close ranks first, and mix all of their lineages once (``averaging.rules.final_mix``).

**Nobody waits without a deadline.** Every phase has a timer (``deadline`` is the earliest), all
relative to the own clock; no time of another peer is compared with it.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping

from averaging import messages as said
from averaging.history.standing import Standing, told
from averaging.messages import BadMessage, Commit, Head, Join, Message
from averaging.round.catching_up import Catching, Doubts
from averaging.round.doubt import Doubt, Doubting
from averaging.round.effects import Effect, GiveUp, Note, RefuseStream, Send, Value
from averaging.round.inputs import (
    AnswerEveryCall,
    Applied,
    CaughtUp,
    Due,
    Folded,
    GatherEverybody,
    GiveWay,
    Input,
    Leave,
    LineMeasured,
    LinkLost,
    MergedArrived,
    Offered,
    PeerSilent,
    Progressed,
    ReachabilityChanged,
    Received,
    SliceMerged,
    StepsCounted,
    StreamOpened,
    Tick,
    UploadArrived,
    UploadFailed,
)
from averaging.round.joining import Joining
from averaging.round.leading import Leading
from averaging.round.neighbourhood import Neighbourhood
from averaging.round.participation import Ended, Participation, Stage
from averaging.round.phase import Phase
from averaging.round.roster import Gathering
from averaging.rules import commit_check as terms
from averaging.rules import final_mix as finale
from averaging.rules.due import DueTime
from averaging.rules.grouping import PeerView
from averaging.rules.mixing import Measured
from averaging.rules.policy import RoundPolicy
from averaging.rules.sites import carries, riders_of
from dht.identity import PeerId

ROUNDS_MAX = 16
"""Rounds of one fragment that a peer may be in at once: one as a member, others as they fade.

They fade for ``margin_s`` after everybody has finished; quick learners make several in that time.
"""
OUTCOMES_MAX = 64


class FragmentRounds:
    """All that one peer does about the rounds of one fragment. See the module.

    ``handle`` takes an input and the time, and returns effects, to be carried out in their order.
    ``Tick`` is wanted at ``deadline``.
    """

    __slots__ = (
        "_begun_at_step",
        "_interval",
        "_interval_at",
        "_local",
        "_norm_ratio_max",
        "_out",
        "_outcomes",
        "_verify",
        "around",
        "bytes_per_s",
        "catching",
        "closed_ranks",
        "closed_version",
        "codecs",
        "counters",
        "dealt_version",
        "doubting",
        "due_time",
        "encoded_bytes",
        "founder",
        "fragment",
        "fresh_version",
        "incarnation",
        "joining",
        "leading",
        "me",
        "measured",
        "mine",
        "phase",
        "policy",
        "rounds",
        "sign",
        "site",
        "standing",
        "step",
        "step_time_s",
        "timers",
        "topic",
    )

    def __init__(
        self,
        *,
        fragment: int,
        me: PeerId,
        incarnation: int,
        topic: bytes,
        policy: RoundPolicy,
        view: Mapping[PeerId, PeerView],
        standing: Standing | None,
        sign: Callable[[bytes], bytes],
        verify: Callable[[PeerId, bytes, bytes], bool],
        encoded_bytes: Callable[[str], int],
        codecs: tuple[str, ...],
        trains: bool = True,
        reachable: bool = True,
        bytes_per_s: float = 0.0,
        founder: bool = False,
        norm_ratio_max: float = math.inf,
        doubts: Doubts | None = None,
        site: str | None = None,
        step: int = 0,
        now: float = 0.0,
    ) -> None:
        """``topic``: 16 bytes of run and layout, ``view``: kept up to date by the owner,
        ``standing``: ``None`` for an auxiliary without state, ``encoded_bytes``: the fragment's
        size under a codec, ``verify(peer, bytes, signature)``, ``norm_ratio_max``: what I refuse
        as a reducer, ``doubts``: shared with my other fragments, ``step``: the learner's own step
        now.
        """
        self.fragment = fragment
        self.me = me
        self.incarnation = incarnation
        self.topic = topic
        self.policy = policy
        self.standing = standing
        self.sign = sign
        self._verify = verify
        self.encoded_bytes = encoded_bytes
        self.codecs = codecs
        self.bytes_per_s = bytes_per_s
        self.founder = founder
        self.site = site
        """Who says the same is near: ``averaging.rules.sites``."""
        self._norm_ratio_max = norm_ratio_max
        self.step = step
        self.due_time = DueTime(policy.due, fragment=fragment, step=step)
        self.around = Neighbourhood(
            me=me,
            view=view,
            topic=topic,
            fragment=fragment,
            group_size=policy.group_size,
            grouping=policy.grouping,
            suspect_s=policy.suspect_s,
            trains=trains,
            reachable=reachable,
            site=site,
            now=now,
        )
        self.joining = Joining(self, self.around)
        self.leading = Leading(self, self.around)
        self.catching = Catching(self, doubts or Doubts(policy))
        self.doubting = Doubting(self)
        self.phase = Phase.IDLE
        self.counters: Counter[str] = Counter()
        self.rounds: dict[bytes, Participation] = {}
        self.mine: Participation | None = None
        self.step_time_s = 0.0
        self._begun_at_step = step
        self.closed_version = standing.version if standing else 0
        self.dealt_version: int | None = None
        """Of my last round beside which other groups had theirs, as far as I saw then."""
        self.closed_ranks = False
        """Whether all peers meet in one group now, because the run has its tokens.

        See ``averaging.rules.final_mix``.
        """
        self.measured: Measured | None = None
        """How far I was from my group at my last meld."""
        self.fresh_version = standing.version if standing else 0
        self._outcomes: OrderedDict[bytes, Head | None] = OrderedDict()
        self._interval = policy.due.cycle_steps
        self._interval_at: float | None = None
        self.timers: dict[str, float] = {}
        self._out: list[Effect] = []
        self._local: deque[Message] = deque()

    def __repr__(self) -> str:
        version = self.standing.version if self.standing else None
        return f"FragmentRounds({self.me}, fragment={self.fragment}, {self.phase}, v{version})"

    @property
    def trains(self) -> bool:
        """Whether I have a learner that takes part; without one I may lead and reduce."""
        return self.around.trains

    @trains.setter
    def trains(self, trains: bool) -> None:
        self.around.trains = trains

    @property
    def reachable(self) -> bool:
        """Whether others can dial me. Who cannot be dialled neither leads nor reduces."""
        return self.around.reachable

    @property
    def gathering(self) -> Gathering | None:
        """The roster that I have open as a leader."""
        return self.leading.gathering

    @property
    def doubt(self) -> Doubt | None:
        """A contribution of mine of which I do not know whether it is merged."""
        return self.doubting.doubt

    def handle(self, given: Input, now: float) -> list[Effect]:
        """Take one input. Returns what to do, in order."""
        self.around.now = now
        match given:
            case Received(sender, message):
                self._heard(sender, now)
                self._receive(sender, message, now)
            case Progressed():
                self._progressed(given, now)
            case StepsCounted(step):
                self.step = step
            case Tick():
                self._tick(now)
            case Due():
                self.joining.due(now)
            case Offered(offer):
                self.joining.answered(offer, now)
            case GiveWay(reason):
                self.joining.give_way(reason, now)
            case Folded():
                self.joining.folded(now)
            case StreamOpened():
                self._opened(given, now)
            case UploadArrived() | UploadFailed() | SliceMerged() | MergedArrived() | Applied():
                part = self.rounds.get(given.round)
                if part is None:
                    self.counters["report_of_unknown_round"] += 1
                else:
                    self._report(part, given, now)
            case CaughtUp(standing, since, held_s):
                self.catching.caught_up(standing, now, since=since, held_s=held_s)
            case LinkLost(peer):
                self._lost(peer, now)
            case PeerSilent(peer):
                self.around.fail(peer, now)
                self.joining.silent(peer, now)
                self._without(peer, now)
            case Leave(reason):
                self._leave(reason, now)
            case ReachabilityChanged(reachable):
                self.around.reachable = reachable
            case LineMeasured(bytes_per_s):
                self.bytes_per_s = bytes_per_s
            case AnswerEveryCall():
                self.due_time.eager = True
            case GatherEverybody():
                self.around.group_size = said.ROSTER_MAX
        return self._take(now)

    # Time

    @property
    def deadline(self) -> float | None:
        """When ``Tick`` is wanted, ``None`` when nothing waits."""
        times = list(self.timers.values())
        if self.gathering is not None:
            times += (self.gathering.until, self.gathering.look_at)
        if (at := self.doubting.next_at()) is not None:
            times.append(at)
        times += [at for part in self.rounds.values() if (at := part.next_at()) is not None]
        return min(times) if times else None

    def _tick(self, now: float) -> None:
        for name in sorted(name for name, at in self.timers.items() if now >= at):
            if name in self.timers:
                del self.timers[name]
                self._ring(name, now)
        self.leading.tick(now)
        self.doubting.tick(now)
        for part in list(self.rounds.values()):
            part.tick(now)
            if now >= part.end_at and part.is_over:
                self._drop(part)

    def _ring(self, name: str, now: float) -> None:
        if name == "snapshot" and self.phase is Phase.WANTED:
            self.joining.idle(now, "the learner did not come to a safe point in time", retry=True)
        elif name == "answer" and self.joining.attempt is not None:
            self.joining.leader_silent(self.joining.attempt, now)
        elif name == "catching" and self.phase is Phase.CATCHING:
            self.catching.caught_up(None, now)
        elif name == "folding" and self.phase is Phase.FOLDING:
            self.joining.folding_took_too_long(now)

    # The learner

    def _progressed(self, progress: Progressed, now: float) -> None:
        self.step, self.step_time_s = progress.step, progress.step_time_s
        if self.phase is Phase.IDLE and not progress.waits and self.due_time.is_due(self.step):
            self.joining.due(now)

    # What others say

    def _heard(self, sender: PeerId, now: float) -> None:
        self.around.heard(sender)
        for part in self.rounds.values():
            part.heard(sender, now)

    def _receive(self, sender: PeerId, message: Message, now: float) -> None:
        if isinstance(message, (Join, said.Call, said.Behind, said.Compare, said.Finished)):
            self._look_at_the_end(message.head)
        match message:
            case Join():
                self.leading.joined(sender, message, now)
            case said.Noted():
                self.joining.noted(sender, message, now)
            case said.Redirect():
                self.joining.redirected(sender, message, now)
            case said.Call():
                self.joining.called(sender, message, now)
            case said.Pass():
                self.leading.passed_by(sender, now)
            case said.Withdraw():
                self.leading.withdrawn(sender, message, now)
            case said.NoQuorum() | said.Refused():
                self.joining.turned_away(sender, message, now)
            case said.Committed():
                self._committed(message, now)
            case said.Behind():
                self.catching.told_behind(message, now)
            case said.Compare():
                self.catching.compare(sender, message.head, now)
            case said.Bits():
                self.counters["bits_are_the_owners"] += 1
            case said.Closed():
                self.joining.too_late(sender, message, now)
            case _:
                self._of_round(sender, message, now)

    def _of_round(self, sender: PeerId, message: Message, now: float) -> None:
        round_id: bytes = message.round  # type: ignore[union-attr]
        part = self.rounds.get(round_id)
        if self.doubting.is_about(round_id):
            self.doubting.heard(sender, message, now)
        if part is not None:
            if not part.receive(sender, message, now):
                self.counters["stranger"] += 1
            return
        match message:
            case said.Finished():
                self.catching.compare(sender, message.head, now)
            case said.Ask():
                self._asked(sender, round_id)
            case said.Prepare() | said.Propose() | said.Reassign() | said.Forswear():
                head = self._outcomes.get(round_id)
                if head is not None:
                    self.say(sender, said.Finished(self.fragment, round_id, head))
                else:
                    self.counters["unknown_round"] += 1
                    self._remember(round_id, None)
                    reason = "not in my rounds"
                    self.say(sender, said.Declined(self.fragment, round_id, reason, absent=False))
            case _:
                self.counters["unknown_round"] += 1

    def _asked(self, sender: PeerId, round_id: bytes) -> None:
        """Somebody is in doubt about a round that I do not keep (any more)."""
        head = self._outcomes.get(round_id)
        if head is not None:
            self.say(sender, said.Finished(self.fragment, round_id, head))
            return
        # Not finished by this incarnation, and from now on never: should the commit still
        # come, it is declined.
        self._remember(round_id, None)
        mine = self.standing.head() if self.standing else None
        self.say(sender, said.Forsworn(self.fragment, round_id, mine))

    # The commit

    def commit_message(self, part: Participation) -> said.Committed:
        return said.Committed(self.fragment, part.encoded, part.signature)

    def _committed(self, message: said.Committed, now: float) -> None:
        problem = self._learn_commit(message.commit, message.signature, now)
        if problem is not None:
            self.counters["commit_refused"] += 1

    def _opened(self, opened: StreamOpened, now: float) -> None:
        sender, opening = opened.sender, opened.opening
        self._heard(sender, now)
        part = self.rounds.get(opening.round)
        problem: str | None = None
        if part is None:
            if said.digest(opening.commit) != opening.round:
                problem = "the commit is not that of the round"
            else:
                problem = self._learn_commit(opening.commit, opening.signature, now)
            part = self.rounds.get(opening.round)
        if part is None:
            problem = problem or "this round is not mine"
        elif part.commit.index(sender) is None:
            problem = "the sender is not in the roster"
        elif opening.slice >= len(part.reducers):
            problem = f"slice {opening.slice} of {len(part.reducers)}"
        elif part.stage in (Stage.VOID, Stage.FORSWORN):
            problem = "the round is over for me"
        elif opening.slice not in part.reducer.slices and not carries(
            part.commit, part.entry, part.commit.index(sender)
        ):
            problem = "another peer reduces this slice"
        if problem is not None:
            self.counters["opening_refused"] += 1
            self.emit(RefuseStream(problem))

    def _learn_commit(self, encoded: bytes, signature: bytes, now: float) -> str | None:
        """Take a commit from wherever it comes. Returns why it does not hold for me."""
        round_id = said.digest(encoded)
        if round_id in self.rounds:
            self.counters["repeated_commit"] += 1
            return None
        try:
            commit = said.decode_commit(encoded)
        except BadMessage as error:
            return str(error)
        if commit.topic != self.topic or commit.fragment != self.fragment:
            return "the commit is of another run, layout or fragment"
        if not self._verify(commit.leader, encoded, signature):
            self.counters["bad_signature"] += 1
            return "the commit is not signed by its leader"
        index = commit.index(self.me)
        if index is None and self.me not in commit.reducers:
            return "the commit does not name me"
        for parent in commit.parents:
            self._look_at_the_end(Head(parent.version, parent.lineage, (parent,)))
        reason = self._objection(round_id, commit, index)
        if reason is not None:
            # Only the incarnation that is named could have been in it, and a vow keeps it out.
            mine = index is not None and commit.members[index].incarnation == self.incarnation
            absent = mine and round_id not in self._outcomes
            if absent:
                self._remember(round_id, None)
            self.event("declined", leader=commit.leader, reason=reason)
            self.say(commit.leader, said.Declined(self.fragment, round_id, reason, absent=absent))
            return reason
        self.enter(round_id, commit, encoded, signature, leads=False, now=now)
        return None

    def _objection(self, round_id: bytes, commit: Commit, index: int | None) -> str | None:
        if round_id in self._outcomes:
            return "I gave this round up"
        if len(self.rounds) >= ROUNDS_MAX * (1 if self.trains else 8):
            return "too many rounds at once"
        unlike_the_run = terms.objection(
            commit, self.policy, codecs=self.codecs, encoded_bytes=self.encoded_bytes
        )
        if unlike_the_run is not None:
            return unlike_the_run
        if index is None:
            return None if self.reachable else "I can only dial out"
        entry = commit.members[index]
        attempt = self.joining.attempt
        if entry.incarnation != self.incarnation:
            return "I have been restarted since"
        if attempt is None or attempt.leader != commit.leader:
            return "I am not promised to this leader"
        if entry.join != attempt.join.join:
            return "I have withdrawn that join"
        misquoted = terms.misquoted(entry, attempt.join, batch_tokens_max=commit.batch_tokens_max)
        if misquoted is not None:
            return misquoted
        if attempt.join.site is None and (entry.delegate is not None or riders_of(commit, index)):
            return "it puts me at a site with others; I named none"
        parent = commit.parents[entry.parent]
        if self.standing is None or parent.lineage != self.standing.lineage:
            return "I stand elsewhere now"
        if parent.version != self.standing.version:
            return "it gives my lineage another version"
        tokens_end = self.policy.tokens_end
        if tokens_end is not None and self.closed_ranks and finale.goes_on(commit, tokens_end):
            return "the run has its tokens: all mix now"
        return self._objection_to_mix(commit)

    def _objection_to_mix(self, commit: Commit) -> str | None:
        """A leader that is behind, or knows no chain, may take history for another branch of it."""
        assert self.standing is not None
        if commit.kind != "mix":
            return None
        old = {
            index
            for index, parent in enumerate(commit.parents)
            if parent.lineage != self.standing.lineage
            and self.standing.chain.find(parent.version, parent.lineage) is not None
        }
        if not old:
            return None
        for entry in commit.members:
            if entry.parent in old:
                self.say(entry.peer, said.Behind(self.fragment, self.standing.head(), self.me))
        return "it mixes versions that mine grew out of"

    def enter(
        self,
        round_id: bytes,
        commit: Commit,
        encoded: bytes,
        signature: bytes,
        *,
        leads: bool,
        now: float,
    ) -> None:
        index = commit.index(self.me)
        part = Participation(
            me=self.me,
            round_id=round_id,
            commit=commit,
            encoded=encoded,
            signature=signature,
            standing=self.standing,
            policy=self.policy,
            emit=self._out.append,
            send=self.say,
            note=self.event,
            is_down=self.around.is_down,
            has_failed=self.around.failed.__contains__,
            ended=self._ended,
            norm_ratio_max=self._norm_ratio_max,
            now=now,
        )
        self.rounds[round_id] = part
        if index is not None:
            self.timers.pop("answer", None)
            self.joining.attempt = None
            self.mine = part
            self.to(Phase.ENTERED)
            if self.around.is_dealt(now):
                self.dealt_version = commit.version
            self.anchor(commit.version, now)
        part.begin(now, leads=leads)

    def _ended(self, part: Participation, ended: Ended, now: float) -> None:
        """Called by a participation: I am out of this round without a new version."""
        if self.mine is not part:
            if self.doubting.is_about(part.id) and not ended.in_doubt:
                self.doubting.void(ended.reason, now, forsworn=ended.forsworn)
            return
        self.mine = None
        self.joining.balked(
            part.commit.leader, f"its round ended without a version: {ended.reason}"
        )
        dealt = part.commit.version == self.dealt_version
        in_doubt = ended.in_doubt or (ended.forsworn and dealt and part.may_contain_me())
        self._out.append(GiveUp(part.id, ended.reason, in_doubt))
        assert part.entry is not None
        if in_doubt:
            self.event("in_doubt", reason=ended.reason)
            mark = part.commit.members[part.entry].mark
            self.doubting.begin(part.id, part.commit, mark, now, dealt=dealt)
            if ended.forsworn:
                self.doubting.void(ended.reason, now, forsworn=True)
        self.joining.idle(now, ended.reason, retry=True)
        self.catching.take_hint(now)

    # What became of uploads and slices

    def _report(
        self,
        part: Participation,
        given: UploadArrived | UploadFailed | SliceMerged | MergedArrived | Applied,
        now: float,
    ) -> None:
        match given:
            case UploadArrived(_, index, sender, problem, length, riders):
                part.upload_arrived(index, sender, problem, length, now, riders=riders)
            case UploadFailed(_, index, reason):
                part.upload_failed(index, reason, now)
            case SliceMerged(_, index, digest):
                part.slice_merged(index, digest, now)
            case MergedArrived(_, index, digest):
                part.merged_arrived(index, digest, now)
            case Applied() if part.stage is Stage.APPLYING:
                self._finished(part, given, now)

    def _finished(self, part: Participation, applied: Applied, now: float) -> None:
        merged, dispersion = applied.merged, applied.dispersion
        apply = part.applied
        assert apply is not None
        standing = apply.standing
        if merged is not None:
            standing = told(standing, part.commit, merged)
        if dispersion is not None:
            before = self.measured.version if self.measured is not None else 0
            version = standing.version
            self.measured = Measured(version, dispersion, after=version - before)
        self.stand(standing, fresh=apply.contained is not None)
        self.leading.timings.sync_took(now - part.entered_at)
        head = standing.head()
        self._remember(part.id, head)
        self.event(
            "finished",
            version=standing.version,
            contained=apply.contained is not None,
            kind=part.commit.kind,
            took_s=now - part.entered_at,
        )
        if self.mine is part:
            self.mine = None
            self.joining.idle(now, "finished", retry=False)
        part.finished(head, now)
        self.leading.tell_late(part.id, head)
        self.catching.take_hint(now)

    # Where I stand

    def stand(self, standing: Standing, *, fresh: bool) -> None:
        """From now on I stand here. ``fresh``: my work up to my last offer is contained."""
        before = self.standing
        mine = standing.merged.get(self.me)
        newcomer = self.step == self._begun_at_step
        if newcomer or fresh or before is None or mine != before.merged.get(self.me):
            # A newcomer's work begins here as well.
            self.fresh_version = standing.version
        if before is None or standing.lineage != before.lineage:
            self.joining.forgive()
        self.standing = standing
        self._look_at_the_end(standing.head())
        self.doubting.told(standing)

    @property
    def is_final(self) -> bool:
        """Whether the run has its tokens, and nothing more is merged where I stand."""
        standing, tokens_end = self.standing, self.policy.tokens_end
        if tokens_end is None or standing is None or standing.merged.tokens < tokens_end:
            return False
        self._look_at_the_end(standing.head())
        return not self.closed_ranks or finale.grew_from(standing.chain, tokens_end)

    def parts_at_each_round(self, now: float) -> bool:
        """Whether lineages do: there are more peers than one group holds, and no end in sight."""
        return not self.closed_ranks and self.around.is_dealt(now)

    def _look_at_the_end(self, head: Head | None) -> None:
        """Close ranks when somebody, or I, has the run's tokens on one of several lineages."""
        tokens_end = self.policy.tokens_end
        if tokens_end is None or self.closed_ranks or head is None:
            return
        if finale.has_reached(head, tokens_end) and self.around.is_dealt(self.around.now):
            self.closed_ranks = True
            self.around.group_size = said.ROSTER_MAX
            self.due_time.eager = True
            self.event("closed_ranks", version=head.version)
            self.leading.look_round(self.around.now)

    def anchor(self, version: int, now: float) -> None:
        """A roster closed, with me or without me: the next one is a cycle from here."""
        self.closed_version = self.around.closed_version = max(self.closed_version, version)
        self.due_time.closed(self.step, self.cycle(now))

    # Failures

    def _lost(self, peer: PeerId, now: float) -> None:
        self.around.fail(peer, now)
        attempt = self.joining.attempt
        if attempt is not None and attempt.leader == peer:
            # The message may be what was lost: say it again before turning to somebody else.
            at = now + self.policy.suspect_s
            self.timers["answer"] = min(at, self.timers.get("answer", at))
        self._without(peer, now)

    def _without(self, peer: PeerId, now: float) -> None:
        if self.gathering is not None:
            self.leading.consider_closing(now)
        for part in list(self.rounds.values()):
            part.lost(peer, now)

    def _leave(self, reason: str, now: float) -> None:
        if self.phase in (Phase.WANTED, Phase.JOINING, Phase.PROMISED):
            self.joining.leave(reason)
            self.joining.idle(now, reason, retry=True)
        self.leading.dissolve(reason)
        self.trains = False

    # Plumbing

    def say(self, to: PeerId, message: Message) -> None:
        if to == self.me:
            self._local.append(message)
        else:
            self._out.append(Send(to, message))

    def withdrawal(self, join: Join) -> said.Withdraw:
        return said.Withdraw(self.fragment, join.join, self.incarnation)

    def emit(self, effect: Effect) -> None:
        self._out.append(effect)

    def event(self, event: str, **fields: Value) -> None:
        self._out.append(Note(event, fields))

    def to(self, phase: Phase) -> None:
        self.phase = phase

    def _take(self, now: float) -> list[Effect]:
        """All effects of this input, after what I said to myself has been heard."""
        while self._local:
            self._receive(self.me, self._local.popleft(), now)
        out = self._out[:]
        self._out.clear()
        return out

    def _remember(self, round_id: bytes, head: Head | None) -> None:
        self._outcomes[round_id] = head
        while len(self._outcomes) > OUTCOMES_MAX:
            self._outcomes.popitem(last=False)

    def _drop(self, part: Participation) -> None:
        if part.id not in self._outcomes:
            self._remember(part.id, part.head)
        del self.rounds[part.id]
        part.forget()

    def cycle(self, now: float) -> int:
        """H_i, from the median step time of the live peers; looked up now and then."""
        if self._interval_at is None or now - self._interval_at > 10.0:
            self._interval_at = now
            self._interval = self.due_time.interval(
                own_s=self.step_time_s, median_s=self.around.median_step_s(self.step_time_s, now)
            )
        return self._interval
