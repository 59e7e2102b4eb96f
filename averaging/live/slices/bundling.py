"""A delegate's work for its site in one round: riders' uploads in, one bundle out.

``averaging.rules.sites`` says why. ``averaging.live.slices.reducing`` receives the uploads and
``averaging.live.slices.uploading`` sends the bundle, which grows here behind its sources.
``averaging.round.traffic.BundleRoster`` decides who is in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from averaging.live.slices.parts import Parts, Received
from averaging.live.streams.buffers import GrowingBytes
from averaging.numbers.arithmetic import Numbers, Weighted
from averaging.numbers.arrays import Float32s
from averaging.numbers.chunks import Chunk, digest_of
from averaging.numbers.codec import Scratch
from averaging.round.traffic import BundleRoster
from averaging.rules.weights import weights_of


class Bundling:
    """The contributions that one delegate gathers, and the bundle that it makes of them."""

    def __init__(self, parts: Parts, riders: tuple[int, ...], *, norm_ratio_max: float) -> None:
        """``norm_ratio_max``: how many times longer than usual an upload may be."""
        assert parts.entry is not None
        self.parts = parts
        self._entry = parts.entry
        slices = len(parts.cutting.slices)
        self.roster = BundleRoster(parts.entry, riders, slices, norm_ratio_max=norm_ratio_max)
        self.decided = asyncio.Event()
        self._settled = asyncio.Event()
        self._uploads: dict[tuple[int, int], Received] = {}
        """Uploaded slices by rider and slice index."""

    def take(self, rider: int, index: int, upload: Received) -> None:
        """A rider's slice."""
        if not self.roster.wants(rider, index):
            return
        self._uploads[rider, index] = upload
        self.roster.take(rider, index, upload.norm)
        self._look()

    def leave_out(self, rider: int) -> None:
        """A rider's upload cannot be merged."""
        self.roster.leave_out(rider)
        self._look()

    def _look(self) -> None:
        if self.roster.is_settled:
            self._settled.set()

    async def decide(self, wait_s: float) -> None:
        """Return once it is decided who is in the bundle, after ``wait_s`` at the latest."""
        parts = self.parts
        try:
            async with asyncio.timeout(wait_s):
                await self._settled.wait()
        except TimeoutError:
            pass
        parts.traffic.inside = inside = self.roster.decide()
        for rider, reason in self.roster.refused.items():
            parts.tally.refused[parts.commit.members[rider].peer] = reason
        for rider in inside:
            parts.own_maps.update(self._uploads[rider, 0].maps)
        self.decided.set()

    async def make(self, own: Sequence[GrowingBytes], bundle: Sequence[GrowingBytes]) -> None:
        """Merge the own slices, as they grow, with those of the riders in the bundle.

        Raises ``Abandoned``, ``NotFinite``.
        """
        parts, threads = self.parts, self.parts.threads
        inside = sorted([self._entry, *(self.roster.inside or ())])
        weights = weights_of(parts.commit, inside)
        evidence = parts.evidence
        for index, growing in enumerate(own):
            rest = None
            if parts.rests is not None and inside[1:]:
                rest = parts.rests.room(index)
            for chunk, part in parts.cutting.pieces(index):
                while growing.filled < part.stop:
                    await growing.beyond(growing.filled)
                pieces = [
                    (growing.data if member == self._entry else self._uploads[member, index].data)[
                        part
                    ]
                    for member in inside
                ]
                out = bundle[index].data[part]
                lost = None if rest is None else rest.of(chunk)
                given = Weighted(pieces, weights, again=True)
                merge = partial(_merge, parts.numbers, chunk, given, out, lost, threads.scratch)
                leaves = evidence.own_leaves.setdefault(index, [])
                leaves.append(await threads.run(merge))
                if len(leaves) == len(parts.cutting.chunks[index]):
                    self._claim(index, inside)
                bundle[index].grow(part.stop)
            if parts.rests is not None and rest is not None:
                parts.rests.keep(rest, inside)
        self._uploads.clear()

    def _claim(self, index: int, inside: Sequence[int]) -> None:
        """Sign the bundle's slice, with the claims of all whose work is in it."""
        evidence = self.parts.evidence
        sources = [
            evidence.claim_alone(index)
            if member == self._entry
            else self._uploads[member, index].claim
            for member in inside
        ]
        riders = [member for member in inside if member != self._entry]
        evidence.claim_own(index, riders, sources if riders else ())


def _merge(
    numbers: Numbers,
    chunk: Chunk,
    given: Weighted,
    out: memoryview,
    rest: Float32s | None,
    scratch: Callable[[], Scratch],
) -> bytes:
    """Fill a chunk of the bundle. Returns its digest."""
    if len(given.payloads) == 1:
        out[:] = given.payloads[0]  # nobody else came: it is not encoded a second time
    else:
        numbers.merge(chunk, given, out, scratch(), rest=rest)
    return digest_of(out)
