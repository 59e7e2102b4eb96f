"""Serving peers that catch up: whole states in verified pieces, and missed rounds.

One stream carries one request after another: a manifest, a run of pieces, or the replay entries
after a version. The other side is ``averaging.live.states.fetcher``.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta, Struct

from averaging.history.lineage import Lineage
from averaging.history.manifest import Pieces, as_bytes, describe, identity_of
from averaging.history.replay import ReplayEntry
from averaging.history.state import FragmentState
from averaging.live.streams.bulk import FIRST, Uplink
from averaging.live.streams.fair_shares import ServedPlace, ServedPlaces
from averaging.live.streams.questions import (
    DATA,
    REFUSE_WITHIN_S,
    RELAYED,
    STALL_MAX_S,
    NotHere,
    answer_requests,
    in_frames,
)
from averaging.live.streams.threads import Threads
from averaging.messages import BadMessage, Count, Digest, Signatures, encode_signatures
from averaging.rules.line_speed import LineSpeed
from dht.errors import HostClosed, StreamBroken
from dht.host import Messaging, Stream
from dht.identity import PeerId, RunId
from dht.limits import Rate
from dht.wrapped_host import refuse

logger = logging.getLogger(__name__)

SERVED_MAX = 8
"""Streams served at once, in all."""
SERVED_PER_PEER_MAX = 2
SERVED_GRACE_S = 10.0
"""Time after which a served peer loses its stream to another one, when all streams are taken and it
is the slowest, below ``SLOW_BYTES_S``."""
SLOW_BYTES_S = 500e3
SHARE_STATES = 1.5
"""Multiple of the run's whole state after which a peer gives way to others."""
SHARE_S = 600.0
"""Time in which a peer regains all of its share of ``SHARE_STATES``."""
GIVE_WAY_S = 5.0
"""Pause before each piece for such a peer, while another one is being served."""
KEPT_S = 20.0
"""Time for which a state is kept for those that have its manifest and no stream yet to read it on:
they wait for the manifests of others."""


class _Request(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    fragment: Annotated[int, Meta(ge=0, lt=2**16)]


class AskManifest(_Request, frozen=True):
    """Asks which state a peer has. The answer is a frame of the signatures under its newest link,
    frames of the manifest and an empty one. Over a relay its digest (``Manifest.identity``) stands
    in the manifest's place."""


class AskPieces(_Request, frozen=True):
    """Pieces of the state whose manifest you told me. Answered by one frame each."""

    lineage: Digest
    first: Count
    count: Annotated[int, Meta(ge=1, le=256)]


class AskReplay(_Request, frozen=True):
    """The rounds after this one. For each its entry and its payload, then an empty frame."""

    version: Count
    lineage: Digest


Request = AskManifest | AskPieces | AskReplay

REQUESTS: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)


class Library(Protocol):
    """The states and replay logs that a server serves."""

    def state(self, fragment: int) -> FragmentState | None:
        """The current state; ``None`` while there is none."""
        ...

    def signatures(self, state: FragmentState) -> Signatures:
        """The signatures under a state's newest link: its certificate."""
        ...

    def replay(self, fragment: int, version: int, lineage: Lineage) -> Sequence[ReplayEntry] | None:
        """The rounds after this state, oldest first; ``None`` when they do not lead on from it."""
        ...


@dataclass(slots=True, eq=False)
class _Shown:
    """A state whose manifest was asked for."""

    state: FragmentState
    manifest: asyncio.Future[bytes]
    until: float = 0.0
    """It is kept until then, and as long as it is read."""
    readers: int = 0
    """Streams that asked for it last."""


@dataclass(slots=True, eq=False)
class _Reader:
    """A stream being answered."""

    stream: Stream
    place: ServedPlace
    places: ServedPlaces
    line: LineSpeed | None
    reading: _Shown | None = None
    """The state that it asked for last."""

    async def tell(self, *parts: bytes | memoryview) -> None:
        """Send a frame of an answer."""
        began = asyncio.get_running_loop().time()
        await self.stream.send(DATA, *parts, timeout_s=STALL_MAX_S)
        size, now = sum(len(part) for part in parts), asyncio.get_running_loop().time()
        self.places.served(self.place, size, now)
        if self.line is not None:
            self.line.carried(size, began=began, ended=now)

    def reads(self, shown: _Shown | None) -> None:
        """Note that it reads this state from now on, and no other one."""
        if self.reading is not None:
            self.reading.readers -= 1
        if shown is not None:
            shown.readers += 1
        self.reading = shown


class FetchServer:
    """Answers those who catch up. A state that is being read is kept until it was read: each stream
    has one, so those that keep places from others (``ServedPlaces``) keep no memory either."""

    def __init__(
        self,
        host: Messaging,
        *,
        run: RunId,
        library: Library,
        threads: Threads,
        prefers: Callable[[PeerId], bool] = lambda peer: False,
        state_bytes: float | None = None,
        line: LineSpeed | None = None,
        uplink: Uplink | None = None,
    ) -> None:
        """``prefers``: whether this peer is served even when all others would have to wait.

        ``state_bytes``: size of the states of all fragments; ``None``: nobody has a share.
        ``line``: hears what is sent. ``uplink``: the order of replays beside what rounds send.
        """
        self.counters: Counter[str] = Counter()
        self._host = host
        self._protocol = fetch_protocol(run)
        self._library = library
        self._threads = threads
        self._line = line
        self._uplink = uplink or Uplink()
        self._shown: dict[tuple[int, Lineage], _Shown] = {}
        self._served = ServedPlaces(
            SERVED_MAX,
            SERVED_PER_PEER_MAX,
            grace_s=SERVED_GRACE_S,
            slow_bytes_s=SLOW_BYTES_S,
            shares=None if state_bytes is None else _shares(SHARE_STATES * state_bytes),
            preferred=prefers,
        )

    async def start(self) -> None:
        await self._host.serve_streams(self._protocol, self._serve)

    def _let_go(self) -> None:
        """Let go of states that nobody reads: each may be the last of its version in memory."""
        now = asyncio.get_running_loop().time()
        for key, shown in list(self._shown.items()):
            if not shown.readers and shown.until <= now and shown.manifest.done():
                del self._shown[key]

    async def _serve(self, stream: Stream) -> None:
        peer = stream.remote
        now = asyncio.get_running_loop().time()
        place = self._served.admit(peer, now=now, end=stream.abort)
        if place is None:
            self.counters["fetches_refused"] += 1
            await refuse(
                stream,
                "too many fetches at once; ask somebody else, or later",
                timeout_s=REFUSE_WITHIN_S,
            )
            return
        reader = _Reader(stream, place, self._served, self._line)
        try:
            await answer_requests(stream, REQUESTS, partial(self._answer, reader))
        except BadMessage as error:
            self.counters["requests_refused"] += 1
            await refuse(stream, str(error), timeout_s=REFUSE_WITHIN_S)
        except (StreamBroken, HostClosed) as error:
            logger.debug("fetch_broken peer=%s reason=%s", peer, error)
        finally:
            reader.reads(None)
            self._served.leave(place)
            asyncio.get_running_loop().call_later(KEPT_S, self._let_go)

    async def _answer(self, reader: _Reader, request: Request) -> None:
        match request:
            case AskManifest(fragment):
                reader.reads(shown := self._show(fragment))
                await self._tell_manifest(reader, shown)
            case _ if reader.stream.relayed:
                raise NotHere(RELAYED)
            case AskPieces():
                shown = self._kept(request)
                reader.reads(shown)
                await self._tell_pieces(reader, request, shown.state)
            case AskReplay():
                await self._tell_replay(reader, request)

    async def _tell_manifest(self, reader: _Reader, shown: _Shown) -> None:
        data = await asyncio.shield(shown.manifest)
        self.counters["manifests_served"] += 1
        await reader.tell(encode_signatures(self._library.signatures(shown.state)))
        if reader.stream.relayed:
            await reader.tell(identity_of(data))  # relays carry little
        else:
            for part in in_frames(memoryview(data)):
                await reader.tell(bytes(part))  # only values are memoryviews
        await reader.tell()

    def _show(self, fragment: int) -> _Shown:
        """The state that a peer has now, with its manifest."""
        state = self._library.state(fragment)
        if state is None:
            raise NotHere(f"no state of fragment {fragment} here")
        self._let_go()
        key = (fragment, state.lineage)
        shown = self._shown.get(key)
        if shown is None:
            made = asyncio.ensure_future(self._threads.run(describe, state))
            shown = self._shown[key] = _Shown(state, made)
        shown.until = asyncio.get_running_loop().time() + KEPT_S
        return shown

    def _kept(self, request: AskPieces) -> _Shown:
        shown = self._shown.get((request.fragment, request.lineage))
        if shown is None:
            raise NotHere("that state is no longer kept here: ask for the manifest again")
        return shown

    async def _tell_pieces(self, reader: _Reader, request: AskPieces, state: FragmentState) -> None:
        pieces = Pieces(state.theta.size)
        if request.first + request.count > pieces.count:
            raise BadMessage(
                f"pieces {request.first}+{request.count} asked for; there are {pieces.count}"
            )
        theta, momentum = as_bytes(state.theta), as_bytes(state.momentum)
        for index in range(request.first, request.first + request.count):
            if self._served.gives_way(reader.place, asyncio.get_running_loop().time()):
                await asyncio.sleep(GIVE_WAY_S)
            await reader.tell(pieces.view(index, theta, momentum))
            self.counters["pieces_served"] += 1

    async def _tell_replay(self, reader: _Reader, request: AskReplay) -> None:
        entries = self._library.replay(request.fragment, request.version, request.lineage)
        if entries is None:
            raise NotHere(f"no replay from version {request.version} of that lineage here")
        for entry in entries:
            head, payload = entry.to_wire()
            await reader.tell(head)
            for part in in_frames(memoryview(payload).cast("B")):
                async with self._turn(reader.place.author, len(part)):
                    await reader.tell(part)
        await reader.tell()

    def _turn(self, peer: PeerId, size: int) -> AbstractAsyncContextManager[None]:
        """A turn to send a part of a replay: before what rounds send, to a peer that has not had
        its share."""
        now, served = asyncio.get_running_loop().time(), self._served
        goes_first = served.preferred(peer) and not served.had_its_share(peer, now)
        return self._uplink.turn(size, since=FIRST if goes_first else now)


def _shares(share_bytes: float) -> Rate[PeerId]:
    """The debt is at most a second share: a peer goes first again after twice the time."""
    return Rate(share_bytes / SHARE_S, share_bytes, debt=share_bytes)


def fetch_protocol(run: RunId) -> str:
    return f"shoal/{run}/fetch/1"
