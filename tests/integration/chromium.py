"""A headless Chromium, controlled with its DevTools protocol (no driver, no extra package)."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.processes import Processes

ANSWER_S = 60.0


def executable() -> str | None:
    """Path of Chromium, if it is installed (``apt install chromium``)."""
    found = (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))
    return next((path for path in found if path), None)


class Tab:
    """One page in a browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._calls = 0

    async def call(self, method: str, **fields: Any) -> dict[str, Any]:
        self._calls += 1
        await self._socket.send_json({"id": self._calls, "method": method, "params": fields})
        async with asyncio.timeout(ANSWER_S):
            while True:  # events of the page arrive in between
                answer = await self._socket.receive_json()
                if answer.get("id") == self._calls:
                    assert "error" not in answer, answer
                    result: dict[str, Any] = answer["result"]
                    return result

    async def value(self, expression: str) -> Any:
        """The value of a JavaScript expression, or of its promise."""
        answer = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, expression: str, *, timeout_s: float) -> None:
        """Wait until a JavaScript expression is true; fails with the text of the page."""
        try:
            async with asyncio.timeout(timeout_s):
                while not await self.value(expression):  # noqa: ASYNC110  the browser cannot call us
                    await asyncio.sleep(0.1)
        except TimeoutError:
            shown = await self.value("document.body.innerText")
            raise AssertionError(f"not in {timeout_s:g} s: {expression}\n{shown}") from None

    async def go(self, url: str) -> None:
        await self.call("Page.enable")
        await self.call("Page.navigate", url=url)

    async def look(self, *, width: int, height: int, dark: bool) -> None:
        """A screenshot with this window size."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def photograph(self, path: Path) -> None:
        answer = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))  # noqa: ASYNC240  nobody else is here


@asynccontextmanager
async def open_tab(processes: Processes, profile: Path) -> AsyncIterator[Tab]:
    program = executable()
    assert program is not None
    browser = processes.start(
        [
            *(program, "--headless=new", "--no-sandbox", "--disable-gpu"),
            *("--disable-dev-shm-usage", "--remote-debugging-port=0"),
            *(f"--user-data-dir={profile}", "about:blank"),
        ]
    )
    where = profile / "DevToolsActivePort"
    async with asyncio.timeout(60):
        while not where.exists() or not where.read_text().count("\n"):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    port = where.read_text().splitlines()[0]
    try:
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                tabs = json.loads(await answer.text())
            page = next(tab for tab in tabs if tab["type"] == "page")
            async with session.ws_connect(
                page["webSocketDebuggerUrl"], max_msg_size=64 << 20
            ) as socket:
                yield Tab(socket)
    finally:
        browser.terminate()
        browser.wait(timeout=20)
