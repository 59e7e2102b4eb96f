"""Judges that rounds end in time, that training goes on, and that returning peers merge again."""

from __future__ import annotations

import itertools
import math
import statistics
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise

from tests.chaos.judging.evidence import Evidence, Life, PeerEvidence, Sample
from tests.chaos.judging.learning import SPIKE_MAX, largest_rise
from tests.chaos.judging.schedule import FaultKind
from tests.chaos.judging.verdict import (
    OTHERS_SHARE_MAX,
    Promise,
    Verdict,
    others_text,
    verdict_of,
)

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

FIRST_STEPS_S = 5.0
"""A trainer in the run still reads its data and makes the first steps, which take most memory."""
FLOOD_MEMORY_MAX_BYTES = 200e6
"""A stranger may open 64 streams, each with two unread frames of one mebibyte."""

BOOTSTRAP_MEMORY_MAX_BYTES = 320e6
"""A full directory has 64 MiB of records, twice that in Python's objects, and the daemon remembers
addresses and connections."""

WINDOW_S = 10.0
"""Versions are counted in windows of this length, beside strangers and without them."""

WINDOWS_MIN = 3
BESIDE_STRANGERS_MIN = 0.9
"""Versions per minute beside strangers, relative to those without. Less is within noise if it is
less than three standard errors from it."""


def judge_bounded(evidence: Evidence) -> Verdict:
    """Judge the duration of rounds and departures, and the memory that floods take."""
    wrong: list[str] = []
    longest = 0.0
    for peer in evidence.honest:
        for report in peer.rounds:
            seconds = report.seconds - _frozen_s(
                evidence, peer.name, report.at_s - report.seconds, report.at_s
            )
            longest = max(longest, seconds)
            if seconds > evidence.round_deadline_s + DEADLINE_SLACK_S:
                wrong.append(f"a round took {seconds:.0f} s at {peer.name}")
        life = peer.lives[-1]
        if life.ended_s - evidence.ended_s > LEAVE_MAX_S:
            wrong.append(f"{peer.name} took {life.ended_s - evidence.ended_s:.0f} s to leave")
    grown_bytes = 0
    sampled = {peer.name: peer.samples for peer in evidence.honest} | dict(evidence.bootstraps)
    lives = {peer.name: peer.lives for peer in evidence.honest}
    for name, samples in sampled.items():
        for role, grown in _grown_in_floods(evidence, samples, lives.get(name, ())):
            grown_bytes = max(grown_bytes, grown)
            hosts = name in evidence.bootstraps
            if grown > (BOOTSTRAP_MEMORY_MAX_BYTES if hosts else FLOOD_MEMORY_MAX_BYTES):
                wrong.append(f"a flood made the {role} of {name} {grown / 1e6:.0f} MB larger")
    flooded = f"; a flood took {grown_bytes / 1e6:.0f} MB at most" if grown_bytes else ""
    return verdict_of(Promise.BOUNDED, wrong, f"the longest round took {longest:.1f} s{flooded}")


def _grown_in_floods(
    evidence: Evidence, samples: Sequence[Sample], lives: Sequence[Life]
) -> Iterator[tuple[str, int]]:
    """Role and memory growth of each process, for each flood.

    Nothing is said of a learner that was starting: it grows by what it imports and reads.
    """
    for fault in evidence.faults:
        if fault.kind not in (FaultKind.FLOOD, FaultKind.CROWD):
            continue
        if any(life.began_s <= fault.at_s < _started_s(life) for life in lives):
            continue
        before: dict[tuple[int, str], int] = {}
        largest: dict[tuple[int, str], int] = {}
        for sample in samples:
            process = (sample.pid, sample.role)
            if sample.at_s < fault.at_s:
                before[process] = sample.memory_bytes
            elif sample.at_s <= fault.until_s:
                largest[process] = max(sample.memory_bytes, largest.get(process, 0))
        for process, most in sorted(largest.items()):
            if process in before:
                yield process[1], most - before[process]


def _started_s(life: Life) -> float:
    return life.ended_s if life.ready_s is None else life.ready_s + FIRST_STEPS_S


def judge_goes_on(evidence: Evidence) -> Verdict:
    """Judge that merges never pause for long, and that no peer ended by itself."""
    wrong: list[str] = []
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
    slower, beside = _beside_strangers(evidence)
    if slower:
        wrong.append(beside)
    kept = f"never more than {gap_s:.1f} s without a merge{beside and '; ' + beside}"
    return verdict_of(Promise.GOES_ON, wrong, kept)


def _beside_strangers(evidence: Evidence) -> tuple[bool, str]:
    """True if versions come more slowly beside a crowd of strangers than without it, and how many
    a minute. Nothing is said of too short a run, or when other programs used the machine."""
    crowds = [(f.at_s, f.until_s) for f in evidence.faults if f.kind is FaultKind.CROWD]
    if not crowds or len(crowds) < len(evidence.faults):
        return False, ""
    edges = [evidence.ready_s, *(edge for crowd in crowds for edge in crowd), evidence.ended_s]
    times = evidence.round_times_s()
    quiet, beside = (
        [
            60.0 / WINDOW_S * (bisect_left(times, at_s + WINDOW_S) - bisect_left(times, at_s))
            for begin_s, end_s in spans
            for at_s in _windows(begin_s, end_s)
        ]
        for spans in (zip(edges[::2], edges[1::2], strict=True), crowds)
    )
    if min(len(quiet), len(beside)) < WINDOWS_MIN:
        return False, ""
    usual, found = statistics.fmean(quiet), statistics.fmean(beside)
    error = math.sqrt(
        statistics.variance(quiet) / len(quiet) + statistics.variance(beside) / len(beside)
    )
    text = f"{found:.0f} versions a minute beside strangers, {usual:.0f} (+-{error:.0f}) without"
    if evidence.others_share > OTHERS_SHARE_MAX:
        return False, f"{text}; {others_text(evidence)}"
    return found < BESIDE_STRANGERS_MIN * usual and usual - found > 3 * error, text


def _windows(begin_s: float, end_s: float) -> list[float]:
    """Beginnings of the windows that fit into an interval."""
    return [begin_s + number * WINDOW_S for number in range(int((end_s - begin_s) / WINDOW_S))]


def _steps_in_quiet_end(evidence: Evidence, life: Life) -> int:
    within = [
        report.steps
        for report in life.reports
        if evidence.quiet_s <= report.at_s <= evidence.ended_s
    ]
    return within[-1] - within[0] if within else 0


def longest_gap(evidence: Evidence, fragment: int | None = None) -> tuple[float, float]:
    """The longest time without a merge although two learners could have merged, and its start.

    ``fragment``: of this one; ``None``: of any.
    """
    times = [
        report.at_s
        for _, report in evidence.finished_rounds()
        if evidence.ready_s <= report.at_s <= evidence.ended_s
        and fragment in (None, report.fragment)
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


MEASUREMENTS_MIN = 4


def judge_resizes(evidence: Evidence) -> Verdict:
    """Judge the longest pause of a fragment's merges, and the largest rise of the held-out loss.

    Merges of a fragment come once in a cycle; a pause is the time beyond that, and a cycle of it is
    allowed. Where learners are killed, the round that they were in may also last until its deadline
    before the others are out of it.
    """
    if not evidence.sizes:
        return Verdict(Promise.RESIZES, None, "the number of learners did not change by schedule")
    sizes = [size for _, size in evidence.sizes]
    cycle_s = evidence.cycle_steps * evidence.pace_s
    fragments = sorted({report.fragment for _, report in evidence.finished_rounds()})
    gaps = [(*longest_gap(evidence, fragment), fragment) for fragment in fragments]
    wrong = [
        f"fragment {fragment} was not merged for {gap_s:.1f} s from {since_s:.0f} s on"
        for gap_s, since_s, fragment in gaps
        if gap_s > 2 * cycle_s + _until_out_of_round_s(evidence, since_s, since_s + gap_s)
    ]
    rise = largest_rise(evidence.held_out)
    if rise > SPIKE_MAX:
        wrong.append(f"the held-out loss rose by {rise:.3f} nats")
    longest_s, any_s = max((gap[0] for gap in gaps), default=0.0), longest_gap(evidence)[0]
    text = (
        f"{min(sizes)} to {max(sizes)} learners, {len(evidence.peers)} in all: never more than "
        f"{longest_s / cycle_s:.2f} cycles between two merges of a fragment, {any_s / cycle_s:.2f} "
        "of any"
    )
    if len(evidence.held_out) >= MEASUREMENTS_MIN:
        text = f"{text}; largest rise of the held-out loss {rise:.3f} nats"
    return verdict_of(Promise.RESIZES, wrong, text, on=evidence)


def _until_out_of_round_s(evidence: Evidence, begin_s: float, end_s: float) -> float:
    """Time that a kill between two moments may cost more."""
    killed = any(
        life.killed and begin_s <= life.ended_s <= end_s
        for peer in evidence.honest
        for life in peer.lives
    )
    fewer = any(
        begin_s <= at_s <= end_s and after < before
        for (_, before), (at_s, after) in pairwise(evidence.sizes)
    )
    return evidence.round_deadline_s if killed and fewer else 0.0
