"""What axe finds on the site and on the pages of peers and runs, in a real browser."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from importlib.resources import files
from pathlib import Path

import pytest

from peer.events.board import Board
from peer.events.names import Names
from peer.extras.site.run_page import Site, serve_run_pages
from peer.installed import ROLES
from peer.views.agent_page import content as agent_page
from peer.views.agent_page import peer_rows
from peer.views.page_address import parse_page
from peer.views.pages import Content, serve_pages
from tests.integration import chromium
from tests.peer.extras.site.example_pages import OTHER, RUN, a_page
from tests.peer.statuses import a_status
from tests.processes import Processes, free_port

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build/docs"
FOLDERS = (".", *ROLES)
SCREENS = ((1200, False), (390, True), (1200, True), (390, False))
"""Widths in pixels, and whether the screen is dark."""

RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]
FOUND = f"""
axe.run(document, {{runOnly: {RULES}, preload: false, resultTypes: ["violations"]}}).then(result =>
  result.violations.flatMap(rule => rule.nodes.slice(0, 3).map(node =>
    rule.id + ": " + node.target.join(" ") + " " + node.html.slice(0, 160).replace(/\\s+/g, " "))))
"""

SHARED = """
document.querySelectorAll(".md-header, .md-tabs, .md-sidebar--primary, .md-footer")
  .forEach(part => part.remove())
"""
"""What all pages of the site have alike is looked at on the first one: it is half of the work."""

DARK = "void (document.body.dataset.mdColorScheme = 'slate')"
SETTLED = "document.getAnimations().every(one => one.playState !== 'running')"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(chromium.executable() is None, reason="no Chromium: apt install chromium"),
]


def axe() -> str:
    package = pytest.importorskip("axe_core_python")
    return files(package).joinpath("axe.min.js").read_text(encoding="utf-8")


def look_at(
    processes: Processes, folder: Path, look: Callable[[chromium.Tab], Awaitable[None]]
) -> None:
    async def main() -> None:
        async with chromium.open_tab(processes, folder / "profile") as tab:
            await tab.call("Page.addScriptToEvaluateOnNewDocument", source=axe())
            await look(tab)

    asyncio.run(main())


async def faults(tab: chromium.Tab, url: str, shown: str) -> list[str]:
    """What axe finds on each screen. ``shown``: true once the page is there."""
    found = []
    for width, dark in SCREENS:
        await tab.look(width=width, height=800, dark=dark)
        await tab.go(url)
        await tab.until(shown, timeout_s=60)
        found += [f"{width} {dark}: {fault}" for fault in await tab.value(FOUND)]
    return found


def test_pages_of_runs_have_no_faults(processes: Processes, tmp_path: Path) -> None:
    pages = {RUN: a_page(), OTHER: a_page(run=OTHER, name="another", needs="8 GB of memory")}
    site = Site(who="Served by a test", pages=lambda: pages)

    async def look(tab: chromium.Tab) -> None:
        async with serve_run_pages(parse_page(f"127.0.0.1:{free_port()}"), site) as url:
            listed = "document.querySelectorAll('#runs a').length === 2"
            shown = "document.getElementById('page')?.hidden === false"
            found = await faults(tab, url, listed) + await faults(tab, f"{url}?run={OTHER}", shown)
            assert not found, "\n".join(found)

    look_at(processes, tmp_path, look)


def test_the_page_of_a_peer_has_no_faults(processes: Processes, tmp_path: Path) -> None:
    board = Board(Names({}))
    rows = peer_rows(a_status(), (), {}, {}, lambda peer: f"?{peer}")
    page = agent_page(a_status(), board, rows, run_id=RUN, run_name="tiny", wall_time=0.0)
    content = Content(state=lambda: page, events=board.search, token_file=tmp_path / "token")

    async def look(tab: chromium.Tab) -> None:
        pages = serve_pages(
            parse_page(f"127.0.0.1:{free_port()}"),
            checks=list,
            metrics=lambda: (),
            content=content,
        )
        async with pages as url:
            shown = "document.getElementById('phase')?.textContent === 'training'"
            found = await faults(tab, url, shown)
            assert not found, "\n".join(found)

    look_at(processes, tmp_path, look)


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_site_has_no_faults(folder: str, processes: Processes, tmp_path: Path) -> None:
    # The page for wrong addresses has absolute paths: its styles are with a server only.
    pages = sorted(page for page in (SITE / folder).glob("*.html") if page.name != "404.html")
    if not pages:
        pytest.skip("there is no site: make docs")

    async def look(tab: chromium.Tab) -> None:
        found = []
        for page in pages:
            await tab.look(width=1400, height=800, dark=False)
            await tab.go(page.as_uri())
            there = "document.readyState === 'complete' && window.axe !== undefined"
            await tab.until(there, timeout_s=60)
            if folder != ".":
                await tab.value(SHARED)
            found += [f"{page.stem} 1400 light: {fault}" for fault in await tab.value(FOUND)]
            # The theme asks for the scheme only as a page is loaded, which costs as much as a look.
            await tab.look(width=390, height=800, dark=True)
            await tab.value(DARK)
            await tab.until(SETTLED, timeout_s=60)
            found += [f"{page.stem} 390 dark: {fault}" for fault in await tab.value(FOUND)]
        assert not found, "\n".join(found)

    look_at(processes, tmp_path, look)
