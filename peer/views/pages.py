"""The HTTP pages of a long-running process, which are read-only.

    /healthz   200 as long as the process answers at all
    /readyz    200 or 503, with each check and its reason, as JSON
    /metrics   for Prometheus, in its text format
    /          a page for people, which reads
    /state.json, /events.json?search=WORDS

They are served on the loopback interface by default. On other interfaces the page and its JSON,
which contain addresses and names of peers, require a token. The first three contain sums only and
do not, so that a watchdog and Prometheus need no secret.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import json
import os
import secrets
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeAlias

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from dht.bounded_mapping import ALL
from peer.views.connections import CONNECTIONS_MAX, REQUEST_WITHIN_S, Connections
from peer.views.event_log import plain
from peer.views.page_address import PageAddress, PageError, is_local, reason_of

SEARCH_MAX = 100

_HEADERS = {
    # The page is self-contained; texts of peers can neither load nor run anything.
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True, slots=True)
class Check:
    """One condition for this process to be ready."""

    name: str
    ok: bool
    reason: str
    """The finding with its values; if it is not ok, also the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """Content of the page for people. Its functions are called for each request; must not wait."""

    state: Callable[[], Mapping[str, Any]]
    events: Callable[[str], Sequence[Mapping[str, Any]]]
    """Returns the newest events in which a text occurs."""
    token_file: Path
    """File of the token, if one is required; created if it is missing."""


@asynccontextmanager
async def serve_pages(
    address: PageAddress,
    *,
    checks: Callable[[], Sequence[Check]],
    metrics: Callable[[], Iterable[Metric]],
    content: Content | None = None,
) -> AsyncIterator[str]:
    """Serve the pages while the block runs; yields the URL. Raises ``PageError``.

    ``checks`` and ``metrics`` are called for each request and must not wait.
    """
    registry = CollectorRegistry()
    registry.register(_Figures(metrics))
    ProcessCollector(registry=registry)

    def ready(request: web.Request) -> web.Response:
        results = checks()
        is_ready = all(check.ok for check in results)
        content = {"ready": is_ready, "checks": [asdict(check) for check in results]}
        return _json(content, status=200 if is_ready else 503)

    def figures(request: web.Request) -> web.Response:
        metrics_type = {"Content-Type": CONTENT_TYPE_LATEST}
        return web.Response(body=generate_latest(registry), headers=metrics_type)

    routes: dict[str, Answer] = {
        "/": lambda request: web.Response(text="/healthz\n/readyz\n/metrics\n"),
        "/healthz": lambda request: _json({"status": "alive"}),
        "/readyz": ready,
        "/metrics": figures,
    }
    token = None
    if content is not None:
        token = None if address.is_local else _token(content.token_file)
        routes |= _for_people(content)
    guard = _guard(address, token)
    async with serve(routes, address, guard=guard, headers=_HEADERS) as served:
        yield served.url + ("" if token is None else f"?token={token}")


def _for_people(content: Content) -> dict[str, Answer]:
    """The page for people, and what it reads."""
    page = page_text()

    def events(request: web.Request) -> web.Response:
        wanted = request.query.get("search", "")[:SEARCH_MAX]
        return _json({"events": content.events(wanted)})

    return {
        "/": lambda request: web.Response(text=page, content_type="text/html"),
        "/state.json": lambda request: _json(content.state()),
        "/events.json": events,
    }


def drawing_text() -> str:
    """The script that all pages are drawn with."""
    return files("peer.views").joinpath("drawing.js").read_text(encoding="utf-8")


def page_text() -> str:
    """The page for people, in one file: it loads nothing."""
    text = files("peer.views").joinpath("page.html").read_text(encoding="utf-8")
    return text.replace("// drawing.js\n", drawing_text())


Answer: TypeAlias = Callable[[web.Request], web.StreamResponse | Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serve(
    routes: Mapping[str, Answer],
    address: PageAddress,
    *,
    guard: Middleware,
    headers: Mapping[str, str],
    option: str = "--page",
) -> AsyncIterator[PageAddress]:
    """Answer ``GET`` at the first free port of an address while the block runs.

    ``guard`` sees each request first; every answer has the ``headers``. Raises ``PageError``, which
    names the ``option`` that the address is from.
    """

    async def harden(request: web.BaseRequest, response: web.StreamResponse) -> None:
        for name, value in headers.items():
            response.headers.setdefault(name, value)
        response.headers["Server"] = "shoal"

    connections = Connections()
    application = web.Application(client_max_size=0, middlewares=[guard, connections.watching()])
    application.add_routes([web.get(path, _handler(answer)) for path, answer in routes.items()])
    application.on_response_prepare.append(harden)
    runner = web.AppRunner(
        application,
        access_log=None,
        handle_signals=False,
        shutdown_timeout=1.0,
        keepalive_timeout=REQUEST_WITHIN_S,
    )
    await runner.setup()
    listening = None
    try:
        listening, served = await _listen(runner, connections, address, option)
        yield served
    finally:
        if listening is not None:
            listening.close()
        await runner.cleanup()


def _handler(answer: Answer) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        made = answer(request)
        return await made if isinstance(made, Awaitable) else made

    return handle


async def _listen(
    runner: web.AppRunner, connections: Connections, address: PageAddress, option: str
) -> tuple[asyncio.Server, PageAddress]:
    server, loop = runner.server, asyncio.get_running_loop()
    assert server is not None, "the runner is set up"
    for number in range(address.tries):
        tried = replace(address, port=address.port + number)
        try:
            return await loop.create_server(
                lambda: connections.accept(server), tried.host, tried.port, backlog=CONNECTIONS_MAX
            ), tried
        except OSError as error:
            if error.errno == errno.EADDRINUSE and number + 1 < address.tries:
                continue
            raise PageError(str(tried), reason_of(error), option) from error
    raise AssertionError("tries is positive")


_FOR_MACHINES = ("/healthz", "/readyz", "/metrics")


def _guard(address: PageAddress, token: str | None) -> Middleware:
    """Middleware that refuses requests without the token, or from other web sites."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in _FOR_MACHINES:
            return await handler(request)
        if address.is_local and not is_local(request.url.host or ""):
            # A web site whose name resolves to this address must not read it through a browser.
            raise web.HTTPForbidden(text=f"this page is served at {address.host} only\n")
        given = request.query.get("token", "")
        given = request.headers.get("Authorization", "").removeprefix("Bearer ") or given
        if token is not None and not hmac.compare_digest(
            given.encode(errors="replace"), token.encode()
        ):
            raise web.HTTPUnauthorized(text="add ?token=TOKEN; it was printed with the address\n")
        return await handler(request)

    return guard


def _token(file: Path) -> str:
    """The token in a file, kept over restarts so that a bookmark stays valid."""
    try:
        if known := file.read_text(encoding="ascii").strip():
            return known
    except FileNotFoundError:
        pass
    token = secrets.token_urlsafe(18)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as out:
        out.write(token + "\n")
    return token


class _Figures(Collector):
    def __init__(self, metrics: Callable[[], Iterable[Metric]]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics()
        yield from table_metrics()


def table_metrics() -> Iterator[Metric]:
    """How full the tables of this process are (``dht.bounded_mapping``)."""
    text = "tables of what others can cause, which drop what is worth the least"
    for figure, what, family in (
        ("entries", "Entries of", GaugeMetricFamily),
        ("places", "Places of", GaugeMetricFamily),
        ("bytes", "Memory of", GaugeMetricFamily),
        ("dropped", "Entries that gave way in", CounterMetricFamily),
    ):
        metric = family(f"shoal_table_{figure}", f"{what} {text}.", labels=["table"])
        for name, used in ALL.use().items():
            metric.add_metric([name], getattr(used, figure))
        yield metric


def _json(content: object, *, status: int = 200) -> web.Response:
    return web.Response(
        text=json.dumps(plain(content), indent=1) + "\n",
        status=status,
        content_type="application/json",
    )
