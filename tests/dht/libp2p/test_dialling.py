"""Host names become IP addresses before the daemon gets them."""

from __future__ import annotations

import pytest
from multiaddr import Multiaddr

from dht.errors import AddressError
from dht.identity import Identity
from dht.libp2p.dialling import by_ip

RELAY = Identity.generate().peer_id


async def found(*texts: str) -> list[str]:
    return [str(address) for address in await by_ip(map(Multiaddr, texts), within_s=30)]


async def test_a_name_gives_way_to_its_addresses_and_the_rest_of_an_address_stays() -> None:
    assert await found(
        "/dns4/localhost/tcp/7700", "/ip6/::1/tcp/1", f"/dns4/localhost/tcp/2/p2p/{RELAY}"
    ) == ["/ip4/127.0.0.1/tcp/7700", "/ip6/::1/tcp/1", f"/ip4/127.0.0.1/tcp/2/p2p/{RELAY}"]
    circuit = f"/p2p/{RELAY}/p2p-circuit"
    assert await found(f"/dns4/localhost/tcp/7{circuit}") == [f"/ip4/127.0.0.1/tcp/7{circuit}"]
    assert await found() == []


async def test_names_without_an_address_are_left_out_unless_nothing_else_is_there() -> None:
    assert await found("/dns4/nowhere.invalid/tcp/1", "/ip4/127.0.0.1/tcp/2") == [
        "/ip4/127.0.0.1/tcp/2"
    ]
    with pytest.raises(OSError, match=r"^the name nowhere.invalid cannot be resolved \("):
        await found("/dns4/nowhere.invalid/tcp/1")


async def test_addresses_that_are_not_tcp_are_refused() -> None:
    with pytest.raises(AddressError, match="over /tcp only"):
        await found("/ip4/127.0.0.1/udp/1/quic-v1")
