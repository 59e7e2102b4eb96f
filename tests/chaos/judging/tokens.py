"""Accounts for the tokens of a swarm: its ledger, its goodput, and whether the books agree."""

from __future__ import annotations

from tests.chaos.judging.evidence import Evidence
from tests.chaos.judging.verdict import Promise, Verdict, verdict_of


def tokens(evidence: Evidence) -> dict[str, float]:
    """The swarm's ledger: means over fragments weighted by size; discarded also by reason."""
    total: dict[str, float] = {"processed": 0, "merged": 0, "pending": 0, "discarded": 0}
    for peer in evidence.honest:
        sizes = {part.fragment: part.size for part in peer.fragments}
        whole = sum(sizes.values())
        for index, fate in enumerate(peer.fates):
            share = sizes[index] / whole
            total["processed"] += share * fate.processed
            total["merged"] += share * fate.merged
            total["pending"] += share * fate.pending
            for reason, count in fate.discarded.items():
                total["discarded"] += share * count
                key = f"discarded.{reason}"
                total[key] = total.get(key, 0) + share * count
    return total


def goodput(evidence: Evidence) -> float | None:
    """Tokens merged between ``ready_s`` and ``ended_s``, as a share of those that as many learners
    would process without faults or waiting at their pace."""
    final = evidence.final_maps()
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
    seconds = len(evidence.honest) * (evidence.ended_s - evidence.ready_s)
    if evidence.sizes:
        seconds = sum(
            max(0.0, min(life.ended_s, evidence.ended_s) - max(life.began_s, evidence.ready_s))
            for peer in evidence.honest
            for life in peer.lives
        )
    possible = seconds / evidence.pace_s * evidence.step_tokens
    return gained / possible


def judge_ledger(evidence: Evidence, *, late_max: int = 0) -> Verdict:
    """Judge that ledgers, final states and trainers' counters agree.

    ``late_max``: tokens that a trainer may process while its agent ends.
    """
    wrong: list[str] = []
    final = evidence.final_maps()
    for peer in evidence.honest:
        last = peer.lives[-1]
        if last.killed or evidence.was_starting(last):
            continue  # its tokens since the last checkpoint are written off at its next start
        if not peer.fates:
            wrong.append(f"{peer.name} saved no ledger")
            continue
        states = {part.fragment: part for part in peer.fragments}
        for index, fate in enumerate(peer.fates):
            where = f"{peer.name}, fragment {index}"
            rest = fate.merged + fate.pending + fate.discarded_total
            if fate.processed != rest - fate.excess:
                wrong.append(f"{where}: processed {fate.processed}, but accounts for {rest}")
            if not 0 <= peer.processed_tokens - fate.processed <= late_max:
                wrong.append(
                    f"{where}: the ledger says {fate.processed} processed, the trainer's own "
                    f"counter {peer.processed_tokens}"
                )
            merged = states[index].merged.get(peer.peer_id, 0)
            if merged != fate.merged:
                wrong.append(f"{where}: the ledger says {fate.merged} merged, the state {merged}")
            swarm = final[index][1].get(peer.peer_id, 0)
            if swarm < fate.merged:
                wrong.append(
                    f"{where}: {fate.merged} merged in its own state, {swarm} in the swarm's"
                )
    totals = tokens(evidence)
    return verdict_of(
        Promise.LEDGER,
        wrong,
        f"{totals['processed']:.0f} tokens = {totals['merged']:.0f} merged + "
        f"{totals['pending']:.0f} pending + {totals['discarded']:.0f} discarded",
    )
