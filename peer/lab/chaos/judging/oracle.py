"""Whether a hurt swarm kept its promises (DESIGN 6): judged from evidence, never from hope. Pure.

A verdict is ``None`` where the evidence cannot tell: too short a run, nothing to compare with.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from peer.lab.chaos.judging.evidence import (
    Evidence,
    FaultDone,
    HeldOutPoint,
    Life,
    PeerEvidence,
    RoundTold,
)
from peer.lab.chaos.judging.schedule import ABSENT, STRANGERS, FaultKind


class Promise(StrEnum):
    """What is judged; the numbers are those of DESIGN 6."""

    IDENTICAL = "identical"
    """2: equal lineages have equal bits, a round has one outcome, nobody stays apart."""
    ONCE = "once"
    """2: no token is merged twice, and none that was never processed."""
    BOUNDED = "bounded"
    """3: rounds and goodbyes end within their deadlines."""
    GOES_ON = "goes_on"
    """4: the others merge on, and nobody ends by itself."""
    SPEED = "speed"
    """4: the steps per second of those who are not hurt do not drop."""
    LEDGER = "ledger"
    """5: processed = merged + pending + discarded, as three independent books have it."""
    RETURNS = "returns"
    """6: who returns contributes within two cycles."""
    LOSS = "loss"
    """6: no spike when somebody comes, and no worse a loss than without faults."""
    HYGIENE = "hygiene"
    """DESIGN 5: what is not finite or outlying is never merged, and nothing else is refused."""
    CLEAN = "clean"
    """No process, file or shared memory is left."""
    FLAT = "flat"
    """Memory and descriptors do not grow with time."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One promise: kept, broken, or not to be told; and the words for it."""

    promise: Promise
    kept: bool | None
    reason: str


SILENCES = frozenset(
    {FaultKind.PARTITION, FaultKind.LINK, FaultKind.FREEZE, FaultKind.CRAWL, FaultKind.FLOOD}
)
"""What makes a peer that is there answer late, or not at all."""

SPEED_MEDIAN_MAX = 1.1
SPEED_MEAN_MAX = 1.3
"""Of the control's. The mean feels the starts of processes that share our cores."""

OTHERS_SHARE_MAX = 0.2
"""Of the processors. Beyond it steps that take longer may be others' doing, and more of them may
pass, being paced, while a round waits for a processor."""

SETTLED_STEPS = 31
"""A life's first steps are those of its start."""

STEPS_PER_SPAN_S = 2.0
LOOK_S = 0.25
DEADLINE_SLACK_S = 5.0
LEAVE_MAX_S = 45.0
"""For the last rounds, the checkpoints and the goodbye."""

FLOOD_MEMORY_MAX_BYTES = 200e6
"""A stranger may have 64 streams open, each with two frames of a mebibyte waiting to be read."""

LOSS_RATIO_MAX = 1.06
SPIKE_MAX = 0.25
"""In nats, beyond what the control shows."""

FLAT_AFTER_S = 300.0
"""Of one process's life: before that it is still growing into its size."""

MEMORY_GROWTH_MAX_BYTES_S = 40e3
DESCRIPTORS_GROWTH_MAX = 24


def judge(evidence: Evidence, control: Evidence | None = None) -> tuple[Verdict, ...]:
    """Every promise, in the order of ``Promise``."""
    return (
        _identical(evidence),
        _once(evidence),
        _bounded(evidence),
        _goes_on(evidence),
        _speed(evidence, control),
        _ledger(evidence),
        _returns(evidence),
        _loss(evidence, control),
        _hygiene(evidence),
        _clean(evidence),
        _flat(evidence, control),
    )


def _verdict(promise: Promise, faults: Sequence[str], kept: str) -> Verdict:
    if not faults:
        return Verdict(promise, True, kept)
    more = f" (and {len(faults) - 3} more)" if len(faults) > 3 else ""
    return Verdict(promise, False, "; ".join(faults[:3]) + more)


# --- one history --------------------------------------------------------------------------------


def _finished(evidence: Evidence) -> Iterator[tuple[PeerEvidence, RoundTold]]:
    for peer in evidence.honest:
        for told in peer.rounds:
            if told.finished:
                yield peer, told


def _identical(evidence: Evidence) -> Verdict:
    wrong: list[str] = []
    outcomes: dict[str, tuple[str, RoundTold]] = {}
    for peer, told in _finished(evidence):
        name, first = outcomes.setdefault(told.round, (peer.name, told))
        if (first.lineage, first.contributors) != (told.lineage, told.contributors):
            wrong.append(f"round {told.round[:8]} ended differently at {name} and {peer.name}")
    bits: dict[tuple[int, str], tuple[str, str]] = {}
    saved = [(peer, fragment) for peer in evidence.honest for fragment in peer.fragments]
    for peer, fragment in saved:
        key = (fragment.fragment, fragment.lineage)
        name, digest = bits.setdefault(key, (peer.name, fragment.bits))
        if digest != fragment.bits:
            wrong.append(
                f"{name} and {peer.name} have other bits of fragment {fragment.fragment} "
                f"at the same lineage"
            )
    for index in sorted({fragment.fragment for _, fragment in saved}):
        holders = [(peer, part) for peer, part in saved if part.fragment == index]
        heaviest, head = max(
            holders, key=lambda held: (sum(held[1].merged.values()), held[1].version, held[0].name)
        )
        for peer, part in holders:
            if (part.version, part.lineage) not in head.chain:
                wrong.append(
                    f"{peer.name} ended apart from {heaviest.name} in fragment {index}, "
                    f"at version {part.version} and {head.version}"
                )
    if not saved:
        return Verdict(Promise.IDENTICAL, None, "nobody saved a state")
    shared = Counter(told.round for _, told in _finished(evidence))
    several = sum(count > 1 for count in shared.values())
    return _verdict(
        Promise.IDENTICAL,
        wrong,
        f"{several} rounds finished alike by several peers, {len(bits)} final lineages of one "
        f"history each",
    )


def _final_merged(evidence: Evidence) -> dict[int, tuple[int, Mapping[str, int]]]:
    """By fragment: its size, and the heaviest state's map."""
    found: dict[int, tuple[int, Mapping[str, int]]] = {}
    for peer in evidence.peers:
        for part in peer.fragments:
            before = found.get(part.fragment)
            if before is None or sum(part.merged.values()) > sum(before[1].values()):
                found[part.fragment] = (part.size, part.merged)
    return found


def _once(evidence: Evidence) -> Verdict:
    wrong: list[str] = []
    names = {peer.peer_id: peer for peer in evidence.peers}
    for index, (_, merged) in sorted(_final_merged(evidence).items()):
        for peer_id, tokens in sorted(merged.items()):
            peer = names.get(peer_id)
            if peer is not None and not peer.hostile and tokens > peer.processed_tokens:
                wrong.append(
                    f"fragment {index} has {tokens} tokens of {peer.name} merged, which "
                    f"processed {peer.processed_tokens}"
                )
    for peer in evidence.honest:
        for account in peer.accounts:
            if account.excess:
                wrong.append(f"{peer.name} counts {account.excess} tokens merged twice")
    checked = 0
    for (index, peer_id, _), spans in sorted(_merged_spans(evidence).items()):
        before = 0
        for end, steps, version in sorted(spans):
            checked += 1
            if end - steps < before:
                name = names[peer_id].name if peer_id in names else peer_id
                wrong.append(
                    f"version {version} of fragment {index} has steps {end - steps} to {end} of "
                    f"{name}, of which {before} were merged before"
                )
            before = end
    return _verdict(Promise.ONCE, wrong, f"{checked} contributions, each in one version")


def _merged_spans(evidence: Evidence) -> dict[tuple[int, str, int], set[tuple[int, int, int]]]:
    """Of each fragment's heaviest final state: who has which steps in it, and by which version.

    By fragment, peer and incarnation: the last step, how many, and the version. Of a chain that was
    mixed the versions of both sides count.
    """
    chains: dict[int, tuple[int, frozenset[tuple[int, str]]]] = {}
    for peer in evidence.honest:
        for part in peer.fragments:
            tokens = sum(part.merged.values())
            if part.fragment not in chains or tokens > chains[part.fragment][0]:
                chains[part.fragment] = (tokens, part.chain)
    spans: dict[tuple[int, str, int], set[tuple[int, int, int]]] = defaultdict(set)
    for _, told in _finished(evidence):
        chain = chains.get(told.fragment)
        if chain is None or (told.version, told.lineage) not in chain[1]:
            continue
        for peer_id, (incarnation, mark, steps, _) in told.marks.items():
            spans[told.fragment, peer_id, incarnation].add((mark, steps, told.version))
    return spans


# --- nobody waits, nobody stops -----------------------------------------------------------------


def _frozen_s(evidence: Evidence, name: str, begin_s: float, end_s: float) -> float:
    """For how much of a time a learner could not run."""
    return sum(
        max(0.0, min(end_s, fault.until_s) - max(begin_s, fault.at_s))
        for fault in evidence.faults
        if fault.kind in (FaultKind.FREEZE, FaultKind.CRAWL) and fault.victim == name
    )


def _bounded(evidence: Evidence) -> Verdict:
    wrong: list[str] = []
    longest = 0.0
    for peer in evidence.honest:
        for told in peer.rounds:
            seconds = told.seconds - _frozen_s(
                evidence, peer.name, told.at_s - told.seconds, told.at_s
            )
            longest = max(longest, seconds)
            if seconds > evidence.round_deadline_s + DEADLINE_SLACK_S:
                wrong.append(f"a round took {seconds:.0f} s at {peer.name}")
        life = peer.lives[-1]
        if life.ended_s - evidence.ended_s > LEAVE_MAX_S:
            wrong.append(f"{peer.name} took {life.ended_s - evidence.ended_s:.0f} s to leave")
    grown_bytes = 0
    for peer in evidence.honest:
        for role, grown in _grown_in_floods(evidence, peer):
            grown_bytes = max(grown_bytes, grown)
            if grown > FLOOD_MEMORY_MAX_BYTES:
                wrong.append(f"a flood made the {role} of {peer.name} {grown / 1e6:.0f} MB larger")
    flooded = f"; a flood took {grown_bytes / 1e6:.0f} MB at most" if grown_bytes else ""
    return _verdict(Promise.BOUNDED, wrong, f"the longest round took {longest:.1f} s{flooded}")


def _grown_in_floods(evidence: Evidence, peer: PeerEvidence) -> Iterator[tuple[str, int]]:
    """By how much each process of a peer was larger while a stranger flooded it than before."""
    for fault in evidence.faults:
        if fault.kind is not FaultKind.FLOOD:
            continue
        before: dict[tuple[int, str], int] = {}
        largest: dict[tuple[int, str], int] = {}
        for sample in peer.samples:
            process = (sample.pid, sample.role)
            if sample.at_s < fault.at_s:
                before[process] = sample.memory_bytes
            elif sample.at_s <= fault.until_s:
                largest[process] = max(sample.memory_bytes, largest.get(process, 0))
        for process, most in sorted(largest.items()):
            if process in before:
                yield process[1], most - before[process]


def _goes_on(evidence: Evidence) -> Verdict:
    wrong: list[str] = []
    for peer in evidence.honest:
        for life in peer.lives:
            if _never_got_in(evidence, life):
                continue
            if not life.killed and life.exit_code not in (0, 130):
                wrong.append(f"{peer.name} ended by itself with exit code {life.exit_code}")
            elif not life.killed and life.ended_s < evidence.ended_s:
                wrong.append(f"{peer.name} left at {life.ended_s:.0f} s without being asked")
    gap_s, since_s = _longest_gap(evidence)
    # The slowest honest way to the next merge: a whole cycle, a quorum that waits for somebody
    # who died just then, and a round that loses its leader at its end.
    cycle_s = evidence.cycle_steps * evidence.pace_s
    gap_max_s = cycle_s + evidence.quorum_deadline_s + evidence.round_deadline_s
    if gap_s > gap_max_s:
        wrong.append(f"no merge for {gap_s:.0f} s from {since_s:.0f} s on")
    for peer in evidence.honest:
        # In steps, because on a busy machine there are few of them in the same time.
        if _steps_in_quiet_end(evidence, peer.lives[-1]) < 4 * evidence.cycle_steps:
            continue
        merged = [told for told in peer.rounds if told.finished and told.contributed]
        if not any(told.at_s >= evidence.quiet_s for told in merged):
            wrong.append(f"{peer.name} merged nothing in the quiet end")
    return _verdict(Promise.GOES_ON, wrong, f"never more than {gap_s:.1f} s without a merge")


def _steps_in_quiet_end(evidence: Evidence, life: Life) -> int:
    within = [
        report.steps
        for report in life.reports
        if evidence.quiet_s <= report.at_s <= evidence.ended_s
    ]
    return within[-1] - within[0] if within else 0


def _never_got_in(evidence: Evidence, life: Life) -> bool:
    """It was still starting when everybody was asked to leave: nothing can be said of it."""
    return life.ready_s is None and life.ended_s >= evidence.ended_s


def _longest_gap(evidence: Evidence) -> tuple[float, float]:
    """The longest time without a merge, and since when: of it only what two learners were whole."""
    times = [
        told.at_s
        for _, told in _finished(evidence)
        if evidence.ready_s <= told.at_s <= evidence.ended_s
    ]
    moments = sorted([evidence.ready_s, *times, evidence.ended_s])
    return max(
        (_able_s(evidence, earlier, later), earlier)
        for earlier, later in itertools.pairwise(moments)
    )


def _able_s(evidence: Evidence, begin_s: float, end_s: float) -> float:
    """For how much of a time at least two learners were in the run and could have merged."""
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


def _is_without_agent(evidence: Evidence, peer: PeerEvidence, at_s: float) -> bool:
    """Its agent was killed, and the next one was not in the run yet."""
    killed_s = max(
        (
            fault.at_s
            for fault in evidence.faults
            if fault.kind is FaultKind.AGENT and fault.victim == peer.name and fault.at_s <= at_s
        ),
        default=None,
    )
    return killed_s is not None and not any(killed_s < in_s <= at_s for in_s in peer.agents_in_s)


def step_times_s(evidence: Evidence) -> list[float]:
    """Of learners while they were not hurt themselves, over spans of about two seconds."""
    times: list[float] = []
    for peer in evidence.honest:
        own = [fault for fault in evidence.faults if _is_hurt_by(peer, fault)]
        for life in peer.lives:
            begin = None
            for report in life.reports:
                if report.steps <= SETTLED_STEPS or report.at_s < evidence.ready_s:
                    continue
                if begin is None:
                    begin = report
                    continue
                if report.trained_s - begin.trained_s < STEPS_PER_SPAN_S:
                    continue
                hurt = any(
                    fault.at_s - 1.0 < report.at_s and begin.at_s < fault.until_s + 2.0
                    for fault in own
                )
                steps = report.steps - begin.steps
                if steps and not hurt and report.at_s <= evidence.ended_s:
                    times.append((report.trained_s - begin.trained_s) / steps)
                begin = report
    return times


def _is_hurt_by(peer: PeerEvidence, fault: FaultDone) -> bool:
    # Losing the agent or the disk must not slow a trainer down: those count as not hurt.
    return fault.victim == peer.name and fault.kind in ABSENT


def _speed(evidence: Evidence, control: Evidence | None) -> Verdict:
    hurt = step_times_s(evidence)
    if control is not None:
        quiet, whose = step_times_s(control), "without faults"
    else:
        quiet, whose = [evidence.pace_s], "as paced"
    if len(hurt) < 5 or not quiet:
        return Verdict(Promise.SPEED, None, "too few steps to tell")
    median, mean = statistics.median(hurt), statistics.fmean(hurt)
    usual, usual_mean = statistics.median(quiet), statistics.fmean(quiet)
    figures = (
        f"a step took {1e3 * median:.0f} ms (mean {1e3 * mean:.0f}); "
        f"{whose} {1e3 * usual:.0f} (mean {1e3 * usual_mean:.0f})"
    )
    kept = median <= SPEED_MEDIAN_MAX * usual and mean <= SPEED_MEAN_MAX * usual_mean
    if not kept and evidence.others_share > OTHERS_SHARE_MAX:
        return Verdict(Promise.SPEED, None, f"{figures}; {_busy(evidence)}")
    return Verdict(Promise.SPEED, kept, figures)


def _busy(evidence: Evidence) -> str:
    return f"processes that are none of ours had {evidence.others_share:.0%} of this machine"


# --- every token has a fate ---------------------------------------------------------------------


def _ledger(evidence: Evidence) -> Verdict:
    wrong: list[str] = []
    final = _final_merged(evidence)
    for peer in evidence.honest:
        last = peer.lives[-1]
        if last.killed or _never_got_in(evidence, last):
            continue  # what it had since its last checkpoint is written off when it comes back
        if not peer.accounts:
            wrong.append(f"{peer.name} saved no ledger")
            continue
        states = {part.fragment: part for part in peer.fragments}
        for account in peer.accounts:
            where = f"{peer.name}, fragment {account.fragment}"
            rest = account.merged + account.pending + sum(account.discarded.values())
            if account.processed != rest - account.excess:
                wrong.append(f"{where}: processed {account.processed}, but fates for {rest}")
            if account.processed != peer.processed_tokens:
                wrong.append(
                    f"{where}: the ledger says {account.processed} processed, the trainer's own "
                    f"counter {peer.processed_tokens}"
                )
            told = states[account.fragment].merged.get(peer.peer_id, 0)
            if told != account.merged:
                wrong.append(f"{where}: the ledger says {account.merged} merged, the state {told}")
            swarm = final[account.fragment][1].get(peer.peer_id, 0)
            if swarm < account.merged:
                wrong.append(
                    f"{where}: {account.merged} merged in its own state, {swarm} in the swarm's"
                )
    totals = tokens(evidence)
    return _verdict(
        Promise.LEDGER,
        wrong,
        f"{totals['processed']:.0f} tokens = {totals['merged']:.0f} merged + "
        f"{totals['pending']:.0f} pending + {totals['discarded']:.0f} discarded",
    )


def tokens(evidence: Evidence) -> dict[str, float]:
    """The swarm's ledger: means over fragments, weighted by size; discarded also by reason."""
    total: dict[str, float] = {"processed": 0, "merged": 0, "pending": 0, "discarded": 0}
    for peer in evidence.honest:
        sizes = {part.fragment: part.size for part in peer.fragments}
        whole = sum(sizes.values())
        for account in peer.accounts:
            share = sizes[account.fragment] / whole
            total["processed"] += share * account.processed
            total["merged"] += share * account.merged
            total["pending"] += share * account.pending
            for reason, count in account.discarded.items():
                total["discarded"] += share * count
                key = f"discarded.{reason}"
                total[key] = total.get(key, 0) + share * count
    return total


def goodput(evidence: Evidence, *, step_s: float | None = None) -> float | None:
    """Merged tokens of the time from ``ready_s`` to ``ended_s``, as a share of what as many
    learners would have made that are never hurt, wait for nobody and take ``step_s`` a step."""
    final = _final_merged(evidence)
    whole = sum(size for size, _ in final.values())
    if not whole or evidence.ended_s <= evidence.ready_s:
        return None
    gained = 0.0
    for peer in evidence.honest:
        before = 0.0
        for report in (report for life in peer.lives for report in life.reports):
            if report.at_s > evidence.ready_s:
                break
            before = report.merged_tokens
        after = sum(size * merged.get(peer.peer_id, 0) for size, merged in final.values()) / whole
        gained += after - before
    seconds = evidence.ended_s - evidence.ready_s
    possible = len(evidence.honest) * seconds / (step_s or evidence.pace_s) * evidence.step_tokens
    return gained / possible


# --- coming back --------------------------------------------------------------------------------


def _returns(evidence: Evidence) -> Verdict:
    allowed = 2 * evidence.cycle_steps
    wrong: list[str] = []
    seen: list[int] = []
    for peer in evidence.honest:
        for life in peer.lives[1:]:
            steps = life.merged_after_steps
            if steps is not None and steps <= allowed:
                seen.append(steps)
            elif _had_its_chance(evidence, peer, life, allowed):
                told = "never" if steps is None else f"after {steps} steps"
                wrong.append(f"{peer.name}, back at {life.began_s:.0f} s, merged {told}")
    if not seen and not wrong:
        return Verdict(Promise.RETURNS, None, "nobody came back for long enough")
    if wrong and evidence.others_share > OTHERS_SHARE_MAX:
        return Verdict(Promise.RETURNS, None, f"{'; '.join(wrong)}; {_busy(evidence)}")
    worst = f", the last after {max(seen)} steps of {allowed}" if seen else ""
    return _verdict(Promise.RETURNS, wrong, f"{len(seen)} came back{worst}")


def _had_its_chance(evidence: Evidence, peer: PeerEvidence, life: Life, allowed: int) -> bool:
    """Whether two cycles of a life passed in which nothing was done to this peer or its links.

    Nor was anybody silent who could be taken for a leader: to notice that takes ten seconds (the
    kill of one is noticed at once), which is more than the two cycles of a swarm as hasty as ours.
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


# --- what it is all for -------------------------------------------------------------------------


def _loss(evidence: Evidence, control: Evidence | None) -> Verdict:
    points = evidence.held_out
    if control is None or len(control.held_out) < 4 or len(points) < 4:
        return Verdict(Promise.LOSS, None, "no control to compare with, or too few measurements")
    hurt, usual = losses(evidence, control)
    spike, usual_spike = _spike(points), _spike(control.held_out)
    figures = (
        f"held-out loss {hurt:.3f}, without faults {usual:.3f} after as many tokens; "
        f"largest rise {spike:.3f}, without faults {usual_spike:.3f}"
    )
    kept = hurt <= LOSS_RATIO_MAX * usual and spike <= usual_spike + SPIKE_MAX
    return Verdict(Promise.LOSS, kept, figures)


def losses(evidence: Evidence, control: Evidence) -> tuple[float, float]:
    """The held-out loss at the end, and the control's after as many tokens."""
    last = list(evidence.held_out)[-3:]
    loss = statistics.fmean(point.loss for point in last)
    at = statistics.fmean(point.global_tokens for point in last)
    return loss, _loss_at(control.held_out, at)


def _loss_at(points: Sequence[HeldOutPoint], tokens: float) -> float:
    """Smoothed over the neighbours; the last one where the control did not come so far."""
    ordered = sorted(points, key=lambda point: point.global_tokens)
    nearest = min(range(len(ordered)), key=lambda i: abs(ordered[i].global_tokens - tokens))
    near = ordered[max(0, nearest - 1) : nearest + 2]
    return statistics.fmean(point.loss for point in near)


def _spike(points: Iterable[HeldOutPoint]) -> float:
    """The largest rise over the best of the three before."""
    values = [point.loss for point in points]
    rises = [values[i] - min(values[i - 3 : i]) for i in range(3, len(values))]
    return max([0.0, *rises])


# --- trust --------------------------------------------------------------------------------------

NEVER_MERGED = frozenset({"nan", "inf", "norm", "short", "long"})
"""What a hostile peer may send that no reducer may take. Flipped signs look like work."""


def _hygiene(evidence: Evidence) -> Verdict:
    wrong = [
        f"{peer.name} saved numbers of fragment {part.fragment} that are not finite"
        for peer in evidence.honest
        for part in peer.fragments
        if not part.finite
    ]
    names = {peer.peer_id: peer.name for peer in evidence.honest}
    for peer in evidence.honest:
        for told in peer.rounds:
            for peer_id, reason in told.refused.items():
                if peer_id in names:
                    wrong.append(f"{peer.name} refused {names[peer_id]}'s honest work: {reason}")
    contributors = {told.round: told.contributors for _, told in _finished(evidence)}
    known = {peer.peer_id for peer in evidence.peers}
    merged = {peer_id for _, told in _finished(evidence) for peer_id in told.contributors}
    wrong += [f"{peer_id}, who is none of us, was in a merge" for peer_id in sorted(merged - known)]
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
    came = f"; {got_through} frames of strangers came to nothing" if visits else ""
    return _verdict(Promise.HYGIENE, wrong, f"every saved number is finite{kept}{came}")


def _clean(evidence: Evidence) -> Verdict:
    leaks = evidence.leaks
    wrong = [f"still running: {text}" for text in leaks.processes]
    wrong += [f"left behind: {path}" for path in (*leaks.files, *leaks.shared_memory)]
    return _verdict(Promise.CLEAN, wrong, "nothing is left")


def _flat(evidence: Evidence, control: Evidence | None) -> Verdict:
    """The control's processes count: where all are killed now and then, only they grow old.

    The memory that floods take and that is given back between them hides what grows. It has a bound
    of its own (``_bounded``); descriptors are counted all the same.
    """
    flooded = any(fault.kind is FaultKind.FLOOD for fault in evidence.faults)
    watched = [(peer, not flooded) for peer in evidence.honest]
    watched += [(peer, True) for peer in (control.honest if control is not None else ())]
    wrong: list[str] = []
    judged = 0
    steepest = 0.0
    for peer, has_level in watched:
        by_process: dict[tuple[int, str], list[tuple[float, int, int]]] = defaultdict(list)
        for sample in peer.samples:
            by_process[sample.pid, sample.role].append(
                (sample.at_s, sample.memory_bytes, sample.descriptors)
            )
        for (_, role), samples in sorted(by_process.items()):
            begin_s, end_s = samples[0][0], samples[-1][0]
            if end_s - begin_s < FLAT_AFTER_S:
                continue
            judged += 1
            middle = [x for x in samples if 0.4 <= (x[0] - begin_s) / (end_s - begin_s) < 0.6]
            last = [x for x in samples if (x[0] - begin_s) / (end_s - begin_s) >= 0.8]
            if not middle or not last:
                continue
            grown = statistics.median(x[1] for x in last) - statistics.median(x[1] for x in middle)
            rate = grown / (0.4 * (end_s - begin_s))
            if has_level:
                steepest = max(steepest, rate)
            if has_level and rate > MEMORY_GROWTH_MAX_BYTES_S:
                wrong.append(f"the {role} of {peer.name} grows by {rate / 1e3:.0f} kB/s")
            more = statistics.median(x[2] for x in last) - statistics.median(x[2] for x in middle)
            if more > DESCRIPTORS_GROWTH_MAX:
                wrong.append(f"the {role} of {peer.name} has {more:.0f} more descriptors")
    if not judged:
        return Verdict(
            Promise.FLAT, None, f"no process lived for {FLAT_AFTER_S:.0f} s: run for longer"
        )
    return _verdict(
        Promise.FLAT, wrong, f"{judged} processes, the steepest grows {steepest / 1e3:.1f} kB/s"
    )
