"""Contents of the public page of a run. Pure, apart from ``ask``.

A keeper that serves the page, or publishes exports, answers everybody's call for it; a bootstrap
peer takes that for its own page. Everything on a page is a claim of the peer that serves it.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta, Struct

from dht.host import Host
from dht.identity import PeerId, RunId
from peer.calls import Call
from peer.data.files import hosts_of
from peer.run_file.sections import FilesData, HfData, RunFile

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


def data_words(run: RunFile) -> str:
    """The recipe, and what it reads as far as that has a name everywhere."""
    data = run.data
    if isinstance(data, HfData):
        return f"{data.dataset} at {data.revision}"[:_TEXT_MAX]
    if isinstance(data, FilesData) and (hosts := hosts_of(data)):
        return f"files from {', '.join(hosts)}"[:_TEXT_MAX]
    return str(data.__struct_config__.tag)


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
        "data": data_words(run),
        "tokens_goal": goal if isinstance(goal, int) else None,
    }
