"""Which of the states that peers keep the owner attests."""

from __future__ import annotations

from collections.abc import Sequence

from peer.calls import Kept


def chosen(told: Sequence[Sequence[Kept]], fragments: int) -> tuple[tuple[Kept, int], ...] | None:
    """The newest state of each fragment that most peers hold alike, with their number.

    ``told``: the answer of each peer that keeps states. ``None`` if there is a fragment without.
    """
    holders: dict[Kept, int] = {}
    for states in told:
        for kept in set(states):
            holders[kept] = holders.get(kept, 0) + 1
    attested = []
    for fragment in range(fragments):
        able = [
            (kept.version, count, kept.digest, kept)
            for kept, count in holders.items()
            if kept.fragment == fragment and 2 * count > len(told)
        ]
        if not able:
            return None
        _, count, _, kept = max(able, key=lambda each: each[:3])
        attested.append((kept, count))
    return tuple(attested)
