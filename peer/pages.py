"""The local pages of a long-running process: is it alive, is it ready, and its figures.

    /healthz   200 as long as the process answers at all
    /readyz    200 or 503, and each check with its reason, as JSON
    /metrics   for Prometheus, in its text format

They only read, and are served on the loopback interface unless told otherwise.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass

from aiohttp import web
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from peer.errors import PeerError

DEFAULT_PAGE = "127.0.0.1:9100"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that has to be right before others can rely on this process."""

    name: str
    ok: bool
    reason: str
    """What was found, with its values; when it is not right also what to do."""


@dataclass(frozen=True, slots=True)
class PageAddress:
    """Where pages are served."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class PageError(PeerError):
    """The pages cannot be served there."""

    exit_code = 2

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(address, reason)
        self.address = address
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"the page cannot be served at {self.address}: {self.reason}; "
            "choose another place with --page HOST:PORT, or none with --page off"
        )


def parse_page(text: str) -> PageAddress:
    """Read ``HOST:PORT`` (or ``[::1]:9100``). Raises ``PageError``."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise PageError(repr(text), f"it is not HOST:PORT, such as {DEFAULT_PAGE}")
    return PageAddress(host, int(port))


@asynccontextmanager
async def serve_pages(
    address: PageAddress,
    *,
    checks: Callable[[], Sequence[Check]],
    metrics: Callable[[], Iterable[Metric]],
) -> AsyncIterator[None]:
    """Serve the pages while the block runs. Raises ``PageError``.

    ``checks`` and ``metrics`` are asked for every request; they must not wait.
    """
    registry = CollectorRegistry()
    registry.register(_Figures(metrics))
    ProcessCollector(registry=registry)

    async def health(request: web.Request) -> web.Response:
        return _json({"status": "alive"})

    async def ready(request: web.Request) -> web.Response:
        found = checks()
        is_ready = all(check.ok for check in found)
        content = {"ready": is_ready, "checks": [asdict(check) for check in found]}
        return _json(content, status=200 if is_ready else 503)

    async def figures(request: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    async def index(request: web.Request) -> web.Response:
        return web.Response(text="/healthz\n/readyz\n/metrics\n")

    application = web.Application(client_max_size=0)
    application.add_routes(
        [
            web.get("/", index),
            web.get("/healthz", health),
            web.get("/readyz", ready),
            web.get("/metrics", figures),
        ]
    )
    runner = web.AppRunner(application, access_log=None, handle_signals=False, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, address.host, address.port)
        try:
            await site.start()
        except OSError as error:
            raise PageError(str(address), _why(error)) from error
        yield
    finally:
        await runner.cleanup()


class _Figures(Collector):
    def __init__(self, metrics: Callable[[], Iterable[Metric]]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics()


def _json(content: object, *, status: int = 200) -> web.Response:
    return web.Response(
        text=json.dumps(content, indent=1) + "\n", status=status, content_type="application/json"
    )


def _why(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "another program serves something there already"
    if error.errno == errno.EADDRNOTAVAIL:
        return "that is no address of this machine"
    return os.strerror(error.errno) if error.errno else str(error)
