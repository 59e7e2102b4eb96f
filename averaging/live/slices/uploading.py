"""One peer's uploads in one round, and the merged slices that come back on the same streams.

Sending runs behind encoding. A stream that breaks, or a deadline, ends that upload and no other:
the round machine is told, unless ``averaging.round.traffic`` knows another way.
"""

from __future__ import annotations

import asyncio

from averaging import messages as said
from averaging.history.claims import encode_statement
from averaging.history.parent_maps import encode_maps
from averaging.live.slices.bundling import Bundling
from averaging.live.slices.parts import Parts, WorldErrors, send_growing
from averaging.live.slices.reducing import Reducing
from averaging.live.streams.bulk import Bulk
from averaging.live.streams.links import Transport
from averaging.round.interface.inputs import UploadFailed
from averaging.round.traffic import Route
from dht.errors import StreamBroken
from dht.identity import PeerId

HANGS_UP_WITHIN_S = 1.0
"""A peer that hangs up says why first; the reason may still be on its way for so long."""


class Uploading:
    """The streams that a member opens in one round."""

    def __init__(
        self, parts: Parts, reducing: Reducing, bundling: Bundling | None, transport: Transport
    ) -> None:
        self.parts = parts
        self._reducing = reducing
        self._bundling = bundling
        self._transport = transport
        self._uploads: dict[int, asyncio.Task[None]] = {}

    def upload(self, index: int, to: PeerId, *, gives: bool) -> None:
        """Carry out ``Upload``. One of a slice replaces an earlier one of it."""
        route = self.parts.traffic.upload(index, to, gives=gives)
        if route is not None:
            self._go(route)

    def _go(self, route: Route) -> None:
        before = self._uploads.pop(route.slice, None)
        if before is not None:
            before.cancel()
        if route.to != self.parts.me:
            work = self._upload(route, before)
            self._uploads[route.slice] = self.parts.start(work, "upload")
        elif route.gives:
            work = self._reducing.hand_over(route.slice)
            self._uploads[route.slice] = self.parts.start(work, "hand over")

    async def _upload(self, route: Route, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])  # two must not write to one merged slice
        parts = self.parts
        try:
            async with asyncio.timeout_at(parts.end_at):
                if route.after_s:
                    await asyncio.sleep(route.after_s)
                if route.gives and self._bundling is not None:
                    await self._bundling.decided.wait()
                opening = parts.traffic.opening(route)
                bulk = await self._transport.open_bulk(route.to, said.encode_opening(opening))
                bulk.since = parts.entered_at
                try:
                    with parts.tally.over(bulk):
                        await self._converse(bulk, route.slice, gives=opening.gives)
                finally:
                    bulk.abort()
        except WorldErrors as error:
            instead = parts.traffic.broke(route)
            if instead is None:
                reason = str(error) or "the round's deadline has come"
                parts.tell_machine(UploadFailed(parts.round, route.slice, reason))
                return
            self._uploads.pop(route.slice, None)
            for each in instead:
                self._go(each)

    async def _converse(self, bulk: Bulk, index: int, *, gives: bool) -> None:
        """Send the own part, then read the merged slice.

        A peer that refuses an upload says so and hangs up, also in the middle of it.
        """
        try:
            if gives:
                await self.send_part(bulk, index)
        except StreamBroken:
            await bulk.granted(timeout_s=HANGS_UP_WITHIN_S)
            raise
        remaining_s = max(0.1, self.parts.end_at - asyncio.get_running_loop().time())
        if but := await bulk.granted(timeout_s=remaining_s):
            self.parts.event("not_taken", slice=index, by=bulk.remote, reason=but)
        await self._read_merged(bulk, index)

    async def send_part(self, bulk: Bulk, index: int) -> None:
        """Send the own part of a slice."""
        parts = self.parts
        if parts.traffic.has_maps(index):
            await bulk.send_sized(await parts.threads.run(encode_maps, parts.own_maps))
        assert parts.own is not None
        await send_growing(bulk, parts.own[index])
        claim = parts.evidence.claim_own(index, parts.traffic.inside or ())
        await bulk.send_frame(encode_statement(claim.statement))

    async def _read_merged(self, bulk: Bulk, index: int) -> None:
        parts = self.parts
        growing = parts.merged[index]
        if growing.filled:
            return  # it came another way; an empty slice never has, and is still reported
        if index in parts.traffic.reduces:
            await self._reducing.read_merged(bulk, index)
            return
        digest = await parts.receive_merged(bulk, index, growing.data)
        await bulk.finished()
        growing.grow(len(growing.data))
        parts.is_here(index)
        parts.tell_merged(index, digest)
