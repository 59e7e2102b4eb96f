"""One peer's part in the bytes of one round: encode, send, reduce, receive, take the outer step.

The round machine decides who sends what to whom; an ``Exchange`` carries that out. It holds at most
three encoded copies of the fragment (its own, the uploads that it reduces, the merged one) and,
during the step, the new theta. Results are inputs of the machine; a stream that breaks, a peer that
lies or a deadline ends that part and no other.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import numpy as np

from averaging.errors import NotFinite
from averaging.history.parent_maps import united
from averaging.history.standing import Standing, merged_after, with_merged_map
from averaging.history.state import FragmentState
from averaging.live.slices.bundling import Bundling
from averaging.live.slices.parts import FragmentFacts, Parts, Workshop
from averaging.live.slices.reducing import Reducing
from averaging.live.slices.uploading import Uploading
from averaging.live.streams.buffers import Abandoned, GrowingBytes
from averaging.numbers.arrays import Float32s, Float64s
from averaging.numbers.chunks import Chunk, digest_of
from averaging.numbers.outer import Step
from averaging.round.contributing import Contribution, Rests
from averaging.round.interface.effects import Apply, Enter
from averaging.rules.sites import SITE_SHARE
from averaging.rules.usual_norms import is_unusual


class Exchange:
    """The bytes of one participation. Made by ``Enter``, ended by ``close``."""

    def __init__(
        self, enter: Enter, facts: FragmentFacts, workshop: Workshop, *, now: float
    ) -> None:
        self.parts = Parts(enter, facts, workshop, now=now)
        self._usual = facts.usual
        self._encoding: asyncio.Task[None] | None = None
        self.is_unusual = False
        """True if the merge moves the fragment further than merges usually do, as of its step."""
        riders = self.parts.traffic.riders
        self._bundling = (
            Bundling(self.parts, riders, norm_ratio_max=workshop.norm_ratio_max) if riders else None
        )
        self.reducing = Reducing(self.parts, self._bundling)
        self.uploading = Uploading(self.parts, self.reducing, self._bundling, workshop.transport)

    async def close(self) -> None:
        """End everything that is under way and forget the bytes."""
        await self.parts.close()
        self.reducing.close()

    @property
    def dispersion(self) -> float | None:
        """After a meld's step: how far the weights were from the group's mean."""
        return self.parts.numbers.dispersion if self.parts.commit.melds else None

    # The own contribution

    def contribute(self, given: Contribution) -> None:
        """Begin to encode the contribution."""
        parts = self.parts
        parts.own = own = self._room()
        parts.traffic.gives = True
        if given.keeps_rests:
            floats = parts.arena.floats
            parts.rests = Rests(parts.commit, parts.entry, parts.cutting, floats=floats)
        if given.own_map is not None and parts.entry is not None:
            parts.own_maps = {self.parts.commit.members[parts.entry].parent: given.own_map}
        into = own
        if self._bundling is not None:
            # The own contribution is encoded for the bundle, and the bundle is sent.
            into = parts.alone = self._room()
            parts.start(self._bundle(self._bundling, into), "bundle")
        self._encoding = parts.start(self._encode(given, into, own), "encode")

    def _room(self) -> list[GrowingBytes]:
        cutting = self.parts.cutting
        data = self.parts.arena.uninitialised(cutting.data_size)
        return [GrowingBytes(data[cutting.data_of(index)]) for index in range(len(cutting.slices))]

    async def stop_encoding(self) -> None:
        """Return once nobody reads the learner's arrays any more."""
        task = self._encoding
        if task is not None and not task.done():
            for growing in self.parts.own or ():
                growing.abandon("the round ended before all was encoded")
            await asyncio.wait([task])

    async def _bundle(self, bundling: Bundling, own: list[GrowingBytes]) -> None:
        """Merge the contributions of the site into one, as its delegate."""
        parts = self.parts
        assert parts.own is not None and parts.entry is not None
        with suppress(Abandoned):  # then there will be no bundle: ``make`` says so
            for index, growing in enumerate(own):
                squares = await parts.as_it_grows(index, growing, parts.square_chunk)
                norm = await parts.upload_norm(index, squares)
                bundling.measured(index, norm)
        await bundling.decide(SITE_SHARE * self.parts.commit.upload_s)
        try:
            await bundling.make(own, parts.own)
        except (Abandoned, NotFinite) as error:
            for growing in parts.own:
                growing.abandon(str(error))

    async def _encode(
        self, given: Contribution, into: list[GrowingBytes], own: list[GrowingBytes]
    ) -> None:
        # Slices for others first: those that this peer reduces have no way to travel.
        reduces = self.parts.traffic.reduces
        order = sorted(range(len(into)), key=lambda index: index in reduces)
        for index in order:
            growing = into[index]
            work = partial(self._encode_slice, index, given, growing, own[index])
            try:
                await self.parts.threads.run_telling(len(own[index].data), work, tell=growing.grow)
            except NotFinite as error:
                reason = str(error)
                self.parts.traffic.gives = False
                self.parts.event("not_finite", reason=reason)
                for other in (*into, *own):
                    other.abandon(reason)
                return
            if not growing.complete:
                return  # nobody wants it any more
        self.parts.watch.encoded(
            self.parts.commit, self.parts.round, [growing.data for growing in into]
        )
        self.parts.tally.encoded_at = asyncio.get_running_loop().time()

    def _encode_slice(
        self,
        index: int,
        given: Contribution,
        into: GrowingBytes,
        own: GrowingBytes,
        say: Callable[[int], None],
    ) -> None:
        evidence = self.parts.evidence
        kept = evidence.own_leaves if self._bundling is None else evidence.alone_leaves
        leaves = kept.setdefault(index, [])
        for chunk, place in self.parts.cutting.pieces(index):
            if into.lost is not None or own.lost is not None:
                return
            try:
                self._encode_chunk(chunk, given, into.data[place])
            except NotFinite as error:
                tensor = self.parts.cutting.tensor_at(chunk.first_unit + error.unit)
                raise error.in_tensor(tensor) from None
            leaves.append(digest_of(into.data[place]))
            say(place.stop)

    def _encode_chunk(self, chunk: Chunk, given: Contribution, out: memoryview) -> None:
        self.parts.numbers.encode(chunk, given, out, self.parts.threads.scratch())

    # The outer step

    async def step(
        self, state: FragmentState, standing: Standing, seal: Sequence[int]
    ) -> FragmentState:
        """The state after the round."""
        theta, momentum = (self.parts.floats(each.size) for each in (state.theta, state.momentum))
        squares = np.zeros(len(self.parts.cutting.fragment.units))
        for chunks in self.parts.cutting.chunks:
            size = sum(theta[chunk.values].nbytes for chunk in chunks)
            await self.parts.threads.run_on(
                size, self._step_slice, chunks, state, theta, momentum, squares
            )
        usual = self._usual.norm(slice(None))
        self.is_unusual = is_unusual(math.sqrt(squares.sum()), usual=usual)
        self._usual.merged(squares)
        standing = self.completed(standing, seal)
        return standing.state(state.fragment, theta, momentum)

    async def leave_rests(self, apply: Apply, offered: Float32s) -> None:
        """Make what encoding lost of what was merged here part of the next contribution."""
        if self.parts.rests is not None:
            await self.parts.threads.run(self.parts.rests.leave, apply, offered)

    def completed(self, standing: Standing, seal: Sequence[int]) -> Standing:
        """The standing after the round, with the merged map that follows from the parents' maps."""
        if not self.parts.maps:
            return standing
        merged = merged_after(united(self.parts.maps), self.parts.commit, seal)
        return with_merged_map(standing, merged)

    def _step_slice(
        self,
        chunks: Sequence[Chunk],
        state: FragmentState,
        theta: Float32s,
        momentum: Float32s,
        squares: Float64s,
    ) -> None:
        """``squares``: filled with the squared norm of the merged displacement of each unit."""
        scratch = self.parts.threads.scratch()
        for chunk in chunks:
            part = chunk.values
            if not self.parts.commit.melds:
                np.copyto(momentum[part], state.momentum[part])
            data, numbers = self.parts.merged_bytes[chunk.merged], self.parts.numbers
            numbers.step(chunk, data, Step(state.theta, theta, momentum), scratch)
            squares[chunk.first_unit : chunk.end_unit] = numbers.down.squares(chunk, data)
