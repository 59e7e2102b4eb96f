"""Judges that the swarm has one history: equal bits, and every token merged at most once."""

from __future__ import annotations

from collections import Counter, defaultdict

from peer.lab.chaos.judging.evidence import Evidence, RoundReport
from peer.lab.chaos.judging.verdict import Promise, Verdict, verdict_of


def judge_identical(evidence: Evidence) -> Verdict:
    """Judge that rounds and final states are the same at every peer."""
    wrong: list[str] = []
    outcomes: dict[str, tuple[str, RoundReport]] = {}
    for peer, report in evidence.finished_rounds():
        name, first = outcomes.setdefault(report.round, (peer.name, report))
        if (first.lineage, first.contributors) != (report.lineage, report.contributors):
            wrong.append(f"round {report.round[:8]} ended differently at {name} and {peer.name}")
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
        return Verdict(Promise.IDENTICAL, None, "no peer saved a state")
    shared = Counter(report.round for _, report in evidence.finished_rounds())
    several = sum(count > 1 for count in shared.values())
    return verdict_of(
        Promise.IDENTICAL,
        wrong,
        f"{several} rounds finished alike by several peers, {len(bits)} final lineages of one "
        f"history each",
    )


def judge_once(evidence: Evidence) -> Verdict:
    """Judge that merged work was processed, and merged only once."""
    wrong: list[str] = []
    names = {peer.peer_id: peer for peer in evidence.peers}
    for index, (_, merged) in sorted(evidence.final_maps().items()):
        for peer_id, tokens in sorted(merged.items()):
            peer = names.get(peer_id)
            if peer is not None and not peer.hostile and tokens > peer.processed_tokens:
                wrong.append(
                    f"fragment {index} has {tokens} tokens of {peer.name} merged, which "
                    f"processed {peer.processed_tokens}"
                )
    for peer in evidence.honest:
        for fate in peer.fates:
            if fate.excess:
                wrong.append(f"{peer.name} counts {fate.excess} tokens merged twice")
    checked = 0
    liars = {peer.peer_id for peer in evidence.liars}
    for (index, peer_id, _), spans in sorted(_merged_spans(evidence).items()):
        if peer_id in liars:
            continue  # they claim any number of steps
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
    return verdict_of(Promise.ONCE, wrong, f"{checked} contributions, each in one version")


def _merged_spans(evidence: Evidence) -> dict[tuple[int, str, int], set[tuple[int, int, int]]]:
    """The contributions in each fragment's heaviest final state.

    By fragment, peer id and incarnation: last step, number of steps, and version. In a chain that
    was mixed the versions of both sides count.
    """
    chains: dict[int, tuple[int, frozenset[tuple[int, str]]]] = {}
    for peer in evidence.honest:
        for part in peer.fragments:
            tokens = sum(part.merged.values())
            if part.fragment not in chains or tokens > chains[part.fragment][0]:
                chains[part.fragment] = (tokens, part.chain)
    spans: dict[tuple[int, str, int], set[tuple[int, int, int]]] = defaultdict(set)
    for _, report in evidence.finished_rounds():
        chain = chains.get(report.fragment)
        if chain is None or (report.version, report.lineage) not in chain[1]:
            continue
        for peer_id, (incarnation, mark, steps, _) in report.marks.items():
            spans[report.fragment, peer_id, incarnation].add((mark, steps, report.version))
    return spans
