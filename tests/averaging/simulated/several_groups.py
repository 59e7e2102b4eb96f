"""Storms over a swarm that is dealt into several groups."""

from __future__ import annotations

from averaging.rules.mixing import MixingPolicy
from tests.averaging.simulated.swarm import Storm

SEVERAL_GROUPS = (
    Storm(peers=(9, 14), group_size=4),
    Storm(peers=(9, 14), group_size=4, mixing=MixingPolicy(every=3)),
    Storm(peers=(6, 12), group_size=3, mixing=MixingPolicy(every=0)),
)
