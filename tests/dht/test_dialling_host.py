"""The host that dials a peer at the addresses of its record."""

from __future__ import annotations

import pytest

from dht.errors import PeerUnreachable
from dht.forwarding_host import DiallingHost
from dht.host import Stream
from dht.identity import Identity
from dht.memory.host import MemoryNetwork


async def leave_open(stream: Stream) -> None: ...


@pytest.mark.parametrize("known", [True, False])
async def test_a_stream_is_opened_to_a_peer_of_which_only_the_addresses_are_known(
    known: bool,
) -> None:
    network = MemoryNetwork()
    anna, boris = (network.host(Identity.generate()) for _ in range(2))
    await boris.serve_streams("talk", leave_open)
    found = await boris.addresses() if known else ()
    dialling = DiallingHost(anna, lambda peer: found, dials=anna)
    with pytest.raises(PeerUnreachable):
        await anna.open_stream(boris.peer_id, "talk", timeout_s=1.0)

    if known:
        stream = await dialling.open_stream(boris.peer_id, "talk", timeout_s=1.0)
        assert stream.remote == boris.peer_id
    else:
        with pytest.raises(PeerUnreachable):
            await dialling.open_stream(boris.peer_id, "talk", timeout_s=1.0)
    await anna.close()
    await boris.close()
