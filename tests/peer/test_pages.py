"""The pages of a process, asked over real HTTP on the loopback interface."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import aiohttp
import pytest
from prometheus_client.core import GaugeMetricFamily, Metric

from peer.pages import Check, PageAddress, PageError, parse_page, serve_pages

Fetch = Callable[[str], Awaitable[tuple[int, str]]]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def with_pages(
    work: Callable[[Fetch], Awaitable[None]],
    checks: list[Check],
    metrics: Callable[[], list[Metric]] = list,
) -> None:
    async def main() -> None:
        address = PageAddress("127.0.0.1", free_port())
        async with (
            serve_pages(address, checks=lambda: checks, metrics=metrics),
            aiohttp.ClientSession() as session,
        ):

            async def fetch(path: str) -> tuple[int, str]:
                async with session.get(f"http://{address}{path}") as response:
                    return response.status, await response.text()

            await work(fetch)

    asyncio.run(main())


def test_ready_means_that_every_check_is_right_and_each_gives_its_reason() -> None:
    checks = [Check("daemon", True, "running as process 5")]

    async def work(fetch: Fetch) -> None:
        status, text = await fetch("/readyz")
        assert status == 200
        assert '"ready": true' in text
        assert "running as process 5" in text
        checks.append(Check("disk", False, "0 GB free; free some space"))
        status, text = await fetch("/readyz")
        assert status == 503
        assert '"ready": false' in text
        assert "free some space" in text

    with_pages(work, checks)


def test_alive_means_only_that_it_answers() -> None:
    async def work(fetch: Fetch) -> None:
        status, text = await fetch("/healthz")
        assert (status, '"alive"' in text) == (200, True)

    with_pages(work, [Check("disk", False, "full")])


def test_figures_are_read_anew_for_each_request() -> None:
    values = iter([1.0, 2.0])

    async def work(fetch: Fetch) -> None:
        for value in (1.0, 2.0):
            _, text = await fetch("/metrics")
            assert f"shoal_peers {value}" in text
            assert "process_resident_memory_bytes" in text

    with_pages(work, [], lambda: [GaugeMetricFamily("shoal_peers", "Peers.", value=next(values))])


def test_pages_cannot_be_written_to() -> None:
    async def main() -> None:
        address = PageAddress("127.0.0.1", free_port())
        async with (
            serve_pages(address, checks=list, metrics=list),
            aiohttp.ClientSession() as session,
            session.post(f"http://{address}/readyz", data=b"x") as response,
        ):
            assert response.status == 405

    asyncio.run(main())


def test_a_port_in_use_is_a_page_error_which_says_what_to_do() -> None:
    async def main() -> None:
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen(1)
            address = PageAddress("127.0.0.1", other.getsockname()[1])
            with pytest.raises(PageError, match="another program") as caught:
                async with serve_pages(address, checks=list, metrics=list):
                    pass
        assert "--page" in str(caught.value)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("127.0.0.1:9100", "127.0.0.1", 9100), ("[::1]:80", "::1", 80), ("seed:1", "seed", 1)],
)
def test_page_addresses_are_read(text: str, host: str, port: int) -> None:
    assert parse_page(text) == PageAddress(host, port)
    assert str(parse_page(text)) == text


@pytest.mark.parametrize("text", ["", "9100", ":9100", "host:", "host:0", "host:65536", "host:x"])
def test_nonsense_is_no_page_address(text: str) -> None:
    with pytest.raises(PageError, match="HOST:PORT"):
        parse_page(text)
