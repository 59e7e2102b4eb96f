"""A delegate's work for its site in one round: riders' uploads in, one bundle out.

``averaging.rules.sites`` says why. ``averaging.live.slices.reducing`` receives the uploads and
``averaging.live.slices.uploading`` sends the bundle, which grows here behind its sources.
Who is in it is decided once, when all is here or time is up. A rider whose upload has an absurd
norm is left out, as a reducer would leave it out; otherwise the whole bundle would be refused, and
with it the work of everybody at the site.
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
from averaging.round.slices import Reducer
from averaging.rules.usual_norms import UploadNorm
from averaging.rules.weights import weights_of


class Bundling:
    """The contributions that one delegate gathers, and the bundle that it makes of them."""

    def __init__(self, parts: Parts, riders: tuple[int, ...], *, norm_ratio_max: float) -> None:
        """``norm_ratio_max``: how many times longer than usual an upload may be."""
        assert parts.entry is not None
        self.parts = parts
        self._entry = parts.entry
        self._judge = Reducer(range(len(parts.cutting.slices)), norm_ratio_max=norm_ratio_max)
        self._riders = set(riders)
        """Those whose uploads may still be merged."""
        self.decided = asyncio.Event()
        self._settled = asyncio.Event()
        self._uploads: dict[tuple[int, int], Received] = {}
        """Uploaded slices by rider and slice index."""

    def wants(self, rider: int, index: int) -> bool:
        """True if a rider's slice is missing and would still be in time."""
        is_here = rider in self._judge.slices[index].complete
        undecided = self.parts.traffic.inside is None
        return undecided and rider in self._riders and not is_here

    def measured(self, index: int, norm: UploadNorm | None) -> None:
        """The delegate's own slice."""
        self._judge.arrived(index, self._entry, None, norm)

    def take(self, rider: int, index: int, upload: Received) -> None:
        """A rider's slice."""
        if self.wants(rider, index):
            self._uploads[rider, index] = upload
            self._judge.arrived(index, rider, None, upload.norm)
            self._look()

    def leave_out(self, rider: int) -> None:
        """A rider's upload cannot be merged."""
        if self.parts.traffic.inside is None:
            self._riders.discard(rider)
            self._look()

    def _look(self) -> None:
        if all(self._riders <= each.complete for each in self._judge.slices.values()):
            self._settled.set()

    async def decide(self, wait_s: float) -> None:
        """Return once it is decided who is in the bundle, after ``wait_s`` at the latest."""
        parts = self.parts
        try:
            async with asyncio.timeout(wait_s):
                await self._settled.wait()
        except TimeoutError:
            pass
        whole, absurd = set(self._riders), dict[int, str]()
        for index, each in self._judge.slices.items():
            whole &= each.complete
            absurd.update(self._judge.outlying(index))
        parts.traffic.inside = inside = tuple(sorted(whole - absurd.keys()))
        for rider in absurd.keys() - {self._entry}:
            parts.tally.refused[parts.commit.members[rider].peer] = absurd[rider]
        for rider in inside:
            parts.own_maps.update(self._uploads[rider, 0].maps)
        self.decided.set()

    async def make(self, own: Sequence[GrowingBytes], bundle: Sequence[GrowingBytes]) -> None:
        """Merge the own slices, as they grow, with those of the riders in the bundle.

        Raises ``Abandoned``, ``NotFinite``.
        """
        parts, threads = self.parts, self.parts.threads
        inside = sorted([self._entry, *(parts.traffic.inside or ())])
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
