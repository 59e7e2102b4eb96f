"""A merge rule and a grouping of your own in a simulated swarm: ten lines each, used by name.

    shoal simulate swarm --plugin examples/own_merge_rule.py \
        --set outer.merge=mean,middle --set rounds.grouping=halves,rotation \
        --set peers.count=16 --set rounds.group_size=4 --set outer.codec=f32 --seeds 3

A rule computes one unit (a tensor, or some rows of a large one) of the merged displacement. A
grouping divides peers into groups for a version of a fragment. Both must give the same result at
every peer: no clock, no random numbers, no order that depends on a dict or a set. A codec
is registered in the same way, with ``register_codec``; it has all methods of ``Codec`` in
averaging/numbers/codec.py.
"""

from collections.abc import Sequence

import numpy as np

from peer.simulate.swarm.plugins import (
    Contributions,
    Float32s,
    Kind,
    PeerId,
    register_grouping,
    register_merge_rule,
)


class Middle:
    """The median of all contributions, value by value: no single peer has a large influence."""

    name = "middle"

    def only_adds(self, kind: Kind) -> bool:
        return False  # a median needs all contributions, not their weighted sum

    def merge(self, unit: Contributions, accumulator: Float32s) -> None:
        rows = np.empty((len(unit), unit.size), np.float32)
        for index, row in enumerate(rows):
            unit.decode(index, row)
        np.median(rows, axis=0, out=accumulator)


class Rotation:
    """Groups of neighbours in a row that is shifted by half a group at each version."""

    name = "rotation"

    def deal(
        self, peers: Sequence[PeerId], *, size: int, fragment: int, version: int
    ) -> tuple[tuple[PeerId, ...], ...]:
        shift = (version * (size // 2 or 1)) % len(peers)
        row = [*peers[shift:], *peers[:shift]]
        return tuple(tuple(sorted(row[at : at + size])) for at in range(0, len(row), size))

    def smallest(self, size: int) -> int:
        return 1  # the rest of a row


register_merge_rule(Middle())
register_grouping(Rotation())
