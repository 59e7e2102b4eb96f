"""The peers around one peer, as it sees them: which are live, which count, which have failed.

These are opinions: two peers may see different things, and the round is correct all the same. The
owner keeps ``view`` up to date. Failures that this peer noticed itself are kept here; it is the
one object that the parts of a machine share, and each of them may add to it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from statistics import median
from typing import Protocol

from averaging.history.merged_map import MergedMap
from averaging.messages import ROSTER_MAX, Commit, Entry, Join
from averaging.round.interface.identity import Circumstances, Identity
from averaging.rules.electors import SEEN_MAX, SLACK, Electors, RequiredWork
from averaging.rules.grouping import group_of, smallest_group
from averaging.rules.mixing import MELD_LAG
from averaging.rules.peer_view import SILENCE_MAX_S, PeerView
from averaging.rules.plausible import overstated
from averaging.rules.reputation import Reputation
from dht.bounded_mapping import BoundedMapping
from dht.identity import PeerId

FAILED_MAX = 256
"""Failed peers that are remembered; beyond it those are forgotten that have worked the least."""

GONE_S = 10.0
"""A peer that was out of reach for longer may have merged without this one meanwhile."""

BACK_MAX = 2
"""Peers that are back and are asked at once where they stand: of a side of a partition that has
healed one is enough."""

LASTING_ROUNDS = 16
"""Most rounds without a part at the beginning of a life. They double with each life that ends
before it was in this many times as many merged rounds, and are one again after a longer one."""


class Crowd(Protocol):
    """A table of all peers at once, this one included, that answers questions about all of them.

    A simulation of thousands of peers shares one table among them, and evaluates it once.
    """

    def trainers(self, now: float) -> tuple[PeerId, ...]:
        """Live peers that train, sorted."""
        ...

    def electorate(self, now: float) -> frozenset[PeerId]:
        """Those of them that have been live for a while."""
        ...

    def median_step_s(self, now: float) -> float: ...

    def sites(self, now: float) -> Mapping[PeerId, str]:
        """The sites of the peers that named one."""
        ...


@dataclass(slots=True)
class _Life:
    """One life of another peer, as far as it was in merged rounds with this one."""

    incarnation: int
    without_part: int = 0
    """Number of rounds, its first ones, in which it has no part that others need."""
    rounds: int = 0
    """Number of merged rounds that it has been in."""

    @property
    def has_part(self) -> bool:
        return self.rounds >= self.without_part

    @property
    def without_part_next(self) -> int:
        """The number for the peer's next life."""
        lasted = self.rounds >= LASTING_ROUNDS * max(1, self.without_part)
        return 1 if lasted else min(LASTING_ROUNDS, max(1, 2 * self.without_part))


class Neighbourhood:
    """The peers that may take part in rounds of one fragment, as one peer sees them."""

    def __init__(
        self,
        identity: Identity,
        circumstances: Circumstances,
        view: Mapping[PeerId, PeerView],
        *,
        now: float,
        electors: Electors | None = None,
    ) -> None:
        self._id = identity
        self._absent = circumstances.absent
        self._began_at = now
        self.electors = electors or Electors(identity.policy.reputation())
        """The electors, with the others' reputation; all fragments of a peer share one."""
        self._required: tuple[float, RequiredWork] | None = None
        """Cache of ``required_work``, as of one moment."""
        self._policy = identity.policy
        self._merged_at = BoundedMapping[PeerId, float]("last merges", SEEN_MAX, worth=self.worth)
        """Time at which this peer last saw work of each other one merged, in this fragment."""
        self._lives = BoundedMapping[PeerId, _Life]("lives", SEEN_MAX, worth=self.worth)
        """The life of each peer in the last merged round with this one, else the first one that
        was in a round with it."""
        self.view = view
        self.group_size = identity.policy.group_size
        self.trains = circumstances.trains
        self.reachable = circumstances.reachable
        self.bytes_per_s = circumstances.bytes_per_s
        """Speed of this peer's line, as its record says it; 0: not known."""
        self.crowd: Crowd | None = None
        """Used instead of ``view`` for questions about all peers."""
        self.closed_version = 0
        """The newest version of which a roster closed, as far as this peer heard."""
        self.failed = BoundedMapping[PeerId, float]("failed peers", FAILED_MAX, worth=self.worth)
        """Peers whose last call failed, and when."""
        self._back: deque[PeerId] = deque(maxlen=BACK_MAX)

    @property
    def reputation(self) -> Reputation:
        return self.electors.reputation

    def worth(self, peer: PeerId, value: object = None) -> float:
        """How much a peer's work counts here when there is no place for what is known of all."""
        return self.electors.worth(peer)

    def mark_heard(self, peer: PeerId, now: float) -> None:
        failed_at = self.failed.pop(peer, None)
        if failed_at is not None and now - failed_at >= GONE_S:
            self._back.append(peer)

    def mark_failed(self, peer: PeerId, now: float) -> None:
        self.failed.renew(peer, now)

    def drop_outdated_failures(self) -> None:
        """A peer of which the owner's view has heard since its failure is back."""
        for peer, failed_at in list(self.failed.items()):
            seen = self.view.get(peer)
            if seen is not None and seen.heard_at > failed_at:
                del self.failed[peer]
                if seen.heard_at - failed_at >= GONE_S:
                    self._back.append(peer)

    def back(self) -> tuple[PeerId, ...]:
        """Return peers that were gone and are back since this was asked last: some of them."""
        self.drop_outdated_failures()
        back = tuple(self._back)
        self._back.clear()
        return back

    def has_failed(self, peer: PeerId) -> bool:
        return peer in self.failed

    def is_down(self, peer: PeerId, now: float) -> bool:
        """Failed, and not heard for so long that another peer may take its place."""
        failed_at = self.failed.get(peer)
        return failed_at is not None and now - failed_at >= self._policy.suspect_s

    def is_gone(self, peer: PeerId, now: float) -> bool:
        """True if a peer has fallen silent for so long that it is not live, or has left.

        A broken link alone does not say so: it may come back in a moment.
        """
        seen = self.view.get(peer)
        return peer != self._id.me and (seen is None or not seen.is_live(now))

    def is_deserted(
        self, commit: Commit, now: float, declined: frozenset[int] = frozenset()
    ) -> bool:
        """True if so many voters of a roster are gone that no ballot of the others can succeed.

        Those that have declined never vote: they may have been restarted. Not if this peer is
        alone: it has nobody to merge with instead, and may as well wait.
        """
        voters = set(commit.voters).difference(declined)
        left = sum(not self.is_gone(commit.members[index].peer, now) for index in voters)
        return left < commit.majority and len(self.trainers(now)) > 1

    def is_live(self, peer: PeerId, now: float) -> bool:
        if peer == self._id.me:
            return True
        seen = self.view.get(peer)
        return seen is not None and seen.is_live(now) and peer not in self.failed

    def is_established(self, peer: PeerId, now: float) -> bool:
        """True if a peer counts for this one (``averaging.rules.electors``)."""
        electors = self.electors
        if electors.counts_all_at(now):
            return True
        return electors.progress(peer, self.required_work(now), now) >= 1.0

    def required_work(self, now: float) -> RequiredWork:
        """Return the work that a peer must have done now to count."""
        if self._required is None or self._required[0] != now:
            self._required = now, self.electors.required_work(self._all_live(now), now)
        return self._required[1]

    def _all_live(self, now: float) -> list[PeerId]:
        return [self._id.me, *(peer for peer in self.view if self.is_live(peer, now))]

    def took_state(self, versions: int, tokens: Mapping[PeerId, int]) -> None:
        """This peer took a state that is so many versions on, with so many tokens of each peer."""
        self.electors.took_state(versions, tokens)
        self._required = None

    def met(self, members: Iterable[Entry]) -> None:
        """This peer is in a round with these members."""
        for entry in members:
            self._lives.setdefault(entry.peer, _Life(entry.incarnation))

    def finished_with(self, members: Iterable[Entry]) -> None:
        """A round of these members was merged, with the work of each or without it.

        A member on probation has less time for its upload than others. Were it to stay there until
        its work is merged, one restart could keep one on a slow line out of all later rounds.
        """
        for entry in members:
            life = self._lives.setdefault(entry.peer, _Life(entry.incarnation))
            if life.incarnation != entry.incarnation:
                life = self._lives[entry.peer] = _Life(entry.incarnation, life.without_part_next)
            life.rounds += 1

    def saw_merged(self, contributors: Iterable[PeerId], now: float) -> None:
        """A round was merged with the work of these peers."""
        contributors = tuple(contributors)
        for peer in contributors:
            self._merged_at[peer] = now
        # Where all count it does not matter who missed a merge, and there may be thousands.
        live = () if self.electors.counts_all_at(now) else self._all_live(now)
        may_train_on = (peer for peer, at in self._absent.items() if at is not None)
        self.electors.saw_merged(contributors, live, now, met=chain(self.view, may_train_on))
        self._required = None

    def overstates(
        self, peer: PeerId, steps: int, median_step_s: float, now: float, *, slack: float = 1.0
    ) -> str | None:
        """The reason why this peer cannot have made so many steps since its last merged
        contribution."""
        seen = self.view.get(peer)
        since = self._merged_at.get(peer, seen.first_seen if seen is not None else None)
        if since is None or peer == self._id.me:
            return None
        return overstated(steps, seen_s=now - since, median_step_s=median_step_s, slack=slack)

    def newcomers(self, peers: Iterable[PeerId], now: float) -> set[PeerId]:
        """The peers among these that are on probation."""
        if self.electors.counts_all_at(now):
            return set()
        return {peer for peer in peers if not self.is_established(peer, now)}

    def on_probation(self, joined: Mapping[PeerId, Join], now: float) -> set[PeerId]:
        """The peers among these that do not count in a round."""
        newcomers = self.newcomers(joined, now)
        return newcomers | self._restarted(joined, newcomers)

    def _restarted(self, joined: Mapping[PeerId, Join], newcomers: set[PeerId]) -> set[PeerId]:
        """The peers that were restarted, and in too few merged rounds with this one since.

        What a machine has of a round is lost with its process: its vote, the slices that it
        reduces, as nobody else has its own uploads of them, and what auditors of these ask for. One
        that was killed after each seal cost the others half of their versions, for all attempts at
        a version have the same reducers. So the first round of each life has it like a newcomer,
        without a part in the round that others need. One that merged falsely, and was restarted
        each time before it was audited, had up to 18 such rounds of 59 and was never convicted: so
        a peer that comes back again and again has more rounds like the first one in each life. Not
        where so many were restarted, as after a power cut, that half of the members would not vote;
        nor where lineages meet, as none of the others may stand where such a member does.
        """
        if len({join.head.lineage for join in joined.values()}) > 1:
            return set()
        found = {
            peer
            for peer, join in joined.items()
            if peer not in newcomers
            and peer != self._id.me
            and self._is_new(peer, join.incarnation)
        }
        return found if 2 * (len(newcomers) + len(found)) < len(joined) else set()

    def _is_new(self, peer: PeerId, incarnation: int) -> bool:
        life = self._lives.get(peer)
        return life is not None and not (life.incarnation == incarnation and life.has_part)

    def to_call(self, group: Iterable[PeerId], now: float) -> list[PeerId]:
        """Newcomers that may join a group's round. Among several groups they come by themselves."""
        if self.electors.counts_all_at(now) or self.has_several_groups(now):
            return []
        known = set(group)
        return [
            peer
            for peer, seen in sorted(self.view.items())
            if peer not in known and seen.trains and self.is_live(peer, now)
        ][:ROSTER_MAX]

    def group(self, peer: PeerId, version: int, now: float) -> tuple[PeerId, ...]:
        """The established peers that a peer may meet in a round, and itself."""
        return group_of(
            peer,
            self.trainers(now),
            size=self.group_size,
            fragment=self._id.fragment,
            version=self.epoch(version, now),
            sites=self._sites(now),
        )

    def _sites(self, now: float) -> Mapping[PeerId, str]:
        if self.crowd is not None:
            return self.crowd.sites(now)
        sites = {peer: seen.site for peer, seen in self.view.items() if seen.site is not None}
        if self._id.site is not None:
            sites[self._id.me] = self._id.site
        return sites

    def trainers(self, now: float) -> tuple[PeerId, ...]:
        """All live peers that train and count, and this one if it trains, sorted."""
        if self.crowd is not None:
            return self.crowd.trainers(now)
        return tuple(sorted(self._trainers(now)))

    def _trainers(self, now: float) -> Iterator[PeerId]:
        me, counts_all = self._id.me, self.electors.counts_all_at(now)
        if self.trains:
            yield me
        for other, seen in self.view.items():
            if (
                seen.trains
                and seen.is_live(now)
                and other != me
                and (counts_all or self.is_established(other, now))
            ):
                yield other

    def has_several_groups(self, now: float) -> bool:
        """True if more peers train than one group holds, as far as this peer sees."""
        return self.may_have_several_groups and self._more_train_than(self.group_size, now)

    @property
    def may_have_several_groups(self) -> bool:
        """True if more peers are known than one group holds, whichever of them are live."""
        return self.crowd is not None or len(self.view) >= self.group_size

    @property
    def young_versions(self) -> int:
        """Versions since a fork after which all work on either side can still be offered again.

        Groups part at every round: no fork among them counts as young.
        """
        return 0 if self.may_have_several_groups else self._policy.stale_max

    def _more_train_than(self, count: int, now: float) -> bool:
        if self.crowd is not None:
            return len(self.crowd.trainers(now)) > count
        return next(islice(self._trainers(now), count, None), None) is not None

    def epoch(self, version: int, now: float) -> int:
        """The version by which a peer that stands on ``version`` is grouped and ranked.

        In a swarm of several groups, a peer that missed its round must meet peers that did not.
        So the newest closing that was heard of counts, unless it is too far ahead.
        """
        if self.closed_version <= version or not self.has_several_groups(now):
            return version
        return min(self.closed_version, version + MELD_LAG)

    def knows(self, peer: PeerId) -> bool:
        """True if this is a peer of the run, as far as this one sees: its messages may count."""
        return peer == self._id.me or peer in self.view

    def electorate(self, now: float) -> frozenset[PeerId]:
        """The other peers whose signatures certify a version for this one.

        They are those that count (``is_established``) and have been live for a while. Where there
        are none yet, all that have been live for a while are meant, then all live ones; a peer that
        was cut off, and has yet to hear who is live, means all that it knew. Keepers count where no
        other peer trains.
        """
        me = self._id.me
        if self.crowd is not None and (others := self.crowd.electorate(now) - {me}):
            return others
        known = {peer: seen for peer, seen in self.view.items() if peer != me and not seen.arrives}
        live = {peer: seen for peer, seen in known.items() if seen.is_live(now)}
        long_here = {peer: seen for peer, seen in live.items() if seen.is_established(now)}
        able = long_here
        if not self.electors.counts_all_at(now):
            able = {p: seen for p, seen in long_here.items() if self.is_established(p, now)}
        able = able or long_here or live or known
        return frozenset(peer for peer, seen in able.items() if seen.trains) or frozenset(able)

    def may_lead(self, peer: PeerId, now: float) -> bool:
        """True if a peer that says that it leads may do so, whoever else may."""
        seen = self.view.get(peer)
        if seen is None or not seen.reachable:
            return False
        electors = self.electors
        if (
            not electors.counts_all_at(now)
            and electors.progress(peer, self.required_work(now), now) < SLACK
        ):
            # Where no other can be dialled newcomers have to lead.
            return not self._counts_any_leader(now)
        return True

    def _counts_any_leader(self, now: float) -> bool:
        """True if any peer counts and can be dialled, this one included."""
        if self.reachable and self.trains and self.is_established(self._id.me, now):
            return True
        return any(
            seen.reachable and self.is_live(peer, now) and self.is_established(peer, now)
            for peer, seen in self.view.items()
        )

    def smallest_group(self, now: float) -> int:
        """Fewest peers that a group has where there are several. A site may be a unit of its own,
        and groups of units have any size."""
        if self._sites(now):
            return 2
        return smallest_group(self._policy.group_size)

    def lineages_part(self, now: float) -> bool:
        """True if rounds leave peers on several lineages, also when all meet to end the run."""
        return self._more_train_than(self._policy.group_size, now)

    def others_train(self, now: float) -> bool:
        """True if any other live peer trains."""
        return any(
            peer != self._id.me and seen.trains and seen.is_live(now)
            for peer, seen in self.view.items()
        )

    def unseen_since(self, merged: MergedMap, now: float) -> float | None:
        """When this peer last heard of another that may train on where it does not see it.

        ``None``: there is none, so that work which this peer merges alone forks no history. A peer
        with work in ``merged`` that was not here since this one began is not known to have left.
        """
        silent = [at for at in self._absent.values() if at is not None]
        silent += [
            seen.heard_at for seen in self.view.values() if seen.trains and not seen.is_live(now)
        ]
        if not self._id.founder:
            others = set(merged).difference(self.view, self._absent, (self._id.me,))
            if others or not (self.view or self._absent):
                silent.append(self._began_at)
        return max(silent, default=None)

    def may_work_until(self, now: float) -> float:
        """End of the wait for live learners that make no steps; long ago without any."""
        worked_at = [
            seen.worked_at
            for seen in self.view.values()
            if seen.worked_at is not None and not seen.trains and seen.is_live(now)
        ]
        return max(worked_at, default=-math.inf) + SILENCE_MAX_S

    def keepers(self, now: float) -> tuple[PeerId, ...]:
        """The keepers that can be reached and lead a round of one that leaves, sorted."""
        return tuple(
            peer
            for peer, seen in sorted(self.view.items())
            if seen.keeps and self.is_live(peer, now) and (seen.reachable or self.reachable)
        )

    def others_arrive(self, now: float) -> bool:
        """True if a live peer is about to begin: it fetches the state as it is now."""
        return any(
            peer != self._id.me and seen.arrives and seen.is_live(now)
            for peer, seen in self.view.items()
        )

    def median_step_s(self, own_s: float, now: float) -> float:
        """Median step time of all live peers that train, this one included; 0: not known."""
        if self.crowd is not None:
            return self.crowd.median_step_s(now)
        times = [
            seen.step_time_s
            for peer, seen in self.view.items()
            if seen.trains
            and seen.step_time_s
            and seen.is_live(now)
            and self.is_established(peer, now)
        ]
        times += [own_s] if own_s else []
        return median(times) if times else 0.0
