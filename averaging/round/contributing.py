"""The contribution of a member: what it encodes once it has entered a round."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from averaging.history.parent_maps import ParentMap
from averaging.history.state import FragmentState
from averaging.numbers.arrays import Float32s
from averaging.round.effects import Enter


@dataclass(frozen=True, slots=True)
class Contribution:
    """Arrays to be encoded, and what travels with them."""

    base: Float32s
    values: Float32s
    """``base - values`` is encoded; in a mix both are, momentum and theta."""
    own_map: ParentMap | None = None
    """The own merged map, where states travel."""
    carried: tuple[Float32s, Float32s] | None = None
    """Theta and momentum, which a meld moves besides."""
    feedback: bool = False
    """``values`` become those that the encoded contribution stands for."""


def contribution(
    enter: Enter,
    state: FragmentState | None,
    offered: tuple[Float32s, Float32s] | None,
    *,
    feedback: Collection[str],
) -> Contribution | None:
    """Return what a member gives to a round; ``None``: nothing.

    ``offered``: base and values of the learner's snapshot. ``feedback``: codecs of uploads whose
    loss stays in the learner's parameters.
    """
    commit = enter.commit
    if commit.kind == "mix":
        if enter.entry not in commit.carriers:
            return None
        assert state is not None
        own_map = ParentMap(state.merged, state.history)
        return Contribution(state.momentum, state.theta, own_map)
    if offered is None:
        return None
    base, values = offered
    fed_back = commit.displacement_codec in feedback
    if commit.kind == "merge":
        return Contribution(base, values, feedback=fed_back)
    assert state is not None
    own_map = ParentMap(state.merged, state.history)
    return Contribution(base, values, own_map, (state.theta, state.momentum), fed_back)
