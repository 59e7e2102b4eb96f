"""Sizes of the tally of contributions of large runs: ``python -m tests.benchmark.tally_sizes``."""

from __future__ import annotations

import random

from averaging.history.lineage import bound
from averaging.history.merged_map import Mark, MergedMap
from averaging.history.parent_maps import ParentMap
from averaging.messages import Link
from dht.identity import Identity, PeerId, RunId
from peer.extras.credit.accounting import wire
from peer.extras.credit.accounting.tally import Part, ProvenMap, Tally, everything, stated

SIGNATURES = 9
"""Signatures under a link in a round of sixteen members."""


def large_tally(peers: int, fragments: int) -> Tally:
    """A tally of so many contributors, each with a name."""
    rng = random.Random(peers)
    identities = [Identity.from_seed(n.to_bytes(32, "big")) for n in range(peers)]
    tokens = {each.peer_id: rng.randint(10**6, 10**10) for each in identities}
    made = Tally(RunId("5f" * 32), fragments)
    maps = tuple(_proven(rng, identities, tokens, fragment) for fragment in range(fragments))
    made.unite(Part(maps=maps), believes=everything)
    said = tuple(stated(each, made.run, 1, f"peer {each.peer_id[-8:]}") for each in identities)
    made.unite(Part(statements=said), believes=everything)
    return made


def _proven(
    rng: random.Random,
    identities: list[Identity],
    tokens: dict[PeerId, int],
    fragment: int,
) -> ProvenMap:
    """The map of a fragment, which is up to a cycle behind those of others."""
    marks = {
        each.peer_id: Mark(
            1_790_000_000 + rng.randint(0, 10**7),
            rng.randint(10**3, 10**6),
            max(1, tokens[each.peer_id] - rng.randint(0, 10**5)),
        )
        for each in identities
    }
    merged, history = MergedMap(marks), bytes([fragment]) * 32
    link = Link(1000, bound(history, merged.digest()), merged.tokens)
    signatures = tuple((each.peer_id, bytes(64)) for each in identities[:SIGNATURES])
    return ProvenMap(fragment, link, ParentMap(merged, history), signatures)


def main() -> None:
    for peers, fragments in ((50, 8), (1000, 24)):
        part = large_tally(peers, fragments).part
        whole, maps = len(wire.encode(part)), len(wire.encode(Part(maps=part.maps)))
        print(
            f"{peers} contributors, {fragments} fragments: {whole / 1e6:.2f} MB; "
            f"maps {maps / peers / fragments:.0f} bytes for each contributor and fragment, names "
            f"{(whole - maps) / peers:.0f} bytes for each contributor"
        )


if __name__ == "__main__":
    main()
