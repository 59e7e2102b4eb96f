"""The public page of a run: in a real browser, and published by real peers."""

from __future__ import annotations

import asyncio
import json
import os
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peer.extras.site.run_page import Point, Site, serve_run_pages
from peer.views.page_address import parse_page
from tests.integration import chromium
from tests.peer.extras.site.example_pages import BAD, LINK, OTHER, RUN, a_page
from tests.processes import Processes, free_port
from tests.swarms.commands import Command, Swarm, address_of, answer, run_text, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]
in_browser = pytest.mark.skipif(
    chromium.executable() is None, reason="no Chromium: apt install chromium"
)

PICTURES = os.environ.get("SHOAL_TEST_PICTURES")
"""A folder that keeps the screenshots for inspection."""

SHOWN = "document.getElementById('page')?.hidden === false"
FITS = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
TEXT = "document.body.innerText"
LINKS = "[...document.querySelectorAll('#facts a')].map(each => each.href)"
LABEL = "document.querySelector('#loss svg').getAttribute('aria-label')"
COUNTS = (
    "document.querySelector('#loss polyline.train').getAttribute('points').split(' ')"
    ".map(point => parseFloat(point))"
)
SMALLEST = (
    "Math.min(...[...document.querySelectorAll('svg text')].map(each => "
    "each.getBoundingClientRect().height))"
)
WATCH = (
    "window.broken = []; addEventListener('securitypolicyviolation', e => "
    "window.broken.push(e.violatedDirective)); addEventListener('error', e => "
    "window.broken.push(String(e.message)), true);"
)


def browse(
    processes: Processes, folder: Path, site: Site, look: Callable[[chromium.Tab, str], Any]
) -> None:
    async def main() -> None:
        address = parse_page(f"127.0.0.1:{free_port()}")
        async with (
            serve_run_pages(address, site) as url,
            chromium.open_tab(processes, folder / "profile") as tab,
        ):
            await tab.call("Page.addScriptToEvaluateOnNewDocument", source=WATCH)
            await look(tab, url)
            assert await tab.value("window.broken") == []

    asyncio.run(main())


@in_browser
def test_the_page_shows_a_run_on_desktop_and_phone_in_light_and_dark(
    processes: Processes, tmp_path: Path
) -> None:
    pictures = Path(PICTURES) if PICTURES else tmp_path
    site = Site(who="Served by ada, a keeper of the run", pages=lambda: {RUN: a_page()})

    async def look(tab: chromium.Tab, url: str) -> None:
        for name, width, dark in (
            ("desktop-light", 1100, False),
            ("desktop-dark", 1100, True),
            ("phone-light", 360, False),
            ("phone-dark", 360, True),
        ):
            await tab.look(width=width, height=780, dark=dark)
            await tab.go(url)
            await tab.until(SHOWN, timeout_s=20)
            assert await tab.value(FITS), f"wider than {width} pixels"
            assert await tab.value(SMALLEST) >= 10, "texts of pictures are too small"
            await tab.photograph(pictures / f"run-{name}.png")
        text = await tab.value(TEXT)
        for word in (
            "399 M",
            "23\npeers train now",
            "57\ncontributed so far",
            "Ada of the Alps",
            f"shoal join '{LINK}'",
            "2026-11-23",
            "held-out loss 2.213 at 396 M tokens",
        ):
            assert word in text, word
        assert BAD in text, "what peers say is text"
        assert await tab.value("document.title") == "tiny-stories-124m"
        assert await tab.value(LINKS) == [
            "https://example.org/tiny-stories",
            "mailto:ada@example.org",
        ], "no link to what is no address"

        assert await tab.value(LABEL) == "loss over tokens"
        counts = await tab.value(COUNTS)
        assert len(counts) > 10 and counts == sorted(set(counts)), "no vertical jumps"
        await tab.value("document.getElementById('bytime').click()")
        assert await tab.value(LABEL) == "loss over time"
        await tab.value("document.getElementById('copy').click()")
        await tab.until(
            "/Cop|Select/.test(document.getElementById('copy').textContent)", timeout_s=5
        )

    browse(processes, tmp_path, site, look)


@in_browser
def test_the_join_line_is_a_code_for_phones(processes: Processes, tmp_path: Path) -> None:
    pytest.importorskip("segno", reason="the extra 'page' is not installed")
    site = Site(who="Served by a test", pages=lambda: {RUN: a_page()})

    async def look(tab: chromium.Tab, url: str) -> None:
        await tab.go(url)
        await tab.until("document.getElementById('code')?.hidden === false", timeout_s=20)
        assert await tab.value("document.getElementById('code').naturalWidth") > 100

    browse(processes, tmp_path, site, look)


@in_browser
def test_a_host_of_several_runs_lists_them_and_says_what_it_cannot_know(
    processes: Processes, tmp_path: Path
) -> None:
    little = a_page(
        run=OTHER,
        name="another",
        losses=(),
        held_out=(),
        days=(),
        contributors=(),
        latest=None,
        news=(),
        unknown=("No keeper publishes a page of this run.",),
    )
    site = Site(who="Served by a bootstrap peer", pages=lambda: {RUN: a_page(), OTHER: little})

    async def look(tab: chromium.Tab, url: str) -> None:
        await tab.look(width=360, height=780, dark=False)
        await tab.go(url)
        await tab.until("document.querySelectorAll('#runs a').length === 2", timeout_s=20)
        assert await tab.value(FITS)
        data = await tab.value("document.getElementById('json').href")
        assert data == url + "runs.json", "there is no run.json of several runs"
        await tab.value("document.querySelectorAll('#runs a')[1].click()")
        await tab.until(SHOWN, timeout_s=20)
        text = await tab.value(TEXT)
        assert "another" in text and "No keeper publishes a page of this run." in text
        assert "Contributors" not in text and "Latest export" not in text

    browse(processes, tmp_path, site, look)


@in_browser
def test_a_page_of_absurd_numbers_does_not_stop_the_browser(
    processes: Processes, tmp_path: Path
) -> None:
    """Where the step of an axis was too small for its numbers, the browser counted for ever."""
    far = [Point(at=1e11 - n, tokens=2**61 + 512 * n, loss=1e9 - 1e-7 * n) for n in range(2)]
    page = a_page(losses=tuple(far), held_out=(), tokens=2**62 - 1, days=(), at=1e11)

    async def look(tab: chromium.Tab, url: str) -> None:
        await tab.look(width=360, height=780, dark=False)
        await tab.go(url)
        await tab.until(SHOWN, timeout_s=20)
        drawn = await tab.value("document.querySelectorAll('#loss text').length")
        assert 0 < drawn < 200

    browse(processes, tmp_path, Site(who="x", pages=lambda: {RUN: page}), look)


def read(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.loads(answer.read())


def test_a_keeper_and_a_bootstrap_host_publish_a_run_that_goes_on(
    processes: Processes, tmp_path: Path
) -> None:
    swarm = Swarm(processes, tmp_path)
    pages = [f"http://127.0.0.1:{free_port()}/" for _ in range(2)]
    ports = [page.removeprefix("http://").removesuffix("/") for page in pages]
    bootstrap = swarm.bootstrap(options=("--run-page", ports[0]))
    anna = swarm.start("anna", run_text(address_of(bootstrap), cycle=8))
    boris = swarm.join("boris", anna.link())
    boris.ready()
    exports = tmp_path / "exports"
    keeper: Command = swarm.keep(
        tmp_path / "keeper",
        anna.link(),
        options=(
            *("--publish", str(exports), "--every", "10s", "--keep-exports", "2"),
            *("--run-page", ports[1]),
        ),
    )
    keeper.wait_for(lambda r: r.get("event") == "published", "an export", timeout_s=240)

    def shown(page: str) -> dict[str, Any]:
        found: dict[str, Any] = read(page + "run.json")
        return found

    def names(page: str) -> set[str]:
        return {row["name"] for row in shown(page).get("contributors", ())}

    until(lambda: names(pages[1]) >= {"anna", "boris"}, "contributors", timeout_s=120)
    until(lambda: shown(pages[1])["losses"] != [], "a loss", timeout_s=60)
    page = shown(pages[1])
    assert page["name"] == "integration" and page["learners"] == 2
    assert sum(day["tokens"] for day in page["days"]) <= page["tokens"]
    assert abs(sum(row["share"] for row in page["contributors"]) - 1) < 1e-6
    latest = page["latest"]
    with urllib.request.urlopen(pages[1] + latest["path"], timeout=30) as response:
        assert len(response.read()) == latest["size_bytes"]
    assert (exports / "latest" / "model.safetensors").exists()

    # What the keeper published is at the bootstrap host, too, which serves no files.
    until(lambda: names(pages[0]) >= {"anna", "boris"}, "the host's page", timeout_s=60)
    until(
        lambda: (shown(pages[0])["latest"] or {"path": "?"})["path"] == "",
        "the export is told of, and not linked to",
        timeout_s=60,
    )
    told = answer("credit", anna.link(), home=tmp_path / "other")
    [rows] = [each["contributors"] for each in told.values()]
    assert {row["name"] for row in rows} == {"anna", "boris"}
    learners = [row["peer"] for row in rows]
    for each in pages:
        page = shown(each)
        assert page["link"] and not any(peer in page["link"] for peer in learners)
        rest = json.dumps({**page, "link": ""})
        assert "/tcp/" not in rest and "127.0.0.1" not in rest, "addresses of peers"

    keeper.stop()
    assert keeper.wait() == 130

    def knows_little() -> bool:
        found = shown(pages[0])
        return bool(found["unknown"]) and found.get("contributors", []) == []

    until(knows_little, "the host says what it cannot know", timeout_s=90)
    assert shown(pages[0])["name"] == "integration", "the run file is known"
    began = time.monotonic()
    swarm.end()
    assert time.monotonic() - began < 90
    bootstrap.stop()
    assert bootstrap.wait() == 0
