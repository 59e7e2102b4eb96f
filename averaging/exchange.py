"""One peer's numbers of one round: its encoded contribution, what it reduces, what comes back.

The round machine decides who sends what to whom; an ``Exchange`` does it. It
holds at most three encoded copies of the fragment (its own, the parts that it reduces, the
merged one) and, while it steps, the new theta. Encoding runs ahead of sending,
checking behind receiving, answering behind merging. What became of everything is told to
``Outcomes``; a stream that breaks, a peer that lies or a deadline ends that part and no other.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import blake3
import msgspec
import numpy as np

from averaging import messages as said
from averaging.arena import Arena
from averaging.arrays import Float32s
from averaging.effects import Enter
from averaging.errors import AveragingError, BadPayload, BulkRefused, NotFinite
from averaging.growing import Abandoned, Growing
from averaging.layout import Fragment
from averaging.lineage import Mark, MergedMap
from averaging.messages import MERGED, NOTHING, OWN, Opening
from averaging.numbers import Chunk, Cutting, MeldNumbers, numbers_of
from averaging.standing import Standing, melded, told
from averaging.state import FragmentState
from averaging.threads import Threads
from averaging.transport import Bulk, Transport
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

NORM_MIN = 1e-20
"""An own contribution smaller than this says nothing about what is usual."""

BROKEN_GRACE_S = 5.0
"""Whose upload broke may try again this long before it is reported as missing."""

DISCARD_BYTES = 1 << 20

_MARKS_MAX_BYTES = 1 << 20
"""The merged map of a mix travels in one frame: ten thousand peers."""


class Outcomes(Protocol):
    """Where an exchange tells what became of its parts: the inputs of the round machine."""

    def upload_arrived(
        self, slice_index: int, sender: PeerId, problem: str | None, norm: float | None = None
    ) -> None:
        """``norm`` of a displacement that is here, for who has none of its own to compare with."""
        ...

    def upload_failed(self, slice_index: int, reason: str) -> None: ...

    def unfit(self, reason: str) -> None:
        """My own contribution cannot be sent. The round goes on without it."""

    def slice_merged(self, slice_index: int, digest: bytes) -> None: ...

    def merged_arrived(self, slice_index: int, digest: bytes) -> None: ...


@dataclass(slots=True, eq=False)
class Received:
    """One member's upload of one slice, at its reducer."""

    data: memoryview | None = None
    """In full, finite and in bound; ``None`` until then, and once it is not needed."""
    arrived: bool = False
    streams: int = 0
    problem: str | None = None


@dataclass(slots=True)
class Tally:
    """What an exchange cost, for the round's report."""

    sent_bytes: int = 0
    received_bytes: int = 0
    encoded_at: float | None = None
    merged_at: float | None = None
    refused: dict[PeerId, str] = field(default_factory=dict)


class Exchange:
    """The doing side of one participation. Made by ``Enter``, ended by ``close``."""

    def __init__(
        self,
        enter: Enter,
        fragment: Fragment,
        *,
        me: PeerId,
        transport: Transport,
        threads: Threads,
        arena: Arena,
        outcomes: Outcomes,
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
        norm_ratio_max: float,
        now: float,
    ) -> None:
        self.round = enter.round
        self.commit = enter.commit
        self.entry = enter.entry
        self.entered_at = now
        self.end_at = now + enter.commit.round_s
        self.tally = Tally()
        self.cutting = Cutting(fragment, numbers_of(enter.commit), enter.commit.shares)
        self.unfit: str | None = None
        """Why my own contribution cannot be sent, if so."""
        self._enter = enter
        self._me = me
        self._numbers = numbers_of(enter.commit)
        self._transport = transport
        self._threads = threads
        self._arena = arena
        self._outcomes = outcomes
        self._spawn = spawn
        self._norm_ratio_max = norm_ratio_max
        count = len(self.cutting.slices)
        self._own: list[Growing] | None = None
        self._merged_bytes = arena.room(self.cutting.data_size)
        self._merged = [Growing(self._merged_bytes[self.cutting.data_of(i)]) for i in range(count)]
        self._answerable = [asyncio.Event() for _ in range(count)]
        self._reducing: dict[int, asyncio.Event] = {}
        self._received: dict[tuple[int, int], Received] = {}
        self._uploads: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._encoding: asyncio.Task[None] | None = None
        self._marks: bytes | None = None
        """Mix only: my own merged map, as it travels."""
        self._marks_received: dict[int, bytes] = {}
        self._marks_merged: bytes | None = None
        for index in enter.slices:
            self.reduce(index)

    def __repr__(self) -> str:
        done = sum(growing.complete for growing in self._merged)
        return f"Exchange({self.round.hex()[:8]}, {done} of {len(self._merged)} slices merged)"

    # Life

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = self._spawn(work, f"{name} {self.round.hex()[:8]}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """End everything that is under way and forget the bytes."""
        pending = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)
        for growing in (*self._merged, *(self._own or ())):
            growing.abandon("the round is over")
        self._received.clear()
        self._own = None

    @property
    def encoded_commit(self) -> bytes:
        return self._enter.encoded

    @property
    def is_mix(self) -> bool:
        """Only states travel, those of the carriers."""
        return self.commit.kind == "mix"

    @property
    def moves_states(self) -> bool:
        """States travel, and with the first slice what is merged in them."""
        return self.commit.kind != "merge"

    @property
    def dispersion(self) -> float | None:
        """After a meld's step: how far my weights were from the group's mean."""
        return self._numbers.dispersion if isinstance(self._numbers, MeldNumbers) else None

    # My own contribution

    def contribute(
        self,
        base: Float32s,
        values: Float32s,
        marks: MergedMap | None,
        *,
        carried: tuple[Float32s, Float32s] | None = None,
    ) -> None:
        """Begin to encode what I give: base - values; in a mix, momentum and theta.

        ``carried``: theta and momentum, which a meld moves besides.
        """
        if isinstance(self._numbers, MeldNumbers):
            assert carried is not None
            self._numbers.carry(*carried)
        data = self._arena.room(self.cutting.data_size)
        count = len(self.cutting.slices)
        self._own = [Growing(data[self.cutting.data_of(index)]) for index in range(count)]
        if marks is not None:
            self._marks = _encode_marks(marks)
        self._encoding = self._start(self._encode(base, values), "encode")

    async def stop_encoding(self) -> None:
        """Return once nobody reads the learner's arrays any more."""
        task = self._encoding
        if task is not None and not task.done():
            for growing in self._own or ():
                growing.abandon("the round ended before all was encoded")
            await asyncio.wait([task])

    async def _encode(self, base: Float32s, values: Float32s) -> None:
        assert self._own is not None
        # What goes to others first: my own slice has no way to travel.
        order = sorted(range(len(self._own)), key=lambda index: index in self._reducing)
        for index in order:
            growing = self._own[index]
            start = self.cutting.data_of(index).start
            for chunk in self.cutting.chunks[index]:
                if growing.lost is not None:
                    return
                end = chunk.data.stop - start
                out = growing.data[chunk.data.start - start : end]
                try:
                    await self._threads.run(self._encode_chunk, chunk, base, values, out)
                except NotFinite as error:
                    tensor = self.cutting.tensor_at(chunk.first_unit + error.unit)
                    self.unfit = str(error.in_tensor(tensor))
                    self._outcomes.unfit(self.unfit)
                    for other in self._own:
                        other.abandon(self.unfit)
                    return
                growing.grow(end)
        self.tally.encoded_at = asyncio.get_running_loop().time()

    def _encode_chunk(
        self, chunk: Chunk, base: Float32s, values: Float32s, out: memoryview
    ) -> None:
        self._numbers.encode(chunk, base, values, out, self._threads.scratch())

    # Uploading, as a member

    def upload(self, index: int, to: PeerId, what: str) -> None:
        """Carry out ``Upload``. One of a slice replaces an earlier one of it."""
        before = self._uploads.pop(index, None)
        if before is not None:
            before.cancel()
        if what == OWN and self._own is None:
            what = NOTHING
        if to == self._me:
            if what == OWN:
                self._uploads[index] = self._start(self._hand_over(index), "hand over")
            return
        self._uploads[index] = self._start(self._upload(index, to, what, before), "upload")

    async def _hand_over(self, index: int) -> None:
        """My own part of a slice that I reduce myself."""
        assert self._own is not None and self.entry is not None
        growing = self._own[index]
        received = self._received.setdefault((index, self.entry), Received())
        try:
            await _whole(growing)
        except Abandoned as error:
            self._outcomes.upload_arrived(index, self._me, error.reason)
            return
        received.data, received.arrived = growing.data, True
        if index == 0 and self._marks is not None:
            self._marks_received[self.entry] = self._marks
        self._outcomes.upload_arrived(index, self._me, None)

    async def _upload(
        self, index: int, to: PeerId, what: str, before: asyncio.Task[None] | None
    ) -> None:
        if before is not None:
            await asyncio.wait([before])  # two must not write to one merged slice
        try:
            async with asyncio.timeout_at(self.end_at):
                opening = Opening(
                    fragment=self.commit.fragment,
                    round=self.round,
                    slice=index,
                    what=NOTHING if what == OWN and self.unfit is not None else what,
                    commit=self._enter.encoded,
                    signature=self._enter.signature,
                )
                bulk = await self._transport.open_bulk(to, said.encode_opening(opening))
                try:
                    await self._converse(bulk, index, opening.what)
                finally:
                    self.tally.sent_bytes += bulk.sent_bytes
                    self.tally.received_bytes += bulk.received_bytes
                    bulk.abort()
        except WorldErrors as error:
            self._outcomes.upload_failed(index, str(error) or "the round's deadline has come")

    async def _converse(self, bulk: Bulk, index: int, what: str) -> None:
        """Send what there is, while listening for a refusal; then read the merged slice."""
        remaining_s = max(0.1, self.end_at - asyncio.get_running_loop().time())
        listening = asyncio.ensure_future(bulk.granted(timeout_s=remaining_s))
        sending = asyncio.ensure_future(self._send_part(bulk, index, what))
        try:
            await asyncio.wait((listening, sending), return_when=asyncio.FIRST_COMPLETED)
            if sending.done() and sending.exception() is not None and not listening.done():
                # Whoever hangs up says why first; the reason may still be on its way.
                await asyncio.wait((listening,), timeout=1.0)
            if listening.done():
                listening.result()
            await sending
            await listening
        finally:
            for half in (listening, sending):
                half.cancel()
            await asyncio.wait((listening, sending))
            for half in (listening, sending):
                if not half.cancelled():
                    half.exception()  # the first one was raised; the other is its echo
        if what == MERGED:
            await bulk.finish()
            return
        await self._read_merged(bulk, index)

    async def _send_part(self, bulk: Bulk, index: int, what: str) -> None:
        if what == NOTHING:
            return
        if self.moves_states and index == 0:
            marks = self._marks_merged if what == MERGED else self._marks
            await bulk.send_frame(marks or b"")
        if what == MERGED:
            await bulk.send(self._merged[index].data)
            return
        assert self._own is not None
        await _send_growing(bulk, self._own[index])

    async def _read_merged(self, bulk: Bulk, index: int) -> None:
        growing = self._merged[index]
        if growing.filled:
            return  # it came another way; an empty slice never has, and still has to be told of
        marks = None
        if self.moves_states and index == 0:
            marks = await bulk.receive_frame(_MARKS_MAX_BYTES)
        await bulk.receive_into(growing.data)
        await bulk.finished()
        await self._take_merged(index, growing.data, marks)
        growing.grow(len(growing.data))
        self._outcomes.merged_arrived(index, await self._digest(index))

    async def _take_merged(self, index: int, data: memoryview, marks: bytes | None) -> None:
        """Check a merged slice that somebody else made, before anything is done with it."""
        if marks is not None:
            _decode_marks(marks)
            self._marks_merged = marks
        start = self.cutting.data_of(index).start
        for chunk in self.cutting.chunks[index]:
            part = data[chunk.data.start - start : chunk.data.stop - start]
            await self._threads.run(self._check_finite, chunk, part)

    def _check_finite(self, chunk: Chunk, data: memoryview) -> None:
        self._numbers.check(chunk, data, self._threads.scratch())

    async def _digest(self, index: int) -> bytes:
        """What a merged slice is known by: its bytes, and in a mix the merged map with slice 0."""
        data = self._merged[index].data
        if self.moves_states and index == 0:
            marks = self._marks_merged or b""
            return await self._threads.run(lambda: blake3.blake3(data).update(marks).digest())
        return await self._threads.run(lambda: blake3.blake3(data).digest())

    # Reducing

    def reduce(self, index: int) -> None:
        """From now on uploads of this slice are taken here."""
        self._reducing.setdefault(index, asyncio.Event()).set()

    async def serve(self, bulk: Bulk, opening: Opening) -> None:
        """One incoming stream, which the machine has admitted: take it, then answer it."""
        entry = self.commit.index(bulk.remote)
        assert entry is not None
        try:
            async with asyncio.timeout_at(self.end_at):
                if opening.what == MERGED:
                    await self._receive_merged(bulk, opening.slice)
                    return
                if opening.what == OWN:
                    await self._receive_own(bulk, opening.slice, entry)
                elif not self.is_mix:
                    problem = "it has nothing to give: its numbers are not finite"
                    self._outcomes.upload_arrived(opening.slice, bulk.remote, problem)
                await self._answer(bulk, opening.slice)
        except (BadPayload, BulkRefused) as error:
            await bulk.refuse(str(error))
        except (Abandoned, TimeoutError) as error:
            await bulk.refuse(str(error) or "the round's deadline has come")
        finally:
            self.tally.sent_bytes += bulk.sent_bytes
            self.tally.received_bytes += bulk.received_bytes

    async def _receive_own(self, bulk: Bulk, index: int, entry: int) -> None:
        received = self._received.setdefault((index, entry), Received())
        size = len(self._merged[index].data)
        if received.arrived:
            await _discard(bulk, size, marks=self.moves_states and index == 0)
            return
        received.streams += 1
        try:
            marks = None
            if self.moves_states and index == 0:
                marks = await bulk.receive_frame(_MARKS_MAX_BYTES)
                _decode_marks(marks)
            growing = Growing(self._arena.room(size))
            checking = asyncio.ensure_future(self._check(index, growing))
            try:
                await bulk.receive_growing(growing)
                total = await checking
            finally:
                checking.cancel()
                await asyncio.wait((checking,))
                if not checking.cancelled():
                    checking.exception()
            await self._check_norm(index, total)
        except StreamBroken as error:
            broken = self._report_broken(index, entry, bulk.remote, error.reason)
            self._start(broken, "broken upload")
            raise
        except BadPayload as error:
            self._refuse(index, entry, bulk.remote, str(error))
            raise
        finally:
            received.streams -= 1
        if not received.arrived:
            received.arrived = True
            if index in self._reducing:
                received.data = growing.data
            if marks is not None:
                self._marks_received[entry] = marks
        norm = None if self.is_mix else math.sqrt(total)
        self._outcomes.upload_arrived(index, bulk.remote, None, norm)

    async def _check(self, index: int, growing: Growing) -> float:
        """Look at each chunk as soon as it is here; returns the sum of squares."""
        start = self.cutting.data_of(index).start
        total = 0.0
        for chunk in self.cutting.chunks[index]:
            end = chunk.data.stop - start
            while growing.filled < end:
                await growing.beyond(end - 1)
            part = growing.data[chunk.data.start - start : end]
            total += await self._threads.run(self._check_chunk, chunk, part)
        return total

    def _check_chunk(self, chunk: Chunk, data: memoryview) -> float:
        return self._numbers.check(chunk, data, self._threads.scratch())

    async def _check_norm(self, index: int, total: float) -> None:
        """Refuse what is absurdly larger than my own. Who has none compares all of them later."""
        if self._own is None or self.is_mix or not math.isfinite(self._norm_ratio_max):
            return
        try:
            await _whole(self._own[index])
            mine = await self._check(index, self._own[index])
        except (Abandoned, BadPayload):
            return
        norm, usual = math.sqrt(total), math.sqrt(mine)
        if usual > NORM_MIN and norm > self._norm_ratio_max * usual:
            raise BadPayload(
                self.commit.codec,
                f"its norm is {norm / usual:.3g} times mine; at most {self._norm_ratio_max:g}",
            )

    def _refuse(self, index: int, entry: int, peer: PeerId, problem: str) -> None:
        received = self._received[index, entry]
        if not received.arrived:
            received.problem = problem
            self.tally.refused[peer] = problem
            self._outcomes.upload_arrived(index, peer, problem)

    async def _report_broken(self, index: int, entry: int, peer: PeerId, reason: str) -> None:
        await asyncio.sleep(BROKEN_GRACE_S)
        received = self._received.get((index, entry))
        if received is not None and not received.arrived and not received.streams:
            self._refuse(index, entry, peer, f"its upload broke off: {reason}")

    async def _receive_merged(self, bulk: Bulk, index: int) -> None:
        """A member who has the merged slice gives it to me, its new reducer."""
        growing = self._merged[index]
        marks = None
        if self.moves_states and index == 0:
            marks = await bulk.receive_frame(_MARKS_MAX_BYTES)
        data = self._arena.room(len(growing.data))
        await bulk.receive_into(data)
        await self._take_merged(index, data, marks)
        if not growing.filled:
            growing.data[:] = data
            growing.grow(len(data))
            self._outcomes.merged_arrived(index, await self._digest(index))
        await bulk.grant()
        await bulk.finished()

    def merge(self, index: int, contributors: Sequence[int], weights: Sequence[float]) -> None:
        """Carry out ``Merge``; answering may follow on its heels."""
        self._answerable[index].set()
        self._start(self._merge(index, tuple(contributors), tuple(weights)), "merge")

    async def _merge(
        self, index: int, contributors: tuple[int, ...], weights: tuple[float, ...]
    ) -> None:
        growing = self._merged[index]
        start = self.cutting.data_of(index).start
        payloads = []
        for entry in contributors:
            data = self._received[index, entry].data
            assert data is not None, "the machine merges what has arrived"
            payloads.append(data)
        for (at, entry), received in self._received.items():
            if at == index and entry not in contributors:
                received.data = None
        if self.moves_states and index == 0:
            united = MergedMap()
            for entry in contributors:
                united = united.united(_decode_marks(self._marks_received[entry]))
            self._marks_merged = _encode_marks(united)
        hasher = blake3.blake3()
        for chunk in self.cutting.chunks[index]:
            part = slice(chunk.data.start - start, chunk.data.stop - start)
            pieces = [payload[part] for payload in payloads]
            try:
                await self._threads.run(
                    self._merge_chunk, chunk, pieces, weights, growing.data[part], hasher
                )
            except NotFinite as error:
                # Each was finite; together they are not. Nobody will have this slice: void.
                growing.abandon(str(error))
                return
            growing.grow(part.stop)
        for entry in contributors:
            self._received[index, entry].data = None
        self.tally.merged_at = asyncio.get_running_loop().time()
        if self.moves_states and index == 0:
            hasher.update(self._marks_merged or b"")
        self._outcomes.slice_merged(index, hasher.digest())

    def _merge_chunk(
        self,
        chunk: Chunk,
        payloads: Sequence[memoryview],
        weights: Sequence[float],
        out: memoryview,
        hasher: Any,
    ) -> None:
        self._numbers.merge(chunk, payloads, weights, out, self._threads.scratch())
        hasher.update(out)

    def answer(self, index: int) -> None:
        """Carry out ``Answer``."""
        self._answerable[index].set()

    async def _answer(self, bulk: Bulk, index: int) -> None:
        await self._answerable[index].wait()
        growing = self._merged[index]
        if self.moves_states and index == 0:
            await growing.beyond(0)
        await bulk.grant()
        if self.moves_states and index == 0:
            await bulk.send_frame(self._marks_merged or b"")
        await _send_growing(bulk, growing)
        await bulk.finish()

    # The outer step

    @property
    def merged_payload(self) -> memoryview:
        """All merged slices, in order. Complete once the machine says ``Apply``."""
        return self._merged_bytes

    def merged_marks(self) -> MergedMap | None:
        """After a mix: the united merged map."""
        return None if self._marks_merged is None else _decode_marks(self._marks_merged)

    async def step(
        self, state: FragmentState, standing: Standing, seal: Sequence[int], *, in_place: bool
    ) -> FragmentState:
        """The state after the round. ``in_place``: nobody reads ``state``'s momentum any more."""
        theta = self._arena.floats(state.theta.size)
        momentum = state.momentum
        if self.moves_states or not in_place:
            momentum = self._arena.floats(state.theta.size)
        for chunks in self.cutting.chunks:
            for chunk in chunks:
                await self._threads.run(self._step_chunk, chunk, state, theta, momentum)
        merged = self.merged_marks()
        if merged is not None and self.commit.kind == "meld":
            merged = melded(merged, self.commit, seal)
        if merged is not None:
            standing = told(standing, self.commit, merged)
        return FragmentState(
            state.fragment,
            standing.version,
            standing.lineage,
            standing.chain,
            theta,
            momentum,
            standing.merged,
        )

    def _step_chunk(
        self, chunk: Chunk, state: FragmentState, theta: Float32s, momentum: Float32s
    ) -> None:
        part = chunk.values
        if not self.moves_states and momentum is not state.momentum:
            np.copyto(momentum[part], state.momentum[part])
        data = self._merged_bytes[chunk.data]
        scratch = self._threads.scratch()
        self._numbers.step(chunk, data, state.theta, theta, momentum, scratch)


async def _whole(growing: Growing) -> None:
    while growing.filled < len(growing.data):
        await growing.beyond(growing.filled)
    if growing.lost is not None:
        raise Abandoned(growing.lost)


async def _send_growing(bulk: Bulk, growing: Growing) -> None:
    sent = 0
    while sent < len(growing.data):
        filled = await growing.beyond(sent)
        await bulk.send(growing.data[sent:filled])
        sent = filled


async def _discard(bulk: Bulk, size: int, *, marks: bool) -> None:
    """Read past an upload that is here already."""
    if marks:
        await bulk.receive_frame(_MARKS_MAX_BYTES)
    scrap = memoryview(bytearray(min(size, DISCARD_BYTES)))
    left = size
    while left:
        left -= await bulk.receive_some(scrap[:left])


# The merged map of a mix on the wire

_marks_decoder = msgspec.msgpack.Decoder(dict[said.Peer, tuple[said.Count, said.Count, said.Count]])


def _encode_marks(merged: MergedMap) -> bytes:
    """The same bytes for equal maps: peers in order."""
    data = msgspec.msgpack.encode(
        {peer: (mark.incarnation, mark.step, mark.tokens) for peer, mark in sorted(merged.items())}
    )
    if len(data) > _MARKS_MAX_BYTES:
        raise AveragingError(f"a merged map of {len(data)} bytes does not fit a frame")
    return data


def _decode_marks(data: bytes) -> MergedMap:
    try:
        marks = _marks_decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadPayload("mix", f"not a merged map: {error}") from error
    return MergedMap({peer: Mark(*numbers) for peer, numbers in marks.items()})
