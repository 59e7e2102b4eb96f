"""The slices that one peer reduces in one round: uploads in, merged slices out.

Checking runs behind receiving, merging behind checking, answering behind merging. A bad upload is
read to its end and left out; its sender is told the reason and still gets the merged slice.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from averaging.errors import BadPayload, BulkRefused, NotFinite
from averaging.history.claims import STATEMENT_MAX_BYTES, Claim, encode_statement
from averaging.history.parent_maps import ParentMap, encode_maps, parents_of
from averaging.live.slices.bundling import Bundling, Rider
from averaging.live.slices.parts import Parts, end_of_arrived, receive_behind, send_growing
from averaging.live.streams.buffers import Abandoned, GrowingBytes
from averaging.live.streams.bulk import Bulk
from averaging.live.streams.threads import is_small
from averaging.messages import Opening
from averaging.numbers.arithmetic import Weighted
from averaging.numbers.chunks import Chunk
from averaging.numbers.piece_digests import digest_of, digests_of, root_of
from averaging.round.interface.inputs import SliceMerged
from averaging.round.rests import Rest
from averaging.round.traffic import NOTHING_TO_GIVE, Incoming, Payloads
from averaging.rules.sites import riders_of
from averaging.rules.weights import weights_of
from dht.errors import StreamBroken

BROKEN_GRACE_S = 5.0
"""A member whose upload broke off may try again for so long before it is reported as missing."""

STREAMS_MAX = 2
"""Streams that may bring the same bytes at once: the sender may know of a broken one before this
peer does. Each takes the memory of a slice."""

DISCARD_BYTES = 1 << 20


@dataclass(slots=True, eq=False)
class Received:
    """One member's upload of one slice, at its reducer."""

    data: memoryview | None = None
    """The complete upload, finite; ``None`` until then, and once it is not needed."""
    checked: GrowingBytes | None = None
    """The part of the latest stream that is finite so far: it may be merged ahead of the seal."""
    arrived: bool = False
    claim: Claim | None = None
    """The sender's, about the complete upload."""
    streams: int = 0


@dataclass(slots=True, eq=False)
class OngoingMerge:
    """A merge of one slice that runs behind its uploads, perhaps for a seal that never comes."""

    contributors: tuple[int, ...]
    weights: tuple[float, ...]
    sources: tuple[GrowingBytes, ...]
    """The contributors' uploads, as far as they may be read."""
    members: tuple[int, ...] | None
    """Number of contributors in each upload; ``None``: one in each."""
    merged: GrowingBytes
    places: Mapping[int, Sequence[slice]]
    """The places of the pieces in the merged bytes of each chunk, by its first unit."""
    rest: Rest | None
    """The loss of encoding the slice; ``None``: it is not fed back."""
    leaves: list[bytes] = field(default_factory=list)
    """Digests of the pieces that are merged so far."""
    task: asyncio.Task[None] | None = None
    working: asyncio.Future[None] | None = None
    """The thread's work on a few chunks: it writes whether or not anybody still waits."""
    stopped: bool = False
    """The chunks that are not begun are not wanted. Read by the thread."""
    sealed: bool = False
    """The seal asks for this merge. Any other writer to its memory writes the same bytes."""

    def is_for(
        self,
        contributors: tuple[int, ...],
        weights: tuple[float, ...],
        payloads: Sequence[memoryview],
    ) -> bool:
        """True if a seal asks for this merge. Uploads are the same if their memory is."""
        return (
            (self.contributors, self.weights) == (contributors, weights)
            and len(self.sources) == len(payloads)
            and all(a.data is b for a, b in zip(self.sources, payloads, strict=True))
        )

    async def stop(self) -> None:
        """Return once nothing more is written."""
        self.stopped = True
        if self.task is not None and not self.task.done():
            self.task.cancel()
            await asyncio.wait((self.task,))
        if self.working is not None and not self.working.done():
            await asyncio.wait((self.working,))


class Reducing:
    """A reducer's uploads, merges and answers, and a delegate's side of its riders' streams."""

    def __init__(self, parts: Parts, bundling: Bundling | None) -> None:
        self.parts = parts
        self._traffic = parts.traffic
        self._bundling = bundling
        self._received: dict[tuple[int, int], Received] = {}
        self._merged_streams: Counter[int] = Counter()
        """Streams under way that bring a merged slice, by slice."""
        self._ongoing: dict[int, OngoingMerge] = {}
        self._maps: dict[int, ParentMap] = {}
        """Merged maps by parent, as they came with slice 0 where states travel."""
        self._answerable = [asyncio.Event() for _ in parts.merged]

    def close(self) -> None:
        for ongoing in self._ongoing.values():
            ongoing.stopped = True
        self._received.clear()
        self._ongoing.clear()

    def reduce(self, index: int) -> None:
        """Take uploads of this slice from now on."""
        self._traffic.reduces.add(index)

    def begin_ahead(self) -> None:
        """Begin to merge slices behind the own contribution, which has come into being."""
        for index in sorted(self._traffic.reduces):
            self._merge_ahead(index)

    # Uploads

    async def hand_over(self, index: int) -> None:
        """Take the own part of a slice that this peer reduces itself."""
        parts = self.parts
        assert parts.own is not None and parts.entry is not None
        growing = parts.own[index]
        received = self._received.setdefault((index, parts.entry), Received())
        if self._bundling is not None:
            await self._bundling.decided.wait()
        riders = self._traffic.handed_over(index)
        try:
            # Encoding refuses what is not finite: there is nothing to check.
            squares = await parts.as_it_grows(index, growing, parts.square_chunk)
        except Abandoned as error:
            parts.tell_upload(index, parts.me, error.reason, riders=riders)
            return
        norm = await parts.upload_norm(index, squares)
        received.data, received.arrived = growing.data, True
        received.claim = parts.evidence.claim_own(index, riders)
        if index == 0:
            self._maps.update(parts.own_maps)
        parts.tell_upload(index, parts.me, None, norm, riders=riders)

    async def serve(self, bulk: Bulk, opening: Opening) -> None:
        """Take one incoming stream, which the machine has admitted, then answer it."""
        bulk.since = self.parts.entered_at
        with self.parts.tally.over(bulk):
            await self._serve(bulk, opening)

    async def _serve(self, bulk: Bulk, opening: Opening) -> None:
        index, entry = opening.slice, self.parts.commit.index(bulk.remote)
        assert entry is not None
        incoming = self._traffic.arriving(opening, entry)
        try:
            async with asyncio.timeout_at(self.parts.end_at):
                match incoming:
                    case Incoming.MERGED:
                        await self._receive_merged(bulk, index)
                    case Incoming.RIDER | Incoming.EMPTY_RIDER:
                        assert self._bundling is not None
                        if incoming is Incoming.RIDER:
                            await self._receive_rider(self._bundling, bulk, index, entry)
                        else:
                            self._bundling.leave_out(entry)
                        await self.parts.until_here(index)
                        await self._give_merged(bulk, index, "")
                    case Incoming.OWN:
                        await self._receive_own(bulk, index, entry, opening.riders)
                        await bulk.received()
                        await self._answer(bulk, index, entry)
                    case Incoming.EMPTY:
                        riders = riders_of(self.parts.commit, entry)
                        self.parts.tell_upload(index, bulk.remote, NOTHING_TO_GIVE, riders=riders)
                        await self._answer(bulk, index, entry)
                    case Incoming.WAITS:
                        await self._answer(bulk, index, entry)
        except (BadPayload, BulkRefused) as error:
            await bulk.refuse(str(error))
        except (Abandoned, TimeoutError) as error:
            await bulk.refuse(str(error) or "the round's deadline has come")

    async def _receive_rider(self, bundling: Bundling, bulk: Bulk, index: int, entry: int) -> None:
        """Take a rider's part of the bundle. A bad one is only left out of it."""
        parts = self.parts
        size = parts.cutting.upload_size(index)
        if not bundling.roster.wants(entry, index):
            await self._discard(bulk, index)
            return
        if reason := parts.refuses(bulk.remote):
            await self._discard(bulk, index)
            bundling.leave_out(entry)
            parts.tally.refused[bulk.remote] = reason
            return
        try:
            sent = await parts.receive_maps(bulk, index)
            growing = GrowingBytes(parts.room_for(bulk, size))
            leaves: list[bytes] = []
            measure = parts.hashing(index, leaves, parts.measure_chunk)
            squares = await receive_behind(
                bulk, growing, parts.as_it_grows(index, growing, measure)
            )
            claim = await parts.take_upload_claim(bulk, index, leaves, [entry])
            maps = await parts.read_maps(sent, [entry])
            norm = await parts.upload_norm(index, squares)
        except BadPayload as error:
            bundling.leave_out(entry)
            parts.tally.refused[bulk.remote] = str(error)
            return
        bundling.take(entry, index, Rider(growing.data, claim), maps, norm)

    async def _receive_own(
        self, bulk: Bulk, index: int, entry: int, riders: tuple[int, ...]
    ) -> None:
        """Take an upload. A bad one is read to its end: its sender still gets the merged slice on
        this stream, and has no reason to send the same bytes again."""
        parts = self.parts
        received = self._received.setdefault((index, entry), Received())
        if received.arrived:
            await self._discard(bulk, index)
            return
        if reason := parts.refuses(bulk.remote):
            await self._discard(bulk, index)
            self._refuse(index, entry, reason, riders)
            return
        if received.streams >= STREAMS_MAX:
            raise BulkRefused(bulk.remote, "this upload is being received already")
        received.streams += 1
        try:
            sent = await parts.receive_maps(bulk, index)
            growing = GrowingBytes(parts.room_for(bulk, parts.cutting.upload_size(index)))
            if received.checked is not None:
                await self.stop_ahead(index)  # it was reading bytes that will not be completed
            received.checked = checked = GrowingBytes(growing.data)
            self._merge_ahead(index)
            leaves: list[bytes] = []
            measure = parts.hashing(index, leaves, parts.measure_chunk)
            checking = parts.as_it_grows(index, growing, measure, checked)
            squares = await receive_behind(bulk, growing, checking)
            claim = await parts.take_upload_claim(bulk, index, leaves, [entry, *riders])
            maps = await parts.read_maps(sent, [entry, *riders])
            norm = await parts.upload_norm(index, squares)
        except StreamBroken as error:
            broken = self._report_broken(index, entry, error.reason, riders)
            parts.start(broken, "broken upload")
            raise
        except BadPayload as error:
            self._refuse(index, entry, str(error), riders)
            return
        finally:
            received.streams -= 1
        if not received.arrived:
            received.arrived, received.claim = True, claim
            self._traffic.took(index, entry, riders)
            if index in self._traffic.reduces:
                received.data = growing.data
            self._maps.update(maps or {})
        parts.tell_upload(index, bulk.remote, None, norm, riders=riders)

    async def _discard(self, bulk: Bulk, index: int) -> None:
        """Read past an upload that is here already."""
        await self.parts.receive_maps(bulk, index)
        left = self.parts.cutting.upload_size(index)
        scrap = memoryview(bytearray(min(left, DISCARD_BYTES)))
        while left:
            left -= await bulk.receive_some(scrap[:left])
        await bulk.receive_frame(STATEMENT_MAX_BYTES)

    def _refuse(self, index: int, entry: int, problem: str, riders: tuple[int, ...]) -> None:
        """Leave an upload out, and say why to the round and, in time, to its sender."""
        if not self._received[index, entry].arrived:
            peer = self.parts.commit.members[entry].peer
            self.left_out(index, entry, problem)
            self.parts.tell_upload(index, peer, problem, riders=riders)

    def left_out(self, index: int, entry: int, problem: str) -> None:
        """Remember why an upload is not merged, for its sender and for the round's report."""
        self._traffic.left_out(index, entry, problem)
        self.parts.tally.refused[self.parts.commit.members[entry].peer] = problem

    async def _report_broken(
        self, index: int, entry: int, reason: str, riders: tuple[int, ...]
    ) -> None:
        await asyncio.sleep(BROKEN_GRACE_S)
        received = self._received.get((index, entry))
        if received is not None and not received.arrived and not received.streams:
            self._refuse(index, entry, f"its upload broke off: {reason}", riders)

    async def _receive_merged(self, bulk: Bulk, index: int) -> None:
        """A member that has the merged slice gives it to this peer, its new reducer."""
        data, digest = await self.read_merged(bulk, index)
        await self.keep_merged(index, data, digest)
        await bulk.grant()
        await bulk.finished()

    async def read_merged(self, bulk: Bulk, index: int) -> tuple[memoryview, bytes]:
        """Read a merged slice that another peer made, with its digest, into memory of its own: this
        peer reduces the slice, and may merge it meanwhile."""
        parts = self.parts
        if self._merged_streams[index] >= STREAMS_MAX:
            raise BulkRefused(bulk.remote, "this slice is being received already")
        self._merged_streams[index] += 1
        try:
            sent = await parts.receive_maps(bulk, index)
            data = parts.room_for(bulk, len(parts.merged[index].data))
            leaves = await parts.take_merged(bulk, index, data, sent)
            digest = await parts.take_merged_claim(bulk, index, leaves)
        finally:
            self._merged_streams[index] -= 1
        return data, digest

    async def keep_merged(self, index: int, data: memoryview, digest: bytes) -> None:
        """Take a merged slice that was read, unless it is here or is being merged."""
        parts = self.parts
        growing = parts.merged[index]
        await self.stop_ahead(index)
        if not growing.filled and not self._answerable[index].is_set():  # not being merged here
            growing.data[:] = data
            growing.grow(len(data))
            parts.is_here(index)
            parts.tell_merged(index, digest)

    # Merging

    def merge(self, index: int, contributors: Sequence[int], weights: Sequence[float]) -> None:
        """Carry out ``Merge``; ``answer`` may follow at once."""
        payloads = self._traffic.merge(index, contributors, weights)
        self._answerable[index].set()
        work = self._merge(index, tuple(contributors), payloads)
        self.parts.start(work, "merge")

    def _merge_ahead(self, index: int) -> None:
        """Begin to merge behind the uploads, as the seal will have it if nobody drops out.

        Nothing of it is reported or sent before the seal; under another seal it is made anew.
        """
        if index not in self._traffic.reduces or index in self._ongoing:
            return
        if self._answerable[index].is_set() or self.parts.merged[index].filled:
            return
        commit = self.parts.commit
        if commit.on_probation or any(entry.delegate is not None for entry in commit.members):
            return  # a bundle's members are not known before it is here; newcomers may not come
        sources: list[GrowingBytes] = []
        everybody = tuple(range(len(commit.members)))
        for entry in everybody:
            if entry == self.parts.entry:
                source = None if self.parts.own is None else self.parts.own[index]
            else:
                source = self._received.get((index, entry), Received()).checked
            if source is None:
                return
            sources.append(source)
        self._begin_merge(
            index, everybody, weights_of(self.parts.commit, everybody), tuple(sources), None
        )

    def _begin_merge(
        self,
        index: int,
        contributors: tuple[int, ...],
        weights: tuple[float, ...],
        sources: tuple[GrowingBytes, ...],
        members: tuple[int, ...] | None,
    ) -> OngoingMerge:
        merged, rests = GrowingBytes(self.parts.merged[index].data), self.parts.rests
        rest = None if rests is None else rests.room(index)
        places = self.parts.cutting.audited_places(index, merged=True)
        ongoing = OngoingMerge(contributors, weights, sources, members, merged, places, rest)
        self._ongoing[index] = ongoing
        ongoing.task = self.parts.start(self._merge_behind(index, ongoing), "merge chunks")
        return ongoing

    async def stop_ahead(self, index: int) -> None:
        """Free the merged slice's memory for another writer, or for another seal."""
        ongoing = self._ongoing.get(index)
        if ongoing is not None and not ongoing.sealed:
            del self._ongoing[index]
            await ongoing.stop()

    async def _merge_behind(self, index: int, ongoing: OngoingMerge) -> None:
        pieces = self.parts.cutting.pieces(index)
        places = [place for _, place in self.parts.cutting.pieces(index, merged=True)]
        first = 0
        while first < len(pieces):
            try:
                last = await end_of_arrived(pieces, first, ongoing.sources)
                given = pieces[first:last]
                size = len(ongoing.sources) * (given[-1][1].stop - given[0][1].start)
                work = partial(self._merge_chunks, given, places[first:last], ongoing)
                if is_small(size):
                    work(ongoing.merged.grow)
                else:
                    ongoing.working = asyncio.ensure_future(
                        self.parts.threads.run_telling(size, work, tell=ongoing.merged.grow)
                    )
                    ongoing.working.add_done_callback(_hear_out)
                    await asyncio.shield(ongoing.working)
            except (Abandoned, NotFinite) as error:
                ongoing.merged.abandon(str(error))
                return
            first = last

    async def _merge(self, index: int, inside: tuple[int, ...], taken: Payloads) -> None:
        """``inside``: the contributors; delegates send the payloads for all of their site."""
        parts = self.parts
        growing = parts.merged[index]
        contributors, weights, members = taken.carriers, taken.weights, taken.members
        payloads, claims = [], []
        for entry in contributors:
            received = self._received[index, entry]
            data, claim = received.data, received.claim
            assert data is not None and claim is not None, "the machine merges what has arrived"
            payloads.append(data)
            claims.append(claim)
        for (at, entry), received in self._received.items():
            if at == index and entry not in contributors:
                received.data = received.checked = None
        maps = b""
        if self._traffic.has_maps(index):
            there = parents_of(parts.commit, inside)
            chosen = {parent: self._maps[parent] for parent in there}
            try:
                maps = await parts.threads.run(encode_maps, chosen)
            except BadPayload as error:
                growing.abandon(str(error))  # each map fits, together they do not: void
                parts.maps_here.set()
                return
            parts.have_maps(chosen, maps)
        ongoing = self._ongoing.get(index)
        if ongoing is None or not ongoing.is_for(contributors, weights, payloads):
            await self.stop_ahead(index)
            sources = tuple(GrowingBytes.whole(payload) for payload in payloads)
            ongoing = self._begin_merge(index, contributors, weights, sources, members)
        ongoing.sealed = True
        followed = 0
        try:
            while followed < len(growing.data):
                followed = await ongoing.merged.beyond(followed)
                growing.grow(max(followed, growing.filled))
        except Abandoned as error:
            # Each was finite; together they are not. Nobody will have this slice: void.
            growing.abandon(error.reason)
            return
        self._ongoing.pop(index, None)
        for entry in contributors:
            self._received[index, entry].data = self._received[index, entry].checked = None
        if parts.rests is not None and ongoing.rest is not None:
            parts.rests.keep(ongoing.rest, inside)
        parts.tally.merged_at = asyncio.get_running_loop().time()
        if self._traffic.has_maps(index):
            ongoing.leaves.append(digest_of(maps))
        digest = root_of(ongoing.leaves)
        parts.evidence.claim_merged(index, inside, digest, claims)
        parts.is_here(index)
        parts.tell_machine(SliceMerged(parts.round, index, digest))

    def _merge_chunks(
        self,
        given: Sequence[tuple[Chunk, slice]],
        places: Sequence[slice],
        ongoing: OngoingMerge,
        say: Callable[[int], None],
    ) -> None:
        """``given``: chunks and their places in the uploads; ``places``: in the merged slice."""
        scratch = self.parts.threads.scratch()
        for (chunk, part), place in zip(given, places, strict=True):
            if ongoing.stopped:
                return
            out = ongoing.merged.data[place]
            payloads = [source.data[part] for source in ongoing.sources]
            uploads = Weighted(payloads, ongoing.weights, ongoing.members)
            rest = None if ongoing.rest is None else ongoing.rest.of(chunk)
            self.parts.numbers.merge(chunk, uploads, out, scratch, rest=rest)
            ongoing.leaves += digests_of(out, ongoing.places[chunk.first_unit])
            say(place.stop)

    # Answering

    def answer(self, index: int) -> None:
        """Carry out ``Answer``."""
        self._traffic.answerable.add(index)
        self._answerable[index].set()

    async def _answer(self, bulk: Bulk, index: int, entry: int) -> None:
        await self._answerable[index].wait()
        if self._traffic.has_maps(index):
            await self.parts.maps_here.wait()
        await self._give_merged(bulk, index, self._traffic.problem(index, entry))

    async def _give_merged(self, bulk: Bulk, index: int, but: str) -> None:
        await bulk.grant(but=but, with_answer=True)
        if self._traffic.has_maps(index):
            await bulk.send_sized(self.parts.encoded_maps)
        await send_growing(bulk, self.parts.merged[index])
        await self.parts.until_here(index)
        await bulk.send_frame(encode_statement(self.parts.evidence.merged[index].statement))
        await bulk.finish()


def _hear_out(work: asyncio.Future[None]) -> None:
    """Retrieve the error of work that nobody waits for any more."""
    if not work.cancelled():
        work.exception()
