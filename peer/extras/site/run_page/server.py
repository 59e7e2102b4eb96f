"""Serves public pages of runs: read-only, without cookies, at a bounded rate, also behind a proxy.

    /                       the page: of the run, or of all runs that this peer knows
    /page.js  /page.css     its parts; nothing is loaded from elsewhere
    /runs.json              the runs, for `shoal runs`, and who serves this
    /run.json?run=ID        everything the page shows (``content.RunPage``)
    /qr.svg?run=ID          the join link as a QR code
    /exports/NAME/FILE      files of the exports that are listed
    /healthz                200

Nothing here changes anything, so there is no form, no token and no session. The content of a run is
computed once in ``FRESH_S``, however often it is asked for. The rate is bounded for all clients
together, because behind a proxy all have one address.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from dht.limits import Rate
from peer.extras.site.publishing.shelf import published
from peer.extras.site.run_page.content import RunPage
from peer.views.page_address import PageAddress, PageError
from peer.views.pages import drawing_text, serve

FRESH_S = 5.0
RATE_PER_S = 100.0
"""Limit of requests, for all visitors together."""

BURST = 300.0
DOWNLOADS_MAX = 4
"""Files of exports that are sent at once; a web server on the folder sends as many as it likes."""
LISTED = (
    *("run", "link", "name", "description", "model", "data", "needs", "licence"),
    *("learners", "tokens", "tokens_goal"),
)
"""The fields of a run in ``runs.json``: those of ``peer.extras.run_lists``, and the id."""

DOWNLOAD_S = 6 * 3600.0
"""A download that takes longer is cut off: it would hold one of few places."""

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": f"public, max-age={FRESH_S:.0f}",
}

_FILES = {
    "/": ("page.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Contents that are served. Its functions must not wait."""

    who: str
    """The peer that serves it, in words."""
    pages: Callable[[], Mapping[str, RunPage]]
    """The runs by their ids."""
    exports: Path | None = None
    """The folder in which the run's exports are published."""


class _Server:
    def __init__(self, site: Site) -> None:
        self._site = site
        self._rate = Rate[None](RATE_PER_S, BURST)
        self._fresh_until = 0.0
        self._pages: Mapping[str, RunPage] = {}
        self._downloads = 0
        self._codes: dict[str, bytes | None] = {}
        self._files = {
            path: (files("peer.extras.site.run_page").joinpath(name).read_bytes(), kind)
            for path, (name, kind) in _FILES.items()
        }
        script, kind = self._files["/page.js"]
        self._files["/page.js"] = drawing_text().encode() + script, kind

    def application(self) -> web.Application:
        made = web.Application(client_max_size=0, middlewares=[self._guard])
        made.add_routes([web.get(path, self._file) for path in _FILES])
        made.add_routes(
            [
                web.get("/runs.json", self._runs),
                web.get("/run.json", self._run),
                web.get("/qr.svg", self._code),
                web.get("/healthz", self._health),
                web.get("/exports/{export}/{name}", self._export),
            ]
        )
        made.on_response_prepare.append(_harden)
        return made

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if not self._rate.spend(None, asyncio.get_running_loop().time()):
            raise web.HTTPTooManyRequests(text="too many requests\n", headers={"Retry-After": "2"})
        return await handler(request)

    def _fresh(self) -> Mapping[str, RunPage]:
        now = asyncio.get_running_loop().time()
        if now >= self._fresh_until:
            self._fresh_until = now + FRESH_S
            self._pages = self._site.pages()
        return self._pages

    def _page(self, request: web.Request) -> RunPage:
        pages, wanted = self._fresh(), request.query.get("run", "")
        page = pages.get(wanted) if wanted or len(pages) != 1 else next(iter(pages.values()))
        if page is None:
            raise web.HTTPNotFound(text="this peer does not know this run\n")
        return page

    async def _file(self, request: web.Request) -> web.Response:
        data, kind = self._files[request.path]
        return web.Response(body=data, content_type=kind, charset="utf-8")

    async def _runs(self, request: web.Request) -> web.Response:
        runs = [{name: getattr(page, name) for name in LISTED} for page in self._fresh().values()]
        return _json({"who": self._site.who, "runs": runs})

    async def _run(self, request: web.Request) -> web.Response:
        return _json(self._page(request))

    async def _code(self, request: web.Request) -> web.Response:
        link = self._page(request).link
        if link not in self._codes:
            self._codes.clear()
            self._codes[link] = qr_svg(link) if link else None
        code = self._codes[link]
        if code is None:
            raise web.HTTPNotFound(text="there is no code\n")
        return web.Response(body=code, content_type="image/svg+xml")

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(text="alive\n")

    async def _export(self, request: web.Request) -> web.StreamResponse:
        path = self._listed(request.match_info["export"], request.match_info["name"])
        if path is None:
            raise web.HTTPNotFound(text="there is no such file\n")
        if self._downloads >= DOWNLOADS_MAX:
            raise web.HTTPServiceUnavailable(
                text="as many downloads as this peer allows are under way\n",
                headers={"Retry-After": "60"},
            )
        self._downloads += 1
        try:
            answer = web.FileResponse(path)
            async with asyncio.timeout(DOWNLOAD_S):
                await answer.prepare(request)
            return answer
        finally:
            self._downloads -= 1

    def _listed(self, export: str, name: str) -> Path | None:
        """A file of an export that is published; nothing else on this machine is ever sent."""
        folder = self._site.exports
        if folder is None or export not in {each.name for each in published(folder)}:
            return None
        there = {path.name: path for path in (folder / export).iterdir() if path.is_file()}
        listed = there.get(name)
        return None if listed is None or listed.is_symlink() else listed


async def _harden(request: web.BaseRequest, response: web.StreamResponse) -> None:
    for name, value in _HEADERS.items():
        response.headers.setdefault(name, value)
    response.headers["Server"] = "shoal"


def _json(content: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), content_type="application/json")


@asynccontextmanager
async def serve_run_pages(address: PageAddress, site: Site) -> AsyncIterator[str]:
    """Serve while the block runs; yields the URL. Raises ``PageError``."""
    try:
        async with serve(_Server(site).application(), address) as served:
            yield served.url
    except PageError as error:
        raise PageError(error.address, error.reason, "--run-page") from error


def qr_svg(text: str) -> bytes | None:
    """The code as an SVG image, dark on white; ``None`` without the package."""
    try:
        import segno
    except ImportError:
        return None
    out = io.BytesIO()
    segno.make(text, error="m", micro=False).save(
        out, kind="svg", scale=4, border=4, dark="#000", light="#fff", xmldecl=False, svgns=True
    )
    return out.getvalue()
