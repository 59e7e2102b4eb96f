"""What became of spoilt uploads, of strangers, and of members that lie.

Liars are banned by proof, struck, refused, or without effect. Rounds are counted from the first lie
of a kind: those that any honest peer finished since.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.chaos.judging.evidence import Blame, Evidence, HostileUpload, LieTold, PeerEvidence
from tests.chaos.judging.lies import PROVABLE, Act, Lie

NEVER_MERGED = frozenset({"nan", "inf", "norm", "short", "long"})
"""Kinds of spoilt uploads that every reducer must refuse. Flipped signs look like honest work."""


def merged_beside_work(evidence: Evidence) -> list[str]:
    """Whatever is in states beside honest work, honest work that was refused, and strangers that
    were taken for members."""
    wrong = [
        f"{peer.name} saved numbers of fragment {part.fragment} that are not finite"
        for peer in evidence.honest
        for part in peer.fragments
        if not part.finite
    ]
    names = {peer.peer_id: peer.name for peer in evidence.honest}
    wrong += [
        f"{peer.name} refused {names[peer_id]}'s honest work: {reason}"
        for peer in evidence.honest
        for report in peer.rounds
        for peer_id, reason in report.refused.items()
        if peer_id in names
    ]
    known = {peer.peer_id for peer in evidence.peers}
    merged = {
        peer_id for _, report in evidence.finished_rounds() for peer_id in report.contributors
    }
    wrong += [f"{peer_id}, an unknown peer, was in a merge" for peer_id in sorted(merged - known)]
    most = max(
        (r.peers for p in evidence.peers for life in p.lives for r in life.reports), default=0
    )
    if most > len(evidence.peers):
        wrong.append(f"a peer counted {most} peers in the run; it has {len(evidence.peers)}")
    for word in ("believed", "states_served"):
        count = sum(fault.did.get(word, 0) for fault in evidence.faults)
        if count:
            wrong.append(f"strangers counted {word}: {count}")
    wrong += [
        f"an upload of kind {upload.kind} was merged: {upload.round[:8]}"
        for upload, merged in _spoilt(evidence)
        if merged
    ]
    return wrong


def kept_out(evidence: Evidence) -> int:
    """Number of spoilt uploads to rounds that finished without their author."""
    return sum(not merged for _, merged in _spoilt(evidence))


def _spoilt(evidence: Evidence) -> Iterator[tuple[HostileUpload, bool]]:
    """Uploads that must be refused, to rounds that finished, and whether their author is in it."""
    contributors = {report.round: report.contributors for _, report in evidence.finished_rounds()}
    hostile = {peer.peer_id for peer in evidence.peers if peer.hostile}
    for upload in evidence.hostile_uploads:
        if upload.kind in NEVER_MERGED and upload.round in contributors:
            yield upload, bool(hostile & set(contributors[upload.round]))


CONVICTED = "convicted"
STRIKE = "strike"

STRIKES_MAX = 3.0
"""Strikes with which a peer is on probation (``averaging.rules.reputation``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LieFound:
    """Row of the report: what became of one way to lie."""

    lie: Lie
    liars: int
    told: int
    """Number of lies."""
    found_by: str
    rounds: int | None
    """Rounds from the first lie until the ban by every honest peer, or else until the first honest
    peer held it against a liar; ``None``: nobody did."""
    lies: int | None
    """Lies until then, or until the first ban."""
    versions_per_minute: float
    """While the liars lied in this way."""
    usual_versions_per_minute: float | None
    """Versions per minute of the control."""


def found(evidence: Evidence, control: Evidence | None) -> tuple[LieFound, ...]:
    """A row for each way to lie, in the order of ``Lie``."""
    rows = []
    usual = None if control is None else _per_minute(control, control.ready_s, control.ended_s)
    for lie in Lie:
        told = [each for each in evidence.lies if each.lie is lie]
        if told:
            rows.append(_row(evidence, lie, told, usual))
    return tuple(rows)


def _row(evidence: Evidence, lie: Lie, told: Sequence[LieTold], usual: float | None) -> LieFound:
    names = {each.liar for each in told}
    liars = [peer for peer in evidence.liars if peer.name in names]
    since_s = told[0].at_s
    if lie in PROVABLE:
        bans = [_banned_s(peer, liar) for liar in liars for peer in _present(evidence, since_s)]
        first_s, last_s = min(bans, default=math.inf), max(bans, default=math.inf)
        rounds = None if last_s == math.inf else _rounds_between(evidence, since_s, last_s)
        reasons = Counter(
            blame.reason
            for liar in liars
            for peer in evidence.honest
            for blame in peer.blames
            if blame.kind == CONVICTED and blame.peer_id == liar.peer_id
        )
        how = "proof: " + ", ".join(sorted(reasons)) if reasons else "nothing"
    else:
        blames = _noticed(evidence, lie, liars)
        first_s = min((blame.at_s for blame in blames), default=math.inf)
        rounds = None if first_s == math.inf else _rounds_between(evidence, since_s, first_s)
        kinds = Counter(blame.kind for blame in blames)
        how = ", ".join(f"{kind} ({count})" for kind, count in sorted(kinds.items())) or "nothing"
        most = max((blame.strikes for blame in blames), default=0.0)
        how += f", up to {most:.1f} strikes" if most else ""
    seconds = sum(act.ends_s - act.begins_s for act in _acts_of(evidence, lie))
    made = sum(_rounds_between(evidence, a.begins_s, a.ends_s) for a in _acts_of(evidence, lie))
    return LieFound(
        lie=lie,
        liars=len(liars),
        told=len(told),
        found_by=how,
        rounds=rounds,
        lies=None if first_s == math.inf else sum(each.at_s <= first_s for each in told),
        versions_per_minute=60.0 * made / seconds if seconds else 0.0,
        usual_versions_per_minute=usual,
    )


def _noticed(evidence: Evidence, lie: Lie, liars: Sequence[PeerEvidence]) -> list[Blame]:
    """Blames of these liars by honest peers, while they lied in this way."""
    ids = {liar.peer_id for liar in liars}
    numbers = {liar.peer_id: number for number, liar in enumerate(evidence.liars)}
    return [
        blame
        for peer in evidence.honest
        for blame in peer.blames
        if blame.peer_id in ids
        and blame.kind != CONVICTED
        and any(
            act.begins_s <= blame.at_s < act.ends_s and act.of(numbers[blame.peer_id]) is lie
            for act in evidence.acts
        )
    ]


def _acts_of(evidence: Evidence, lie: Lie) -> list[Act]:
    return [act for act in evidence.acts if lie in act.lies]


def honest_ones_blamed(evidence: Evidence) -> list[str]:
    """Honest peers that others have banned, or hold too many strikes against."""
    names = {peer.peer_id: peer.name for peer in evidence.honest}
    wrong = []
    for peer in evidence.honest:
        last: dict[str, float] = {}
        for blame in peer.blames:
            if blame.peer_id not in names:
                continue
            if blame.kind == CONVICTED:
                wrong.append(f"{peer.name} banned {names[blame.peer_id]}: it {blame.reason}")
            elif blame.kind == STRIKE:
                last[blame.peer_id] = blame.strikes
        wrong += [
            f"{peer.name} has {strikes:.1f} strikes against {names[other]}"
            for other, strikes in last.items()
            if strikes >= STRIKES_MAX
        ]
    return wrong


def _present(evidence: Evidence, since_s: float) -> list[PeerEvidence]:
    """Honest peers that were in the run from the first lie on."""
    return [
        peer
        for peer in evidence.honest
        if any(
            life.ready_s is not None
            and life.ready_s <= since_s
            and life.ended_s >= evidence.ended_s
            for life in peer.lives
        )
    ]


def _banned_s(peer: PeerEvidence, liar: PeerEvidence) -> float:
    """Time at which a peer banned a liar; infinite if it did not."""
    times = (
        blame.at_s
        for blame in peer.blames
        if blame.kind == CONVICTED and blame.peer_id == liar.peer_id
    )
    return min(times, default=math.inf)


def _per_minute(evidence: Evidence, begin_s: float, end_s: float) -> float:
    return 60.0 * _rounds_between(evidence, begin_s, end_s) / max(1e-9, end_s - begin_s)


def _rounds_between(evidence: Evidence, begin_s: float, end_s: float) -> int:
    """Number of rounds that any honest peer finished first in this time."""
    if begin_s == math.inf:
        return 0
    times = evidence.round_times_s()
    return bisect_right(times, end_s) - bisect_right(times, begin_s)
