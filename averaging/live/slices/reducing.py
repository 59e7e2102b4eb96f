"""The slices that one peer reduces in one round: uploads in, merged slices out.

Checking runs behind receiving, and answering behind merging, which begins with the seal. A bad
upload is read to its end and left out; its sender is told the reason and still gets the merged
slice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from averaging.errors import BadPayload, BulkRefused, NotFinite
from averaging.history.claims import STATEMENT_MAX_BYTES, encode_statement
from averaging.history.parent_maps import ParentMap, encode_maps, parents_of
from averaging.live.slices.bundling import Bundling
from averaging.live.slices.parts import Parts, Received, send_growing
from averaging.live.streams.buffers import Abandoned
from averaging.live.streams.bulk import Bulk
from averaging.messages import Opening
from averaging.numbers.arithmetic import Weighted
from averaging.numbers.chunks import digest_of, root_of
from averaging.round.interface.effects import Merge
from averaging.round.interface.inputs import SliceMerged
from averaging.round.traffic import NOTHING_TO_GIVE
from averaging.rules.sites import Share, riders_of
from dht.errors import StreamBroken

BROKEN_GRACE_S = 5.0
"""A member whose upload broke off may try again for so long before it is reported as missing."""

STREAMS_MAX = 2
"""Streams that may bring the same bytes at once: the sender may know of a broken one before this
peer does. Each takes the memory of a slice."""

DISCARD_BYTES = 1 << 20


@dataclass(slots=True, eq=False)
class Expected:
    """One member's upload of one slice, at its reducer."""

    upload: Received | None = None
    """``None`` until it is here, and once it is not needed."""
    arrived: bool = False
    streams: int = 0


class Reducing:
    """A reducer's uploads, merges and answers, and a delegate's side of its riders' streams."""

    def __init__(self, parts: Parts, bundling: Bundling | None) -> None:
        self.parts = parts
        self._traffic = parts.traffic
        self._bundling = bundling
        self._expected: dict[tuple[int, int], Expected] = {}
        self._maps: dict[int, ParentMap] = {}
        """Merged maps by parent, as they came with slice 0 where states travel."""
        self._merging: set[int] = set()
        """The slices that this peer merges itself."""

    def close(self) -> None:
        self._expected.clear()

    def reduce(self, index: int) -> None:
        """Take uploads of this slice from now on."""
        self._traffic.reduces.add(index)

    # Uploads

    async def hand_over(self, index: int) -> None:
        """Take the own part of a slice that this peer reduces itself."""
        parts = self.parts
        assert parts.own is not None and parts.entry is not None
        growing = parts.own[index]
        expected = self._expected.setdefault((index, parts.entry), Expected())
        if self._bundling is not None:
            await self._bundling.decided.wait()
        riders = self._traffic.inside or ()
        try:
            # Encoding refuses what is not finite: there is nothing to check.
            squares = await parts.as_it_grows(index, growing, parts.square_chunk)
        except Abandoned as error:
            parts.tell_upload(index, parts.me, error.reason, riders=riders)
            return
        norm = await parts.upload_norm(index, squares)
        claim = parts.evidence.claim_own(index, riders)
        expected.upload, expected.arrived = Received(growing.data, claim, {}, norm), True
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
        commit = self.parts.commit
        try:
            async with asyncio.timeout_at(self.parts.end_at):
                if self._traffic.is_rider(entry):
                    assert self._bundling is not None
                    if opening.gives:
                        await self._receive_rider(self._bundling, bulk, index, entry)
                    else:
                        self._bundling.leave_out(entry)
                elif opening.gives:
                    await self._receive_own(bulk, index, entry, opening.riders)
                    await bulk.received()
                elif commit.members[entry].delegate is None:  # a rider's delegate says it for it
                    riders = riders_of(commit, entry)
                    self.parts.tell_upload(index, bulk.remote, NOTHING_TO_GIVE, riders=riders)
                await self._answer(bulk, index, entry)
        except (BadPayload, BulkRefused) as error:
            await bulk.refuse(str(error))
        except (Abandoned, TimeoutError) as error:
            await bulk.refuse(str(error) or "the round's deadline has come")

    async def _receive_rider(self, bundling: Bundling, bulk: Bulk, index: int, entry: int) -> None:
        """Take a rider's part of the bundle. A bad one is only left out of it."""
        parts = self.parts
        if not bundling.wants(entry, index):
            await self._discard(bulk, index)
            return
        if reason := parts.refuses(bulk.remote):
            await self._discard(bulk, index)
            bundling.leave_out(entry)
            parts.tally.refused[bulk.remote] = reason
            return
        try:
            upload = await parts.receive_upload(bulk, index, [entry])
        except BadPayload as error:
            bundling.leave_out(entry)
            parts.tally.refused[bulk.remote] = str(error)
            return
        bundling.take(entry, index, upload)

    async def _receive_own(
        self, bulk: Bulk, index: int, entry: int, riders: tuple[int, ...]
    ) -> None:
        """Take an upload. A bad one is read to its end: its sender still gets the merged slice on
        this stream, and has no reason to send the same bytes again."""
        parts = self.parts
        expected = self._expected.setdefault((index, entry), Expected())
        if expected.arrived:
            await self._discard(bulk, index)
            return
        if reason := parts.refuses(bulk.remote):
            await self._discard(bulk, index)
            self._refuse(index, entry, reason, riders)
            return
        if expected.streams >= STREAMS_MAX:
            raise BulkRefused(bulk.remote, "this upload is being received already")
        expected.streams += 1
        try:
            upload = await parts.receive_upload(bulk, index, [entry, *riders])
        except StreamBroken as error:
            broken = self._report_broken(index, entry, error.reason, riders)
            parts.start(broken, "broken upload")
            raise
        except BadPayload as error:
            self._refuse(index, entry, str(error), riders)
            return
        finally:
            expected.streams -= 1
        if not expected.arrived:
            expected.arrived = True
            if index in self._traffic.reduces:
                expected.upload = upload
            self._maps.update(upload.maps)
        parts.tell_upload(index, bulk.remote, None, upload.norm, riders=riders)

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
        if not self._expected[index, entry].arrived:
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
        expected = self._expected.get((index, entry))
        if expected is not None and not expected.arrived and not expected.streams:
            self._refuse(index, entry, f"its upload broke off: {reason}", riders)

    async def read_merged(self, bulk: Bulk, index: int) -> None:
        """Read a slice that another peer was given to merge as well, into memory of its own: this
        peer reduces it too, and may merge it meanwhile. Take it unless it does."""
        parts = self.parts
        growing = parts.merged[index]
        data = parts.room_for(bulk, len(growing.data))
        digest = await parts.receive_merged(bulk, index, data)
        await bulk.finished()
        if not growing.filled and index not in self._merging:
            growing.data[:] = data
            growing.grow(len(data))
            parts.is_here(index)
            parts.tell_merged(index, digest)

    # Merging

    def merge(self, asked: Merge) -> None:
        """Carry out ``Merge``; the answers follow as it goes on."""
        taken = self._traffic.merge(asked)
        self._merging.add(asked.slice)
        work = self._merge(asked.slice, asked.contributors, taken)
        self.parts.start(work, "merge")

    async def _merge(self, index: int, inside: tuple[int, ...], taken: Sequence[Share]) -> None:
        """``inside``: the contributors; delegates send the payloads for all of their site."""
        parts = self.parts
        growing = parts.merged[index]
        contributors = [share.carrier for share in taken]
        payloads, claims = [], []
        for entry in contributors:
            upload = self._expected[index, entry].upload
            assert upload is not None, "the machine merges what has arrived"
            payloads.append(upload.data)
            claims.append(upload.claim)
        for (at, entry), expected in self._expected.items():
            if at == index and entry not in contributors:
                expected.upload = None
        maps = b""
        if self._traffic.has_maps(index):
            there = parents_of(parts.commit, inside)
            chosen = {parent: self._maps[parent] for parent in there}
            try:
                maps = await parts.threads.run(encode_maps, chosen)
            except BadPayload as error:
                growing.abandon(str(error))  # each map fits, together they do not: void
                parts.begins(index)
                return
            parts.have_maps(chosen, maps)
        parts.begins(index)
        weights, members = zip(*((share.weight, share.members) for share in taken), strict=True)
        given, leaves = Weighted(payloads, weights, members), list[bytes]()
        try:
            await parts.merge(index, given, growing, leaves, inside)
        except NotFinite as error:
            # Each was finite; together they are not. Nobody will have this slice: void.
            growing.abandon(str(error))
            return
        for entry in contributors:
            self._expected[index, entry].upload = None
        parts.tally.merged_at = asyncio.get_running_loop().time()
        if self._traffic.has_maps(index):
            leaves.append(digest_of(maps))
        digest = root_of(leaves)
        parts.evidence.claim_merged(index, inside, digest, claims)
        parts.is_here(index)
        parts.tell_machine(SliceMerged(parts.round, index, digest))

    # Answering

    async def _answer(self, bulk: Bulk, index: int, entry: int) -> None:
        """Send the merged slice, and why the upload is not merged if it is not."""
        await self.parts.until_begun(index)
        bulk.grant(self._traffic.problem(index, entry))
        if self._traffic.has_maps(index):
            await bulk.send_sized(self.parts.encoded_maps)
        await send_growing(bulk, self.parts.merged[index])
        await self.parts.until_here(index)
        await bulk.send_frame(encode_statement(self.parts.evidence.merged[index].statement))
        await bulk.finish()
