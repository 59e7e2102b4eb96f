"""A list of runs, ``runs.json``: what somebody says of runs that others may join.

Anybody can serve one as a static file, and the page of a run serves one. It is a stranger's word:
bounded data, of which nothing is believed before the peers of a run have been asked. A list is
fetched only where a user has named it.
"""

from __future__ import annotations

import ssl
from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Struct

from dht import addresses
from dht.decoding import decoded
from peer.errors import RunNotFound
from peer.joining.link import Link, download, parse_link, read_file

RUNS_MAX = 50
LIST_MAX_BYTES = 1 << 20

Short: TypeAlias = Annotated[str, Meta(max_length=100)]
Text: TypeAlias = Annotated[str, Meta(max_length=500)]
Count: TypeAlias = Annotated[int, Meta(ge=0, lt=2**62)]


class NoRunList(RunNotFound):
    """There is no list of runs at an address or path."""

    message = "no list of runs at {where}: {reason}"


class ListedRun(Struct, frozen=True, kw_only=True):
    """A run of a list. Fields that are not known here are ignored: each server may add some."""

    link: Annotated[str, Meta(max_length=2000)] = ""
    """The link to join by; empty where the server knows none that leads to it from elsewhere."""
    name: Short = ""
    description: Annotated[str, Meta(max_length=4000)] = ""
    model: Text = ""
    data: Text = ""
    needs: Text = ""
    """The needs of a machine that trains in it, in words."""
    licence: Short = ""
    learners: Count | None = None
    """Peers that train, as the server counts them."""
    tokens: Count | None = None
    tokens_goal: Count | None = None


class RunList(Struct, frozen=True, kw_only=True):
    """The content of ``runs.json``."""

    runs: Annotated[tuple[ListedRun, ...], Meta(max_length=RUNS_MAX)] = ()


def decode(data: bytes) -> RunList:
    """Raises ``ValueError``."""

    def read(content: bytes) -> RunList:
        return msgspec.json.decode(content, type=RunList)

    return decoded(data, read, "a list of runs", max_bytes=LIST_MAX_BYTES)


def read_list(where: str, *, timeout_s: float = 30.0, tls: ssl.SSLContext | None = None) -> RunList:
    """The list at an ``https`` address or in a file. Raises ``NoRunList``."""
    where = where.strip()
    try:
        if "://" in where:
            data = download(where, timeout_s=timeout_s, tls=tls, bytes_max=LIST_MAX_BYTES)
        else:
            data = read_file(Path(where), bytes_max=LIST_MAX_BYTES)
        return decode(data)
    except RunNotFound as error:
        raise NoRunList(error.where, error.reason) from error
    except ValueError as error:
        raise NoRunList(where, str(error)) from error


def link_of(listed: ListedRun, where: str) -> Link:
    """The link of a run of the list at ``where``. Raises ``LinkError`` or ``ValueError``.

    A list from elsewhere leads to public addresses only: it must not make this machine dial others
    in its own network.
    """
    if not listed.link:
        raise ValueError("the list has no link to it")
    link = parse_link(listed.link)
    if "://" not in where.strip():
        return link
    scopes = {seed: addresses.scope_of(seed) for seed in link.seeds}
    public = tuple(seed for seed, scope in scopes.items() if scope is addresses.Scope.INTERNET)
    if not public:
        raise ValueError("its link has no public address")
    return replace(link, seeds=public)
