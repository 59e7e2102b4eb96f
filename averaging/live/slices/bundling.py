"""A delegate's work for its site in one round: riders' uploads in, one bundle out.

``averaging.rules.sites`` says why. ``averaging.live.slices.reducing`` receives the uploads and
``averaging.live.slices.uploading`` sends the bundle, which grows here.
Who is in it is decided once, when all is here or time is up. A rider whose upload has an absurd
norm is left out, as a reducer would leave it out; otherwise the whole bundle would be refused, and
with it the work of everybody at the site.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from averaging.live.slices.parts import Parts, Received
from averaging.live.streams.buffers import GrowingBytes
from averaging.numbers.arithmetic import Weighted
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
        """Merge the own slices with those of the riders in the bundle.

        Raises ``Abandoned``, ``NotFinite``.
        """
        parts, evidence = self.parts, self.parts.evidence
        riders = parts.traffic.inside or ()
        inside = sorted([self._entry, *riders])
        weights = weights_of(parts.commit, inside)
        for index, growing in enumerate(own):
            await growing.beyond(len(growing.data) - 1)  # it is here, or was given up
            given = {self._entry: (growing.data, evidence.claim_alone(index))}
            for rider in riders:
                upload = self._uploads[rider, index]
                given[rider] = upload.data, upload.claim
            payloads, claims = zip(*(given[member] for member in inside), strict=True)
            if riders:
                evidence.sources_of_own[index] = claims
            leaves = evidence.own_leaves.setdefault(index, [])
            merged = Weighted(payloads, weights, again=True)
            await parts.merge(index, merged, bundle[index], leaves, inside)
        self._uploads.clear()
