"""The members of a delegate's bundle: who is left out of it, and who is waited for."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

from averaging.history.claims import Claim
from averaging.live.slices.bundling import Bundling
from averaging.live.slices.parts import Parts, Received
from averaging.rules.usual_norms import UploadNorm
from dht.identity import PeerId
from tests.averaging.values import commit_of, entry

CLAIM = Claim(0, (), b"", bytes(32), b"")


def bundling(*riders: int) -> Bundling:
    """The work of a delegate, member 1, in a round of one slice."""
    members = [entry(PeerId(f"p{index}")) for index in range(5)]
    parts = SimpleNamespace(
        entry=1,
        commit=commit_of(members),
        cutting=SimpleNamespace(slices=[None]),
        traffic=SimpleNamespace(inside=None),
        tally=SimpleNamespace(refused={}),
        own_maps={},
    )
    return Bundling(cast(Parts, parts), riders, norm_ratio_max=50.0)


async def test_a_delegate_leaves_out_an_absurd_rider_and_waits_for_nobody_who_gives_nothing() -> (
    None
):
    made = bundling(2, 3, 4)
    made.measured(0, UploadNorm(1.0, usual=1.0))
    for who, value in ((2, 1.5), (3, 1e6)):
        norm = UploadNorm(value, usual=1.0)
        made.take(who, 0, Received(memoryview(b""), CLAIM, {}, norm))
    assert made.wants(4, 0) and not made.wants(3, 0)
    made.leave_out(4)
    began = asyncio.get_running_loop().time()
    await made.decide(60.0)
    assert asyncio.get_running_loop().time() == began
    assert made.parts.traffic.inside == (2,)
    assert list(made.parts.tally.refused) == ["p3"]
    assert not made.wants(4, 0)


async def test_a_delegate_waits_for_a_rider_for_a_time_and_no_longer() -> None:
    made = bundling(2)
    await made.decide(6.0)
    assert made.parts.traffic.inside == () and not made.wants(2, 0)
