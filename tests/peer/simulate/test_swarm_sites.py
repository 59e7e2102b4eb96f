"""Sites: peers of a site reduce among themselves, and a delegate uses the shared line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from averaging.history.parent_maps import ParentMap
from averaging.history.state import FragmentState
from averaging.messages import Commit
from averaging.round.interface.effects import Apply
from averaging.virtual.peer import Peer
from peer.simulate.settings import Swarm
from peer.simulate.simulation import SimulatedSwarm

SITE = 4
SITES: dict[str, Any] = {
    "peers.count": 12,
    "outer.fragments": 2,
    "outer.codec": "f32",
    "rounds.slice_bytes_min": 4096,
    "weather.site_size": SITE,
    "problem.size": 192,
    "end.cycles": 3.5,
}
"""Sites of four peers each, and fragments that are large compared with messages."""


def experiment(**settings: Any) -> Swarm:
    given = {name.replace("__", "."): value for name, value in settings.items()}
    return Swarm().with_settings({**SITES, **given})


def over_slow_lines(swarm: SimulatedSwarm) -> int:
    """Bytes over the shared lines of all sites, in both directions."""
    firsts = [slot.name for slot in swarm.lives.slots[::SITE]]
    return sum(sum(swarm.lives.network.shared_traffic(name)) for name in firsts)


@pytest.mark.slow  # a figure; bundles: averaging/live/test_averager_sites.py
@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({}, "merge"),
        ({"peers__count": 16, "rounds__group_size": 8}, "meld"),
    ],
)
def test_bytes_over_the_slow_line_fall_by_the_number_of_peers_at_a_site(
    settings: dict[str, Any], kind: str
) -> None:
    """One group of three sites; and four sites in groups of two, which meld."""
    by_site = SimulatedSwarm(experiment(**settings), 1)
    apart = SimulatedSwarm(experiment(rounds__by_site=False, **settings), 1)
    with by_site, apart:
        results = [swarm.run() for swarm in (by_site, apart)]

    for result in results:
        assert kind in {record.kind for record in result.rounds}
        assert result.final.version >= 3
        assert {record.contributors for record in result.rounds} == {12 if kind == "merge" else 8}
    per_round = [over_slow_lines(s) / len(s.rounds) for s in (by_site, apart)]
    # In a round of s sites of n peers each, members send their slices to all: (s - 1)/s of s*n
    # payloads leave their site; with delegates, (s - 1)/s of s payloads. Groups that are formed
    # regardless of sites spread over more of them, so that even more payloads leave.
    ratio = per_round[1] / per_round[0]
    assert ratio == pytest.approx(SITE, rel=0.1) if kind == "merge" else ratio > SITE


class Timed(SimulatedSwarm):
    """Notes how long each peer takes from its own contribution to the end of the round."""

    def __init__(self, swarm: Swarm, seed: int) -> None:
        self.closed: dict[bytes, float] = {}
        self.took: list[float] = []
        super().__init__(swarm, seed)

    def encoded(
        self, peer: Peer, commit: Commit, round_id: bytes, slices: Sequence[memoryview]
    ) -> None:
        self.closed.setdefault(round_id, self.lives.now)

    def applied(
        self,
        peer: Peer,
        apply: Apply,
        before: FragmentState,
        after: FragmentState,
        merged: memoryview,
        maps: Mapping[int, ParentMap],
    ) -> None:
        self.took.append(self.lives.now - self.closed[apply.round])
        super().applied(peer, apply, before, after, merged, maps)


@pytest.mark.slow  # a figure
def test_a_slow_upload_to_a_delegate_does_not_delay_the_round_until_its_deadline() -> None:
    with Timed(experiment(end__cycles=8.0), 1) as swarm:
        crawling = swarm.lives.slots[5].name
        swarm.lives.network.set_link(crawling, up_bytes_s=200.0)
        result = swarm.run()
    left_out = [r for r in result.rounds if r.members - r.contributors == 1]
    assert len(left_out) > 2
    # Where the slow peer is the delegate itself, all wait for it as for any slow peer.
    assert float(np.median(swarm.took)) < 0.5 * swarm.lives.policy.upload_s
