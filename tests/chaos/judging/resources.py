"""Judges the use of machines: growth of memory, and leftovers at the end."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence

from tests.chaos.judging.evidence import Evidence, Life, Sample
from tests.chaos.judging.schedule import FaultKind
from tests.chaos.judging.verdict import (
    Promise,
    Verdict,
    verdict_of,
)

DAEMON_FOLDER = "shoal-p2p-"
"""Beginning of the name of a libp2p daemon's folder (``dht.libp2p.hivemind_daemon``)."""

FLAT_AFTER_S = 300.0
"""Shorter processes are not judged: they have not reached their size yet."""

FLAT_BESIDE_LIARS_AFTER_S = 600.0
"""The same beside members that lie: proofs, and uploads kept for auditors, fill up for longer."""

MEMORY_GROWTH_MAX_BYTES_S = 40e3

DESCRIPTORS_GROWTH_MAX = 24

FIRST_STEPS_S = 5.0
"""A trainer in the run still reads its data and makes the first steps, which take most memory."""
FLOOD_MEMORY_MAX_BYTES = 200e6
"""A stranger may open 64 streams, each with two unread frames of one mebibyte."""

BOOTSTRAP_MEMORY_MAX_BYTES = 320e6
"""A full directory has 64 MiB of records, twice that in Python's objects, and the daemon remembers
addresses and connections."""


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
    floods memory has a bound instead: buffers that come and go hide growth.
    """
    flooded = any(fault.kind is FaultKind.FLOOD for fault in evidence.faults)
    watched = [(peer, not flooded) for peer in evidence.honest]
    watched += [(peer, True) for peer in (control.honest if control is not None else ())]
    after_s = FLAT_BESIDE_LIARS_AFTER_S if evidence.acts else FLAT_AFTER_S
    wrong, most_bytes = _grown_too_much_in_floods(evidence)
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
    floods = f"; a flood took {most_bytes / 1e6:.0f} MB at most" if most_bytes else ""
    if not judged and not wrong:
        why = f"no process lived for {after_s:.0f} s: run for longer{floods}"
        return Verdict(Promise.FLAT, None, why)
    kept = f"{judged} processes, the steepest grows {steepest / 1e3:.1f} kB/s{floods}"
    return verdict_of(Promise.FLAT, wrong, kept)


def _grown_too_much_in_floods(evidence: Evidence) -> tuple[list[str], int]:
    """Processes that a flood made too large, and the largest growth of any."""
    wrong, most_bytes = [], 0
    sampled = {peer.name: peer.samples for peer in evidence.honest} | dict(evidence.bootstraps)
    lives = {peer.name: peer.lives for peer in evidence.honest}
    for name, samples in sampled.items():
        hosts = name in evidence.bootstraps
        for role, grown in _grown_in_floods(evidence, samples, lives.get(name, ())):
            most_bytes = max(most_bytes, grown)
            if grown > (BOOTSTRAP_MEMORY_MAX_BYTES if hosts else FLOOD_MEMORY_MAX_BYTES):
                wrong.append(f"a flood made the {role} of {name} {grown / 1e6:.0f} MB larger")
    return wrong, most_bytes


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
