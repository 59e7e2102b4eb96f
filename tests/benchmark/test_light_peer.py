"""A light peer against a real host."""

from __future__ import annotations

import asyncio

import pytest

from dht.identity import PeerId
from tests.benchmark.light_peer import LightPeer, LightPeerError
from tests.integration.loopback import hosts, identity, run


async def who_calls(peer: PeerId, request: bytes) -> bytes:
    return peer.encode() + b" " + request


def test_it_connects_with_its_own_key_and_its_calls_are_answered() -> None:
    async def scenario() -> None:
        async with hosts(1) as (host,):
            await host.serve_calls("/test/who", who_calls, request_max_bytes=100_000)
            (address, *_) = await host.addresses()
            port = int(str(address).split("/")[4])
            me = identity(7)
            light = await LightPeer.open(me, host.peer_id, port, source="127.0.0.1", timeout_s=10.0)
            try:
                large = b"x" * 70_000  # more than one Noise message
                for request in (b"hello", large):
                    reply = await light.call("/test/who", request, timeout_s=10.0)
                    assert reply == me.peer_id.encode() + b" " + request
                (connection,) = await host.connections()
                assert connection.peer == me.peer_id
                assert str(connection.address).startswith("/ip4/127.0.0.1/")
                with pytest.raises(LightPeerError, match="na"):
                    await light.call("/test/not-served", b"", timeout_s=10.0)
                with pytest.raises(LightPeerError, match="100000"):
                    await light.call("/test/who", bytes(100_001), timeout_s=10.0)
            finally:
                await light.close()
            async with asyncio.timeout(10.0):
                while await host.connections():  # noqa: ASYNC110
                    await asyncio.sleep(0.02)

    run(scenario())


def test_it_refuses_a_host_with_another_key() -> None:
    async def scenario() -> None:
        async with hosts(1) as (host,):
            (address, *_) = await host.addresses()
            port = int(str(address).split("/")[4])
            with pytest.raises(LightPeerError, match="was expected"):
                await LightPeer.open(
                    identity(7), identity(8).peer_id, port, source="127.0.0.1", timeout_s=10.0
                )

    run(scenario())
