"""Keepers on a simulated network."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from averaging.live.averager import Averager
from averaging.numbers.layout import Layout, TensorSpec
from dht.addresses import with_peer
from dht.identity import Identity
from dht.libp2p.hivemind_host import HivemindHost
from dht.memory.host import MemoryHost, MemoryNetwork, identity_of
from dht.presence.presence import Presence
from dht.presence.this_peer import Profile
from dht.record_keeper import RecordKeeper
from peer.agent.keeper import Keeper
from peer.agent.life import go_online, make_averager
from peer.agent.peer import Peer
from peer.agent.services import FirstStates, Seat
from peer.bridge.settings import PeerSettings
from peer.guest.enforcement import Guest
from peer.rules.leaving import Departure
from peer.run_file.reading import parse
from tests.swarms import learner_process

AT_ONCE = Departure("the test is over", 0, finished=False, timeout_s=0.0)

LAYOUT = Layout.build([TensorSpec("w", (4, 4), "float32")], 1)


def keeper_in(directory: Path, seeds: tuple[str, ...] = (), policy: str = "") -> Keeper:
    seat = Seat(
        run=parse(learner_process.text() + policy),
        identity=identity_of("keeper"),
        directory=directory,
        role="keeper",
        settings=PeerSettings(name="keeper", seeds=seeds, listen=(), page=None),
    )
    return Keeper(seat, LAYOUT, Guest(directory, trains=False))


@asynccontextmanager
async def keeper_online(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    can_be_dialled_back: bool = True,
    policy: str = "",
) -> AsyncIterator[tuple[Peer, Averager]]:
    """A keeper on a simulated network, with the averager that it makes, beside one other peer."""
    network = MemoryNetwork()

    async def opened(identity: Identity, *args: Any, keeper: RecordKeeper) -> MemoryHost:
        return network.host(identity, keeper=keeper)

    monkeypatch.setattr(HivemindHost, "open", opened)
    monkeypatch.setattr(MemoryHost, "listen", (), raising=False)
    monkeypatch.setattr(MemoryHost, "lane", None, raising=False)
    helper = network.host("boris")
    seeds = tuple(str(with_peer(at, helper.peer_id)) for at in await helper.addresses())
    other = Presence(helper, identity_of("boris"), Profile(None))
    await other.start()
    peer = keeper_in(directory, seeds if can_be_dialled_back else (), policy).peer
    try:
        async with AsyncExitStack() as stack:
            await go_online(peer, stack)
            yield peer, make_averager(peer, FirstStates())
    finally:
        peer.log.close()
        await other.close()
