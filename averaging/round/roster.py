"""A leader before its commit: who has joined, who passed, and the commit that comes of it.

Leading needs no state of the model: everything that the commit says comes from the joins.
When to close is ``averaging.rules.quorum``'s to say, who may come ``averaging.rules.grouping``'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median_low

from averaging.history.chain import Chain, ChainLink
from averaging.history.standing import heaviest, tokens_of
from averaging.messages import Commit, Entry, Head, Join, Link
from averaging.numbers.slices import reducers_count
from averaging.rules.deadlines import Load, deadlines
from averaging.rules.policy import RoundPolicy
from averaging.rules.quorum import ALL, Turnout
from averaging.rules.sites import delegates
from averaging.rules.succession import succession
from averaging.rules.weights import clamped
from dht.identity import PeerId

MELD_LINKS = 8
"""Links that a meld's commit shows of each parent's chain."""

SHARE_RATIO_MAX = 16
"""No reducer gets more than this many times the slice of another, however fast it says it is."""

ALIKE = 2.0
"""Lines whose measured speeds differ by less than this are taken to be equal."""


class Gathering:
    """The roster of the next round while it is still open."""

    __slots__ = (
        "called",
        "group",
        "held",
        "joins",
        "look_at",
        "opened_at",
        "passed",
        "quorum_at",
        "until",
    )

    def __init__(
        self, group: tuple[PeerId, ...], *, until: float, look_at: float, now: float
    ) -> None:
        self.group = group
        """Who may meet here."""
        self.joins: dict[PeerId, Join] = {}
        self.held: dict[PeerId, Join] = {}
        """Joins from versions that I have to fetch before I can count them."""
        self.passed: set[PeerId] = set()
        self.called: set[PeerId] = set()
        self.opened_at = now
        self.quorum_at: float | None = None
        self.until = until
        """When to decide again."""
        self.look_at = look_at
        """When to look again who is around."""

    def turnout(self, live: Callable[[PeerId], bool], *, room: int) -> Turnout:
        """``room``: for so many members. With strangers among them not all of the group fit."""
        here = self.joins.keys()
        around = {peer for peer in self.group if peer in here or live(peer)} | here
        return Turnout(
            live=min(len(around), max(room, len(here))),
            joined=len(here),
            passed=len((self.passed & around) - here),
            opened_at=self.opened_at,
            quorum_at=self.quorum_at,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader:
    """Who composes a commit."""

    peer: PeerId
    incarnation: int
    topic: bytes
    fragment: int
    nonce: int


def compose(
    leader: Leader,
    joins: Sequence[tuple[PeerId, Join]],
    policy: RoundPolicy,
    *,
    encoded_bytes: Callable[[str], int],
    staleness_of: Callable[[Join], int] = lambda join: join.staleness,
    apart: str = "mix",
) -> Commit:
    """The commit for these joins: who, from where, what each reduces, and by which rules.

    ``apart``: the kind of round, should they stand on several lineages.
    """
    by_peer = dict(joins)
    heads = {join.head.lineage: join.head for _, join in sorted(joins)}
    parents = _heaviest_first(heads.values())
    place = {head.lineage: index for index, head in enumerate(parents)}
    version = max(head.version for head in parents)
    kind = "merge" if len(parents) == 1 else apart

    ranked = succession(by_peer, topic=leader.topic, fragment=leader.fragment, version=version)
    first = [peer for peer in ranked if peer == leader.peer]
    first += [peer for peer in ranked if by_peer[peer].reachable and peer not in first]
    roster = first + [peer for peer in ranked if not by_peer[peer].reachable and peer not in first]

    codecs = set.intersection(*(set(join.codecs) for join in by_peer.values()))
    codec = policy.codec if policy.codec in codecs else "f32"
    if kind == "mix":
        codec = "f32"  # theta itself travels: it is not rounded
    elif kind == "meld":
        codec = policy.mixing.codec(codec)

    # The slices of a site come and go with its delegate: nobody else there reduces.
    carried = delegates(roster, by_peer) if kind != "mix" else {}
    able = [peer for peer in roster if by_peer[peer].reachable and peer not in carried]
    able = able or [leader.peer]
    count = reducers_count(len(able), encoded_bytes(codec), slice_bytes_min=policy.slice_bytes_min)
    # Who reduces when not all do changes with the version, so that the load goes round.
    turn = succession(able, topic=b"reduce", fragment=leader.fragment, version=version)
    reducers = turn[:count]
    shares = _shares([by_peer[peer].bytes_per_s if peer in by_peer else 0 for peer in reducers])
    parts = {peer: share / sum(shares) for peer, share in zip(reducers, shares, strict=True)}
    limits = deadlines(
        policy,
        encoded_bytes=encoded_bytes(codec),
        loads=[
            Load(
                share=parts.get(peer, 0.0),
                members=len(roster),
                bytes_per_s=by_peer[peer].bytes_per_s if peer in by_peer else 0.0,
            )
            for peer in dict.fromkeys([*roster, *reducers])
        ],
    )
    batch_tokens_max = policy.batch_tokens_max
    if batch_tokens_max is None:
        batch_tokens_max = max(1, *(join.batch_tokens_max for join in by_peer.values()))
    return Commit(
        topic=leader.topic,
        fragment=leader.fragment,
        kind=kind,
        leader=leader.peer,
        leader_incarnation=leader.incarnation,
        nonce=leader.nonce,
        parents=tuple(Link(head.version, head.lineage, tokens_of(head)) for head in parents),
        ancestors=_ancestors(parents, kind),
        mix_tokens=_mix_tokens(parents) if kind == "mix" else (),
        mix_total=_mix_total(parents) if kind == "mix" else 0,
        carriers=_carriers(parents, roster, by_peer) if kind == "mix" else (),
        members=tuple(
            Entry(
                peer=peer,
                incarnation=join.incarnation,
                join=join.join,
                parent=place[join.head.lineage],
                base_version=join.base_version,
                staleness=staleness_of(join),
                mark=join.mark,
                steps=max(1, join.steps),
                # Whoever claims more than its steps can hold must not move the schedule either.
                tokens=clamped(
                    join.tokens, steps=max(1, join.steps), batch_tokens_max=batch_tokens_max
                ),
                reachable=join.reachable,
                delegate=carried.get(peer),
            )
            for peer, join in ((peer, by_peer[peer]) for peer in roster)
        ),
        reducers=reducers,
        shares=shares,
        codec=codec,
        merge=policy.merge,
        eta=policy.eta,
        mu=policy.mu,
        batch_tokens_max=batch_tokens_max,
        contributors_min=len(roster) if policy.quorum.required == ALL else 2,
        upload_s=limits.upload_s,
        round_s=limits.round_s,
    )


def _ancestors(parents: Sequence[Head], kind: str) -> tuple[tuple[Link, ...], ...]:
    if kind == "merge":
        return ()
    # Lineages that parted at the last round need little of each other's chain, and are many.
    count = MELD_LINKS if kind == "meld" else None
    return tuple(head.links[:count] for head in parents)


def _heaviest_first(heads: Iterable[Head]) -> list[Head]:
    left = {head.lineage: head for head in heads}
    ordered = []
    while left:
        head = heaviest(left.values())
        ordered.append(left.pop(head.lineage))
    return ordered


def _shared_tokens(parents: Sequence[Head]) -> int:
    """Tokens of the last version that all of these chains show; 0 if there is none."""
    first = Chain(ChainLink(*_plain(link)) for link in parents[0].links)
    since = tokens_of(parents[0])
    for head in parents[1:]:
        ancestor = first.common_ancestor(ChainLink(*_plain(link)) for link in head.links)
        since = min(since, ancestor.tokens if ancestor is not None else 0)
    return since


def _mix_tokens(parents: Sequence[Head]) -> tuple[int, ...]:
    since = _shared_tokens(parents)
    return tuple(max(1, tokens_of(head) - since) for head in parents)


def _mix_total(parents: Sequence[Head]) -> int:
    since = _shared_tokens(parents)
    return since + sum(max(0, tokens_of(head) - since) for head in parents)


def _plain(link: Link) -> tuple[int, bytes, int]:
    return link.version, link.lineage, link.tokens


def _carriers(
    parents: Sequence[Head], roster: Sequence[PeerId], joins: dict[PeerId, Join]
) -> tuple[int, ...]:
    """The first in rank on each parent supplies its copy; who can be dialled comes first."""
    return tuple(
        next(index for index, peer in enumerate(roster) if joins[peer].head.lineage == head.lineage)
        for head in parents
    )


def _shares(speeds: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers in proportion to link speed. Of whom nothing is known gets the least.

    Equal lines are measured a third apart, and a slice that is a third larger makes its reducer
    carry more than twice the fragment: who is about as fast as the others counts as just as fast.
    """
    known = [speed for speed in speeds if speed > 0]
    if not known:
        return (1,) * len(speeds)
    usual = median_low(known)
    speeds = [speed if speed > 0 else min(known) for speed in speeds]
    speeds = [usual if 1 / ALIKE < speed / usual < ALIKE else speed for speed in speeds]
    slowest = max(min(speeds), max(speeds) / SHARE_RATIO_MAX)
    return tuple(max(1, round(100 * max(slowest, speed) / slowest)) for speed in speeds)
