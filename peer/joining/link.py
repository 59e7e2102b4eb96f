"""Links to runs, and finding the run file behind one.

A link ``shoal://RUN_ID?seed=ADDRESS&seed=ADDRESS`` consists of the hash of a run's settings and
of addresses of peers that have them. The run file is checked against the hash. ``find_run`` also
takes a local file and an ``https`` address. Peers are asked by a child process (``ask_peers``):
who looks for a run has no network.
"""

from __future__ import annotations

import os
import re
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.parse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Timer
from typing import Any

from multiaddr import Multiaddr

from dht import addresses
from dht.identity import PeerId, RunId
from dht.membership.credentials import InviteKey, parse_invite
from peer.errors import LinkError, RunFileUnreadable, RunNotFound, SeedsElsewhere
from peer.https import answers_checked, https_opener, reason_of
from peer.processes import child_environment
from peer.run_file.reading import RUN_FILE_MAX_BYTES, TEXT_MAX_BYTES, from_canonical, parse_whole
from peer.run_file.sections import SEEDS_MAX, CustomModel, RunFile

SCHEME = "shoal://"
LINK_MAX_CHARACTERS = 8192
SHORT_SEEDS = 3
"""Number of addresses in the links that peers print."""

ELSEWHERE = 4
"""Exit code of the process that asks for a run file, when all seeds take part in another run:
asking again is of no use."""

MEANWHILE = "meanwhile: "
"""Beginning of the lines in which that process says why it has no run file yet."""

NOBODY_YET = "no seed of the link has answered yet"

_RUN_ID = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Link:
    """A run id, and addresses of peers to ask for the run file."""

    run_id: RunId
    seeds: tuple[Multiaddr, ...] = ()
    invite: InviteKey | None = None
    """Admits the holder of the link to a run for invited peers."""

    def __str__(self) -> str:
        """The text that people pass on, with only those addresses that lead here from farthest."""
        # "/" and ":" need no escape in a query (RFC 3986, 3.4), which keeps the link legible.
        # Where the link is pasted, 127.0.0.1 or 192.168.1.5 is another machine or none.
        far = [seed for seed in self.seeds if addresses.scope_of(seed) is self.scope]
        parts = [f"seed={urllib.parse.quote(str(seed), safe='/:')}" for seed in far]
        if self.invite is not None:
            parts.append(f"invite={self.invite}")
        return f"{SCHEME}{self.run_id}" + ("?" + "&".join(parts) if parts else "")

    @property
    def scope(self) -> addresses.Scope | None:
        """The scope in which the link can be used; ``None``: it names no address."""
        return max(map(addresses.scope_of, self.seeds), default=None)


@dataclass(frozen=True, slots=True)
class FoundRun:
    """A run file, and the addresses found with it."""

    run: RunFile
    seeds: tuple[Multiaddr, ...]
    """Addresses in the file or the link. They are hints, and not part of the run's id."""
    folder: Path | None = None
    """Folder of a local file, which its relative paths refer to."""
    invite: InviteKey | None = None
    """Invite in the link."""
    by_link: bool = False
    """A link led to it: the run has been founded."""


def parse_link(text: str) -> Link:
    """Parse a link. Raises ``LinkError``."""
    text = text.strip()
    if len(text) > LINK_MAX_CHARACTERS:
        raise LinkError(text, f"it is longer than {LINK_MAX_CHARACTERS} characters")
    if not text.lower().startswith(SCHEME):
        raise LinkError(text, f"it does not begin with {SCHEME}")
    run_id, _, query = text[len(SCHEME) :].partition("?")
    run_id = run_id.rstrip("/").lower()
    if not _RUN_ID.fullmatch(run_id):
        raise LinkError(
            text,
            f"a run id has 64 hex digits, this one has {len(run_id)} characters: {run_id[:70]!r}",
        )
    seeds: list[Multiaddr] = []
    invite: InviteKey | None = None
    try:
        pairs = urllib.parse.parse_qsl(
            query, keep_blank_values=True, strict_parsing=bool(query), errors="strict"
        )
    except ValueError as error:
        raise LinkError(text, f"the part after '?' is not NAME=VALUE&...: {error}") from error
    for name, value in pairs:
        if name not in ("seed", "invite"):
            raise LinkError(text, f"{name!r} is not part of a link; 'seed' and 'invite' are")
        try:
            if name == "invite":
                invite = parse_invite(value)
                continue
            seed = addresses.parse_seed(value)
        except ValueError as error:
            raise LinkError(text, str(error)) from error
        if seed not in seeds:
            seeds.append(seed)
    if len(seeds) > SEEDS_MAX:
        raise LinkError(text, f"it has {len(seeds)} seeds; at most {SEEDS_MAX} are allowed")
    return Link(RunId(run_id), tuple(seeds), invite)


def short_link(run_id: RunId, *, seeds: Sequence[Multiaddr], own: Sequence[Multiaddr]) -> Link:
    """A link with at most ``SHORT_SEEDS`` addresses, all of the widest scope that there is.

    ``seeds`` in the order of preference, of which each peer is named once, and addresses of the
    peer that makes the link: one of them is always in it.
    """
    scope = max(map(addresses.scope_of, [*seeds, *own]), default=None)
    mine = [address for address in own if addresses.scope_of(address) is scope]
    me = {addresses.peer_of(address) for address in own}
    others: dict[PeerId | None, Multiaddr] = {}
    for seed in seeds:
        if addresses.scope_of(seed) is scope and addresses.peer_of(seed) not in me:
            others.setdefault(addresses.peer_of(seed), seed)
    first = list(others.values())[: SHORT_SEEDS - bool(mine)]
    return Link(run_id, tuple([*first, *mine][:SHORT_SEEDS]))


def is_news(link: str, told: str | None) -> bool:
    """True if people need this link beside the one that they were told before.

    That one may lead nowhere any more, or not as far as this one.
    """
    if told is None:
        return True
    new, old = parse_link(link), parse_link(told)
    if new.scope is None or old.scope is None:
        return new.scope is not None
    return new.scope > old.scope or not set(new.seeds) & set(old.seeds)


def only_from(text: str) -> str | None:
    """A warning about a link that is of no use elsewhere; ``None``: it is fine."""
    scope = parse_link(text).scope
    if scope is None or scope is addresses.Scope.INTERNET:
        return None
    where = "on this machine" if scope is addresses.Scope.MACHINE else "in this local network"
    return (
        f"that link works only {where}: it holds no public address; for others name a bootstrap "
        "host with --seed, or forward a port and name the outer address with --announce"
    )


def tell_link(link: str, run: RunFile, event: Callable[[str, dict[str, Any]], None]) -> None:
    """Report how others join, and from where they cannot."""
    limit, by_program = only_from(link), isinstance(run.model, CustomModel)
    event("link", {"link": link, "limit": limit, "by_program": by_program})
    if limit is not None:
        event("link_limited", {"text": limit})


def find_run(where: str, tell: Callable[[str], None] = lambda reason: None) -> FoundRun:
    """The run of a local file, an ``https`` address or a link.

    ``tell`` is that of ``ask_peers``, which blocks as long as it takes. Raises what ``run_at``
    raises.
    """
    if not where.strip().lower().startswith(SCHEME):
        return run_at(where)
    link = parse_link(where)
    # The private half of an invite stays here: a link is passed to another process.
    run = from_canonical(ask_peers(replace(link, invite=None), tell), link.run_id)
    return FoundRun(run, link.seeds, invite=link.invite, by_link=True)


def run_at(where: str, *, timeout_s: float = 30.0, tls: ssl.SSLContext | None = None) -> FoundRun:
    """The run of a local file or an ``https`` address. Blocks for about ``timeout_s`` at most.

    Raises ``RunNotFound``, ``RunFileError`` or ``LinkError``. ``tls`` is for tests and private
    certificate authorities.
    """
    scheme = where.strip().partition("://")[0].lower()
    if scheme in ("http", "https") and "://" in where:
        data = download(where.strip(), timeout_s=timeout_s, tls=tls)
        return _found(_text(data, where.strip(), RunNotFound), where.strip())
    path = Path(where)
    if (problem := _no_path(where)) is not None and not path.is_file():
        raise LinkError(where, problem)
    return replace(_found(read_text(path), where), folder=path.absolute().parent)


def _no_path(where: str) -> str | None:
    """The fault of a text that was meant as a link; ``None``: it may be a path."""
    if not where.strip():
        return "it is empty"
    if where.strip().startswith(("/ip4/", "/ip6/", "/dns")):
        return "it is the address of a peer, and names no run: pass it with --seed beside a link"
    scheme, is_url, _ = where.strip().partition("://")
    return f"it begins with {scheme}:// and not with {SCHEME}" if is_url else None


def read_text(path: Path) -> str:
    """The text of a local run file. Raises ``RunFileUnreadable``."""
    return _text(read_file(path), str(path), RunFileUnreadable)


def _found(text: str, source: str) -> FoundRun:
    run = parse_whole(text, source=source)
    return FoundRun(run, run.seed_addresses)


def _text(data: bytes, source: str, refusal: type[RunNotFound]) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise refusal(source, f"it is not UTF-8 text ({error.reason})") from error


def read_file(path: Path, *, bytes_max: int = TEXT_MAX_BYTES) -> bytes:
    """The bytes of a local file. Raises ``RunFileUnreadable``."""
    try:
        if path.is_fifo():
            raise ValueError("it is a pipe, which may never end")
        with path.open("rb") as file:
            # One byte more than allowed shows that it is too long; a device or pipe may be endless.
            data = file.read(bytes_max + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        problem = f"{reason}; pass a file, an https URL or a link"
        raise RunFileUnreadable(str(path), problem) from error
    if len(data) > bytes_max:
        raise RunFileUnreadable(str(path), f"it is longer than {bytes_max} bytes")
    return data


def download(
    url: str, *, timeout_s: float, tls: ssl.SSLContext | None, bytes_max: int = TEXT_MAX_BYTES
) -> bytes:
    """The content of an ``https`` address. Raises ``RunNotFound``."""
    if not url.lower().startswith("https://"):
        raise RunNotFound(url, "http is not protected against modification; use https")
    opener = https_opener(tls)
    deadline = time.monotonic() + timeout_s
    try:
        with answers_checked(), opener.open(url, timeout=timeout_s) as response:
            # The socket's timeout is per read; a slow server needs a deadline for all reads.
            data = b""
            while piece := response.read1(bytes_max + 1 - len(data)):
                data += piece
                if time.monotonic() > deadline:
                    raise TimeoutError(f"not complete after {timeout_s:g} s")
    except urllib.error.HTTPError as error:
        raise RunNotFound(url, f"the server answered {error.code} {error.reason}") from error
    except OSError as error:  # URLError and timeouts are, too
        problem = f"{reason_of(error)}; check the address and this machine's connection"
        raise RunNotFound(url, problem) from error
    if len(data) > bytes_max:
        raise RunNotFound(url, f"it is longer than {bytes_max} bytes")
    return data


FETCH_TIMEOUT_S = 120.0
"""The fetching process ends by itself before that."""


def read_run(where: str) -> RunFile:
    """The run of a file, an ``https`` address or a ``shoal://`` link."""
    return find_run(where).run


def ask_peers(link: Link, tell: Callable[[str], None] = lambda reason: None) -> bytes:
    """The canonical run file of ``link``, fetched from peers by a child process. Not verified.

    Blocks for about ``FETCH_TIMEOUT_S`` at most. ``tell`` is called with each new reason why there
    is none yet.
    """
    if not link.seeds:
        raise RunNotFound(str(link), "the link has no seed to ask; ask for a link with one")
    child_end, own_end = os.pipe()  # closed with this process, however it ends
    command = [sys.executable, "-P", "-m", "peer.joining.fetch", str(link), str(child_end)]
    child = subprocess.Popen(
        command,
        env=child_environment(os.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[child_end],
    )
    os.close(child_end)
    late = Timer(FETCH_TIMEOUT_S, child.kill)
    late.start()
    last = ""
    try:
        with child:
            assert child.stdout is not None and child.stderr is not None
            try:
                for line in child.stderr:
                    text = line.decode(errors="replace").strip()
                    if text.startswith(MEANWHILE):
                        tell(text.removeprefix(MEANWHILE))
                    else:
                        last = text or last
                content = child.stdout.read(RUN_FILE_MAX_BYTES + 1)  # a pipe holds as much
            except BaseException:
                child.kill()  # here: the end of the block waits for it
                raise
    finally:
        late.cancel()
        os.close(own_end)
    if child.returncode != 0:
        kind = SeedsElsewhere if child.returncode == ELSEWHERE else RunNotFound
        raise kind("the link's seeds", last or f"exit code {child.returncode}")
    if len(content) > RUN_FILE_MAX_BYTES:
        raise RunNotFound("the link's seeds", f"an answer of over {RUN_FILE_MAX_BYTES} bytes")
    return content
