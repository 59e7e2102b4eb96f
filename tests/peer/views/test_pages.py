"""The pages of a process, over real HTTP on the loopback interface."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest
from prometheus_client.core import GaugeMetricFamily, Metric

from dht.bounded_mapping import BoundedMapping
from peer.views.page_address import PageAddress, PageError, parse_page
from peer.views.pages import Check, Content, page_text, serve_pages, table_metrics

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


def test_a_process_is_ready_if_every_check_is_ok_and_each_has_a_reason() -> None:
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


def test_a_process_that_answers_is_alive() -> None:
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


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_page_on_all_interfaces_names_an_address_that_can_be_opened(host: str) -> None:
    """It was printed as http://0.0.0.0:PORT/."""
    address = PageAddress(host, 8080)
    opened = urlsplit(address.url).hostname
    assert opened is not None
    assert not ipaddress.ip_address(opened).is_unspecified
    family = socket.AF_INET6 if host == "::" else socket.AF_INET
    with socket.socket(family) as server:
        server.bind((opened, 0))  # fails unless it is an address of this machine
    assert PageAddress("seed", 80).url == "http://seed:80/"


@pytest.mark.parametrize("text", ["", "9100", ":9100", "host:", "host:0", "host:65536", "host:x"])
def test_an_invalid_page_address_is_refused(text: str) -> None:
    with pytest.raises(PageError, match="HOST:PORT"):
        parse_page(text)


def a_page(token_file: Path) -> Content:
    return Content(
        state=lambda: {"title": "tiny"},
        events=lambda wanted: [{"text": wanted}],
        token_file=token_file,
    )


def ask(
    address: PageAddress, content: Content, *wanted: tuple[str, dict[str, str]]
) -> tuple[str, list[tuple[int, str]]]:
    """The URL, and status and text of the answers to each (path, headers)."""

    async def main() -> tuple[str, list[tuple[int, str]]]:
        answers = []
        async with (
            serve_pages(address, checks=list, metrics=list, content=content) as url,
            aiohttp.ClientSession() as session,
        ):
            where = f"http://127.0.0.1:{url.split(':')[2].partition('/')[0]}"
            for path, headers in wanted:
                async with session.get(where + path, headers=headers) as response:
                    answers.append((response.status, await response.text()))
        return url, answers

    return asyncio.run(main())


def test_the_page_and_its_content_are_served(tmp_path: Path) -> None:
    local = PageAddress("127.0.0.1", free_port())
    url, answers = ask(
        local,
        a_page(tmp_path / "token"),
        ("/", {}),
        ("/state.json", {}),
        ("/events.json?search=fragment+2", {}),
    )
    assert url == f"http://{local}/"
    (_, html), (_, state), (_, events) = answers
    assert "<!doctype html>" in html
    assert json.loads(state) == {"title": "tiny"}
    assert json.loads(events) == {"events": [{"text": "fragment 2"}]}
    assert not (tmp_path / "token").exists()


def test_what_peers_say_can_neither_load_nor_run_anything_on_the_page(tmp_path: Path) -> None:
    async def main() -> dict[str, str]:
        pages = serve_pages(
            PageAddress("127.0.0.1", free_port()),
            checks=list,
            metrics=list,
            content=a_page(tmp_path / "token"),
        )
        async with pages as url, aiohttp.ClientSession() as session, session.get(url) as response:
            return dict(response.headers)

    headers = asyncio.run(main())
    assert headers["Content-Security-Policy"] == (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
        "connect-src 'self'; frame-ancestors 'none'"
    )
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cache-Control"] == "no-store"


def test_the_page_loads_nothing_from_other_hosts() -> None:
    page = page_text()
    assert set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}
    assert "innerHTML" not in page, "what peers say must never become markup"


def test_a_page_on_other_interfaces_requires_a_token_that_is_kept(tmp_path: Path) -> None:
    everywhere, file = PageAddress("0.0.0.0", free_port()), tmp_path / "token"
    url, answers = ask(
        everywhere,
        a_page(file),
        ("/", {}),
        ("/state.json?token=wrong", {}),
        ("/events.json", {"Authorization": "Bearer "}),
        ("/healthz", {}),
        ("/metrics", {}),
    )
    assert [status for status, _ in answers] == [401, 401, 401, 200, 200]
    token = file.read_text().strip()
    assert url.endswith(f":{everywhere.port}/?token={token}")
    assert file.stat().st_mode & 0o777 == 0o600
    again, answers = ask(
        everywhere,
        a_page(file),
        (f"/?token={token}", {}),
        ("/state.json", {"Authorization": f"Bearer {token}"}),
    )
    assert [status for status, _ in answers] == [200, 200]
    assert again == url


def test_a_web_site_whose_name_resolves_to_this_machine_is_refused(tmp_path: Path) -> None:
    local = PageAddress("127.0.0.1", free_port())
    _, answers = ask(
        local,
        a_page(tmp_path / "token"),
        ("/state.json", {"Host": "evil.example"}),
        ("/state.json", {"Host": f"localhost:{local.port}"}),
    )
    assert [status for status, _ in answers] == [403, 200]


def test_several_peers_on_one_machine_have_a_page_each(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(1)
        taken: int = other.getsockname()[1]
        url, _ = ask(PageAddress("127.0.0.1", taken, tries=20), a_page(tmp_path / "token"))
        assert taken < int(url.rstrip("/").rpartition(":")[2]) < taken + 20
    assert parse_page("auto").tries > 8
    assert parse_page("auto").is_local


def test_a_loss_that_is_not_finite_does_not_break_the_page(tmp_path: Path) -> None:
    """JSON has no NaN: the page took its peer for dead."""

    async def main() -> None:
        address = PageAddress("127.0.0.1", free_port())
        state = {"figures": {"loss": float("nan")}}
        shown = replace(a_page(tmp_path / "token"), state=lambda: state)
        async with (
            serve_pages(address, checks=list, metrics=list, content=shown),
            aiohttp.ClientSession() as session,
            session.get(f"http://{address}/state.json") as response,
        ):
            assert '"loss": null' in await response.text()

    asyncio.run(main())


def test_the_use_of_tables_is_told_by_their_names() -> None:
    table = BoundedMapping[str, bytes](
        "of this test", 4, worth=lambda key, value: 1.0, size=lambda key, value: len(value)
    )
    for number in range(6):
        table[str(number)] = b"12345"
    told = {
        family.name: {sample.labels.get("table"): sample.value for sample in family.samples}
        for family in table_metrics()
    }
    assert {name: values["of this test"] for name, values in told.items()} == {
        "shoal_table_entries": 4,
        "shoal_table_places": 4,
        "shoal_table_bytes": 20,
        "shoal_table_dropped": 2,
    }
