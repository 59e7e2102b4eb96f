"""Examples of what tallies are made of."""

from __future__ import annotations

from collections.abc import Mapping

from averaging.history.lineage import bound
from averaging.history.merged_map import Mark, MergedMap
from averaging.history.parent_maps import ParentMap
from averaging.messages import Link
from dht.identity import Identity, PeerId, RunId
from peer.extras.credit.accounting.tally import Part, ProvenMap, Tally, everything, stated

RUN = RunId("5f" * 32)
ANNA, BORIS, CLARA, DORA = (Identity.from_seed(letter * 32) for letter in (b"a", b"b", b"c", b"d"))
NAMES = {each.peer_id: name for each, name in zip((ANNA, BORIS, CLARA), "ABC", strict=True)}


def proven(
    tokens: Mapping[Identity, int], *, fragment: int = 0, version: int = 1, history: bytes = b"h"
) -> ProvenMap:
    """The map of a version with so many tokens of each peer, and its link."""
    merged = MergedMap({peer.peer_id: Mark(1, version, n) for peer, n in tokens.items()})
    content = ParentMap(merged, (history * 32)[:32])
    lineage = bound(content.history, merged.digest())
    return ProvenMap(fragment, Link(version, lineage, merged.tokens), content)


def nothing(_: ProvenMap) -> bool:
    return False


def named(tokens: Mapping[PeerId, int]) -> dict[str, int]:
    return {NAMES[peer]: count for peer, count in tokens.items()}


def a_tally(*, fragments: int, run: RunId = RUN) -> Tally:
    """Anna's tally of a run of two contributors."""
    made = Tally(run, fragments)
    made.follow(b"t" * 16)
    maps = tuple(
        proven({ANNA: 10 + f, BORIS: 5}, fragment=f, version=f, history=bytes([f]))
        for f in range(fragments)
    )
    made.unite(Part(maps=maps), believes=everything)
    said = (stated(ANNA, run, 1, "anna"), stated(BORIS, run, 2, "boris"))
    made.unite(Part(statements=said), believes=everything)
    return made
