"""Connections that ask nothing take no descriptors away, and no place of those who ask."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager

import aiohttp
import pytest
from aiohttp import web
from aiohttp.typedefs import Handler

from peer.views import connections
from peer.views.page_address import PageAddress, parse_page
from peer.views.pages import serve
from tests.processes import free_port


@web.middleware
async def everybody(request: web.Request, handler: Handler) -> web.StreamResponse:
    return await handler(request)


def serving(address: PageAddress) -> AbstractAsyncContextManager[PageAddress]:
    routes = {"/": lambda request: web.Response(text="alive")}
    return serve(routes, address, guard=everybody, headers={})


async def ended(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read(1) == b""
    except ConnectionResetError:
        return True


def test_idle_connections_give_way_to_those_that_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "CONNECTIONS_MAX", 8)

    async def main() -> None:
        address = parse_page(f"127.0.0.1:{free_port()}")
        async with serving(address) as served, aiohttp.ClientSession() as session:
            opened = [await asyncio.open_connection(served.host, served.port) for _ in range(64)]
            async with session.get(served.url) as answer:
                assert await answer.text() == "alive"
            cut = [reader for reader, _ in opened[: 64 - 8]]
            assert all(await asyncio.gather(*map(ended, cut)))
            for _, writer in opened:
                writer.close()

    asyncio.run(main())


def test_a_connection_on_which_no_whole_request_comes_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("peer.views.pages.REQUEST_WITHIN_S", 0.05)

    async def main() -> None:
        address = parse_page(f"127.0.0.1:{free_port()}")
        async with serving(address) as served:
            reader, writer = await asyncio.open_connection(served.host, served.port)
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n")
            assert await asyncio.wait_for(reader.read(), 30.0) == b""
            writer.close()

    asyncio.run(main())


def test_one_address_has_so_many_connections_unless_it_is_this_machine() -> None:
    class Transport(asyncio.Transport):
        def __init__(self, address: str) -> None:
            super().__init__({"peername": (address, 1)})
            self.aborted = False

        def abort(self) -> None:
            self.aborted = True

    def opened(address: str, count: int) -> int:
        made = connections.Connections()
        transports = [Transport(address) for _ in range(count)]
        for transport in transports:
            made.accept(asyncio.Protocol).connection_made(transport)  # type: ignore[arg-type]
        assert sum(not each.aborted for each in transports) == len(made)
        return len(made)

    most, of_address = connections.CONNECTIONS_MAX, connections.OF_ADDRESS_MAX
    assert opened("203.0.113.7", 100) == of_address
    assert opened("127.0.0.1", 100) == 100
    assert opened("127.0.0.1", 200) == most
