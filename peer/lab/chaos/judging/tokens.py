"""Accounts for the tokens of a swarm: its ledger, its goodput, and whether the books agree."""

from __future__ import annotations

from peer.lab.chaos.judging.evidence import Evidence
from peer.lab.chaos.judging.verdict import Promise, Verdict, verdict_of


def tokens(evidence: Evidence) -> dict[str, float]:
    """The swarm's ledger: means over fragments weighted by size; discarded also by reason."""
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
    """Tokens merged between ``ready_s`` and ``ended_s``, as a share of those that as many learners
    would process without faults or waiting at ``step_s`` per step (default: the pace)."""
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
    seconds = evidence.ended_s - evidence.ready_s
    possible = len(evidence.honest) * seconds / (step_s or evidence.pace_s) * evidence.step_tokens
    return gained / possible


def judge_ledger(evidence: Evidence) -> Verdict:
    """Judge that ledgers, final states and trainers' counters agree."""
    wrong: list[str] = []
    final = evidence.final_maps()
    for peer in evidence.honest:
        last = peer.lives[-1]
        if last.killed or evidence.was_starting(last):
            continue  # its tokens since the last checkpoint are written off at its next start
        if not peer.accounts:
            wrong.append(f"{peer.name} saved no ledger")
            continue
        states = {part.fragment: part for part in peer.fragments}
        for account in peer.accounts:
            where = f"{peer.name}, fragment {account.fragment}"
            rest = account.merged + account.pending + sum(account.discarded.values())
            if account.processed != rest - account.excess:
                wrong.append(f"{where}: processed {account.processed}, but accounts for {rest}")
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
    return verdict_of(
        Promise.LEDGER,
        wrong,
        f"{totals['processed']:.0f} tokens = {totals['merged']:.0f} merged + "
        f"{totals['pending']:.0f} pending + {totals['discarded']:.0f} discarded",
    )
