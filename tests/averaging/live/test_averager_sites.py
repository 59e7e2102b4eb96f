"""Sites between averagers on the in-memory network: real payloads, delegates that carry them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from averaging.live.slices.exchange import Exchange
from averaging.numbers.chunks import Chunk
from averaging.round.contributing import Contribution
from dht.identity import PeerId
from dht.memory.host import MemoryNetwork, identity_of
from tests.averaging.live.quadratic import POLICY, Peer, Swarm, check_tokens, swarm

SMALL_SLICES = replace(POLICY, slice_bytes_min=1024)


async def six(made: Swarm, *, sites: bool, codec: str = "int8") -> list[Peer]:
    policy = replace(SMALL_SLICES, codec=codec)
    return [
        await made.add(
            f"peer-{number}", policy=policy, site=f"site-{number % 2}" if sites else None
        )
        for number in range(6)
    ]


def sent_bytes(peers: Sequence[Peer]) -> int:
    """Bytes of payloads sent to peers of other sites or their own."""
    return sum(peer.averager.stats.sent_bytes for peer in peers)


async def test_sites_meet_as_everybody_would_and_hold_equal_bits() -> None:
    async with swarm(MemoryNetwork()) as made:
        peers = await six(made, sites=True)
        await made.live(40.0)
        made.check()
        check_tokens(peers)
        rounds = [r for p in peers for r in p.told("round") if r["outcome"] == "finished"]
        assert max(len(r["contributors"]) for r in rounds) == 6
        assert min(v for p in peers for v in p.versions() if v is not None) > 2
        for peer in peers:
            assert peer.learner is not None
            assert peer.learner.distance(made.optimum) < 0.7


def exaggerate(monkeypatch: pytest.MonkeyPatch, absurd: PeerId) -> None:
    """This peer's displacements are a million times what they should be."""
    encode = Exchange._encode_chunk

    def spoilt(self: Exchange, chunk: Chunk, given: Contribution, out: memoryview) -> None:
        if self.parts.me == absurd:
            far = given.base - np.float32(1e6) * (given.base - given.values)
            given = replace(given, values=far)
        encode(self, chunk, given, out)

    monkeypatch.setattr(Exchange, "_encode_chunk", spoilt)


async def test_an_absurd_rider_is_left_out_of_the_bundle_and_the_others_of_its_site_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    absurd = identity_of("peer-0").peer_id
    exaggerate(monkeypatch, absurd)

    async with swarm(MemoryNetwork()) as made:
        peers = await six(made, sites=True)
        await made.live(60.0)
        made.check()
        rounds = [r for p in peers for r in p.told("round") if r["outcome"] == "finished"]
        assert rounds and not any(absurd in r["contributors"] for r in rounds)
        neighbours = {peers[2].id, peers[4].id}
        kept = [r for r in rounds if neighbours.issubset(r["contributors"])]
        assert kept, "its work took that of its neighbours along"
        delegates = [r for p in (peers[2], peers[4]) for r in p.told("round")]
        reasons = {r["left_out"].get(absurd, "") for r in delegates}
        assert any("times what is usual" in reason for reason in reasons), reasons


async def test_an_absurd_delegate_is_left_out_with_the_bundle_that_it_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    absurd = identity_of("peer-0").peer_id
    exaggerate(monkeypatch, absurd)

    async with swarm(MemoryNetwork()) as made:
        peers = await six(made, sites=True)
        await made.live(40.0)
        made.check()
        rounds = [r for p in peers for r in p.told("round") if r["contributors"]]
        assert rounds and not any(absurd in r["contributors"] for r in rounds)
        reasons = [f["reason"] for p in peers for f in p.told("refused")]
        assert any("times what is usual" in reason for reason in reasons)
        assert any("it came with another's" in reason for reason in reasons)


@pytest.mark.slow
async def test_riders_send_their_own_payload_and_nothing_else() -> None:
    """Two delegates send a bundle each per round, four riders a payload each, and what delegates
    hand on to riders is the merged one: 2/2 + 4 + 2/2 + 4. Without sites 6 x 5/6, twice.
    """
    costs = []
    for sites in (True, False):
        async with swarm(MemoryNetwork()) as made:
            peers = await six(made, sites=sites)
            await made.live(50.0)
            versions = sum(v for v in peers[0].versions() if v is not None)
            costs.append(sent_bytes(peers) / versions)
    assert costs[0] / costs[1] == pytest.approx(1.0, rel=0.15)


@pytest.mark.slow
async def test_several_groups_meld_by_sites() -> None:
    async with swarm(MemoryNetwork()) as made:
        policy = replace(SMALL_SLICES, group_size=4)
        peers = [
            await made.add(f"peer-{n}", policy=policy, site=f"site-{n // 2}") for n in range(8)
        ]
        await made.live(90.0)
        made.check()
        rounds = [r for p in peers for r in p.told("round") if r["outcome"] == "finished"]
        assert "meld" in {r["kind"] for r in rounds}
        assert max(len(r["members"]) for r in rounds) == 4
        for fragment in range(len(made.layout.fragments)):
            states = [state for p in peers if (state := p.averager.states[fragment])]
            assert all(len(state.merged) == 8 for state in states), "work reaches everybody"


@pytest.mark.parametrize(
    "at_s", [19.5, *(pytest.param(at_s, marks=pytest.mark.slow) for at_s in (17.0, 17.5, 21.0))]
)
async def test_a_site_goes_on_when_its_delegates_die(at_s: float) -> None:
    async with swarm(MemoryNetwork()) as made:
        peers = await six(made, sites=True)
        await made.live(at_s)
        await peers[0].ended()
        await peers[0].host.close()
        await made.live(30.0)
        made.check()
        left = peers[1:]
        check_tokens(left)
        rounds = [r for p in left for r in p.told("round") if r["outcome"] == "finished"]
        assert len(rounds[-1]["contributors"]) == 5
        assert len({tuple(p.versions()) for p in left}) <= 2, "nobody is left behind"


async def test_bundles_in_f32_are_the_merge_of_everybody_apart_from_the_order_of_sums() -> None:
    thetas = []
    for sites in (True, False):
        async with swarm(MemoryNetwork()) as made:
            peers = await six(made, sites=sites, codec="f32")
            await made.live(14.0)
            states = [state for state in peers[0].averager.states if state is not None]
            first = [state for state in states if state.version == 1]
            assert first, "no fragment has made its first version"
            thetas.append({state.fragment: state.theta for state in first})
    for fragment in thetas[0].keys() & thetas[1].keys():
        np.testing.assert_allclose(thetas[0][fragment], thetas[1][fragment], atol=1e-5)
