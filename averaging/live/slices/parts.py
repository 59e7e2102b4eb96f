"""The bytes of one round at one peer: its encoded contribution and the merged slices.

``averaging.live.slices.exchange`` fills and reads them, ``averaging.live.slices.uploading`` and
``averaging.live.slices.reducing`` bring them to other peers and back.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from averaging.errors import BadPayload, BulkRefused
from averaging.history.claims import (
    STATEMENT_MAX_BYTES,
    Claim,
    claimed,
    decode_statement,
)
from averaging.history.parent_maps import MAPS_MAX_BYTES, ParentMap, read_maps
from averaging.live.slices.evidence import Evidence, Uploads
from averaging.live.slices.watch import Watch
from averaging.live.streams.buffers import Abandoned, Arena, GrowingBytes
from averaging.live.streams.bulk import Bulk
from averaging.live.streams.fair_shares import ByteBudget
from averaging.live.streams.links import Transport
from averaging.live.streams.threads import Threads, is_small
from averaging.messages import BadMessage
from averaging.numbers.arithmetic import Weighted, cutting_of, norm_at_most, numbers_of
from averaging.numbers.arrays import Float32s
from averaging.numbers.chunks import Chunk, digest_of, root_of
from averaging.numbers.layout import Fragment
from averaging.round.contributing import Rest, Rests
from averaging.round.interface.effects import Enter
from averaging.round.interface.inputs import MergedArrived, SliceOutcome, UploadArrived
from averaging.round.traffic import Traffic
from averaging.rules.usual_norms import UploadNorm, UsualNorms, norm_objection
from dht.errors import HostClosed, PeerUnreachable, StreamBroken
from dht.identity import PeerId

WorldErrors = (
    PeerUnreachable,
    StreamBroken,
    HostClosed,
    BulkRefused,
    BadPayload,
    Abandoned,
    TimeoutError,
)
"""The failures that other peers and the network can cause. None of them is a bug."""


@dataclass(slots=True)
class Tally:
    """The cost of a round in time and bytes, for the round's report."""

    encoded_at: float | None = None
    merged_at: float | None = None
    refused: dict[PeerId, str] = field(default_factory=dict)
    _sent: int = 0
    _received: int = 0
    _packed_away: int = 0
    _open: list[Bulk] = field(default_factory=list)

    @contextmanager
    def over(self, bulk: Bulk) -> Iterator[None]:
        """Count the bytes of this stream while it lasts, and afterwards."""
        self._open.append(bulk)
        try:
            yield
        finally:
            self._open.remove(bulk)
            self._sent += bulk.sent_bytes
            self._received += bulk.received_bytes
            self._packed_away += bulk.stream.saved_bytes[1]

    @property
    def sent_bytes(self) -> int:
        return self._sent + sum(bulk.sent_bytes for bulk in self._open)

    @property
    def received_bytes(self) -> int:
        return self._received + sum(bulk.received_bytes for bulk in self._open)

    @property
    def received_line_bytes(self) -> int:
        """Bytes received as they were on the line: large frames are packed there."""
        saved = self._packed_away + sum(bulk.stream.saved_bytes[1] for bulk in self._open)
        return self.received_bytes - saved


@dataclass(frozen=True, slots=True, eq=False)
class Received:
    """A member's upload of one slice, complete and finite."""

    data: memoryview
    claim: Claim
    maps: Mapping[int, ParentMap]
    """The merged maps that came with it, where states travel."""
    norm: UploadNorm


@dataclass(frozen=True, slots=True)
class Workshop:
    """Services that all rounds of one averager share."""

    me: PeerId
    transport: Transport
    threads: Threads
    arena: Arena
    floats: Callable[[int], Float32s]
    """Memory of the states that rounds make."""
    outside: ByteBudget
    """Memory for rounds of which this peer is neither member nor leader."""
    norm_ratio_max: float
    """An upload whose norm is a larger multiple of the usual one is left out."""
    sign: Callable[[bytes], bytes]
    """Signs the claims of this peer (``averaging.history.claims``)."""
    verify: Callable[[PeerId, bytes, bytes], bool]
    heard_claim: Callable[[bytes, int, Claim, bool], None]
    """Hears each claim of others, with the encoded commit and the slice; true: it is merged."""
    refuses: Callable[[PeerId], str | None]
    """The reason why this peer, as a reducer, takes no upload of another one."""
    spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]
    watch: Watch


@dataclass(frozen=True, slots=True)
class FragmentFacts:
    """Facts about one fragment that its rounds share."""

    fragment: Fragment
    usual: UsualNorms
    theta: Callable[[], Float32s | None]
    """Theta as it is now, if there is one here."""
    takes: Callable[[PeerId], bool]
    """True if the state has a mark of this peer, or place for one."""
    tell_machine: Callable[[SliceOutcome], None]
    event: Callable[..., None]


class Parts:
    """The bytes that one peer holds of one round, and the tasks that work on them."""

    def __init__(
        self, enter: Enter, facts: FragmentFacts, workshop: Workshop, *, now: float
    ) -> None:
        self.round = enter.round
        self.commit = enter.commit
        self.entry = enter.entry
        self.me = workshop.me
        self.traffic = Traffic(enter)
        self.entered_at = now
        self.end_at = now + enter.commit.round_s
        self.tally = Tally()
        self.numbers = numbers_of(enter.commit)
        self.cutting = cutting_of(enter.commit, facts.fragment, self.numbers)
        self.tell_machine = facts.tell_machine
        self.event = facts.event
        self.threads = workshop.threads
        self.arena = workshop.arena
        self.floats = workshop.floats
        self._charged = 0
        self.closed = False
        self.own: list[GrowingBytes] | None = None
        """The encoded contribution, or the bundle of a site, by slice."""
        self.rests: Rests | None = None
        """The loss of encoding slices that are merged here, with error feedback."""
        self.own_maps: dict[int, ParentMap] = {}
        """The merged maps that go with the own contribution, or the bundle, where states travel."""
        self.merged_bytes = self.arena.uninitialised(self.cutting.merged_size)
        """All merged slices, in order. Complete once the machine says ``Apply``."""
        count = len(self.cutting.slices)
        self.merged = [
            GrowingBytes(self.merged_bytes[self.cutting.merged_of(i)]) for i in range(count)
        ]
        self.maps: dict[int, ParentMap] = {}
        """The merged maps of the round, as they came with slice 0 where states travel."""
        self.encoded_maps = b""
        self._begun = [asyncio.Event() for _ in range(count)]
        self._here = [asyncio.Event() for _ in range(count)]
        self.encoded_commit = enter.encoded
        self.evidence = Evidence(enter, self.me, sign=workshop.sign, verify=workshop.verify)
        self.alone: list[GrowingBytes] | None = None
        """A delegate's own contribution, which it merges into the bundle."""
        self._shown: Counter[PeerId] = Counter()
        self.watch = workshop.watch
        self._workshop = workshop
        self._facts = facts
        self._theta_norms: dict[int, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = self._workshop.spawn(work, f"{name} {self.round.hex()[:8]}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """End everything that is under way and forget the bytes."""
        self.closed = True
        pending = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)
        for growing in (*self.merged, *(self.own or ())):
            growing.abandon("the round is over")
        self.own = None
        if self._charged:
            self._workshop.outside.give_back(self.commit.leader, self._charged)
            self._charged = 0

    def refuses(self, peer: PeerId) -> str | None:
        """The reason why this peer, as a reducer, takes no upload of another one."""
        if self._facts.takes(peer):
            return self._workshop.refuses(peer)
        return "the run has merged work of so many keys that it takes none of new ones"

    def room_for(self, bulk: Bulk, size: int) -> memoryview:
        """Memory for bytes that a peer sends. Raises ``BulkRefused``.

        A round of which this peer is neither member nor leader has little of it: anybody who leads
        a round can name this peer as its reducer.
        """
        if self.entry is None and self.commit.leader != self.me:
            if self.closed or not self._workshop.outside.take(self.commit.leader, size):
                raise BulkRefused(bulk.remote, "no room for uploads to rounds that are not mine")
            self._charged += size
        return self.arena.uninitialised(size)

    @property
    def uploads(self) -> Uploads:
        """Evidence of this peer on the round. It may be kept when the round is over."""
        own, alone = (
            {i: growing.data for i, growing in enumerate(each or ()) if growing.complete}
            for each in (self.own, self.alone)
        )
        return Uploads(
            self.round, self.commit, self.cutting, self.evidence, own, alone, self._shown
        )

    def begins(self, index: int) -> None:
        """The merged slice grows here, or was given up, and the maps ahead of it are here."""
        self._begun[index].set()

    def is_here(self, index: int) -> None:
        """The merged slice is complete, with the claim of its maker."""
        self.traffic.merged.add(index)
        self._begun[index].set()
        self._here[index].set()

    async def until_begun(self, index: int) -> None:
        await self._begun[index].wait()

    async def until_here(self, index: int) -> None:
        await self._here[index].wait()

    async def merge(
        self,
        index: int,
        given: Weighted,
        into: GrowingBytes,
        leaves: list[bytes],
        inside: Sequence[int],
    ) -> None:
        """Merge a slice, or a delegate's part of it, into memory that others read behind.

        ``leaves``: filled with the digests of the pieces, each before it may be read. ``inside``:
        the members whose work is merged. Raises ``NotFinite``.
        """
        rests = None if given.is_alone else self.rests
        rest = None if rests is None else rests.room(index)

        def grown(filled: int) -> None:
            into.grow(max(filled, into.filled))  # the same bytes may have come meanwhile

        work = partial(self._merge_chunks, index, given, into, leaves, rest)
        await self.threads.run_telling(sum(map(len, given.payloads)), work, tell=grown)
        if rests is not None and rest is not None:
            rests.keep(rest, inside)

    def _merge_chunks(
        self,
        index: int,
        given: Weighted,
        into: GrowingBytes,
        leaves: list[bytes],
        rest: Rest | None,
        say: Callable[[int], None],
    ) -> None:
        scratch = self.threads.scratch()
        uploads = self.cutting.pieces(index)
        places = uploads if given.again else self.cutting.pieces(index, merged=True)
        for (chunk, part), (_, place) in zip(uploads, places, strict=True):
            if into.lost is not None:
                return  # the round is over
            out = into.data[place]
            addends = replace(given, payloads=[payload[part] for payload in given.payloads])
            lost = None if rest is None else rest.of(chunk)
            self.numbers.merge(chunk, addends, out, scratch, rest=lost)
            leaves.append(digest_of(out))
            say(place.stop)

    # Looking at slices

    async def as_it_grows(
        self,
        index: int,
        growing: GrowingBytes,
        work: Callable[[Chunk, memoryview], float],
        *,
        merged: bool = False,
    ) -> float:
        """Have a thread run ``work`` on the chunks of a slice as soon as they are here.

        ``merged``: of a merged slice, and not of a contribution. Returns the sum of the results.
        Raises ``Abandoned``.
        """
        pieces = self.cutting.pieces(index, merged=merged)
        total = 0.0
        first = 0
        while first < len(pieces):
            await growing.beyond(pieces[first][1].stop - 1)
            last = first + 1
            while last < len(pieces) and pieces[last][1].stop <= growing.filled:
                last += 1
            parts = [(chunk, growing.data[place]) for chunk, place in pieces[first:last]]
            size = pieces[last - 1][1].stop - pieces[first][1].start
            total += await self.threads.run_on(size, _sum_over, work, parts)
            first = last
        return total

    def square_chunk(self, chunk: Chunk, data: memoryview) -> float:
        return float(self.numbers.up.squares(chunk, data).sum())

    async def upload_norm(self, index: int, squares: float) -> UploadNorm:
        """The norm of an uploaded displacement, beside what is known of its slice."""
        usual = self._facts.usual.norm(self.cutting.slices[index].units)
        harmless = await self._theta_norm(index) if usual is None else 0.0
        return UploadNorm(math.sqrt(squares), usual, harmless)

    async def _theta_norm(self, index: int) -> float:
        theta = self._facts.theta()
        if theta is None:
            return 0.0
        if index not in self._theta_norms:
            piece = self.cutting.slices[index]
            sizes = self.cutting.fragment.unit_sizes[piece.units]
            part = theta[piece.values]
            self._theta_norms[index] = await self.threads.run_on(
                part.nbytes, norm_at_most, part, sizes
            )
        return self._theta_norms[index]

    async def receive_upload(self, bulk: Bulk, index: int, members: Sequence[int]) -> Received:
        """Receive and check an upload of these members' work, the first of whom sends it."""
        sent = await self.receive_maps(bulk, index)
        data = self.room_for(bulk, self.cutting.upload_size(index))
        squares, leaves = await self._receive_pieces(bulk, index, data, merged=False)
        said = await self._receive_claim(bulk, index, root_of(leaves), merged=False)
        if (said.by, said.members) != (members[0], tuple(sorted(members))):
            raise BadPayload(self.commit.codec, "its claim is about another upload")
        maps = await self._read_maps(sent, members)
        return Received(data, said, maps, await self.upload_norm(index, squares))

    async def receive_merged(self, bulk: Bulk, index: int, data: memoryview) -> bytes:
        """Receive a merged slice that somebody else made, and check it before it is used.

        Returns its digest: that of its pieces and, where states travel, of the maps with slice 0.
        """
        sent = await self.receive_maps(bulk, index)
        squares, leaves = await self._receive_pieces(bulk, index, data, merged=True)
        reason = await self._norm_objection(index, math.sqrt(squares))
        if reason is not None:
            raise BadPayload(self.commit.codecs[1], reason)
        if sent is not None:
            leaves.append(digest_of(sent))
        said = await self._receive_claim(bulk, index, root_of(leaves), merged=True)
        maps = await self._read_maps(sent, said.members)
        if sent is not None and not self.maps:
            self.have_maps(maps, bytes(sent))
        self.evidence.merged.setdefault(index, said)
        self.evidence.merged_leaves.setdefault(index, leaves)
        return said.made

    async def _receive_pieces(
        self, bulk: Bulk, index: int, data: memoryview, *, merged: bool
    ) -> tuple[float, list[bytes]]:
        """Receive the bytes of a slice and check them as they come. Returns their squared norm, and
        the digests of the pieces."""
        leg, leaves = self.numbers.down if merged else self.numbers.up, list[bytes]()

        def check(chunk: Chunk, part: memoryview) -> float:
            leaves.append(digest_of(part))
            leg.check(chunk, part, self.threads.scratch())
            return float(leg.squares(chunk, part).sum())

        arriving = GrowingBytes(data)
        checking = self.as_it_grows(index, arriving, check, merged=merged)
        return await _receive_behind(bulk, arriving, checking), leaves

    async def _receive_claim(self, bulk: Bulk, index: int, made: bytes, *, merged: bool) -> Claim:
        """Receive what the sender says of bytes with this digest. Raises ``BadPayload``."""
        try:
            statement = decode_statement(await bulk.receive_frame(STATEMENT_MAX_BYTES))
        except BadMessage as error:
            raise BadPayload("slice", str(error)) from error
        said = claimed(statement, made)
        self.evidence.check(index, said, merged=merged)
        self._workshop.heard_claim(self.encoded_commit, index, said, merged)
        return said

    async def _norm_objection(self, index: int, merged: float) -> str | None:
        """The reason not to take a merged slice of this norm. The cheap bound comes first."""
        ratio = self._workshop.norm_ratio_max
        if math.isinf(ratio):
            return None
        usual = self._facts.usual.norm(self.cutting.slices[index].units)
        if usual and not norm_objection(
            merged, usual=usual, own=0.0, theta=0.0, norm_ratio_max=ratio
        ):
            return None
        own = 0.0
        if self.own is not None and self.own[index].complete:
            own = math.sqrt(await self.as_it_grows(index, self.own[index], self.square_chunk))
        slices = [index] if usual is not None else range(len(self.cutting.slices))
        theta = math.hypot(*[await self._theta_norm(each) for each in slices])
        return norm_objection(merged, usual=usual, own=own, theta=theta, norm_ratio_max=ratio)

    async def receive_maps(self, bulk: Bulk, index: int) -> memoryview | None:
        """The merged maps that travel ahead of this slice, if any do."""
        if not self.traffic.has_maps(index):
            return None
        return await bulk.receive_sized(MAPS_MAX_BYTES, partial(self.room_for, bulk))

    def tell_merged(self, index: int, digest: bytes) -> None:
        """Tell the round machine of a merged slice that came from another peer."""
        contributors = self.evidence.merged[index].members
        self.tell_machine(MergedArrived(self.round, index, digest, contributors))

    def tell_upload(
        self,
        index: int,
        sender: PeerId,
        problem: str | None,
        norm: UploadNorm | None = None,
        *,
        riders: tuple[int, ...] = (),
    ) -> None:
        """Tell the round machine of an upload. ``norm``: of a displacement, to be compared."""
        arrived = UploadArrived(self.round, index, sender, problem, norm, riders)
        self.tell_machine(self.watch.arrived(arrived))

    def have_maps(self, maps: dict[int, ParentMap], encoded: bytes) -> None:
        self.maps, self.encoded_maps = maps, encoded

    async def _read_maps(
        self, data: memoryview | None, members: Sequence[int]
    ) -> dict[int, ParentMap]:
        """The maps that came with the work of these members. Raises ``BadPayload``."""
        if data is None:
            return {}
        return await self.threads.run_on(len(data), read_maps, data, self.commit, members)


def _sum_over(
    work: Callable[[Chunk, memoryview], float], parts: Sequence[tuple[Chunk, memoryview]]
) -> float:
    return sum(work(chunk, part) for chunk, part in parts)


async def _receive_behind(
    bulk: Bulk, growing: GrowingBytes, behind: Coroutine[Any, Any, float]
) -> float:
    """Fill ``growing`` while ``behind`` reads it; returns the result of ``behind``."""
    if is_small(len(growing.data)):  # a frame or two: nothing to be gained by reading behind
        try:
            await bulk.receive_growing(growing)
            return await behind
        finally:
            behind.close()
    reading = asyncio.ensure_future(behind)
    try:
        await bulk.receive_growing(growing)
        return await reading
    finally:
        reading.cancel()
        await asyncio.wait((reading,))
        if not reading.cancelled():
            reading.exception()


async def send_growing(bulk: Bulk, growing: GrowingBytes) -> None:
    sent = 0
    while sent < len(growing.data):
        filled = await growing.beyond(sent)
        await bulk.send(growing.data[sent:filled])
        sent = filled
