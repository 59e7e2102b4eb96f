"""Going back along one's own history, for somebody who gives up one side of a fork.

What a learner has moved since two sides parted is told by the theta that both had then, which
nobody keeps. But a round is ``theta <- theta - eta*(Delta + mu*b)``, and who stands behind it knows
theta, b and Delta: the replay log can be run backwards. That is not exact, because each step was
rounded; it is good enough for a displacement, and no state is ever made of it.

Only as far as work may be old: what began more than ``stale_max`` versions ago is not offered
in any swarm.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from averaging.history.chain import Chain, ChainLink
from averaging.history.replay import ReplayEntry
from averaging.history.state import FragmentState
from averaging.numbers.arrays import Float32s
from averaging.numbers.codec import Scratch

ERROR_MAX = 2.0**-10
"""Of momentum, relative: dividing by mu at each step blows up what was rounded away."""

_ROUNDING = 2.0**-24


def parting(mine: Chain, theirs: Chain, *, versions_max: int) -> ChainLink | None:
    """The last version that both sides share; ``None`` if work from there is too old over there."""
    shared = theirs.common_ancestor(mine)
    if shared is None or theirs.tip.version - shared.version > versions_max:
        return None
    return shared


def rewound(
    state: FragmentState, entries: Sequence[ReplayEntry], sizes: Sequence[int], scratch: Scratch
) -> Float32s | None:
    """Theta before ``entries``, which are all the rounds from there to ``state``, oldest first.

    ``None`` when too much of it would be rounding.
    """
    error = _ROUNDING
    for entry in entries[1:]:
        error /= max(entry.head.commit.mu, _ROUNDING)
    if error > ERROR_MAX and any(entry.head.commit.mu for entry in entries):
        return None
    theta, momentum = state.theta.copy(), state.momentum.copy()
    for entry in reversed(entries):
        commit, codec = entry.head.commit, entry.head.codec
        eta, mu = np.float32(commit.eta), np.float32(commit.mu)
        for part, delta in codec.pieces(entry.payload, sizes, 1.0, scratch):
            b = momentum[part]
            theta[part] += eta * (delta + mu * b)
            if mu:
                b -= delta
                b /= mu
    return theta
