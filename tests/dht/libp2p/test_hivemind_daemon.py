"""Settings that the daemon gets at its start."""

from __future__ import annotations

import pytest
from multiaddr import Multiaddr

from dht.identity import Identity
from dht.libp2p import hivemind_daemon
from dht.libp2p.hivemind_daemon import DaemonSettings, processors


@pytest.mark.parametrize(("has", "may_use"), [(1, 1), (2, 1), (3, 1), (4, 2), (64, 2)])
def test_the_daemon_leaves_processors_to_whoever_trains(has: int, may_use: int) -> None:
    assert processors(has) == may_use


@pytest.mark.parametrize("routed", ["", "203.0.113.7", "2a00:78:1::2"])
def test_the_daemon_gets_one_address_of_each_relay(
    monkeypatch: pytest.MonkeyPatch, routed: str
) -> None:
    """Else it asks none for a place. It is one to which there is a route, if there is any."""
    one, other = (Identity.generate().peer_id for _ in range(2))
    ipv4, ipv6 = f"/ip4/203.0.113.7/tcp/7700/p2p/{one}", f"/ip6/2a00:78:1::2/tcp/7700/p2p/{one}"
    named = f"/dns4/example.org/tcp/7700/p2p/{other}"
    monkeypatch.setattr(
        hivemind_daemon, "own_address_towards", lambda ip: routed if ip == routed else ""
    )
    settings = DaemonSettings(listen=(), relays=tuple(map(Multiaddr, (ipv4, ipv6, named))))
    expected = {ipv6 if ":" in routed else ipv4, named}
    assert set(str(settings.flags()["trustedRelays"]).split(",")) == expected
