"""Peers that can tell a host what its router does."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest
from multiaddr import Multiaddr

from dht.host import Connection
from dht.identity import Identity
from dht.libp2p.hivemind_host import looked_up, outside

RELAY, OTHER, AWAY = (Identity.generate().peer_id for _ in range(3))


@pytest.mark.parametrize("at", ["/ip6/2a00:78:1::2/tcp/7700", "/ip4/203.0.114.7/tcp/7700"])
def test_a_relay_that_is_connected_over_ipv6_is_asked_for_the_address_of_ipv4_all_the_same(
    at: str,
) -> None:
    connections = [
        Connection(RELAY, Multiaddr(at), False),
        Connection(OTHER, Multiaddr("/ip6/2a00:78:2::2/tcp/7700"), False),
        Connection(OTHER, Multiaddr(f"/ip4/203.0.114.7/tcp/7700/p2p/{RELAY}/p2p-circuit"), True),
    ]
    relays = [
        Multiaddr(f"/ip4/203.0.114.7/tcp/7700/p2p/{RELAY}"),
        Multiaddr(f"/ip4/192.168.1.7/tcp/7700/p2p/{RELAY}"),
        Multiaddr(f"/dns4/example.org/tcp/7700/p2p/{RELAY}"),
        Multiaddr(f"/ip4/203.0.114.9/tcp/7700/p2p/{AWAY}"),
    ]
    found = outside(connections, relays)
    connected = (RELAY, at.split("/")[2])
    assert found == list(
        dict.fromkeys((connected, (OTHER, "2a00:78:2::2"), (RELAY, "203.0.114.7")))
    )


async def test_the_ipv4_address_behind_the_name_of_a_relay_is_looked_up_if_it_is_needed() -> None:
    """Seeds that were given by name told a home with IPv6 no address at which others meet it."""
    over_ipv6 = Multiaddr("/ip6/2a00:78:1::2/tcp/7700")
    over_ipv4 = Multiaddr("/ip4/203.0.114.9/tcp/7700")
    circuit = Multiaddr(f"/ip6/2a00:78:1::2/tcp/7700/p2p/{RELAY}/p2p-circuit")
    relays = [
        Multiaddr(f"/{kind}/{name}/tcp/7700/p2p/{peer}")
        for kind, name, peer in (
            ("dns6", "localhost", RELAY),
            ("dns4", "localhost", RELAY),
            ("dns4", "nowhere.invalid", RELAY),
            ("ip4", "203.0.114.7", RELAY),
            ("dns4", "localhost", OTHER),
            ("dns4", "localhost", AWAY),
        )
    ]
    connections = [
        Connection(RELAY, over_ipv6, False),
        Connection(OTHER, over_ipv4, False),
        Connection(AWAY, circuit, True),
    ]
    assert await looked_up(relays, connections) == [
        Multiaddr(f"/ip4/127.0.0.1/tcp/7700/p2p/{RELAY}")
    ]


async def test_names_are_looked_up_at_once_as_no_name_server_may_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One after another, each for two seconds, they took the ten seconds of a whole meeting."""
    names = [f"seed{number}.example.org" for number in range(3)]
    asked = threading.Barrier(len(names), timeout=5.0)

    def answers(name: str, *_: object, **__: object) -> list[Any]:
        asked.wait()  # until every name is asked for
        return socket_answers("localhost", None, family=socket.AF_INET, type=socket.SOCK_STREAM)

    socket_answers = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", answers)
    relays = [Multiaddr(f"/dns4/{name}/tcp/7700/p2p/{RELAY}") for name in names]
    over_ipv6 = Connection(RELAY, Multiaddr("/ip6/2a00:78:1::2/tcp/7700"), False)
    found = await looked_up(relays, [over_ipv6])
    assert found == [Multiaddr(f"/ip4/127.0.0.1/tcp/7700/p2p/{RELAY}")] * len(names)
