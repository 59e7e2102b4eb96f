"""The peers around one peer, as it sees them: who is there, who failed, who leads.

Pure opinion: two peers may see different things, and the round lives with it. The owner keeps
``view`` up to date; what this peer noticed itself (calls that failed) is kept here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Protocol

from averaging.messages import Join
from averaging.rules.grouping import group_of
from averaging.rules.mixing import MELD_LAG
from averaging.rules.peer_view import ESTABLISHED_AFTER_S, PeerView
from averaging.rules.succession import leaders, succession
from dht.identity import PeerId

FAILED_MAX = 256
"""Peers whose last call failed. The oldest are forgotten, that is forgiven, beyond it."""


class Crowd(Protocol):
    """What the keeper of a view knows of all of it at once, I included.

    A simulation of thousands shares one table among many peers, and looks at all of it once.
    """

    def trainers(self, now: float) -> tuple[PeerId, ...]:
        """Live peers that train, sorted."""
        ...

    def median_step_s(self, now: float) -> float: ...

    def sites(self, now: float) -> Mapping[PeerId, str]:
        """Of those who said one."""
        ...


class Neighbourhood:
    """Who may meet me at a fragment's rounds."""

    __slots__ = (
        "closed_version",
        "crowd",
        "failed",
        "fragment",
        "group_size",
        "grouping",
        "me",
        "now",
        "passed_over",
        "reachable",
        "site",
        "started_at",
        "suspect_s",
        "topic",
        "trains",
        "view",
    )

    def __init__(
        self,
        *,
        me: PeerId,
        view: Mapping[PeerId, PeerView],
        topic: bytes,
        fragment: int,
        group_size: int,
        grouping: str,
        suspect_s: float,
        trains: bool,
        reachable: bool,
        site: str | None,
        now: float,
    ) -> None:
        self.me = me
        self.site = site
        self.view = view
        self.topic = topic
        self.fragment = fragment
        self.group_size = group_size
        self.grouping = grouping
        self.suspect_s = suspect_s
        self.trains = trains
        self.reachable = reachable
        self.crowd: Crowd | None = None
        """Instead of ``view``, where the question is about everybody."""
        self.closed_version = 0
        """The newest version of which a roster closed, as far as I heard."""
        self.started_at = now
        self.now = now
        """Of the input that is being handled."""
        self.failed: OrderedDict[PeerId, float] = OrderedDict()
        self.passed_over: OrderedDict[PeerId, None] = OrderedDict()
        """They answer, and nothing comes of it: I let the next in rank lead."""

    def __repr__(self) -> str:
        return f"Neighbourhood({self.me}, {len(self.view)} seen, {len(self.failed)} failed)"

    def heard(self, peer: PeerId) -> None:
        self.failed.pop(peer, None)

    def fail(self, peer: PeerId, now: float) -> None:
        self.failed[peer] = now
        self.failed.move_to_end(peer)
        while len(self.failed) > FAILED_MAX:
            self.failed.popitem(last=False)

    def forgive(self) -> None:
        """Who was heard since it failed, by whomever the owner's view comes from, is back."""
        for peer, failed_at in list(self.failed.items()):
            seen = self.view.get(peer)
            if seen is not None and seen.heard_at > failed_at:
                del self.failed[peer]

    def is_down(self, peer: PeerId) -> bool:
        """Failed, and not heard for long enough that others may take its place."""
        failed_at = self.failed.get(peer)
        return failed_at is not None and self.now - failed_at >= self.suspect_s

    def is_live(self, peer: PeerId, now: float) -> bool:
        if peer == self.me:
            return True
        seen = self.view.get(peer)
        return seen is not None and seen.is_live(now) and peer not in self.failed

    def group(self, peer: PeerId, version: int, now: float) -> tuple[PeerId, ...]:
        return group_of(
            peer,
            self.trainers(now),
            size=self.group_size,
            fragment=self.fragment,
            version=self.epoch(version, now),
            grouping=self.grouping,
            sites=self._sites(now),
        )

    def _sites(self, now: float) -> Mapping[PeerId, str]:
        if self.crowd is not None:
            return self.crowd.sites(now)
        sites = {peer: seen.site for peer, seen in self.view.items() if seen.site is not None}
        if self.site is not None:
            sites[self.me] = self.site
        return sites

    def trainers(self, now: float) -> tuple[PeerId, ...]:
        """All live peers that train, I too, sorted."""
        if self.crowd is not None:
            return self.crowd.trainers(now)
        live = [
            other
            for other, seen in self.view.items()
            if seen.trains and seen.is_live(now) and other != self.me
        ]
        if self.trains:
            live.append(self.me)
        return tuple(sorted(live))

    def is_dealt(self, now: float) -> bool:
        """Whether there are more peers than one group holds, as far as I see."""
        return len(self.trainers(now)) > self.group_size

    def epoch(self, version: int, now: float) -> int:
        """By which version peers are dealt and ranked, for who stands on this one.

        In a swarm of several groups who missed its round meets those who did not: it goes by
        what it heard of closings, as long as that is near.
        """
        if self.closed_version <= version or not self.is_dealt(now):
            return version
        return min(self.closed_version, version + MELD_LAG)

    def pass_over(self, peer: PeerId) -> None:
        self.passed_over[peer] = None
        while len(self.passed_over) > FAILED_MAX:
            self.passed_over.popitem(last=False)

    def is_unfit(self, peer: PeerId) -> bool:
        return peer in self.failed or peer in self.passed_over

    def unfit(self) -> tuple[PeerId, ...]:
        """Whom I would not join, the latest last: it did not answer, or nothing came of it."""
        return (*(peer for peer in self.failed if peer not in self.passed_over), *self.passed_over)

    def leader(
        self, version: int, failed: tuple[PeerId, ...], now: float, *, asked: bool = False
    ) -> PeerId | None:
        """Who leads my group, as far as I see; ``asked``: somebody takes me for its leader."""
        self.forgive()
        group = self.group(self.me, version, now) if self.trains else ()
        able = leaders(
            group,
            self.view,
            me=self.me,
            me_reachable=self.reachable,
            # In a young swarm nobody is established; in an old one I am, if I have been here. Who
            # asks me has seen me for long, though I may have begun late: two that each take only
            # the other for established would send it to one another.
            me_established=asked or now - self.started_at >= ESTABLISHED_AFTER_S,
            failed=(*self.unfit(), *failed),
            now=now,
        )
        epoch = self.epoch(version, now)
        ranked = succession(able, topic=self.topic, fragment=self.fragment, version=epoch)
        if not ranked and self.passed_over:
            self.passed_over.clear()  # nobody is left: they may have been right
            return self.leader(version, failed, now, asked=asked)
        return ranked[0] if ranked else None

    def leader_for(self, sender: PeerId, join: Join, now: float) -> PeerId | None:
        """Who leads the group of this joiner, as far as I see."""
        self.forgive()
        version = join.head.version
        failed = tuple(peer for peer in join.failed if peer != self.me)
        if self.trains and self.me in self.group(sender, version, now):
            return self.leader(version, failed, now, asked=True)
        able = leaders(
            self.group(sender, version, now),
            self.view,
            me=self.me,
            me_reachable=self.reachable,
            me_established=False,
            failed=(*self.failed, *failed),
            now=now,
        )
        if not able or (not self.trains and all(not self.view[p].trains for p in able)):
            return self.me  # I was borrowed
        epoch = self.epoch(version, now)
        return succession(able, topic=self.topic, fragment=self.fragment, version=epoch)[0]

    def outranks(self, one: PeerId, other: PeerId) -> bool:
        """Whether the first leads when views disagree.

        By name alone: not even by version, because who disagrees may stand on different ones,
        and then each of two would take itself for the first, again and again.
        """
        return (
            succession((one, other), topic=self.topic, fragment=self.fragment, version=0)[0] == one
        )

    def others_train(self, now: float) -> bool:
        """Whether anybody but me is there to average with."""
        return any(
            peer != self.me and seen.trains and seen.is_live(now)
            for peer, seen in self.view.items()
        )

    def others_arrive(self, now: float) -> bool:
        """Whether anybody is on its way in: it fetches the state that I have now."""
        return any(
            peer != self.me and seen.arrives and seen.is_live(now)
            for peer, seen in self.view.items()
        )

    def median_step_s(self, own_s: float, now: float) -> float:
        """Of all live peers that train, me included; 0 when nothing is known."""
        if self.crowd is not None:
            return self.crowd.median_step_s(now)
        times = [
            seen.step_time_s
            for seen in self.view.values()
            if seen.trains and seen.step_time_s and seen.is_live(now)
        ]
        return median([*times, own_s] if own_s else times)


def median(values: list[float]) -> float:
    """0 of nothing."""
    if not values:
        return 0.0
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
