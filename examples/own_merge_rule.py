"""A merge rule of your own in a simulated swarm.

    cd examples
    shoal simulate --set outer.merge=mean,own_merge_rule:Middle \
        --set peers.count=16 --set rounds.group_size=4 --set outer.codec=f32 --seeds 3

A rule computes one unit (a tensor, or some rows of a large one) of the merged displacement. It must
give the same result at every peer: no clock, no random numbers, no order that depends on a dict or
a set.

For simulations only: a run file names our own rules and no others. Members merge pieces of each
other's rounds again, and ban a peer whose bytes differ; two versions of a rule, or of what it
imports, would ban honest peers.
"""

import numpy as np

from peer.simulate import Contributions, Float32s, Kind


class Middle:
    """The median of all contributions, value by value: no single peer has a large influence."""

    def only_adds(self, kind: Kind) -> bool:
        return False  # a median needs all contributions, not their weighted sum

    def merge(self, unit: Contributions, accumulator: Float32s) -> None:
        rows = np.empty((len(unit), unit.size), np.float32)
        for index, row in enumerate(rows):
            unit.decode(index, row)
        np.median(rows, axis=0, out=accumulator)
