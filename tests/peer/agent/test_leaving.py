"""What a peer hears at the end of its run, and who takes over the work of one that leaves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from averaging.rules.peer_view import PeerView
from dht.identity import PeerId
from peer.agent.leaving import Leaving, takers
from peer.agent.network import Network
from peer.agent.peer import Peer
from peer.rules.ending import Whom
from peer.status import HeldOut, PeerStatus
from tests.peer.agent.example_keepers import keeper_online
from tests.peer.statuses import a_status

ANNA, BORIS, CLARA, DORA = map(PeerId, ("anna", "boris", "clara", "dora"))


def line(bytes_per_s: float | None) -> PeerView:
    return PeerView(first_seen=0.0, heard_at=0.0, bytes_per_s=bytes_per_s)


def test_the_keeper_with_the_fastest_line_takes_over_first() -> None:
    view = {ANNA: line(1e6), BORIS: line(3e6), CLARA: line(None), DORA: line(9e6)}
    keepers, followers = [ANNA, BORIS, CLARA], [ANNA, BORIS, CLARA, DORA]
    assert takers(keepers, followers, view) == [BORIS, ANNA, CLARA]
    assert takers([], followers, view) == [DORA, BORIS, ANNA, CLARA]
    assert takers([PeerId("gone")], [DORA], view) == [DORA]


async def test_a_keeper_hears_the_last_held_out_loss_from_those_that_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asked for it every 10 s: of a run of 20 s, whose learner then left, it often had none."""
    measured = HeldOut(3, 2.4, BORIS, 900)

    async def statuses(network: Network, peers: Sequence[PeerId]) -> list[PeerStatus]:
        return [a_status(held_out=measured)]

    monkeypatch.setattr(Network, "statuses", statuses)
    monkeypatch.setattr(Peer, "versions", lambda peer: (3, 4))
    monkeypatch.setattr(Peer, "merged_tokens", lambda peer: 1000)
    nothing: Any = SimpleNamespace()
    async with keeper_online(tmp_path, monkeypatch) as (peer, averager):
        leaving = Leaving(peer, averager, nothing, begin=nothing, stop=nothing)
        await leaving._answers(Whom.FOLLOWERS)
        assert peer.held_out.newest == measured
