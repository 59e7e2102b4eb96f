"""The public page of a run: its content, and the server of it.

A keeper that serves the page, or publishes exports, answers everybody's call for it; a bootstrap
peer takes that for its own page. Everything on a page is a claim of the peer that serves it. It is
served read-only, without cookies, at a bounded rate, also behind a proxy.

    /                       the page: of the run, or of all runs that this peer knows
    /page.js  /page.css     its parts; nothing is loaded from elsewhere
    /runs.json              the runs, for `shoal runs`, and who serves this
    /run.json?run=ID        everything the page shows (``RunPage``)
    /qr.svg?run=ID          the join link as a QR code
    /exports/NAME/FILE      files of the exports that are listed
    /healthz                200

Nothing here changes anything, so there is no form, no token and no session. The content of a run is
computed once in ``FRESH_S``, however often it is asked for. The rate is bounded for all clients
together, because behind a proxy all have one address.

The page of one's own peer, with addresses of others and for its owner alone, is in ``peer.views``.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler
from msgspec import Meta, Struct

from dht.host import Host
from dht.identity import PeerId, RunId
from dht.limits import Rate
from peer.calls import Call
from peer.data.files import data_words
from peer.extras.site.shelf import published
from peer.run_file.sections import RunFile
from peer.views.page_address import PageAddress
from peer.views.pages import Answer, drawing_text, serve

PAGE_MAX_BYTES = 256 << 10
SCHEMA = 1
"""Version of ``run.json``. Fields are added, never changed."""

POINTS_MAX = 400
DAYS_MAX = 400
ROWS_MAX = 100
NEWS_MAX = 50

Short: TypeAlias = Annotated[str, Meta(max_length=100)]
Text: TypeAlias = Annotated[str, Meta(max_length=500)]
Long: TypeAlias = Annotated[str, Meta(max_length=4000)]
Count: TypeAlias = Annotated[int, Meta(ge=0, lt=2**62)]
Time: TypeAlias = Annotated[float, Meta(ge=0, le=1e11)]
Number: TypeAlias = Annotated[float, Meta(ge=-1e9, le=1e9)]


class _Part(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Part of a page. Fields have names, because browsers read it as JSON."""


class Point(_Part, frozen=True, kw_only=True):
    """A moment of the training."""

    at: Time
    tokens: Count
    loss: Number


class Day(_Part, frozen=True, kw_only=True):
    """The tokens that were merged on a day in UTC, as the peer that tells of it has seen."""

    date: Short
    tokens: Count


class Row(_Part, frozen=True, kw_only=True):
    """A contributor, or all further ones together."""

    name: Short
    tokens: Count
    share: Annotated[float, Meta(ge=0, le=1)]


class Latest(_Part, frozen=True, kw_only=True):
    """The newest export."""

    name: Short
    tokens: Count
    at: Time
    size_bytes: Count
    loss: Number | None = None
    loss_tokens: Count = 0
    """Merged tokens when the loss was measured."""
    path: Text = ""
    """Path of its parameters at the server of the page; empty if it is not served there."""
    url: Text = ""
    """Address elsewhere: its repository on the hub."""


class News(_Part, frozen=True, kw_only=True):
    at: Time
    text: Text


class RunPage(_Part, frozen=True, kw_only=True):
    """The public page of a run."""

    run: Annotated[str, Meta(min_length=64, max_length=64, pattern="^[0-9a-f]*$")]
    at: Time
    """Unix time at which this was so."""
    schema: Annotated[int, Meta(ge=SCHEMA, le=SCHEMA)] = SCHEMA
    name: Short = ""
    description: Long = ""
    licence: Short = ""
    homepage: Text = ""
    contact: Text = ""
    discussion: Text = ""
    model: Text = ""
    data: Text = ""
    needs: Text = ""
    """The needs of a machine that trains in the run."""
    link: Annotated[str, Meta(max_length=2000)] = ""
    """The link to join by; empty if this peer knows none."""
    tokens: Count | None = None
    tokens_goal: Count | None = None
    ended_at: Time | None = None
    learners: Count = 0
    """Live peers that train."""
    keepers: Count = 0
    others: Count = 0
    """Other live peers: those that begin or rest, and bootstrap peers."""
    contributors_total: Count | None = None
    losses: Annotated[tuple[Point, ...], Meta(max_length=POINTS_MAX)] = ()
    """Training losses, the median of the learners."""
    held_out: Annotated[tuple[Point, ...], Meta(max_length=POINTS_MAX)] = ()
    days: Annotated[tuple[Day, ...], Meta(max_length=DAYS_MAX)] = ()
    contributors: Annotated[tuple[Row, ...], Meta(max_length=ROWS_MAX + 1)] = ()
    latest: Latest | None = None
    news: Annotated[tuple[News, ...], Meta(max_length=NEWS_MAX)] = ()
    unknown: Annotated[tuple[Text, ...], Meta(max_length=8)] = ()
    """Facts that the peer that serves the page cannot know, in words."""


CALL: Call[str, RunPage] = Call("/shoal/run-page/1", RunPage, "the page of a run", PAGE_MAX_BYTES)


async def ask(host: Host, peer: PeerId, run: RunId, *, timeout_s: float) -> RunPage:
    """Ask a peer for the page of its run. Raises ``DhtError`` or ``ValueError``."""
    page = await CALL.ask(host, peer, run, "", timeout_s=timeout_s)
    if page.run != run:
        raise ValueError(f"the page of run {page.run[:16]}, not {run[:16]}")
    return page


def elsewhere(page: RunPage) -> RunPage:
    """The page for a server that does not have the exports."""
    if page.latest is None:
        return page
    latest = msgspec.structs.replace(page.latest, path="")
    return msgspec.structs.replace(page, latest=latest)


_TEXT_MAX = 500
_SHORT_MAX = 100


def model_words(run: RunFile, parameters: str) -> str:
    """The recipe and its size: ``gpt, 124 M parameters``."""
    recipe = str(run.model.__struct_config__.tag)
    return f"{recipe}, {parameters} parameters" if parameters else recipe


def described(run: RunFile, *, parameters: str = "") -> dict[str, Any]:
    """Fields of ``RunPage`` that the run file says."""
    goal = run.end.tokens
    return {
        "name": run.name[:_SHORT_MAX],
        "description": run.description[:4000],
        "licence": run.licence[:_SHORT_MAX],
        "homepage": run.homepage[:_TEXT_MAX],
        "contact": run.contact[:_TEXT_MAX],
        "discussion": run.discussion[:_TEXT_MAX],
        "model": model_words(run, parameters)[:_TEXT_MAX],
        "data": data_words(run)[:_TEXT_MAX],
        "tokens_goal": goal if isinstance(goal, int) else None,
    }


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
        self._files = {
            path: (files("peer.extras.site").joinpath(name).read_bytes(), kind)
            for path, (name, kind) in _FILES.items()
        }
        script, kind = self._files["/page.js"]
        self._files["/page.js"] = drawing_text().encode() + script, kind

    def routes(self) -> dict[str, Answer]:
        return {
            **dict.fromkeys(_FILES, self._file),
            "/runs.json": self._runs,
            "/run.json": lambda request: _json(self._page(request)),
            "/qr.svg": self._code,
            "/healthz": lambda request: web.Response(text="alive\n"),
            "/exports/{export}/{name}": self._export,
        }

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
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

    def _file(self, request: web.Request) -> web.Response:
        data, kind = self._files[request.path]
        return web.Response(body=data, content_type=kind, charset="utf-8")

    def _runs(self, request: web.Request) -> web.Response:
        runs = [{name: getattr(page, name) for name in LISTED} for page in self._fresh().values()]
        return _json({"who": self._site.who, "runs": runs})

    def _code(self, request: web.Request) -> web.Response:
        link = self._page(request).link
        code = qr_svg(link) if link else None
        if code is None:
            raise web.HTTPNotFound(text="there is no code\n")
        return web.Response(body=code, content_type="image/svg+xml")

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


def _json(content: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), content_type="application/json")


@asynccontextmanager
async def serve_run_pages(address: PageAddress, site: Site) -> AsyncIterator[str]:
    """Serve while the block runs; yields the URL. Raises ``PageError``."""
    server = _Server(site)
    async with serve(
        server.routes(), address, guard=server.guard, headers=_HEADERS, option="--run-page"
    ) as served:
        yield served.url


@lru_cache(maxsize=1)
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
