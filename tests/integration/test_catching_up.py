"""A peer 3 versions behind replays, one 1000 versions behind fetches the state: bytes fetched."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import blake3
import numpy as np
import pytest

from averaging.history.chain import Chain, ChainLink
from averaging.history.lineage import bound
from averaging.history.merged_map import Mark, MergedMap
from averaging.history.state import FragmentState
from averaging.live.states.fetch_server import fetch_protocol
from averaging.numbers.codecs import codec_named
from averaging.numbers.layout import Layout, TensorSpec
from averaging.rules.due import DuePolicy
from averaging.rules.quorum import QuorumPolicy
from dht.host import Host, Stream
from dht.identity import PeerId
from dht.memory.host import MemoryNetwork
from tests.averaging.live.quadratic import POLICY, RUN, Peer, Swarm, swarm
from tests.swarms.commands import tell

ONE_FRAGMENT = Layout.build([TensorSpec("weight", (64, 256)), TensorSpec("bias", (256,))], 1)
VALUES = ONE_FRAGMENT.fragments[0].size
STATE_BYTES = 2 * 4 * VALUES
"""Size of theta and momentum in fp32."""
PAYLOAD_BYTES = codec_named("int4").encoded_size(ONE_FRAGMENT.fragments[0].unit_sizes)

QUICK = replace(
    POLICY,
    codec="int4",
    due=DuePolicy(cycle_steps=2, fragments=1),
    quorum=QuorumPolicy(wait_s=4.0),
)


class CountingStream:
    """A stream that counts received bytes."""

    def __init__(self, stream: Stream, counts: Counter[str]) -> None:
        self._stream = stream
        self._counts = counts

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    async def receive(self, *, timeout_s: float) -> bytes | bytearray | memoryview | None:
        frame = await self._stream.receive(timeout_s=timeout_s)
        self._counts["fetched_bytes"] += len(frame or b"")
        return frame


class CountingHost:
    """A host that counts only the bytes that it fetches to catch up."""

    def __init__(self, host: Host, counts: Counter[str]) -> None:
        self._host = host
        self._counts = counts

    def __getattr__(self, name: str) -> object:
        return getattr(self._host, name)

    async def open_stream(
        self, peer: PeerId, protocol: str, *, timeout_s: float, bulk: bool = False
    ) -> object:
        stream = await self._host.open_stream(peer, protocol, timeout_s=timeout_s, bulk=bulk)
        return CountingStream(stream, self._counts) if protocol == fetch_protocol(RUN) else stream


async def away_for(made: Swarm, versions: int) -> tuple[Peer, Counter[str], int]:
    """Cut one of three peers off until the others have made ``versions``; heal and catch up.

    Returns the peer, the bytes that it fetched, and the number of versions that it was behind.
    """
    counts: Counter[str] = Counter()
    anna = await made.add("anna", policy=QUICK)
    await made.add("boris", policy=QUICK)
    clara = await made.add(
        "clara",
        policy=QUICK,
        wrap=lambda host: CountingHost(host, counts),  # type: ignore[arg-type,return-value]
    )
    await made.live(20.0)
    newest = version_of(clara)
    while version_of(clara) == newest:  # in a round it would wait for the deadline of the round
        await made.live(0.05)
    made.network.partition([[clara.id]])
    await made.live(10.0)  # the others notice
    counts.clear()
    left_at = version_of(clara)
    while version_of(anna) < left_at + versions:
        await made.live(1.0)
    assert version_of(clara) == left_at
    made.network.heal()
    while version_of(clara) < left_at + versions:
        await made.live(0.05)
    made.check()
    return clara, counts, version_of(clara) - left_at


def version_of(peer: Peer) -> int:
    state = peer.averager.states[0]
    assert state is not None
    return state.version


def ways(peer: Peer) -> list[str]:
    return [str(adopted["how"]) for adopted in peer.told("state_adopted")]


def state_at(version: int) -> FragmentState:
    """A state after many versions, with its history."""

    def history(of: int) -> bytes:
        return blake3.blake3(f"version {of}".encode()).digest()

    def merged(of: int) -> MergedMap:
        return MergedMap({PeerId("somebody"): Mark(1, of, 1000 * of)})

    def link(of: int) -> ChainLink:
        return ChainLink(of, bound(history(of), merged(of).digest()), 1000 * of)

    chain = Chain(map(link, range(version + 1)))
    theta = np.full(VALUES, version, np.float32)
    zeros = np.zeros(VALUES, np.float32)
    tip = chain.tip.lineage
    return FragmentState(0, version, tip, chain, theta, zeros, merged(version), history(version))


@pytest.mark.parametrize("behind", [3, 30, 50, 90])
async def test_a_peer_that_is_behind_is_never_mixed(behind: int) -> None:
    """A message has few links of a long chain. For some distances a lineage between two links
    looked like another branch with about as many tokens, and old state was averaged with new."""
    async with swarm(MemoryNetwork(), layout=ONE_FRAGMENT) as made:
        for name in ("anna", "boris", "clara", "dora"):
            state = state_at(150 if name != "clara" else 150 - behind)
            await made.add(name, policy=QUICK, states=[state])
        await made.live(30.0)
        made.check()
        rounds = [done for peer in made.peers for done in peer.told("round")]
        assert not [done for done in rounds if done["kind"] == "mix"]
        assert len({version_of(peer) for peer in made.peers}) == 1
        assert version_of(made.peers[0]) > 150


async def test_a_peer_three_versions_behind_replays_three_payloads() -> None:
    async with swarm(MemoryNetwork(), layout=ONE_FRAGMENT) as made:
        clara, counts, behind = await away_for(made, 3)
        fetched = counts["fetched_bytes"]
        tell(f"behind by {behind}: {fetched} bytes, state {STATE_BYTES}")
        assert set(ways(clara)) == {"replay"}
        assert 3 <= behind <= 6
        # A payload for each version, with its commit and seal.
        assert behind * PAYLOAD_BYTES <= fetched <= behind * (PAYLOAD_BYTES + 2000)
        assert fetched < STATE_BYTES / 2


@pytest.mark.slow
async def test_a_peer_a_thousand_versions_behind_fetches_the_state_and_nothing_else() -> None:
    async with swarm(MemoryNetwork(), layout=ONE_FRAGMENT) as made:
        clara, counts, behind = await away_for(made, 1000)
        fetched = counts["fetched_bytes"]
        tell(f"behind by {behind}: {fetched} bytes, state {STATE_BYTES}")
        assert "state" in ways(clara)
        assert behind >= 1000
        # The state, its manifest with a thousand links, and the versions made meanwhile.
        assert fetched >= STATE_BYTES
        assert fetched <= STATE_BYTES + 100 * behind + 8 * PAYLOAD_BYTES
