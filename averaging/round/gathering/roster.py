"""The commit that a leader composes from the joins of its roster.

Leading needs no state of the model: all that the commit says comes from the joins.

**Protocol.** Its number is the newest one for which all of its members have signed. A leader may
take an older one, as it may take f32 instead of a smaller codec. It does so while it sees a live
peer of the run that does not speak the newest one: rounds are replayed by peers that were not in
them.

**Deadlines** have a fixed part, 15 s for uploads (``RoundPolicy.upload_s``), and twice the time
that the slowest member's line takes for its load. A line of unknown speed counts as 5 Mbit/s, and a
round waits for lines of down to a tenth of that. Both deadlines are in the commit, so all members
have the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

from averaging.history.standing import tokens_of
from averaging.messages import Commit, Entry, Head, Join, Link, Stamp
from averaging.numbers.layout import reducers_count
from averaging.rules.line_levels import agreed
from averaging.rules.line_speed import slow_lines
from averaging.rules.peer_view import PeerView
from averaging.rules.policy import RoundPolicy
from averaging.rules.quorum import ALL
from averaging.rules.sites import delegates
from averaging.rules.succession import succession
from averaging.rules.weights import credited
from dht.identity import PeerId
from dht.protocol import Range

MELD_LINKS = 8
"""Links of each parent's chain that the commit shows in a meld of more than two."""

SHARE_RATIO_MAX = 16
"""The largest slice of a round over the smallest, whatever speeds the reducers state."""

ALIKE = 2.0
"""Lines whose measured speeds differ by less than this factor are taken to be equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader:
    """The peer that composes a commit."""

    peer: PeerId
    incarnation: int
    topic: bytes
    fragment: int
    nonce: int
    directive: Stamp | None = None
    """The owner's directive that it follows."""
    protocol: int = 1
    """The number for which all members have signed their joins."""


def compose(
    leader: Leader,
    joins: Sequence[tuple[PeerId, Join]],
    policy: RoundPolicy,
    *,
    encoded_bytes: Callable[[str], int],
    on_probation: Collection[PeerId] = (),
) -> Commit:
    """The commit for these joins: members, parents, slices of each reducer, and rules.

    ``on_probation``: members that do not count for the leader; if no other is there, all count.
    """
    by_peer = dict(joins)
    parents = _heaviest_first(join.head for _, join in sorted(joins))
    version = max(head.version for head in parents)
    newcomers = set(on_probation).intersection(by_peer)
    if len(newcomers) == len(by_peer):
        newcomers = set()
    roster = _in_rank(by_peer, leader, parents[0], newcomers)
    speeds = {peer: join.bytes_per_s for peer, join in by_peer.items()}
    level = agreed(
        {peer: join.level for peer, join in by_peer.items()}, speeds, levels=len(policy.levels)
    )
    codec, codec_down = _codecs(by_peer.values(), policy, level, melds=len(parents) > 1)
    size = max(encoded_bytes(codec), encoded_bytes(codec_down or codec))
    voters = [peer for peer in roster if peer not in newcomers]
    # A newcomer carries nobody's work: which site a peer names is its own word.
    delegate_of = delegates(voters, by_peer)
    # With fewer slices than members the reducers change with the version, so the load goes round.
    able = succession(
        _able_to_reduce(roster, voters, by_peer, delegate_of) or [leader.peer],
        topic=b"reduce",
        fragment=leader.fragment,
        version=version,
        lineage=parents[0].lineage,
    )
    reducers = able[: reducers_count(len(able), size, slice_bytes_min=policy.slice_bytes_min)]
    shares = slice_shares([speeds.get(peer, 0) for peer in reducers])
    shares_of = dict(zip(reducers, shares, strict=True))
    takes_s = transfer_s(policy, roster, shares_of, speeds, encoded_bytes=size)
    batch_tokens_max = policy.batch_tokens_max
    if batch_tokens_max is None:
        batch_tokens_max = max(1, *(join.batch_tokens_max for join in by_peer.values()))
    tokens = _credited(by_peer, newcomers, batch_tokens_max=batch_tokens_max)
    return Commit(
        topic=leader.topic,
        fragment=leader.fragment,
        leader=leader.peer,
        leader_incarnation=leader.incarnation,
        nonce=leader.nonce,
        parents=tuple(Link(head.version, head.lineage, tokens_of(head)) for head in parents),
        ancestors=_ancestors(parents),
        members=_entries(roster, by_peer, leader, parents, delegate_of, tokens),
        reducers=reducers,
        shares=shares,
        codec=codec,
        codec_down=codec_down,
        merge=policy.merge,
        eta=policy.eta,
        mu=policy.mu,
        batch_tokens_max=batch_tokens_max,
        level=level,
        on_probation=tuple(i for i, peer in enumerate(roster) if peer in newcomers),
        contributors_min=len(voters) if policy.quorum.required == ALL else min(2, len(voters)),
        upload_s=policy.upload_s + takes_s,
        round_s=policy.round_s + TRANSFERS_PER_ROUND * takes_s,
        directive=leader.directive,
        protocol=leader.protocol,
    )


def recomposed(
    commit: Commit, policy: RoundPolicy, *, encoded_bytes: Callable[[str], int]
) -> Commit:
    """The commit that an honest leader composes of these members' claims and parents.

    The choices of a leader are kept: who is in, who of them votes, the codecs if they are the run's
    or f32, and the protocol number of those for which all members have signed.
    """
    codecs = commit.displacement_codec, commit.codec_down or "f32", "f32"
    leader = Leader(
        peer=commit.leader,
        incarnation=commit.leader_incarnation,
        topic=commit.topic,
        fragment=commit.fragment,
        nonce=commit.nonce,
        directive=commit.directive,
        protocol=commit.protocol,
    )
    shown = commit.ancestors or tuple((parent,) for parent in commit.parents)
    heads = [
        Head(parent.version, parent.lineage, links)
        for parent, links in zip(commit.parents, shown, strict=True)
    ]
    joins = [
        (entry.peer, _join(commit, entry, heads[entry.parent], codecs)) for entry in commit.members
    ]
    return compose(
        leader,
        sorted(joins),
        policy,
        encoded_bytes=encoded_bytes,
        on_probation={commit.members[index].peer for index in commit.on_probation},
    )


def _join(commit: Commit, entry: Entry, head: Head, codecs: tuple[str, ...]) -> Join:
    """The join that a member must have sent, as far as a commit follows from it."""
    return Join(
        fragment=commit.fragment,
        topic=commit.topic,
        incarnation=entry.incarnation,
        join=entry.join,
        head=head,
        base_version=entry.base_version,
        staleness=entry.staleness,
        mark=entry.mark,
        steps=entry.steps,
        tokens=entry.tokens if entry.claimed_tokens is None else entry.claimed_tokens,
        batch_tokens_max=entry.batch_tokens_max,
        bytes_per_s=entry.bytes_per_s,
        reachable=entry.reachable,
        codecs=codecs,
        site=entry.site,
        signatures=((commit.protocol, entry.signature),),
        level=entry.level,
    )


def _in_rank(
    joins: Mapping[PeerId, Join], leader: Leader, parent: Head, newcomers: Collection[PeerId]
) -> list[PeerId]:
    """The members in their order of succession: the leader, then the reachable, then the rest, and
    those on probation last."""
    ranked = succession(
        joins,
        topic=leader.topic,
        fragment=leader.fragment,
        version=parent.version,
        lineage=parent.lineage,
    )
    return sorted(
        ranked, key=lambda peer: (peer in newcomers, peer != leader.peer, not joins[peer].reachable)
    )


def _codecs(
    joins: Iterable[Join], policy: RoundPolicy, level: int, *, melds: bool
) -> tuple[str, str | None]:
    """The codec of uploads, and that of merged slices if it is another one."""
    known = set.intersection(*(set(join.codecs) for join in joins))
    wanted = policy.levels[level]
    up, down = wanted.codec, wanted.codec_down
    if not known.issuperset((up, down)):
        up = down = "f32"
    return policy.mixing.codec(up, policy.mu) if melds else up, None if down == up else down


def _able_to_reduce(
    roster: Sequence[PeerId],
    voters: Sequence[PeerId],
    joins: Mapping[PeerId, Join],
    delegate_of: Mapping[PeerId, int],
) -> list[PeerId]:
    """The members that can be dialled and whose lines are not slow.

    Newcomers are among them only where no other member can be dialled. The slices of a site come
    and go with its delegate: its other members do not reduce.
    """
    able = [peer for peer in voters if joins[peer].reachable and peer not in delegate_of]
    able = able or [peer for peer in roster if joins[peer].reachable]
    slow = slow_lines({peer: joins[peer].bytes_per_s for peer in able})
    return [peer for peer in able if peer not in slow]


def _credited(
    joins: Mapping[PeerId, Join], newcomers: Collection[PeerId], *, batch_tokens_max: int
) -> dict[PeerId, int]:
    """The tokens of each member that count."""
    peers = sorted(joins)
    counted = credited(
        [(joins[peer].tokens, joins[peer].steps) for peer in peers],
        batch_tokens_max=batch_tokens_max,
        on_probation=[place for place, peer in enumerate(peers) if peer in newcomers],
    )
    return dict(zip(peers, counted, strict=True))


def _entries(
    roster: Sequence[PeerId],
    joins: Mapping[PeerId, Join],
    leader: Leader,
    parents: Sequence[Head],
    delegate_of: Mapping[PeerId, int],
    tokens: Mapping[PeerId, int],
) -> tuple[Entry, ...]:
    parent_of = {head.lineage: index for index, head in enumerate(parents)}
    return tuple(
        Entry(
            peer=peer,
            incarnation=join.incarnation,
            join=join.join,
            parent=parent_of[join.head.lineage],
            base_version=join.base_version,
            staleness=join.staleness,
            mark=join.mark,
            steps=join.steps,
            tokens=tokens[peer],
            reachable=join.reachable,
            bytes_per_s=join.bytes_per_s,
            batch_tokens_max=join.batch_tokens_max,
            signature=join.signed_for(leader.protocol),
            claimed_tokens=None if tokens[peer] == join.tokens else join.tokens,
            site=join.site,
            delegate=delegate_of.get(peer),
            level=join.level,
        )
        for peer, join in ((peer, joins[peer]) for peer in roster)
    )


def _ancestors(parents: Sequence[Head]) -> tuple[tuple[Link, ...], ...]:
    if len(parents) == 1:
        return ()
    # Lineages that parted at the last round are many, and need little of each other's chain. The
    # two sides of a fork may have parted long ago.
    count = MELD_LINKS if len(parents) > 2 else None
    return tuple(head.links[:count] for head in parents)


def _heaviest_first(heads: Iterable[Head]) -> list[Head]:
    """The heads of distinct lineages, by their merged tokens; ties are broken by lineage."""
    each = {head.lineage: head for head in heads}.values()
    return sorted(each, key=lambda head: (tokens_of(head), head.lineage), reverse=True)


def slice_shares(speeds: Sequence[float]) -> tuple[int, ...]:
    """Sizes of slices in proportion to link speed; 0, an unknown speed, gets the smallest.

    Equal lines are measured a third apart, and a slice that is a third larger makes its reducer
    carry more than twice the fragment: a line of about the median speed counts as the median.
    """
    known = [speed for speed in speeds if speed > 0]
    if not known:
        return (1,) * len(speeds)
    middle = median_low(known)
    speeds = [speed if speed > 0 else min(known) for speed in speeds]
    speeds = [middle if 1 / ALIKE < speed / middle < ALIKE else speed for speed in speeds]
    slowest = max(min(speeds), max(speeds) / SHARE_RATIO_MAX)
    return tuple(max(1, round(100 * max(slowest, speed) / slowest)) for speed in speeds)


def agreed_protocol(
    joins: Mapping[PeerId, Join], view: Mapping[PeerId, PeerView], speaks: Range, now: float
) -> int:
    """The number of a round of these joins: one of those that most of them have signed.

    Three releases may meet at a leader of the middle one, and no number is common to all of them.
    """
    oldest, newest = speaks
    signers = {
        number: sum(number in join.protocols for join in joins.values())
        for number in range(oldest, newest + 1)
    }
    most = max(signers.values())
    able = [number for number, count in signers.items() if count == most]
    in_sight = min(
        (seen.protocol for peer, seen in view.items() if seen.is_live(now)), default=newest
    )
    return max((number for number in able if number <= in_sight), default=able[0])


def without_protocol(joins: Mapping[PeerId, Join], number: int) -> dict[PeerId, Join]:
    """The joins that were not signed for a round of this number."""
    return {peer: join for peer, join in joins.items() if number not in join.protocols}


SLACK = 2.0
"""Factor on the transfer time: a link carries other traffic too, and its speed is a best case."""

TRANSFERS_PER_ROUND = 4
"""Up and down, and both once more if a reducer dies after it was sent everything."""

SLOWER_MAX = 10.0
"""A measured line may be so many times slower than one of unknown speed counts as."""


def transfer_s(
    policy: RoundPolicy,
    roster: Sequence[PeerId],
    shares: Mapping[PeerId, int],
    speeds: Mapping[PeerId, float],
    *,
    encoded_bytes: int,
) -> float:
    """Return the time in which each member and reducer moves its bytes once up and once down.

    ``shares``: of the reducers; ``speeds``: of lines, as joins name them, 0 for an unknown one.
    """
    slowest_s, whole = 0.0, sum(shares.values())
    for peer in (*roster, *shares):
        share = shares.get(peer, 0) / whole
        # Sent as a member, and received as a reducer; as many go back.
        moved = encoded_bytes * ((1.0 - share) + (len(roster) - 1) * share)
        speed = speeds.get(peer) or policy.slow_link_bytes_s
        slowest_s = max(slowest_s, moved / max(speed, policy.slow_link_bytes_s / SLOWER_MAX))
    return SLACK * slowest_s
