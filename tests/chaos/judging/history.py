"""Judges that the swarm has one history: equal bits, and work of members alone, merged once."""

from __future__ import annotations

from collections import Counter, defaultdict

from tests.chaos.judging.evidence import Evidence, FinalFragment, RoundReport
from tests.chaos.judging.hostile import kept_out, merged_beside_work
from tests.chaos.judging.verdict import Promise, Verdict, verdict_of


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
                    f"{peer.name} ended apart from {heaviest.name} in fragment {index}, at version "
                    f"{part.version} {_made_by(evidence, part)} and version {head.version} "
                    f"{_made_by(evidence, head)}"
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


def _made_by(evidence: Evidence, part: FinalFragment) -> str:
    """Name those whose work the round that made this state merged."""
    names = {peer.peer_id: peer.name for peer in evidence.peers}
    for _, report in evidence.finished_rounds():
        if report.lineage == part.lineage:
            return f"(of {', '.join(names.get(peer, peer) for peer in report.contributors)})"
    return "(of no round)"


def judge_once(evidence: Evidence) -> Verdict:
    """Judge that merged work was processed, and that none is merged into a state that contains it.

    After a fork a learner may be merged on one side, go over to the other, which lacks that work,
    and offer it there again: otherwise it would be lost with a side that is never mixed. When the
    two sides are mixed, a step has weight once in total all the same. A mix takes the mean of the
    states, with weights that sum to one. A step that weighs a in one state and b in the other
    weighs w a + (1 - w) b in the mix, at most what the larger of the two is; one that a single side
    has weighs w a. So it gains no weight by being on both sides, it only loses none. Its tokens
    count once: merged maps unite to the maximum. After the mix the map contains both sides, and no
    round may merge any of it again.
    """
    wrong = merged_beside_work(evidence)
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
    liars = {peer.peer_id for peer in evidence.liars}  # they claim any number of steps
    for index, told in sorted(_final_histories(evidence).items()):
        contained: dict[str, dict[tuple[str, int], int]] = {}
        for report in told:
            before = _united(contained, report.parents)
            after = dict(before)
            for peer_id, (incarnation, end, steps, _) in sorted(report.marks.items()):
                if peer_id in liars:
                    continue
                checked += 1
                there = before.get((peer_id, incarnation), 0)
                if end - steps < there:
                    name = names[peer_id].name if peer_id in names else peer_id
                    wrong.append(
                        f"version {report.version} of fragment {index} has steps {end - steps} to "
                        f"{end} of {name}, of which {there} were merged before"
                    )
                after[peer_id, incarnation] = max(there, end)
            assert report.lineage is not None
            contained[report.lineage] = after
    spoilt = kept_out(evidence)
    beside = f"; {spoilt} spoilt uploads were kept out" if spoilt else ""
    return verdict_of(Promise.ONCE, wrong, f"{checked} contributions, none merged again{beside}")


def _final_histories(evidence: Evidence) -> dict[int, list[RoundReport]]:
    """The rounds that each fragment's heaviest final state grew out of, oldest first.

    After a mix they are those of all its sides.
    """
    chains: dict[int, tuple[int, frozenset[tuple[int, str]]]] = {}
    for peer in evidence.honest:
        for part in peer.fragments:
            tokens = sum(part.merged.values())
            if part.fragment not in chains or tokens > chains[part.fragment][0]:
                chains[part.fragment] = (tokens, part.chain)
    found: dict[int, dict[str, RoundReport]] = defaultdict(dict)
    for _, report in evidence.finished_rounds():
        chain = chains.get(report.fragment)
        if chain is not None and (report.version, report.lineage) in chain[1]:
            assert report.lineage is not None
            found[report.fragment][report.lineage] = report
    return {
        index: sorted(told.values(), key=lambda report: (report.version, report.lineage or ""))
        for index, told in found.items()
    }


def _united(
    contained: dict[str, dict[tuple[str, int], int]], parents: tuple[str, ...]
) -> dict[tuple[str, int], int]:
    """The last step of each peer's incarnation that a state grown out of these contains.

    If nobody reported a parent, such as a state that one peer made alone, all that is older counts.
    """
    known = [contained[parent] for parent in parents if parent in contained]
    united: dict[tuple[str, int], int] = {}
    for each in known if known and len(known) == len(parents) else contained.values():
        for who, end in each.items():
            united[who] = max(end, united.get(who, 0))
    return united
