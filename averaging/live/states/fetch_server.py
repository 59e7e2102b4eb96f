"""Serving peers that catch up: whole states in verified pieces, and missed rounds.

One stream carries one request after another: a manifest, a run of pieces, or the replay entries
after a version. The other side is ``averaging.live.states.fetcher``.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta, Struct

from averaging.history.lineage import Lineage
from averaging.history.manifest import Pieces, as_bytes, describe, identity_of
from averaging.history.replay import ReplayEntry
from averaging.history.state import FragmentState
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
from averaging.live.streams.uplink import FIRST, Uplink
from averaging.messages import BadMessage, Count, Digest, Signatures, encode_signatures
from averaging.rules.line_speed import LineSpeed
from dht.errors import HostClosed, StreamBroken
from dht.guarded_host import refuse
from dht.host import Messaging, Stream
from dht.identity import PeerId, RunId
from dht.limits import Rate

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
FROZEN_MAX = 4
"""States kept as they were for somebody who is reading them, while newer ones replace them."""
ASKERS_MAX = 64
"""Peers that are remembered as having asked for one of them."""
FROZEN_SPARE_S = 1.0
"""A frozen state that nobody reads, and nobody read from for so long, makes room for another one.
"""
FROZEN_IDLE_S = 20.0
"""A frozen state that nobody read from for so long is let go."""
FROZEN_UNREAD_S = 2.0
"""Likewise when nobody reads it, or is about to because it asked for the manifest. It takes as much
memory as the state itself, and a newcomer reads one fragment after the other."""


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
class _Frozen:
    state: FragmentState
    manifest: asyncio.Future[bytes]
    read_at: float
    readers: list[PeerId] = field(default_factory=list)
    """Peers whose streams are open and asked for it."""
    awaited: set[PeerId] = field(default_factory=set)
    """Peers that have its manifest, and ask others for theirs before they ask for pieces."""
    asked: set[PeerId] = field(default_factory=set)
    """Peers that have its manifest."""
    frozen_at: float = 0.0
    served_bytes: int = 0

    @property
    def is_wanted(self) -> bool:
        return bool(self.readers or self.awaited)

    def bytes_per_s(self, now: float) -> float:
        return self.served_bytes / max(now - self.frozen_at, 1e-9)


@dataclass(slots=True, eq=False)
class _Reader:
    """A stream being answered."""

    stream: Stream
    place: ServedPlace
    places: ServedPlaces
    line: LineSpeed | None
    reading: list[_Frozen] = field(default_factory=list)
    """States that it asked for."""

    async def tell(self, *parts: bytes | memoryview) -> None:
        """Send a frame of an answer."""
        began = asyncio.get_running_loop().time()
        await self.stream.send(DATA, *parts, timeout_s=STALL_MAX_S)
        size, now = sum(len(part) for part in parts), asyncio.get_running_loop().time()
        self.places.served(self.place, size, now)
        if self.line is not None:
            self.line.carried(size, began=began, ended=now)

    def begins(self, frozen: _Frozen) -> None:
        """Note that it reads this state from now on, until it ends."""
        if all(frozen is not other for other in self.reading):
            frozen.readers.append(self.place.author)
            self.reading.append(frozen)


class FetchServer:
    """Answers those who catch up. It keeps a state that is being read until it was read."""

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
        self._frozen: OrderedDict[tuple[int, Lineage], _Frozen] = OrderedDict()
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
        idle_s, unread_s = FROZEN_IDLE_S, FROZEN_UNREAD_S
        for key, frozen in list(self._frozen.items()):
            idle_max_s = idle_s if frozen.is_wanted else min(idle_s, unread_s)
            if frozen.read_at <= now - idle_max_s and frozen.manifest.done():
                del self._frozen[key]

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
            for frozen in reader.reading:
                frozen.readers.remove(peer)
            self._served.leave(place)
            for idle_s in (FROZEN_UNREAD_S, FROZEN_IDLE_S):
                asyncio.get_running_loop().call_later(idle_s, self._let_go)

    async def _answer(self, reader: _Reader, request: Request) -> None:
        if reader.stream.relayed:
            if not isinstance(request, AskManifest):
                raise NotHere(RELAYED)
            await self._confirm(reader, request)
        elif isinstance(request, AskManifest):
            frozen = self._freeze(request.fragment, reader.place.author)
            if len(frozen.awaited) < ASKERS_MAX:
                frozen.awaited.add(reader.stream.remote)
                frozen.asked.add(reader.stream.remote)
            reader.begins(frozen)
            await self._tell_manifest(reader, frozen)
        elif isinstance(request, AskPieces):
            frozen = self._kept(request)
            frozen.awaited.discard(reader.stream.remote)
            reader.begins(frozen)
            await self._tell_pieces(reader, request, frozen)
        else:
            await self._tell_replay(reader, request)

    async def _tell_manifest(self, reader: _Reader, frozen: _Frozen) -> None:
        data = await asyncio.shield(frozen.manifest)
        self.counters["manifests_served"] += 1
        await reader.tell(encode_signatures(self._library.signatures(frozen.state)))
        for part in in_frames(memoryview(data)):
            await reader.tell(bytes(part))  # only values are memoryviews
        await reader.tell()

    async def _confirm(self, reader: _Reader, request: AskManifest) -> None:
        """Tell the identity of a manifest in its place: relays carry little."""
        frozen = self._freeze(request.fragment, reader.place.author)
        data = await asyncio.shield(frozen.manifest)
        await reader.tell(encode_signatures(self._library.signatures(frozen.state)))
        await reader.tell(identity_of(data))
        await reader.tell()

    def _freeze(self, fragment: int, peer: PeerId) -> _Frozen:
        state = self._library.state(fragment)
        if state is None:
            raise NotHere(f"no state of fragment {fragment} here")
        self._let_go()
        now = asyncio.get_running_loop().time()
        key = (fragment, state.lineage)
        frozen = self._frozen.get(key)
        if frozen is None:
            if len(self._frozen) >= FROZEN_MAX and not self._made_room(peer, now):
                raise NotHere("as many states as I can keep are being read; ask somebody else")
            made = asyncio.ensure_future(self._threads.run(describe, state))
            frozen = self._frozen[key] = _Frozen(state, made, now, frozen_at=now)
        frozen.read_at = now
        return frozen

    def _made_room(self, peer: PeerId, now: float) -> bool:
        """Let go of a state that nobody reads: one that nobody is about to read, if there is one.

        Else a newcomer that fetches one fragment after the other would wait for each to grow idle.
        A state that is being read stays, unless all are: then the one that is read most slowly
        goes, if it is slow, or if all who read it had their share. A state that no other peer has
        asked for makes room at once when its only reader goes on: a model of many small fragments
        is read faster than its states grow idle.
        """
        spare = [
            (
                bool(frozen.awaited) + 2 * bool(frozen.readers),
                frozen.bytes_per_s(now),
                frozen.frozen_at,
                key,
            )
            for key, frozen in self._frozen.items()
            if frozen.manifest.done()
            and (
                (
                    not frozen.readers
                    and (frozen.read_at < now - FROZEN_SPARE_S or frozen.asked == {peer})
                )
                or (
                    frozen.frozen_at < now - SERVED_GRACE_S
                    and frozen.bytes_per_s(now) < SLOW_BYTES_S
                )
                or (frozen.is_wanted and self._all_give_way(frozen, peer, now))
            )
        ]
        if not spare:
            return False
        del self._frozen[min(spare)[-1]]
        return True

    def _all_give_way(self, frozen: _Frozen, peer: PeerId, now: float) -> bool:
        wanted_by = {*frozen.readers, *frozen.awaited}
        return all(self._served.goes_before(peer, other, now) for other in wanted_by)

    def _kept(self, request: AskPieces) -> _Frozen:
        frozen = self._frozen.get((request.fragment, request.lineage))
        if frozen is None:
            raise NotHere("that state is no longer kept here: ask for the manifest again")
        return frozen

    async def _tell_pieces(self, reader: _Reader, request: AskPieces, frozen: _Frozen) -> None:
        pieces = Pieces(frozen.state.theta.size)
        if request.first + request.count > pieces.count:
            raise BadMessage(
                f"pieces {request.first}+{request.count} asked for; there are {pieces.count}"
            )
        theta, momentum = as_bytes(frozen.state.theta), as_bytes(frozen.state.momentum)
        for index in range(request.first, request.first + request.count):
            frozen.read_at = asyncio.get_running_loop().time()
            if self._served.gives_way(reader.place, frozen.read_at):
                await asyncio.sleep(GIVE_WAY_S)
            self._kept(request)  # a slow reader's is let go for others
            piece = pieces.view(index, theta, momentum)
            await reader.tell(piece)
            frozen.served_bytes += len(piece)
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
