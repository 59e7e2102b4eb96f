"""The page of a run: what it says, and that its server sends nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from dht.identity import PeerId, RunId
from peer.extras import run_lists as run_list
from peer.extras.site import run_page as server
from peer.extras.site.run_page import (
    CALL,
    PAGE_MAX_BYTES,
    Site,
    ask,
    elsewhere,
    qr_svg,
    serve_run_pages,
)
from peer.extras.site.shelf import Shelf
from peer.run_file.sections import RunFile
from peer.views.page_address import PageError, parse_page
from tests.peer.extras.site.example_pages import LINK, OTHER, RUN, a_page
from tests.processes import free_port


def test_a_page_is_what_it_was_before_it_was_encoded() -> None:
    page = a_page()
    data = CALL.encode(page)
    assert CALL.decode(data) == page
    assert len(data) < PAGE_MAX_BYTES


def test_a_page_of_another_run_is_refused() -> None:
    class Keeper:
        async def call(self, *args: object, **options: object) -> bytes:
            return CALL.encode(a_page())

    keeper: Any = Keeper()
    with pytest.raises(ValueError, match="the page of run 5f5f"):
        asyncio.run(ask(keeper, PeerId("anna"), RunId(OTHER), timeout_s=1.0))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80",
        CALL.encode(a_page())[:-1],
        msgspec.msgpack.encode({"run": RUN, "at": 1.0, "more": 1}),
        CALL.encode(a_page(link="x" * 3000)),
        CALL.encode(a_page(losses=a_page().losses * 2)),
    ],
)
def test_bytes_that_are_no_page_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not the page of a run"):
        CALL.decode(data)


def test_a_host_without_the_exports_does_not_link_to_them() -> None:
    page = elsewhere(a_page())
    assert page.latest is not None and page.latest.path == "" and page.latest.url
    assert elsewhere(a_page(latest=None)).latest is None


ONE = Site(who="Served by a test", pages=lambda: {RUN: a_page()})
TWO = Site(who="A host", pages=lambda: {RUN: a_page(), OTHER: a_page(run=OTHER, name="other")})
NONE = Site(who="A host", pages=dict)

Get = Callable[[str], Awaitable[tuple[int, Any, bytes]]]


def visit(site: Site, look: Callable[[Get, aiohttp.ClientSession, str], Awaitable[None]]) -> None:
    async def main() -> None:
        address = parse_page(f"127.0.0.1:{free_port()}")
        async with serve_run_pages(address, site) as url, aiohttp.ClientSession() as session:

            async def get(path: str) -> tuple[int, Any, bytes]:
                async with session.get(url + path) as answer:
                    return answer.status, answer.headers, await answer.read()

            await look(get, session, url)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("", "text/html"),
        ("page.js", "text/javascript"),
        ("page.css", "text/css"),
        ("run.json", "application/json"),
        ("runs.json", "application/json"),
        ("healthz", "text/plain"),
        ("nothing/here", "text/plain"),
    ],
)
def test_every_answer_has_strict_headers_and_no_cookies(path: str, kind: str) -> None:
    async def look(get: Get, session: aiohttp.ClientSession, url: str) -> None:
        status, headers, _ = await get(path)
        assert status == (404 if path.startswith("nothing") else 200)
        assert headers["Content-Type"].partition(";")[0] == kind
        assert headers["Content-Security-Policy"] == (
            "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
            "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["X-Frame-Options"] == "DENY"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Permissions-Policy"] == "camera=(), geolocation=(), microphone=()"
        assert headers["Cross-Origin-Opener-Policy"] == "same-origin"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert headers["Cache-Control"] == "public, max-age=5"
        assert "Set-Cookie" not in headers
        assert headers["Server"] == "shoal", "no versions of libraries"

    visit(ONE, look)


def test_the_page_loads_nothing_from_elsewhere_and_has_no_inline_script() -> None:
    async def look(get: Get, session: aiohttp.ClientSession, url: str) -> None:
        html, script, style = [(await get(p))[2].decode() for p in ("", "page.js", "page.css")]
        for text in (html, style):
            assert "http://" not in text and "https://" not in text and "//" not in text
        assert "<script>" not in html and "style=" not in html and " onclick" not in html
        for word in ("innerHTML", "insertAdjacentHTML", "document.write", "eval(", "cookie"):
            assert word not in script

    visit(ONE, look)


def test_only_reading_is_allowed() -> None:
    async def look(get: Get, session: aiohttp.ClientSession, url: str) -> None:
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            async with session.request(method, url + "run.json", data=b"x" * 100) as answer:
                assert answer.status in (405, 413), method
        async with session.head(url + "run.json") as answer:
            assert answer.status == 200

    visit(ONE, look)


def test_a_host_of_several_runs_lists_them() -> None:
    async def look(get: Get, session: aiohttp.ClientSession, url: str) -> None:
        assert (await get("run.json"))[0] == 404, "which of them?"
        assert b'"name":"other"' in (await get(f"run.json?run={OTHER}"))[2]
        assert (await get("run.json?run=" + "0" * 64))[0] == 404
        listed = run_list.decode((await get("runs.json"))[2]).runs
        assert {each.name: each.link for each in listed}["other"] == TWO.pages()[OTHER].link
        assert len(listed) == 2

    visit(TWO, look)


def test_a_host_that_knows_no_run_says_so() -> None:
    async def look(get: Get, session: aiohttp.ClientSession, url: str) -> None:
        assert (await get("runs.json"))[2] == b'{"who":"A host","runs":[]}'
        assert (await get("run.json"))[0] == (await get("qr.svg"))[0] == 404

    visit(NONE, look)


def test_the_code_is_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("segno", reason="the extra 'page' is not installed")

    async def look(get: Get, session: aiohttp.ClientSession, url: str) -> None:
        status, headers, data = await get("qr.svg")
        assert status == 200 and headers["Content-Type"].startswith("image/svg+xml")
        assert data == qr_svg(LINK) != qr_svg(LINK + "x")

    visit(ONE, look)


def test_exports_that_are_listed_are_served_and_nothing_else(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "exports", RunFile(), keep=2)
    shelf.check()

    def write(out: Path) -> None:
        out.mkdir()
        (out / "model.safetensors").write_bytes(b"w" * 100_000)
        (out / "README.md").symlink_to("/etc/hostname")

    entry = shelf.add("ab" * 8, 10, None, write, now=1e9)
    write(shelf.folder / "not-listed")
    (tmp_path / "identity.key").write_bytes(b"secret")

    async def look(get: Get, session: aiohttp.ClientSession, url: str) -> None:
        status, headers, data = await get(f"exports/{entry.name}/model.safetensors")
        assert (status, data) == (200, b"w" * 100_000)
        assert headers["X-Content-Type-Options"] == "nosniff"
        for path in (
            f"exports/{entry.name}/README.md",
            f"exports/{entry.name}/..%2f..%2fidentity.key",
            "exports/..%2fidentity.key",
            "exports/%2e%2e/identity.key",
            "exports/not-listed/model.safetensors",
            "exports/exports.json",
            f"exports/{entry.name}",
        ):
            status, _, data = await get(path)
            assert status == 404 and b"secret" not in data, path

    visit(replace(ONE, exports=shelf.folder), look)


def test_the_rate_is_bounded_for_all_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "RATE_PER_S", 0.001)
    monkeypatch.setattr(server, "BURST", 5.0)

    async def look(get: Get, session: aiohttp.ClientSession, url: str) -> None:
        answers = [(await get("healthz"))[:2] for _ in range(7)]
        assert [status for status, _ in answers] == [200] * 5 + [429] * 2
        assert answers[-1][1]["Retry-After"] == "2"

    visit(ONE, look)


def test_content_is_computed_once_for_many_visitors() -> None:
    asked = []

    def pages() -> dict[str, Any]:
        asked.append(1)
        return {RUN: a_page()}

    async def look(get: Get, session: aiohttp.ClientSession, url: str) -> None:
        await asyncio.gather(*(get("run.json") for _ in range(30)))
        assert len(asked) == 1

    visit(replace(ONE, pages=pages), look)


@pytest.mark.parametrize("text", ["8080", "localhost", "host:99999", ""])
def test_a_bad_address_is_refused_with_its_option(text: str) -> None:
    with pytest.raises(PageError, match=r"choose another address with --run-page HOST:PORT"):
        parse_page(text, "--run-page")
