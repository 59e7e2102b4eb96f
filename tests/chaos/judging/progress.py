"""Judges that training goes on, and that peers which return merge again."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from tests.chaos.judging.evidence import Evidence, Life, PeerEvidence
from tests.chaos.judging.hostile import honest_ones_blamed
from tests.chaos.judging.schedule import FaultKind
from tests.chaos.judging.verdict import Promise, Verdict, verdict_of

SILENCES = frozenset(
    {
        FaultKind.PARTITION,
        FaultKind.LINK,
        FaultKind.FREEZE,
        FaultKind.CRAWL,
        FaultKind.FLOOD,
        FaultKind.CROWD,
    }
)
"""Faults that make a living peer answer late or not at all."""

LOOK_S = 0.25
"""Resolution in which the presence of peers is examined."""
DEADLINE_SLACK_S = 5.0
LEAVE_MAX_S = 45.0
"""Time to leave: for the last rounds, the checkpoints and the notice to the other peers."""


def judge_goes_on(evidence: Evidence) -> Verdict:
    """Judge that merges never pause for long, that rounds and departures end in time, and that no
    peer ended by itself or was banned by others."""
    wrong = [*_beyond_deadlines(evidence), *honest_ones_blamed(evidence)]
    for peer in evidence.honest:
        for life in peer.lives:
            if evidence.was_starting(life):
                continue
            if not life.killed and life.exit_code not in (0, 130):
                wrong.append(f"{peer.name} ended by itself with exit code {life.exit_code}")
            elif not life.killed and life.asked_s is None and life.ended_s < evidence.ended_s:
                wrong.append(f"{peer.name} left at {life.ended_s:.0f} s without being asked")
    gap_s, since_s = longest_gap(evidence)
    # The slowest correct way to the next merge: a whole cycle, a quorum that waits for a peer
    # which has just died, and a round that loses its leader at its end.
    cycle_s = evidence.cycle_steps * evidence.pace_s
    gap_max_s = cycle_s + evidence.quorum_deadline_s + evidence.round_deadline_s
    if gap_s > gap_max_s:
        wrong.append(f"no merge for {gap_s:.0f} s from {since_s:.0f} s on")
    for peer in evidence.honest:
        # Counted in steps: on a busy machine few of them fit into the quiet end.
        if _steps_in_quiet_end(evidence, peer.lives[-1]) < 4 * evidence.cycle_steps:
            continue
        merged = [report for report in peer.rounds if report.finished and report.contributed]
        if not any(report.at_s >= evidence.quiet_s for report in merged):
            wrong.append(f"{peer.name} merged nothing in the quiet end")
    return verdict_of(Promise.GOES_ON, wrong, f"never more than {gap_s:.1f} s without a merge")


def _beyond_deadlines(evidence: Evidence) -> Iterator[str]:
    """Rounds and departures that took too long."""
    for peer in evidence.honest:
        for report in peer.rounds:
            begin_s = report.at_s - report.seconds
            seconds = report.seconds - _frozen_s(evidence, peer.name, begin_s, report.at_s)
            if seconds > evidence.round_deadline_s + DEADLINE_SLACK_S:
                yield f"a round took {seconds:.0f} s at {peer.name}"
        took_s = peer.lives[-1].ended_s - evidence.ended_s
        if took_s > LEAVE_MAX_S:
            yield f"{peer.name} took {took_s:.0f} s to leave"


def _steps_in_quiet_end(evidence: Evidence, life: Life) -> int:
    within = [
        report.steps
        for report in life.reports
        if evidence.quiet_s <= report.at_s <= evidence.ended_s
    ]
    return within[-1] - within[0] if within else 0


def longest_gap(evidence: Evidence) -> tuple[float, float]:
    """The longest time without a merge although two learners could have merged, and its start."""
    times = [
        report.at_s
        for _, report in evidence.finished_rounds()
        if evidence.ready_s <= report.at_s <= evidence.ended_s
    ]
    moments = sorted([evidence.ready_s, *times, evidence.ended_s])
    return max(
        (_able_s(evidence, earlier, later), earlier)
        for earlier, later in itertools.pairwise(moments)
    )


def _able_s(evidence: Evidence, begin_s: float, end_s: float) -> float:
    """Part of an interval in which at least two learners could have merged."""
    count = math.ceil((end_s - begin_s) / LOOK_S)
    looks = [begin_s + (index + 0.5) * (end_s - begin_s) / count for index in range(count)]
    able = sum(
        sum(_is_whole(evidence, peer, at_s) for peer in evidence.honest) >= 2 for at_s in looks
    )
    return able / count * (end_s - begin_s) if count else 0.0


def _is_whole(evidence: Evidence, peer: PeerEvidence, at_s: float) -> bool:
    lived = any(
        life.ready_s is not None and life.ready_s <= at_s < life.ended_s for life in peer.lives
    )
    frozen = _frozen_s(evidence, peer.name, at_s, at_s + 1e-3)
    return lived and not frozen and not _is_without_agent(evidence, peer, at_s)


def _frozen_s(evidence: Evidence, name: str, begin_s: float, end_s: float) -> float:
    """Part of an interval in which a learner was stopped."""
    return sum(
        max(0.0, min(end_s, fault.until_s) - max(begin_s, fault.at_s))
        for fault in evidence.faults
        if fault.kind in (FaultKind.FREEZE, FaultKind.CRAWL) and fault.victim == name
    )


def _is_without_agent(evidence: Evidence, peer: PeerEvidence, at_s: float) -> bool:
    """True if its agent had been killed, and the next one was not in the run yet."""
    killed_s = max(
        (
            fault.at_s
            for fault in evidence.faults
            if fault.kind is FaultKind.AGENT and fault.victim == peer.name and fault.at_s <= at_s
        ),
        default=None,
    )
    return killed_s is not None and not any(killed_s < in_s <= at_s for in_s in peer.agents_in_s)


def judge_returns(evidence: Evidence) -> Verdict:
    """Judge that peers which came back had their work merged within two cycles."""
    allowed = 2 * evidence.cycle_steps
    wrong: list[str] = []
    seen: list[int] = []
    for peer in evidence.honest:
        for life in peer.lives[1:]:
            steps = life.merged_after_steps
            if steps is not None and steps <= allowed:
                seen.append(steps)
            elif _had_its_chance(evidence, peer, life, allowed):
                when = "never" if steps is None else f"after {steps} steps"
                wrong.append(f"{peer.name}, back at {life.began_s:.0f} s, merged {when}")
    if not seen and not wrong:
        return Verdict(Promise.RETURNS, None, "no learner came back for long enough")
    worst = f", the last after {max(seen)} steps of {allowed}" if seen else ""
    return verdict_of(Promise.RETURNS, wrong, f"{len(seen)} came back{worst}", on=evidence)


def _had_its_chance(evidence: Evidence, peer: PeerEvidence, life: Life, allowed: int) -> bool:
    """True if a life had two cycles without a fault of this peer or its links.

    A silent peer elsewhere counts as a fault too: it may be taken for a leader, and to notice its
    silence takes ten seconds (a kill is noticed at once), longer than two cycles of these swarms.
    """
    if not life.reports or life.reports[-1].steps <= allowed or life.ready_s is None:
        return False
    reached_s = next(report.at_s for report in life.reports if report.steps > allowed)
    if reached_s > evidence.ended_s:
        return False
    return not any(
        fault.at_s < reached_s and life.began_s < fault.until_s
        for fault in evidence.faults
        if (fault.victim == peer.name and fault.at_s > life.began_s) or fault.kind in SILENCES
    )
