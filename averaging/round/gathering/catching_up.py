"""Catching up with peers that are ahead, and rebasing on the heavier side of a fork.

The part of ``averaging.round.machine`` that compares chains and asks the owner to catch up or to
rebase. Fetching is the owner's, and so is the check of what was fetched.

A head is followed only if it is certified (``averaging.round.opinions.certificates``). A peer that
is shown one that is not asks the other peers where they stand. Where too few are left to certify
anything, as after a partition into many small sides, or to hold the same bits of what is certified,
as when its other holders came back with older states, nobody could ever go on: a peer that was in
vain for ``doubt_s``, and whose own attempts fail, takes the word of one. A peer whose own state is
certified never does: enough others stand with it to go on. So nobody who stops the rounds of others
for long can replace their state. A leader that stands on what too few have signed is passed over.

Two sides of comparable weight are melded by a round that members of both join. It never comes where
the leaders of one side hold those of the other for newcomers, and both could go on for ever. So the
lighter side rebases as well if no meld has come for ``doubt_s`` and some rounds or attempts.

**Sides that cannot judge each other stay apart**, for example two sides of a long partition with
new members each: in a run with probation neither has seen the other's work, so no signature of the
other side counts. Nothing that a peer sees tells such a side from one that a stranger made up, with
as many keys, as much history and as many tokens as it likes, grown out of a true version: neither
time nor numbers nor tokens can decide safely, and whichever rule gave way would give the run away.
The lighter side says so every ``doubt_s`` (``stays_apart``). The run's owner can decide: peers that
it vouches for count for everybody (``averaging.rules.electors``), and where enough of them stand
on one side the other can judge it. Else the people of one side start their peers anew.

A state under which too few have signed is in no round of several lineages
(``averaging.round.gathering.objections``): that of a peer which was alone, or whose partners lost
what they finished with it. A peer whose join is refused asks those that finished its version with
it for their signatures. If there are none to be had, and its joins are refused again, it gives way
to a certified state, however light: nobody else can ever join it. After the time of a round, or as
soon as all members of the round that made it have signed it, it goes back to the version before, if
the others have stayed there. So a final state that too few have signed gives way to a certified
one: no join is left to be refused, so each lower final state that is shown counts as a refusal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from averaging import messages
from averaging.history.lineage import Lineage
from averaging.history.standing import (
    Apart,
    IAmBehind,
    Relation,
    Standing,
    TheyAreBehind,
    Unclear,
    relate,
    tokens_of,
)
from averaging.messages import Head, Link
from averaging.round.gathering.joining import Joining
from averaging.round.interface.effects import CatchUp, Rebase
from averaging.round.interface.phase import Phase
from averaging.round.opinions.certificates import link_of
from averaging.round.opinions.fragment import Fragment
from averaging.round.sealing.doubt import Doubting
from averaging.rules.mixing import RunsEnd, meets
from averaging.rules.policy import RoundPolicy
from averaging.rules.reputation import Ground
from dht.bounded_mapping import BoundedMapping
from dht.identity import PeerId

BEHIND_MAX = 64
FETCH_BASE_S = 30.0
ATTEMPTS_IN_VAIN = 3
"""Own attempts that led to no version before the word of one peer is taken, if nothing else is
heard for ``doubt_s``."""
REFUSALS_MIN = 2
"""Refusals before a peer gives up a state that too few have signed: of its joins, after the first
of which it asks for more signatures, or lower final states that it is shown."""
TRANSFERS_AT_ONCE = 4
"""Transfers that share the line with that of a state: another state, and rounds."""
SLOWEST_LINE_BYTES_S = 125e3
"""A line counts as this fast where nothing is measured, or less: a state has the time that it takes
then, however long."""


def fetch_timeout_s(
    policy: RoundPolicy, size_bytes: int, *, line_bytes_s: float | None = None
) -> float:
    """Time allowed for fetching this many bytes from a peer that says it has them.

    ``line_bytes_s``: measured speed of the own line, if it is known. A slow one takes its time.
    """
    slow_bytes_s = policy.slow_link_bytes_s
    if line_bytes_s is not None:
        slow_bytes_s = min(slow_bytes_s, line_bytes_s)
    transfer_s = TRANSFERS_AT_ONCE * size_bytes / slow_bytes_s
    return min(policy.catch_up_s, FETCH_BASE_S + transfer_s)


def state_timeout_s(
    policy: RoundPolicy, size_bytes: int, *, line_bytes_s: float | None = None
) -> float:
    """Time allowed for fetching a whole state: what the measured line takes for it, or the slowest
    one if it is not measured.

    Pieces that were fetched are of no use once their source has gone on to another version: a limit
    below that time would be met again and again. A source that stalls is left long before.
    """
    line_bytes_s = line_bytes_s or SLOWEST_LINE_BYTES_S
    transfer_s = TRANSFERS_AT_ONCE * size_bytes / max(line_bytes_s, SLOWEST_LINE_BYTES_S)
    return max(fetch_timeout_s(policy, size_bytes, line_bytes_s=line_bytes_s), transfer_s)


@dataclass(frozen=True, slots=True)
class _SeenBehind:
    """A peer on an older version of the own lineage, and when it showed it first and last."""

    lineage: Lineage
    since: float
    last: float


class CatchingUp:
    """One peer as one that may be behind, or on the lighter side of a fork."""

    def __init__(self, fragment: Fragment, joining: Joining, doubting: Doubting) -> None:
        self._fragment = fragment
        self._joining = joining
        self._doubting = doubting
        self._reputation = fragment.peers.reputation
        self._id = fragment.identity
        self._policy = fragment.policy
        self._peers = fragment.peers
        self._certificates = fragment.certificates
        self._hint: tuple[PeerId, Head] | None = None
        """A peer that showed where it stands in the middle of a round."""
        self._source: PeerId | None = None
        self.began_at = 0.0
        """Time at which the last ``CatchUp`` began."""
        self._asked_at = -math.inf
        """Time at which other peers were last asked where they stand."""
        self._unproven_since: float | None = None
        """Time at which a head that is not certified, or cannot be fetched, was first shown."""
        self._apart_since: float | None = None
        """Time at which a side of comparable weight was first met."""
        self._parted = -1
        """The last version that this peer shares with that side."""
        self._rounds_apart = 0
        """Number of own rounds since that side was met, with those that failed."""
        self.attempts_failed = 0
        """Own attempts that led to no version since this peer stands where it does."""
        self._told_apart_at = -math.inf
        """Time at which this peer last said that it stays apart from a side that it cannot judge.
        """
        self.fellows: tuple[PeerId, ...] = ()
        """The members of the round that made the version that this peer stands on, if it was one
        of them."""
        self._behind = BoundedMapping[PeerId, _SeenBehind](
            "peers behind", BEHIND_MAX, worth=self._peers.worth
        )
        """Peers that stand on an older version of this peer's lineage."""
        self._refusals = 0
        """Times that this state was refused, as too few have signed it, since this peer has it."""
        self._refused_at = math.inf
        """The first of these times."""

    def take_hint(self, now: float) -> None:
        """Compare with the peer that showed where it stands in the middle of a round."""
        hint, self._hint = self._hint, None
        if hint is not None:
            self.compare(hint[0], hint[1], now)

    def compare(
        self, source: PeerId, theirs: Head, now: float, *, knows: Lineage | None = None
    ) -> None:
        """A peer shows where it stands: catch up, rebase, or tell it that it should.

        ``knows``: a lineage that it has found in its chain, of which a message shows some links.
        The fetched state must have it there as well.
        """
        fragment, standing = self._fragment, self._fragment.standing
        if standing is None or source == self._id.me:
            return
        if fragment.phase in (Phase.ENTERED, Phase.FOLDING):
            self._hint = (source, theirs)
            return
        if fragment.phase is Phase.CATCHING:
            return
        if not self._reputation.may_ask(source, now):
            fragment.count("doubted_source")
            return
        mine = standing.head()
        young = self._peers.young_versions
        relation = relate(mine, standing.chain, theirs, young_versions=young)
        if isinstance(relation, Unclear):
            self._fragment.show_standing(source)
            return
        if isinstance(relation, Apart) and relation.founded_apart:
            self._founded_apart(source, mine, relation, theirs)
            return
        is_told = knows == mine.lineage
        if is_told and isinstance(relation, Apart) and not relation.they_are_light:
            relation = IAmBehind()
        self._see_behind(source, theirs, relation, now)
        end = fragment.ending.end(now)
        if isinstance(relation, Apart) and end is not None and end.settles(mine, theirs):
            self._settle_final_state(source, mine, relation, theirs, end, now)
            return
        if isinstance(relation, Apart):
            self._meet(relation, now)
            if self._gives_way_unproven(theirs, now):
                self._go(source, theirs, now, apart=relation, gives_way=True)
                return
        if isinstance(relation, TheyAreBehind) and self._goes_back(theirs, now):
            back = Apart(theirs.version, tokens_of(mine) - tokens_of(theirs), 0)
            self._go(source, theirs, now, apart=back, gives_way=True)
            return
        splits = not fragment.ending.closed_ranks and self._peers.has_several_groups(now)
        # Whoever tells lets nobody join from there: peers differ in who counts.
        parted = isinstance(relation, Apart) and self._is_long_apart(now)
        may_meet = splits and not is_told and not parted and self._doubting.doubt is None
        if may_meet and meets(relation, mine, theirs):
            return
        match relation:
            case IAmBehind():
                self._go(source, theirs, now)
            case Apart() as apart if apart.i_am_light:
                self._go(source, theirs, now, apart=apart)
            case Apart() as apart if apart.they_are_light:
                self._fragment.show_standing(source)
            case Apart() as apart if self._gives_way_unmixed(mine, theirs, apart, now):
                self._go(source, theirs, now, apart=apart)
            case TheyAreBehind():
                fragment.tell_behind(source, theirs.lineage)

    def _founded_apart(self, source: PeerId, mine: Head, relation: Apart, theirs: Head) -> None:
        """Two peers have states of different foundings: both are told, and neither is averaged.

        Which side gives way is decided for all fragments at once, by the owner of the averager.
        """
        told = {"mine": relation.mine, "theirs": relation.theirs}
        self._fragment.note("founded_apart", peer=source, **told)
        # Only the heavier side answers, so that two peers do not answer each other for ever.
        if (relation.mine, mine.lineage) >= (relation.theirs, theirs.lineage):
            self._fragment.show_standing(source)

    def _settle_final_state(
        self,
        source: PeerId,
        mine: Head,
        relation: Apart,
        theirs: Head,
        end: RunsEnd,
        now: float,
    ) -> None:
        """One of two peers takes the other's state, which is final.

        Nobody can take a state that too few have signed, though it outranks the others: whoever
        shows a lower one has refused it.
        """
        outranks = not end.gives_way(mine, theirs)
        if outranks and not self._has_enough_signatures(now):
            self._count_refusal(now)
        if outranks and not self._gives_up_for(theirs, now):
            self._fragment.show_standing(source)
        else:
            self._go(source, theirs, now, apart=relation, gives_way=outranks)

    # Certificates

    def attempt_failed(self) -> None:
        """An own attempt to get into a round led to no version."""
        self.attempts_failed += 1
        self._rounds_apart += 1

    def stands(self) -> None:
        """This peer stands on another version now."""
        self._unproven_since = None
        self.attempts_failed = 0
        self._behind.clear()
        self._rounds_apart += 1
        self._refusals = 0
        self._refused_at = math.inf
        self._certificates.shows_all = False
        self.fellows = ()

    def may_continue(self, parent: Link, now: float) -> bool:
        """True if this peer may be in a round that continues this link of other members."""
        return self._certificates.holds(parent, now, by_one=self._is_stuck(now))

    def met_unproven(self, now: float) -> None:
        """Note that too few have signed, or still hold, the state of another peer."""
        if self._unproven_since is None:
            self._unproven_since = now

    def refused(self, now: float, reason: str) -> None:
        """A leader refused this peer's join: it may not know the state that this peer stands on.

        One that is about to fetch it refuses as well, which says nothing against it.
        """
        self._certificates.shows_all = True
        if reason == messages.UNPROVEN:
            self._count_refusal(now)

    def _count_refusal(self, now: float) -> None:
        self._refusals += 1
        self._refused_at = min(now, self._refused_at)

    def ask_for_signatures(self, now: float) -> None:
        """Ask those that finished this peer's version with it: a join of it was refused."""
        standing = self._fragment.standing
        if standing is None or self._certificates.is_proven(now):
            return
        others = [peer for peer in self.fellows if peer != self._id.me]
        self._fragment.note("asks_for_signatures", peers=len(others))
        for peer in others:
            self._fragment.show_standing(peer)

    def _gives_way_unproven(self, theirs: Head, now: float) -> bool:
        """True if no round takes this peer's state in, and the other one is certified."""
        if self._refusals < REFUSALS_MIN or self._certificates.is_proven(now):
            return False
        return self._certificates.is_certified(link_of(theirs), now)

    def _see_behind(self, peer: PeerId, theirs: Head, relation: Relation, now: float) -> None:
        """Remember since when a peer has shown one older version, and no other standing."""
        if not isinstance(relation, TheyAreBehind):
            self._behind.pop(peer, None)
            return
        seen = self._behind.get(peer)
        since = now if seen is None or seen.lineage != theirs.lineage else seen.since
        self._behind[peer] = _SeenBehind(theirs.lineage, since, now)

    def _is_left_alone(self, theirs: Head, now: float) -> bool:
        """True if most of those that count have stayed on a version before this peer's for long.

        So it is with a certified version whose only other holder is a liar that serves other bits,
        where the others cannot replay the round that made it: this peer has lost its payload, or
        the round was a meld. The sides of a meld may have stayed on two versions. This peer goes
        back to its own.
        """
        if self.attempts_failed < ATTEMPTS_IN_VAIN or self._peers.has_several_groups(now):
            return False  # among several groups peers join from older versions
        link = link_of(theirs)
        has_left = self._certificates.has_left(link)
        electorate, doubt_s = self._peers.electorate(now), self._policy.doubt_s
        stay = [
            peer
            for peer, seen in self._behind.items()
            if peer in electorate
            and (has_left or seen.lineage == theirs.lineage)
            and seen.last - seen.since >= doubt_s
            and now - seen.last < doubt_s
        ]
        may_go = has_left or self._certificates.is_certified(link, now)
        return 2 * len(stay) > len(electorate) and may_go

    def _goes_back(self, theirs: Head, now: float) -> bool:
        """True if others have not come to this peer's version in the time that a round may take.

        They gave the round up that made it, and where the quorum is all they cannot go on without
        this peer; or they cannot fetch it.
        """
        return self._is_left_alone(theirs, now) or self._gives_up_for(theirs, now)

    def _gives_up_for(self, theirs: Head, now: float) -> bool:
        """True if too few have signed this peer's state, others have refused it for as long as a
        round may take or nobody is left to sign it, and the other one is certified."""
        waited = now - self._refused_at >= self._policy.round_s or self._have_all_finished()
        if not waited or self._refusals < REFUSALS_MIN or self._has_enough_signatures(now):
            return False
        return self._certificates.is_certified(link_of(theirs), now)

    def _has_enough_signatures(self, now: float) -> bool:
        """True if this peer's state is certified here, or others can be shown enough."""
        certificates, mine = self._certificates, link_of(self._fragment.here.head())
        return certificates.is_certifiable(now) or certificates.is_certified(mine, now)

    def _have_all_finished(self) -> bool:
        """True if all members of the round that made this peer's version have signed it."""
        standing = self._certificates.standing
        if standing is None or not self.fellows:
            return False
        signers = self._certificates.signers(link_of(standing.head()))
        return set(self.fellows) <= {self._id.me, *signers}

    def sign_for(self, source: PeerId, theirs: Head, now: float) -> None:
        """Show a peer on the same link the signatures that it lacks, this one's among them."""
        standing = self._fragment.standing
        signers = [peer for peer, _ in theirs.signatures]
        if source == self._id.me or standing is None or theirs.lineage != standing.lineage:
            return  # a sender under this peer's name gets no answer
        if self._id.me in signers or len(signers) >= self._certificates.parent_needed(now):
            return
        self._fragment.show_standing(source)

    def may_take(self, link: Link, now: float) -> bool:
        """True if this peer may take the state at this link."""
        certificates = self._certificates
        certified = certificates.is_certified(link, now, by_one=self._is_stuck(now))
        return certified or certificates.has_left(link)

    def holders_min(self, now: float) -> int:
        """Number of peers that count and must hold the same bits of a state that is fetched."""
        return 1 if self._is_stuck(now) else self._certificates.holders_min(now)

    def _is_stuck(self, now: float) -> bool:
        since = self._unproven_since
        waited = since is not None and now - since >= self._policy.doubt_s
        in_vain = waited and self.attempts_failed >= ATTEMPTS_IN_VAIN
        return in_vain and not self._certificates.is_certifiable(now)

    def _gives_way_unmixed(self, mine: Head, theirs: Head, apart: Apart, now: float) -> bool:
        """True if no round melds the two sides, as it seems, and this one is the lighter."""
        lighter = (apart.mine, mine.lineage) < (apart.theirs, theirs.lineage)
        return lighter and self._is_long_apart(now)

    def _is_long_apart(self, now: float) -> bool:
        since = self._apart_since
        waited = since is not None and now - since >= self._policy.doubt_s
        return waited and self._rounds_apart >= ATTEMPTS_IN_VAIN

    def _meet(self, apart: Apart, now: float) -> None:
        """Another side is met: count the time and the rounds since it was met first."""
        self._certificates.shows_all = True
        parted = apart.ancestor if apart.ancestor is not None else -1
        if self._apart_since is None or parted > self._parted:
            self._apart_since, self._parted, self._rounds_apart = now, parted, 0

    def _stays_apart(self, source: PeerId, apart: Apart, now: float) -> None:
        """Say that this peer cannot judge the heavier side, after a while and now and then."""
        if self._is_long_apart(now) and now - self._told_apart_at >= self._policy.doubt_s:
            self._told_apart_at = now
            tokens = {"mine": apart.mine, "theirs": apart.theirs}
            self._fragment.note("stays_apart", peer=source, **tokens)

    def _uncertified(self, source: PeerId, now: float) -> None:
        """Ask others about a head that too few have signed."""
        self.met_unproven(now)
        self._fragment.count("uncertified_head")
        if now - self._asked_at < self._policy.resend_s:
            return
        self._asked_at = now
        for peer in sorted(self._peers.electorate(now) - {source})[: messages.ROSTER_MAX]:
            self._fragment.show_standing(peer)

    # Going there

    def _go(
        self,
        source: PeerId,
        theirs: Head,
        now: float,
        *,
        apart: Apart | None = None,
        gives_way: bool = False,
    ) -> None:
        """Go to where another peer stands. ``apart``: this one is not behind it."""
        if not self.may_take(link_of(theirs), now):
            if apart is not None:
                self._stays_apart(source, apart, now)
            self._uncertified(source, now)
            return
        effect = CatchUp(source, theirs.version, theirs.lineage)
        if apart is None:
            self._joining.abandon("behind")
            self._fragment.note("behind", source=source, version=theirs.version)
        else:
            follow = self._others_follow(now)
            effect = Rebase(source, theirs.version, theirs.lineage, follow, gives_way)
            self._joining.abandon("apart")
            self._fragment.note("rebase", source=source, mine=apart.mine, theirs=apart.theirs)
        self._begin(effect, now)

    def _others_follow(self, now: float) -> bool:
        """True if other peers go on with what was merged on this side since the ancestor.

        They do when it was merged in rounds of several groups. The same holds where a partition
        has left one group of several: a peer on this side may be in a meld before it rebases.
        """
        was_one_of_several = self._certificates.among_groups_at is not None
        return was_one_of_several or self._peers.has_several_groups(now)

    def _begin(self, effect: CatchUp, now: float) -> None:
        self._source = effect.source
        self.began_at = now
        # The owner has limits of its own. On a slow line it fetches one state after the other.
        states_bytes = self._policy.due.fragments * 2 * self._id.encoded_bytes("f32")
        line_bytes_s = self._peers.bytes_per_s
        limit_s = state_timeout_s(self._policy, states_bytes, line_bytes_s=line_bytes_s)
        deadline = now + max(self._policy.catch_up_s, limit_s)
        self._fragment.goes_to(Phase.CATCHING, until=deadline)
        self._fragment.emit(effect)

    def ended(self, standing: Standing | None, held_s: float | None, now: float) -> PeerId | None:
        """``CatchUp`` is done, or has failed: remember it of its source.

        Returns the source if it is to be shown where this peer stands afterwards. One that
        delivered is asked so whether it has gone on meanwhile: else a peer that caught up over a
        slow line would learn that it is behind again only when it is due. One that did not sees
        where this peer stays, but for several groups, in which it joins from there.
        """
        source, self._source = self._source, None
        if source is None:
            return None
        if standing is not None:
            self._apart_since = None
            self._reputation.forgive(source, Ground.STATES)
            return source
        self.met_unproven(now)
        # It may have lied about what it has: ask others before it is believed again.
        waited_s = now - self.began_at if held_s is None else held_s
        self._reputation.wasted(source, held_s=waited_s, now=now)
        stays = self._fragment.standing is not None and not self._peers.has_several_groups(now)
        return source if stays else None
