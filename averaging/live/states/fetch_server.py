"""Serving peers that catch up: whole states in verified pieces, and missed rounds.

One stream carries one request after another: a manifest and the pieces of its state, or the rounds
after a version. A stream holds the state whose manifest it has told last, however many versions
follow meanwhile; nothing else keeps it. The other side is ``averaging.live.states.fetcher``.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec
from msgspec import Struct

from averaging.history.lineage import Lineage
from averaging.history.manifest import describe, identity_of
from averaging.history.replay import ReplayEntry
from averaging.history.state import FragmentState, as_bytes
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
from averaging.messages import BadMessage, Count, Digest, Index, Signatures, encode_signatures
from averaging.rules.line_speed import LineSpeed
from dht.host import Messaging, Stream
from dht.identity import PeerId, RunId
from dht.limits import Rate
from dht.wrapped_host import refuse

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


class _Request(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """A question about a fragment."""


class AskManifest(_Request, frozen=True):
    """Asks which state a peer has. The answer is a frame of the signatures under its newest link,
    frames of the manifest and an empty one. Over a relay its digest (``Manifest.identity``) stands
    in the manifest's place."""

    fragment: Index


class AskPiece(_Request, frozen=True):
    """A piece of the state whose manifest you have told me on this stream. Answered by a frame."""

    index: Count


class AskReplay(_Request, frozen=True):
    """The rounds after this one. For each its entry and its payload, then an empty frame."""

    fragment: Index
    version: Count
    lineage: Digest


Request = AskManifest | AskPiece | AskReplay

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
class _Reader:
    """A stream being answered."""

    stream: Stream
    place: ServedPlace
    places: ServedPlaces
    line: LineSpeed | None
    state: FragmentState | None = None
    """The state whose manifest it was told last."""

    async def tell(self, *parts: bytes | memoryview) -> None:
        """Send a frame of an answer."""
        began = asyncio.get_running_loop().time()
        await self.stream.send(DATA, *parts, timeout_s=STALL_MAX_S)
        size, now = sum(len(part) for part in parts), asyncio.get_running_loop().time()
        self.places.served(self.place, size, now)
        if self.line is not None:
            self.line.carried(size, began=began, ended=now)


class FetchServer:
    """Answers those who catch up. Each stream holds one state at most, so those that keep places
    from others (``ServedPlaces``) keep no memory either."""

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
        self._manifests: dict[int, tuple[Lineage, asyncio.Future[bytes]]] = {}
        """The newest state of each fragment that somebody has asked for, and its manifest."""
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
        finally:
            self._served.leave(place)

    async def _answer(self, reader: _Reader, request: Request) -> None:
        match request:
            case AskManifest(fragment):
                state = self._library.state(fragment)
                if state is None:
                    raise NotHere(f"no state of fragment {fragment} here")
                reader.state = state
                await self._tell_manifest(reader, state)
            case _ if reader.stream.relayed:
                raise NotHere(RELAYED)
            case AskPiece(index):
                await self._tell_piece(reader, index)
            case AskReplay():
                await self._tell_replay(reader, request)

    async def _tell_manifest(self, reader: _Reader, state: FragmentState) -> None:
        data = await asyncio.shield(self._manifest(state))
        self.counters["manifests_served"] += 1
        await reader.tell(encode_signatures(self._library.signatures(state)))
        if reader.stream.relayed:
            await reader.tell(identity_of(data))  # relays carry little
        else:
            for part in in_frames(memoryview(data)):
                await reader.tell(bytes(part))  # only values are memoryviews
        await reader.tell()

    def _manifest(self, state: FragmentState) -> asyncio.Future[bytes]:
        """The manifest of a state, made once for all that ask while it is the newest."""
        lineage, made = self._manifests.get(state.fragment, (None, None))
        if made is None or lineage != state.lineage:
            made = asyncio.ensure_future(self._threads.run(describe, state))
            self._manifests[state.fragment] = state.lineage, made
        return made

    async def _tell_piece(self, reader: _Reader, index: int) -> None:
        if (state := reader.state) is None:
            raise BadMessage("a piece of no state: no manifest was asked for")
        pieces = state.pieces
        if index >= pieces.count:
            raise BadMessage(f"piece {index} asked for; there are {pieces.count}")
        if self._served.gives_way(reader.place, asyncio.get_running_loop().time()):
            await asyncio.sleep(GIVE_WAY_S)
        await reader.tell(pieces.view(index, as_bytes(state.theta), as_bytes(state.momentum)))
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
