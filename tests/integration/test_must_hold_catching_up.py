"""Issue C, 5: behind by 3 versions a peer replays; by 1000 it takes the state. By bytes fetched."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import blake3
import numpy as np
import pytest

from averaging.history.lineage import Chain, ChainLink, Mark, MergedMap
from averaging.history.state import FragmentState
from averaging.live.fetch_server import fetch_protocol
from averaging.numbers.codec import codec_named
from averaging.numbers.layout import Layout, TensorSpec
from averaging.rules.due import DuePolicy
from averaging.rules.quorum import QuorumPolicy
from dht.host import Host, Stream
from dht.identity import PeerId
from dht.memory.host import MemoryNetwork, run
from tests.averaging.live.quadratic import POLICY, RUN, Peer, Swarm, swarm
from tests.integration.swarm_processes import tell

ONE_FRAGMENT = Layout.build([TensorSpec("weight", (64, 256)), TensorSpec("bias", (256,))], 1)
VALUES = ONE_FRAGMENT.fragments[0].size
STATE_BYTES = 2 * 4 * VALUES
"""theta and momentum in fp32."""
PAYLOAD_BYTES = codec_named("int4").encoded_size(ONE_FRAGMENT.fragments[0].unit_sizes)

QUICK = replace(
    POLICY,
    codec="int4",
    due=DuePolicy(cycle_steps=2, fragments=1),
    quorum=QuorumPolicy(wait_s=4.0),
)


class CountingStream:
    """A stream that counts what it receives."""

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
    """A host that counts the bytes which it fetches to catch up, and nothing else."""

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
    """Cut one of three off until the others have made so many versions; heal, and let it catch up.

    Returns it, what it fetched, and by how many versions it was behind.
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
    while version_of(clara) == newest:  # cut off in a round it would wait for the round's deadline
        await made.live(0.05)
    made.network.partition([[clara.id]])
    await made.live(10.0)  # the others come to notice
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
    """A state of a run of many versions, with all its history."""

    def lineage(of: int) -> bytes:
        return blake3.blake3(f"version {of}".encode()).digest()

    chain = Chain([ChainLink(v, lineage(v), 1000 * v) for v in range(version + 1)])
    theta = np.full(VALUES, version, np.float32)
    merged = MergedMap({PeerId("somebody"): Mark(1, version, 1000 * version)})
    zeros = np.zeros(VALUES, np.float32)
    return FragmentState(0, version, lineage(version), chain, theta, zeros, merged)


@pytest.mark.parametrize("behind", [3, 30, 50, 90])
def test_who_is_behind_is_never_mixed_with_whatever_it_leads_or_joins(behind: int) -> None:
    """A message shows few links of a long chain. For some distances a lineage between them looked
    like another branch with about as many tokens, and history was averaged with the present."""

    async def main() -> None:
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

    run(main())


def test_behind_by_three_versions_it_replays_three_payloads() -> None:
    async def main() -> None:
        async with swarm(MemoryNetwork(), layout=ONE_FRAGMENT) as made:
            clara, counts, behind = await away_for(made, 3)
            fetched = counts["fetched_bytes"]
            tell(f"behind by {behind}: {fetched} bytes, state {STATE_BYTES}")
            assert set(ways(clara)) == {"replay"}
            assert 3 <= behind <= 6
            # A payload per version, each with its commit and seal.
            assert behind * PAYLOAD_BYTES <= fetched <= behind * (PAYLOAD_BYTES + 2000)
            assert fetched < STATE_BYTES / 2

    run(main())


@pytest.mark.slow
def test_behind_by_a_thousand_versions_it_takes_the_state_and_nothing_besides() -> None:
    async def main() -> None:
        async with swarm(MemoryNetwork(), layout=ONE_FRAGMENT) as made:
            clara, counts, behind = await away_for(made, 1000)
            fetched = counts["fetched_bytes"]
            tell(f"behind by {behind}: {fetched} bytes, state {STATE_BYTES}")
            assert "state" in ways(clara)
            assert behind >= 1000
            # The state, its manifest with a chain of a thousand links, and what came meanwhile.
            assert fetched >= STATE_BYTES
            assert fetched <= STATE_BYTES + 100 * behind + 8 * PAYLOAD_BYTES

    run(main())
