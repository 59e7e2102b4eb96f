"""Pages in a real browser: they load, follow the run, show that a peer died, and fit a phone."""

from __future__ import annotations

import asyncio
import os
from itertools import pairwise
from pathlib import Path

import pytest

from tests.integration import chromium
from tests.processes import Processes, free_port
from tests.swarms.commands import Command
from tests.swarms.learners import Learner

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(chromium.executable() is None, reason="no Chromium: apt install chromium"),
]

PICTURES = os.environ.get("SHOAL_TEST_PICTURES")
"""A folder that keeps the screenshots for inspection."""

PEERS = "document.querySelectorAll('#peers tr').length"
ROUNDS = "document.querySelectorAll('#rounds rect').length"
GONE = "document.querySelectorAll('#peers tr.gone').length"


CURVES = "document.querySelectorAll('#loss polyline').length"
LEVELS = "[...document.querySelectorAll('#loss text.level')].map(each => each.textContent)"
PERCENTS = (
    "[...document.querySelectorAll('#peers tr')].map(tr => parseFloat(tr.cells[2].textContent))"
)
TABLE_FITS = (
    "document.getElementById('peers').parentElement.scrollWidth"
    " <= document.querySelector('#peersbox .scroll').clientWidth"
)
CUT = (
    "[...document.querySelectorAll('td, th, b, span, code, li')].filter(each => each.clientWidth"
    " && each.scrollWidth > each.clientWidth + 1).map(each => each.textContent)"
)
NARROW = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
RUNS = "[...document.querySelectorAll('#runs tr')].map(tr => tr.innerText.split(/\\s+/).join(' '))"
CHECKS = "[...document.querySelectorAll('#checks li')].map(li => li.innerText.split(/\\s+/)[1])"


def test_the_page_of_a_bootstrap_peer_shows_the_runs_that_meet_there(
    processes: Processes, tmp_path: Path
) -> None:
    port = free_port()
    bootstrap = Command(
        processes,
        [
            *("bootstrap", "--listen", "/ip4/127.0.0.1/tcp/0", "--json"),
            *("--data-dir", str(tmp_path / "bootstrap"), "--page", f"127.0.0.1:{port}"),
        ],
    )
    address = str(bootstrap.wait_for(lambda r: "address" in r, "its address")["address"])
    pictures = Path(PICTURES) if PICTURES else tmp_path

    async def browse() -> None:
        async with chromium.open_tab(processes, tmp_path / "profile") as tab:
            await tab.look(width=1200, height=900, dark=False)
            await tab.go(f"http://127.0.0.1:{port}/")
            await tab.until(f"{RUNS}.join().startsWith('none yet')", timeout_s=60)
            assert await tab.value("document.getElementById('link').textContent") == address
            assert await tab.value(CHECKS) == ["daemon", "reachable", "seeds", "clock", "disk"]

            anna = Learner(
                processes,
                tmp_path / "anna",
                name="anna",
                sample_seed=1,
                seeds=[address],
                found_after_s=0.0,
            )
            await tab.until(f"{RUNS}.some(run => / 1 1 /.test(run))", timeout_s=90)
            tiles = await tab.value("document.getElementById('tiles').innerText")
            assert "live peer" in tiles.splitlines(), "it said '1 live peers'"
            await tab.until("document.querySelectorAll('#events li').length > 0", timeout_s=10)
            assert "anna" in await tab.value("document.getElementById('events').innerText")
            await tab.photograph(pictures / "bootstrap-light.png")
            await tab.look(width=1200, height=900, dark=True)
            await tab.photograph(pictures / "bootstrap-dark.png")
            await tab.look(width=390, height=844, dark=True)
            assert await tab.value(NARROW), "the page is wider than a phone"
            assert await tab.value(CUT) == []
            await tab.photograph(pictures / "bootstrap-phone.png")
            anna.stop()
            anna.end()
            await tab.until(f"{RUNS}.join().startsWith('none yet')", timeout_s=30)

    asyncio.run(browse())
    bootstrap.stop()
    assert bootstrap.wait() == 0


def test_the_page_follows_a_run_in_a_browser(processes: Processes, tmp_path: Path) -> None:
    port = free_port()
    anna = Learner(
        processes, tmp_path / "anna", name="anna", sample_seed=1, page=f"127.0.0.1:{port}"
    )
    seed = anna.ready()["link"].partition("seed=")[2].split("&")[0]
    boris = Learner(processes, tmp_path / "boris", name="boris", sample_seed=2, seeds=[seed])
    boris.ready()
    pictures = Path(PICTURES) if PICTURES else tmp_path

    async def browse() -> None:
        async with chromium.open_tab(processes, tmp_path / "profile") as tab:
            await tab.look(width=1200, height=900, dark=False)
            await tab.go(f"http://127.0.0.1:{port}/")
            await tab.until(f"{PEERS} === 2 && {ROUNDS} > 6", timeout_s=60)
            assert await tab.value("document.title.endsWith('linear')")
            assert "shoal join 'shoal://" in await tab.value(
                "document.getElementById('link').textContent"
            )

            before = await tab.value(ROUNDS)
            await tab.until(f"{ROUNDS} > {before}", timeout_s=30)  # without a reload
            await tab.until(f"{CURVES} === 2", timeout_s=5)
            await tab.value("document.getElementById('smooth').click()")
            await tab.until(f"{CURVES} === 1", timeout_s=5)
            await tab.value("document.getElementById('smooth').click()")
            levels = [float(text) for text in await tab.value(LEVELS)]
            steps = {f"{after - before:.6g}" for before, after in pairwise(levels)}
            assert len(steps) == 1 and steps.pop().strip("0.") in ("1", "2", "5"), levels
            assert await tab.value("document.getElementById('phase').textContent") == "training"
            fates = await tab.value("document.getElementById('fatestext').textContent")
            assert " trained: " in fates and " merged, " in fates
            tiles = await tab.value("document.getElementById('tiles').innerText")
            for label in ("tokens/s", "left of the run", "of the processors"):
                assert label in tiles, tiles
            percents = await tab.value(PERCENTS)
            assert round(10 * sum(percents)) == 1000, percents
            await tab.photograph(pictures / "page-light.png")

            await tab.value(
                "document.getElementById('search').value = 'boris';"
                "document.getElementById('search').dispatchEvent(new Event('input'))"
            )
            await tab.until(
                "[...document.querySelectorAll('#events li')].every(li => "
                "li.textContent.includes('boris'))"
                " && document.querySelectorAll('#events li').length > 0",
                timeout_s=10,
            )
            await tab.value("document.getElementById('search').value = ''")

            processes.kill_hard(boris.process)
            await tab.until(f"{GONE} === 1", timeout_s=30)
            await tab.look(width=1200, height=900, dark=True)
            await tab.photograph(pictures / "page-dark.png")

            await tab.look(width=390, height=844, dark=True)
            assert await tab.value(NARROW), "the page is wider than a phone"
            assert await tab.value(TABLE_FITS), "the table of peers is wider than a phone"
            assert await tab.value(CUT) == []
            assert "(this peer)" in await tab.value("document.getElementById('peers').innerText")
            await tab.photograph(pictures / "page-phone.png")

            anna.stop()
            anna.end()
            await tab.until("!document.getElementById('lost').hidden", timeout_s=20)

    asyncio.run(browse())
