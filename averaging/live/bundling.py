"""A delegate's work for its site in one round: riders' uploads in, one bundle out.

``averaging.rules.sites`` says why. ``averaging.live.exchange`` receives the uploads and sends the
bundle, which grows here behind what it is made of. Who is in it is decided once: when all riders'
uploads are here, or their time is over. A rider whose upload is absurdly long is left out, as a
reducer would leave it out: else the whole bundle would be refused, and everybody's work of the site
with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from averaging.live.growing import Growing
from averaging.live.threads import Threads
from averaging.messages import Commit
from averaging.numbers.arithmetic import Numbers
from averaging.numbers.chunks import Chunk, Cutting
from averaging.numbers.codec import Scratch
from averaging.round.reducer import Length, outlying
from averaging.rules.weights import weights_of


class Bundling:
    """What one delegate gathers and makes. Belongs to an ``Exchange``."""

    def __init__(
        self,
        commit: Commit,
        entry: int,
        riders: tuple[int, ...],
        cutting: Cutting,
        *,
        norm_ratio_max: float,
    ) -> None:
        """``norm_ratio_max``: how many times longer than usual an upload may be."""
        self.riders = riders
        self.refused: dict[int, str] = {}
        """The riders whose uploads were too long, and by how much, once that is decided."""
        self.inside: tuple[int, ...] = ()
        """The riders who are in the bundle, once that is decided."""
        self.decided = asyncio.Event()
        self.marks: dict[int, bytes] = {}
        """By rider, the merged map that came with its first slice, where states travel."""
        self._commit = commit
        self._entry = entry
        self._cutting = cutting
        self._norm_ratio_max = norm_ratio_max
        self._parts: dict[int, dict[int, memoryview]] = {rider: {} for rider in riders}
        self._lengths: dict[int, dict[int, Length]] = {}
        """By slice and member, mine among them."""
        self._settled = asyncio.Event()

    def __repr__(self) -> str:
        whole = sum(self._is_whole(rider) for rider in self._parts)
        return f"Bundling({whole} of {len(self.riders)} riders)"

    def has(self, rider: int, index: int) -> bool:
        """Whether a rider's slice is here, or would come too late."""
        return self.decided.is_set() or index in self._parts.get(rider, {index: None})

    def measured(self, member: int, index: int, length: Length | None) -> None:
        """How long a rider's slice is, or mine."""
        if length is not None:
            self._lengths.setdefault(index, {})[member] = length

    def take(
        self,
        rider: int,
        index: int,
        data: memoryview,
        marks: bytes | None,
        length: Length | None,
    ) -> None:
        """A rider's slice, in full and finite."""
        if self.decided.is_set() or rider not in self._parts:
            return
        self._parts[rider][index] = data
        self.measured(rider, index, length)
        if marks is not None:
            self.marks[rider] = marks
        self._look()

    def leave_out(self, rider: int) -> None:
        """What it sent cannot be merged."""
        if not self.decided.is_set():
            self._parts.pop(rider, None)
            self._look()

    def _is_whole(self, rider: int) -> bool:
        return len(self._parts[rider]) == len(self._cutting.slices)

    def _look(self) -> None:
        if all(map(self._is_whole, self._parts)):
            self._settled.set()

    async def decide(self, wait_s: float) -> None:
        """Return when it is known who is in it. ``wait_s`` from now at the latest."""
        try:
            async with asyncio.timeout(wait_s):
                await self._settled.wait()
        except TimeoutError:
            pass
        for lengths in self._lengths.values():
            absurd = outlying(lengths, norm_ratio_max=self._norm_ratio_max)
            self.refused.update((who, why) for who, why in absurd.items() if who != self._entry)
        self.inside = tuple(
            rider
            for rider in sorted(self._parts)
            if self._is_whole(rider) and rider not in self.refused
        )
        self.decided.set()

    async def make(
        self,
        own: Sequence[Growing],
        bundle: Sequence[Growing],
        numbers: Numbers,
        threads: Threads,
    ) -> None:
        """Merge my slices, as they grow, with those of ``inside``. Raises ``Abandoned``,
        ``NotFinite``."""
        inside = sorted([self._entry, *self.inside])
        weights = weights_of(self._commit, inside)
        for index, growing in enumerate(own):
            start = self._cutting.data_of(index).start
            for chunk in self._cutting.chunks[index]:
                part = slice(chunk.data.start - start, chunk.data.stop - start)
                while growing.filled < part.stop:
                    await growing.beyond(growing.filled)
                pieces = [
                    (growing.data if member == self._entry else self._parts[member][index])[part]
                    for member in inside
                ]
                out = bundle[index].data[part]
                await threads.run(_merge, numbers, chunk, pieces, weights, out, threads.scratch)
                bundle[index].grow(part.stop)
        self._parts.clear()


def _merge(
    numbers: Numbers,
    chunk: Chunk,
    pieces: Sequence[memoryview],
    weights: Sequence[float],
    out: memoryview,
    scratch: Callable[[], Scratch],
) -> None:
    if len(pieces) == 1:
        out[:] = pieces[0]  # nobody else came: it is not encoded a second time
    else:
        numbers.merge(chunk, pieces, weights, out, scratch())
