"""The tally of a reader outside the run, who has seen nobody work and can prove nothing.

It asks a few peers, and takes of each fragment the second heaviest map that they tell of: one of
them alone can add no tokens. Where a single peer answers, its word is all there is.
"""

from __future__ import annotations

from collections.abc import Sequence

from dht.identity import RunId
from peer.credit.proof import ProvenMap
from peer.credit.tally import Part, Tally

FRAGMENTS_MAX = 2**16


def unproven(run: RunId) -> Tally:
    """An empty tally of somebody who only reads."""
    return Tally(run, None, FRAGMENTS_MAX)


def everything(proven: ProvenMap) -> bool:
    """Believe what ``confirmed`` has chosen."""
    return True


def confirmed(parts: Sequence[Part]) -> Part:
    """The tally that several peers know together, as far as one of them does not say it alone."""
    by_fragment: dict[int, list[ProvenMap]] = {}
    for part in parts:
        for each in part.maps:
            by_fragment.setdefault(each.fragment, []).append(each)
    chosen = []
    for _, told in sorted(by_fragment.items()):
        ranked = sorted(told, key=lambda each: each.rank, reverse=True)
        chosen.append(ranked[min(1, len(ranked) - 1)])
    return Part(
        tuple(chosen),
        tuple(each for part in parts for each in part.reports),
        tuple(each for part in parts for each in part.statements),
    )
