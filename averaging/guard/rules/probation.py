"""Probation: newcomers work before they count.

In a run that anybody may join, a peer counts once this peer has seen it work: it was a contributor
of ``rounds`` merges over ``seconds``. It is then *established* for this peer. Until then it is *on
probation*: it contributes with a bounded share (``averaging.rules.weights``), and neither leads,
reduces nor votes, and no majority, group or quorum counts it.

**Relative to those who have worked the most.** A fixed threshold would stop a young swarm, and one
that only newcomers are left of. So nobody has to have merged more than half as often, or for more
than half as long, as the live peer that has done so the most, this peer included. While nobody has
merged anything all peers count, and a swarm starts as if there were no probation. When the founder
leaves, the newcomers that have worked the most are the measure of the others. Keys that never
contribute to a merge fall behind with the first merges and never count. This peer's own work keeps
the measure up when its links to the others fail, so cutting it off does not promote newcomers.

**Views differ**, so the leader of a round names the voters, and a member checks (``objection``)
that a majority of them have done at least half of what it asks for, and that a majority of the
members that it is sure of are among them. The first keeps newcomers from deciding, the second a
leader from choosing its judges. A voter counts itself, whatever it has seen of its own work: one
that came back declined every round of two otherwise, as it alone had forgotten that it had worked.
A peer that came late is sure of nobody before it has seen them work twice as long as required.

**Unseen work.** A peer that comes to an old swarm, restarts or was away holds those for established
that have the most tokens in the states that it takes: it relies on these states for more than that.
The measure is the second most, because a founder may have trained alone for any time.
A peer that has seen most of the run, and came while the swarm was young, holds those for
established that it had met by its first merge, because a partition may cut a swarm in two that have
hardly worked together, or not at all yet.
Either holds for a peer until it misses ``rounds`` merges in a row that it was here for.

**How long.** In the simulator (three old members, five keys that come at once, 22 November 2026,
``probation_experiment.py`` of commit 19e8096b) the swarm made 20 to 22 versions with
0 to 16 rounds of probation, also when all old members left: it costs a swarm no pace. It costs
honest newcomers weight meanwhile (a share of 0.25 and not 0.6), and five keys a majority of the
votes after 0, 3, 5 and 9 rounds of work with 0, 2, 4 and 8 rounds asked. So a run's default is as
long as people accept: 64 merges, under three cycles of 24 fragments, over ten minutes.

**Without probation** all count but those with too many strikes, as long as these are fewer than
half of the live peers: of two liars that take turns in withholding what they merged, each version
had one among its reducers, and a swarm of seven made none in 400 s. A member may be named as one of
them as long as half of the others vote. It contributes as a newcomer does. So does a restarted peer
in its first rounds (``averaging.round.opinions.neighbourhood``).

Not stopped: a patient attacker that does honest work under many keys, and one that is among the
first peers of a young swarm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Final

from averaging.messages import Commit
from averaging.rules.electors import SEEN_MAX, SLACK, Electors, RequiredWork
from averaging.rules.policy import ProbationPolicy
from averaging.rules.reputation import Reputation
from dht.bounded_mapping import BoundedMapping
from dht.identity import PeerId

RELATIVE: Final = 0.5
"""Share of the most that any live peer has done which is enough, whatever the policy asks for."""

YOUNG_ROUNDS: Final = 4
"""While no live peer is known to have merged so often, all count."""

CREDIT: Final = 0.25
"""Share of the second most tokens of a live peer, in the state that this peer began with, that is
enough to be established: peers work at different speeds."""

SURE: Final = 1.5
"""Multiple of the relative threshold above which honest peers agree, if they saw all of a run."""

PATIENCE_MERGES: Final = 64
"""Merges without a peer that one merge with its work is worth: it is remembered for so many more.
A newcomer at work then takes the place of one that has gone, and of none that worked for long:
4096 keys that come and go make nobody forget the founders of a run."""


@dataclass(slots=True)
class _Work:
    """The merges of one peer that this peer saw."""

    since: float
    rounds: int = 0
    founding: bool = False
    """True if it was here when this peer saw its first merge, in a young swarm."""
    missed: int = 0
    """Merges without it in a row that it was here for."""
    last: int = 0
    """Number of merges that this peer had seen when it saw the last one of them."""


@dataclass(eq=False, repr=False)
class Probation(Electors):
    """Record of the work of all peers of a run that one of them has seen, its own included.

    All fragments of a peer share one. Times are on the peer's own clock.
    """

    policy: ProbationPolicy
    _: KW_ONLY
    trusted: Callable[[PeerId], bool] = lambda peer: False
    """Peers that the owner of the run vouches for, established at any time."""
    reputation: Reputation = field(default_factory=Reputation)
    """Peers without power there are on probation, whatever they have done."""
    _versions_unseen: int = 0
    """Number of versions that this peer did not see made, in states that it took."""
    _rounds_unseen: float = 0.0
    """Number of them that several peers have made, about."""
    _tokens_unseen: BoundedMapping[PeerId, int] = field(
        default_factory=lambda: BoundedMapping(
            "tokens in states", SEEN_MAX, worth=lambda _, tokens: tokens
        )
    )
    """The tokens of each peer in those states, by the fragment in which it had the most."""
    _rounds_seen: int = 0
    _seen: BoundedMapping[PeerId, _Work] = field(init=False)
    _tokens_most: int = 1
    """Most tokens of any peer in those states."""

    def __post_init__(self) -> None:
        self._seen = BoundedMapping("work seen", SEEN_MAX, worth=self._worth)

    @property
    def is_on(self) -> bool:
        return self.policy.rounds > 0

    def counts_all_at(self, now: float) -> bool:
        """True if no peer is on probation now."""
        return not self.is_on and self.reputation.all_have_power(now)

    @property
    def saw_most(self) -> bool:
        """True if this peer has seen most of the run's merges."""
        return self._rounds_unseen <= self._rounds_seen

    def took_state(self, versions: int, tokens: Mapping[PeerId, int]) -> None:
        """This peer took a state that is so many versions on, with so many tokens of each peer.

        A version that a peer made alone is no merge, and the more of the tokens one peer has, the
        more versions it made so. It does not count them either: a founder that worked alone for
        long holds its swarm for young, and a newcomer that did not would decline all its commits.
        """
        most = max(tokens.values(), default=0)
        if most > 0:
            shared = min(1.0, (sum(tokens.values()) - most) / most)
            self._versions_unseen += max(0, versions)
            self._rounds_unseen += shared * max(0, versions)
        for peer, count in sorted(tokens.items(), key=lambda item: (item[1], item[0])):
            self._tokens_unseen[peer] = max(count, self._tokens_unseen.get(peer, 0))
        self._tokens_most = max(self._tokens_most, most)

    def saw_merged(
        self,
        contributors: Iterable[PeerId],
        live: Iterable[PeerId],
        now: float,
        *,
        met: Iterable[PeerId] = (),
    ) -> None:
        """A round was merged with the work of these peers, while those were live, too."""
        worked, live = set(contributors), set(live)
        if not self._rounds_seen and self._rounds_unseen < YOUNG_ROUNDS:
            for peer in sorted({*worked, *live, *met}):
                self._seen[peer] = _Work(now, founding=True)
        self._rounds_seen += 1
        for peer in sorted(worked | live):
            work = self._seen.get(peer)
            if work is None:
                if peer not in worked and peer not in self._tokens_unseen:
                    continue
                work = _Work(now)
            if peer in worked:
                work.rounds, work.missed, work.last = work.rounds + 1, 0, self._rounds_seen
            else:
                work.missed += 1
            if peer not in self._seen:  # thousands of peers are there again and again
                self._seen[peer] = work

    def worth(self, peer: PeerId) -> float:
        """How much a peer's work counts when there is no place for what is known of all peers.

        It is the number of merges seen at which the peer is forgotten.
        """
        if self.trusted(peer):
            return math.inf
        return self._worth(peer, self._seen.get(peer, _Work(0.0)))

    def _worth(self, peer: PeerId, work: _Work) -> float:
        rounds = work.rounds + (YOUNG_ROUNDS if work.founding else 0)
        unseen = self._versions_unseen * self._tokens_unseen.get(peer, 0) / self._tokens_most
        return work.last + PATIENCE_MERGES * (rounds + unseen)

    def required_work(self, live: Iterable[PeerId], now: float) -> RequiredWork:
        """Return the work that establishes a peer while these are live."""
        if not self.is_on:
            pardons = not self.reputation.all_have_power(now) and self._pardons(set(live), now)
            return RequiredWork(0.0, 0.0, pardons=pardons)
        live, policy = set(live), self.policy
        *_, second, tokens = 0, 0, *sorted(self._tokens_unseen.get(peer, 0) for peer in live)
        # The peer with the most tokens was in all unseen merges, the others in as large a share.
        before = min(self._versions_unseen * tokens / self._tokens_most, self._rounds_unseen)
        known = [work for peer in live if (work := self._seen.get(peer)) is not None]
        seen = max((work.rounds for work in known), default=0)
        if before + seen < YOUNG_ROUNDS:
            return RequiredWork(0.0, 0.0)
        rounds = min(policy.rounds, RELATIVE * (before + seen))
        seconds = policy.seconds * rounds / policy.rounds
        if seen:  # the unseen merges took as long as those that were seen
            age = max(now - work.since for work in known)
            seconds = min(policy.seconds, RELATIVE * age * (1 + before / seen))
        return RequiredWork(rounds, seconds, CREDIT * (second or tokens))

    def progress(self, peer: PeerId, required: RequiredWork, now: float) -> float:
        """Return how much of the required work this peer has done; 1 or more: it is established."""
        if self.trusted(peer):
            return math.inf
        work, tokens = self._seen.get(peer), self._tokens_unseen.get(peer, 0)
        if work is None and not tokens and required.rounds > 0:
            return 0.0  # first: each message of a round asks it of all keys in view
        if self.is_struck(peer, now) and not required.pardons:
            return 0.0
        if not self.is_on:
            return math.inf
        missed = work.missed if work is not None else 0
        if missed <= self.policy.rounds:
            has_credit = 0.0 < required.tokens <= tokens
            if has_credit or (work is not None and work.founding and self.saw_most):
                return math.inf
        if work is None:
            return required.progress(0, 0.0)
        return required.progress(work.rounds, now - work.since)

    def is_struck(self, peer: PeerId, now: float) -> bool:
        """True if a peer has too many strikes here."""
        return not self.reputation.has_power(peer, now)

    def _pardons(self, live: set[PeerId], now: float) -> bool:
        return 2 * sum(self.is_struck(peer, now) for peer in live) >= len(live)

    def _is_sure_of(self, peer: PeerId, required: RequiredWork, now: float) -> bool:
        """True if no honest peer that has seen as much can hold this one to be on probation."""
        work = self._seen.get(peer)
        if work is None:
            return False
        policy, seconds = self.policy, now - work.since
        if work.rounds >= 2 * policy.rounds and seconds >= 2 * policy.seconds:
            return True
        enough = required.rounds > 0 and required.progress(work.rounds, seconds) >= SURE
        return self.saw_most and enough

    def objection(
        self, commit: Commit, required: RequiredWork, now: float, *, me: PeerId
    ) -> str | None:
        """Return the reason not to enter a round with these voters; ``None`` if there is none."""
        if not self.is_on:
            if 2 * len(commit.voters) < len(commit.members):
                return f"{len(commit.voters)} of its {len(commit.members)} members are its voters"
            return None
        voters = [commit.members[index].peer for index in commit.voters]
        worked = sum(peer == me or self.progress(peer, required, now) >= SLACK for peer in voters)
        if worked < commit.majority:
            return f"{worked} of its {len(voters)} voters have worked; a majority is needed"
        sure = [
            entry.peer for entry in commit.members if self._is_sure_of(entry.peer, required, now)
        ]
        named = len(set(sure) & set(voters))
        # Half is enough: where this peer has seen only two at work, and a fork hid the work of one
        # from the others, each would decline every commit of the other.
        if 2 * named < len(sure):
            return f"{named} of {len(sure)} established members are its voters"
        return None
