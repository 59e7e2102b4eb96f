"""Judges that no bad upload was merged, and that no honest one was refused."""

from __future__ import annotations

from peer.lab.chaos.judging.evidence import Evidence
from peer.lab.chaos.judging.schedule import STRANGERS
from peer.lab.chaos.judging.verdict import Promise, Verdict, verdict_of

NEVER_MERGED = frozenset({"nan", "inf", "norm", "short", "long"})
"""Kinds of spoilt uploads that every reducer must refuse. Flipped signs look like honest work."""


def judge_hygiene(evidence: Evidence) -> Verdict:
    """Judge what became of spoilt uploads, of strangers' frames, and of honest uploads."""
    wrong = [
        f"{peer.name} saved numbers of fragment {part.fragment} that are not finite"
        for peer in evidence.honest
        for part in peer.fragments
        if not part.finite
    ]
    names = {peer.peer_id: peer.name for peer in evidence.honest}
    for peer in evidence.honest:
        for report in peer.rounds:
            for peer_id, reason in report.refused.items():
                if peer_id in names:
                    wrong.append(f"{peer.name} refused {names[peer_id]}'s honest work: {reason}")
    contributors = {report.round: report.contributors for _, report in evidence.finished_rounds()}
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
    hostile = {peer.peer_id for peer in evidence.peers if peer.hostile}
    kept_out = 0
    for upload in evidence.hostile_uploads:
        if upload.kind in NEVER_MERGED and upload.round in contributors:
            if hostile & set(contributors[upload.round]):
                wrong.append(f"an upload of kind {upload.kind} was merged: {upload.round[:8]}")
            else:
                kept_out += 1
    if hostile and not kept_out and not wrong:
        return Verdict(Promise.HYGIENE, None, "no spoilt upload reached a round that finished")
    visits = [fault for fault in evidence.faults if fault.kind in STRANGERS]
    got_through = sum(fault.did.get("frames", 0) for fault in visits)
    if visits and not got_through and not wrong and len(visits) == len(evidence.faults):
        return Verdict(Promise.HYGIENE, None, "no stranger got a frame through")
    kept = f"; {kept_out} spoilt uploads were kept out" if hostile else ""
    came = f"; {got_through} frames of strangers had no effect" if visits else ""
    return verdict_of(Promise.HYGIENE, wrong, f"every saved number is finite{kept}{came}")
