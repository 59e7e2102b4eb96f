"""Judges the use of machines: speed of training, growth of memory, and leftovers at the end."""

from __future__ import annotations

import statistics
from collections import defaultdict

from tests.chaos.judging.evidence import Evidence
from tests.chaos.judging.schedule import ABSENT, FaultKind
from tests.chaos.judging.verdict import (
    Promise,
    Verdict,
    verdict_of,
)

SPEED_MEDIAN_MAX = 1.1

SPEED_MEAN_MAX = 1.3
"""Step times relative to the control's. The mean also contains starts of other processes."""

SETTLED_STEPS = 31
"""The first steps of a life, which are slow, are not judged."""

STEPS_PER_SPAN_S = 2.0

DAEMON_FOLDER = "shoal-p2p-"
"""Beginning of the name of a libp2p daemon's folder (``dht.libp2p.hivemind_daemon``)."""

FLAT_AFTER_S = 300.0
"""Shorter processes are not judged: they have not reached their size yet."""

FLAT_BESIDE_LIARS_AFTER_S = 600.0
"""The same beside members that lie: proofs, and uploads kept for auditors, fill up for longer."""

MEMORY_GROWTH_MAX_BYTES_S = 40e3

DESCRIPTORS_GROWTH_MAX = 24


def step_times_s(evidence: Evidence) -> list[float]:
    """Mean step times over spans of about two seconds, of learners without a fault of their own."""
    times: list[float] = []
    for peer in evidence.honest:
        # Losing the agent or the disk must not slow a trainer down, so these faults do not count.
        own = [f for f in evidence.faults if f.victim == peer.name and f.kind in ABSENT]
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
                affected = any(
                    fault.at_s - 1.0 < report.at_s and begin.at_s < fault.until_s + 2.0
                    for fault in own
                )
                steps = report.steps - begin.steps
                if steps and not affected and report.at_s <= evidence.ended_s:
                    times.append((report.trained_s - begin.trained_s) / steps)
                begin = report
    return times


def judge_speed(evidence: Evidence, control: Evidence | None) -> Verdict:
    """Judge the step times against the control's, or without a control against the pace."""
    times = step_times_s(evidence)
    if control is not None:
        quiet, whose = step_times_s(control), "without faults"
    else:
        quiet, whose = [evidence.pace_s], "as paced"
    if len(times) < 5 or not quiet:
        return Verdict(Promise.SPEED, None, "too few steps to tell")
    median, mean = statistics.median(times), statistics.fmean(times)
    usual, usual_mean = statistics.median(quiet), statistics.fmean(quiet)
    figures = (
        f"a step took {1e3 * median:.0f} ms (mean {1e3 * mean:.0f}); "
        f"{whose} {1e3 * usual:.0f} (mean {1e3 * usual_mean:.0f})"
    )
    kept = median <= SPEED_MEDIAN_MAX * usual and mean <= SPEED_MEAN_MAX * usual_mean
    return verdict_of(Promise.SPEED, [] if kept else [figures], figures, on=evidence)


def judge_clean(evidence: Evidence) -> Verdict:
    """Judge that all processes have ended and all temporary files are gone."""
    leaks = evidence.leaks
    wrong = [f"still running: {text}" for text in leaks.processes]
    # Nobody comes after a learner that was killed for good and removes its daemon's folder.
    killed = sum(peer.lives[-1].killed for peer in evidence.peers if peer.lives)
    folders = [path for path in leaks.files if DAEMON_FOLDER in path][:killed]
    files = [path for path in leaks.files if path not in folders]
    wrong += [f"left behind: {path}" for path in (*files, *leaks.shared_memory)]
    left = f" but {len(folders)} folders of daemons killed for good" if folders else ""
    return verdict_of(Promise.CLEAN, wrong, f"nothing is left{left}")


def judge_flat(evidence: Evidence, control: Evidence | None) -> Verdict:
    """Judge that memory and descriptors do not grow with time.

    Processes of the control count as well: with constant kills they are the only old ones. During
    floods memory is not judged here but by ``judge_bounded``: buffers that come and go hide growth.
    """
    flooded = any(fault.kind is FaultKind.FLOOD for fault in evidence.faults)
    watched = [(peer, not flooded) for peer in evidence.honest]
    watched += [(peer, True) for peer in (control.honest if control is not None else ())]
    after_s = FLAT_BESIDE_LIARS_AFTER_S if evidence.acts else FLAT_AFTER_S
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
            if end_s - begin_s < after_s:
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
        return Verdict(Promise.FLAT, None, f"no process lived for {after_s:.0f} s: run for longer")
    return verdict_of(
        Promise.FLAT, wrong, f"{judged} processes, the steepest grows {steepest / 1e3:.1f} kB/s"
    )
