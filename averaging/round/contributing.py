"""The contribution of a member: what it encodes once it has entered a round."""

from __future__ import annotations

from dataclasses import dataclass, replace

from averaging.history.parent_maps import ParentMap
from averaging.history.state import FragmentState
from averaging.numbers.arithmetic import Moved
from averaging.numbers.arrays import Float32s
from averaging.round.interface.effects import Enter
from averaging.rules.policy import RoundPolicy
from averaging.rules.weights import uploaded_share


@dataclass(frozen=True, slots=True)
class Contribution(Moved):
    """Arrays to be encoded, and what travels with them."""

    own_map: ParentMap | None = None
    """The own merged map, where states travel."""
    keeps_rests: bool = False
    """The loss of encoding the slices that this member merges is part of what it offers next
    (``averaging.round.rests``)."""


def contribution(
    enter: Enter,
    state: FragmentState | None,
    offered: tuple[Float32s, Float32s] | None,
    policy: RoundPolicy,
) -> Contribution | None:
    """Return what a member gives to a round; ``None``: nothing.

    ``offered``: base and values of the learner's snapshot.
    """
    commit = enter.commit
    if offered is None:
        return None
    base, values = offered
    assert enter.entry is not None
    up, down = (names.partition("/")[0] in policy.feedback for names in commit.codecs)
    given = Contribution(
        base,
        values,
        feedback=up,
        keeps_rests=policy.feeds_back_merged and (up or down),
        share=uploaded_share(policy.late_work, staleness=commit.members[enter.entry].staleness),
    )
    if not commit.melds:
        return given
    assert state is not None
    own_map = ParentMap(state.merged, state.history)
    return replace(given, own_map=own_map, carried=(state.theta, state.momentum))
