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
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import blake3
import msgspec
import numpy as np

from averaging import messages as said
from averaging.errors import AveragingError, BadPayload, BulkRefused, NotFinite
from averaging.history.merged_map import Mark, MergedMap
from averaging.history.standing import Standing, merged_after, with_merged_map
from averaging.history.state import FragmentState
from averaging.live.arena import Arena
from averaging.live.bundling import Bundling
from averaging.live.growing import Abandoned, Growing
from averaging.live.threads import Threads
from averaging.live.transport import Bulk, Transport
from averaging.messages import MERGED, NOTHING, OWN, Opening
from averaging.numbers.arithmetic import MeldNumbers, numbers_of
from averaging.numbers.arrays import Float32s, Float64s
from averaging.numbers.chunks import Chunk, Cutting
from averaging.numbers.layout import Fragment
from averaging.numbers.norm_bounds import norm_at_most
from averaging.round.effects import Enter
from averaging.round.paxos import expected_of
from averaging.round.reducer import Length
from averaging.rules.sites import SITE_SHARE, carries, riders_of, shares
from averaging.rules.usual_norms import UsualNorms
from averaging.rules.weights import weights_of
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

BROKEN_GRACE_S = 5.0
"""Whose upload broke may try again this long before it is reported as missing."""

DISCARD_BYTES = 1 << 20

_MARKS_MAX_BYTES = 1 << 20
"""The merged map of a mix travels in one frame: ten thousand peers."""


class Outcomes(Protocol):
    """Where an exchange tells what became of its parts: the inputs of the round machine."""

    def upload_arrived(
        self,
        slice_index: int,
        sender: PeerId,
        problem: str | None,
        length: Length | None = None,
        *,
        riders: tuple[int, ...] = (),
    ) -> None:
        """``length`` of a displacement that is here, to compare with others. ``riders``: whose
        contributions came with it."""
        ...

    def upload_failed(self, slice_index: int, reason: str) -> None: ...

    def not_taken(self, slice_index: int, reducer: PeerId, reason: str) -> None:
        """What I sent is not in the merged slice, which comes all the same."""

    def unfit(self, reason: str) -> None:
        """My own contribution cannot be sent. The round goes on without it."""

    def slice_merged(self, slice_index: int, digest: bytes) -> None: ...

    def merged_arrived(self, slice_index: int, digest: bytes) -> None: ...


@dataclass(slots=True, eq=False)
class Received:
    """One member's upload of one slice, at its reducer."""

    data: memoryview | None = None
    """In full, finite and in bound; ``None`` until then, and once it is not needed."""
    checked: Growing | None = None
    """What of the latest stream is finite so far: it may be merged ahead of the seal."""
    arrived: bool = False
    streams: int = 0
    problem: str | None = None
    """Why nothing of it can be merged."""


@dataclass(slots=True, eq=False)
class Making:
    """The merging of one slice: behind its uploads, and perhaps for a seal that never comes."""

    contributors: tuple[int, ...]
    weights: tuple[float, ...]
    sources: tuple[Growing, ...]
    """The contributors' uploads, as far as they may be read."""
    members: tuple[int, ...] | None
    """For how many each stands; ``None``: each for one."""
    made: Growing
    hasher: Any
    task: asyncio.Task[None] | None = None
    working: asyncio.Future[None] | None = None
    """The thread's work on a few chunks: it writes whether or not anybody still waits."""
    stopped: bool = False
    """Nobody wants the chunks that are not begun. Read by the thread."""
    sealed: bool = False
    """It is what the seal asks for. Whoever else may write there then writes the same bytes."""

    def is_of(
        self,
        contributors: tuple[int, ...],
        weights: tuple[float, ...],
        payloads: Sequence[memoryview],
    ) -> bool:
        """Whether it makes what a seal asks for. Uploads are the same if their memory is."""
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


@dataclass(slots=True)
class Tally:
    """What an exchange cost, for the round's report."""

    encoded_at: float | None = None
    merged_at: float | None = None
    refused: dict[PeerId, str] = field(default_factory=dict)
    _sent: Counter[PeerId] = field(default_factory=Counter)
    _received: Counter[PeerId] = field(default_factory=Counter)
    _open: list[Bulk] = field(default_factory=list)

    @contextmanager
    def over(self, bulk: Bulk) -> Iterator[None]:
        """While this stream lasts, and when it is over, what passes over it counts."""
        self._open.append(bulk)
        try:
            yield
        finally:
            self._open.remove(bulk)
            self._sent[bulk.remote] += bulk.sent_bytes
            self._received[bulk.remote] += bulk.received_bytes

    @property
    def sent_bytes(self) -> int:
        return self._sent.total() + sum(bulk.sent_bytes for bulk in self._open)

    @property
    def received_bytes(self) -> int:
        return sum(self.received_from().values())

    def received_from(self) -> dict[PeerId, int]:
        """Bytes so far, by whom they came from."""
        found = self._received.copy()
        for bulk in self._open:
            found[bulk.remote] += bulk.received_bytes
        return dict(found)


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
        usual: UsualNorms,
        norm_ratio_max: float,
        theta: Callable[[], Float32s | None],
        now: float,
    ) -> None:
        """``usual``: of this fragment here, ``norm_ratio_max``: so many times longer may a rider's
        upload be, ``theta``: as it is now, if I have one.
        """
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
        self._usual = usual
        self._theta = theta
        count = len(self.cutting.slices)
        self._own: list[Growing] | None = None
        self._merged_bytes = arena.room(self.cutting.data_size)
        self._merged = [Growing(self._merged_bytes[self.cutting.data_of(i)]) for i in range(count)]
        self._answerable = [asyncio.Event() for _ in range(count)]
        self._reducing: dict[int, asyncio.Event] = {}
        self._received: dict[tuple[int, int], Received] = {}
        self._makings: dict[int, Making] = {}
        self._theta_norms: dict[int, float] = {}
        self._uploads: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._encoding: asyncio.Task[None] | None = None
        self._marks: bytes | None = None
        """Mix only: my own merged map, as it travels."""
        self._marks_received: dict[int, bytes] = {}
        self._marks_merged: bytes | None = None
        self._here = [asyncio.Event() for _ in range(count)]
        """The merged slice is here: riders may have it."""
        self._wanted: dict[int, PeerId] = {}
        """By slice, where the machine last wanted my upload."""
        self._delegate: PeerId | None = None
        """Who carries my upload, as long as it is there (``averaging.rules.sites``) ..."""
        self._rides = False
        """... for otherwise nobody does."""
        self._bundling: Bundling | None = None
        self._bundles: dict[int, dict[int, tuple[int, ...]]] = {}
        """By slice and delegate, the riders who are in its upload."""
        if self.entry is not None:
            delegate = self.commit.members[self.entry].delegate
            if delegate is not None:
                self._rides = True
                self._delegate = self.commit.members[delegate].peer
            riders = riders_of(self.commit, self.entry)
            if riders:
                self._bundling = Bundling(
                    self.commit, self.entry, riders, self.cutting, norm_ratio_max=norm_ratio_max
                )
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
        for making in self._makings.values():
            making.stopped = True
        self._received.clear()
        self._makings.clear()
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
        into = self._own
        if self._bundling is not None:
            # What I give is encoded for the bundle; what I send is the bundle.
            raw = self._arena.room(self.cutting.data_size)
            into = [Growing(raw[self.cutting.data_of(index)]) for index in range(count)]
            self._start(self._bundle(self._bundling, into), "bundle")
        self._encoding = self._start(self._encode(base, values, into), "encode")
        for index in self._reducing:
            self._merge_ahead(index)

    async def stop_encoding(self) -> None:
        """Return once nobody reads the learner's arrays any more."""
        task = self._encoding
        if task is not None and not task.done():
            for growing in self._own or ():
                growing.abandon("the round ended before all was encoded")
            await asyncio.wait([task])

    async def _bundle(self, bundling: Bundling, own: list[Growing]) -> None:
        """As a delegate: what my riders and I give, in one."""
        assert self._own is not None and self.entry is not None
        with suppress(Abandoned):  # then there will be no bundle: ``make`` says so
            for index, growing in enumerate(own):
                squares = await self._as_it_grows(index, growing, self._square_chunk)
                bundling.measured(self.entry, index, await self._length(index, squares))
        await bundling.decide(SITE_SHARE * self.commit.upload_s)
        for rider, reason in bundling.refused.items():
            self.tally.refused[self.commit.members[rider].peer] = reason
        if self._marks is not None:
            united = _decode_marks(self._marks)
            for rider in bundling.inside:
                united = united.united(_decode_marks(bundling.marks[rider]))
            self._marks = _encode_marks(united)
        try:
            await bundling.make(own, self._own, self._numbers, self._threads)
        except (Abandoned, NotFinite) as error:
            for growing in self._own:
                growing.abandon(str(error))

    async def _encode(self, base: Float32s, values: Float32s, into: list[Growing]) -> None:
        assert self._own is not None
        # What goes to others first: my own slice has no way to travel.
        order = sorted(range(len(into)), key=lambda index: index in self._reducing)
        for index in order:
            growing = into[index]
            work = partial(self._encode_slice, index, base, values, growing, self._own[index])
            try:
                await self._threads.run_telling(work, tell=growing.grow)
            except NotFinite as error:
                self.unfit = str(error)
                self._outcomes.unfit(self.unfit)
                for other in (*into, *self._own):
                    other.abandon(self.unfit)
                return
            if not growing.complete:
                return  # nobody wants it any more
        self.tally.encoded_at = asyncio.get_running_loop().time()

    def _encode_slice(
        self,
        index: int,
        base: Float32s,
        values: Float32s,
        into: Growing,
        own: Growing,
        say: Callable[[int], None],
    ) -> None:
        start = self.cutting.data_of(index).start
        for chunk in self.cutting.chunks[index]:
            if into.lost is not None or own.lost is not None:
                return
            end = chunk.data.stop - start
            out = into.data[chunk.data.start - start : end]
            try:
                self._encode_chunk(chunk, base, values, out)
            except NotFinite as error:
                tensor = self.cutting.tensor_at(chunk.first_unit + error.unit)
                raise error.in_tensor(tensor) from None
            say(end)

    def _encode_chunk(
        self, chunk: Chunk, base: Float32s, values: Float32s, out: memoryview
    ) -> None:
        self._numbers.encode(chunk, base, values, out, self._threads.scratch())

    # Uploading, as a member

    def upload(self, index: int, to: PeerId, what: str) -> None:
        """Carry out ``Upload``. One of a slice replaces an earlier one of it."""
        self._wanted[index] = to
        if what == OWN and self._rides:
            if self._delegate is None:
                what = NOTHING  # in the bundle or not at all: nobody may have it twice
            elif index in self._uploads:
                return  # the delegate has it, and sends it wherever it is wanted
            else:
                to = self._delegate
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
        if self._bundling is not None:
            await self._bundling.decided.wait()
        riders = self._riders_inside()
        self._bundles.setdefault(index, {})[self.entry] = riders
        try:
            # Encoding refuses what is not finite: there is nothing to check.
            squares = await self._as_it_grows(index, growing, self._square_chunk)
        except Abandoned as error:
            self._outcomes.upload_arrived(index, self._me, error.reason, riders=riders)
            return
        length = await self._length(index, squares)
        received.data, received.arrived = growing.data, True
        if index == 0 and self._marks is not None:
            self._marks_received[self.entry] = self._marks
        self._outcomes.upload_arrived(index, self._me, None, length, riders=riders)

    def _riders_inside(self) -> tuple[int, ...]:
        return self._bundling.inside if self._bundling is not None else ()

    async def _upload(
        self, index: int, to: PeerId, what: str, before: asyncio.Task[None] | None
    ) -> None:
        if before is not None:
            await asyncio.wait([before])  # two must not write to one merged slice
        try:
            async with asyncio.timeout_at(self.end_at):
                if what == OWN and self._bundling is not None:
                    await self._bundling.decided.wait()
                opening = Opening(
                    fragment=self.commit.fragment,
                    round=self.round,
                    slice=index,
                    what=NOTHING if what == OWN and self.unfit is not None else what,
                    commit=self._enter.encoded,
                    signature=self._enter.signature,
                    riders=self._riders_inside() if what == OWN else (),
                )
                bulk = await self._transport.open_bulk(to, said.encode_opening(opening))
                try:
                    with self.tally.over(bulk):
                        await self._converse(bulk, index, opening.what)
                finally:
                    bulk.abort()
        except WorldErrors as error:
            if self._rides and what == OWN:
                self._uploads.pop(index, None)
                self._go_alone()
                return
            self._outcomes.upload_failed(index, str(error) or "the round's deadline has come")

    def _go_alone(self) -> None:
        """My delegate is gone: fetch merged slices where they are made."""
        if self._delegate is None:
            return
        self._delegate = None
        for index, to in sorted(self._wanted.items()):
            if not self._here[index].is_set():
                self.upload(index, to, OWN)

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
            but = await listening
        finally:
            for half in (listening, sending):
                half.cancel()
            await asyncio.wait((listening, sending))
            for half in (listening, sending):
                if not half.cancelled():
                    half.exception()  # the first one was raised; the other is its echo
        if but:
            self._outcomes.not_taken(index, bulk.remote, but)
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
        await self._stop_ahead(index)
        digest = await self._receive_and_check_merged(bulk, index, growing.data, marks)
        await bulk.finished()
        growing.grow(len(growing.data))
        self._here[index].set()
        self._outcomes.merged_arrived(index, digest)

    async def _receive_and_check_merged(
        self, bulk: Bulk, index: int, data: memoryview, marks: bytes | None
    ) -> bytes:
        """Take a merged slice that somebody else made, and look at it before anything is done.

        Returns what it is known by: its bytes, and where states move the merged map with slice 0.
        """
        if marks is not None:
            _decode_marks(marks)
            self._marks_merged = marks
        hasher = blake3.blake3()

        def check(chunk: Chunk, part: memoryview) -> float:
            hasher.update(part)
            return self._check_chunk(chunk, part)

        arriving = Growing(data)
        await _receive_behind(bulk, arriving, self._as_it_grows(index, arriving, check))
        if self.moves_states and index == 0:
            hasher.update(self._marks_merged or b"")
        return hasher.digest()

    # Reducing

    def reduce(self, index: int) -> None:
        """From now on uploads of this slice are taken here."""
        self._reducing.setdefault(index, asyncio.Event()).set()

    async def serve(self, bulk: Bulk, opening: Opening) -> None:
        """One incoming stream, which the machine has admitted: take it, then answer it."""
        with self.tally.over(bulk):
            await self._serve(bulk, opening)

    async def _serve(self, bulk: Bulk, opening: Opening) -> None:
        entry = self.commit.index(bulk.remote)
        assert entry is not None
        try:
            async with asyncio.timeout_at(self.end_at):
                if opening.what == MERGED:
                    await self._receive_merged(bulk, opening.slice)
                    return
                if self._bundling is not None and carries(self.commit, self.entry, entry):
                    if opening.what == OWN:
                        await self._receive_rider(self._bundling, bulk, opening.slice, entry)
                    else:
                        self._bundling.leave_out(entry)
                    await self._here[opening.slice].wait()
                    await self._give_merged(bulk, opening.slice, "")
                    return
                if opening.what == OWN:
                    self._bundles.setdefault(opening.slice, {})[entry] = opening.riders
                    await self._receive_own(bulk, opening.slice, entry)
                elif not self.is_mix and self.commit.members[entry].delegate is None:
                    self._bundles.setdefault(opening.slice, {})[entry] = ()
                    problem = "it has nothing to give: its numbers are not finite"
                    riders = riders_of(self.commit, entry)
                    self._outcomes.upload_arrived(
                        opening.slice, bulk.remote, problem, riders=riders
                    )
                await self._answer(bulk, opening.slice, entry)
        except (BadPayload, BulkRefused) as error:
            await bulk.refuse(str(error))
        except (Abandoned, TimeoutError) as error:
            await bulk.refuse(str(error) or "the round's deadline has come")

    async def _receive_rider(self, bundling: Bundling, bulk: Bulk, index: int, entry: int) -> None:
        """As a delegate: what a rider gives, for the bundle. A bad one is only left out of it."""
        size = len(self._merged[index].data)
        if bundling.has(entry, index):
            await _discard(bulk, size, marks=self.moves_states and index == 0)
            return
        try:
            marks = None
            if self.moves_states and index == 0:
                marks = await bulk.receive_frame(_MARKS_MAX_BYTES)
            growing = Growing(self._arena.room(size))
            squares = await _receive_behind(
                bulk, growing, self._as_it_grows(index, growing, self._measure_chunk)
            )
            if marks is not None:
                _decode_marks(marks)
            length = await self._length(index, squares)
        except BadPayload as error:
            bundling.leave_out(entry)
            self.tally.refused[bulk.remote] = str(error)
            return
        bundling.take(entry, index, growing.data, marks, length)

    async def _receive_own(self, bulk: Bulk, index: int, entry: int) -> None:
        """Take an upload. A bad one is read to its end: its sender still gets the merged slice on
        this stream, and has no reason to send the same bytes again."""
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
            growing = Growing(self._arena.room(size))
            if received.checked is not None:
                await self._stop_ahead(index)  # what it was reading will not be completed
            received.checked = checked = Growing(growing.data)
            self._merge_ahead(index)
            checking = self._as_it_grows(index, growing, self._measure_chunk, checked)
            squares = await _receive_behind(bulk, growing, checking)
            if marks is not None:
                _decode_marks(marks)
            length = await self._length(index, squares)
        except StreamBroken as error:
            broken = self._report_broken(index, entry, error.reason)
            self._start(broken, "broken upload")
            raise
        except BadPayload as error:
            self.refuse(index, entry, str(error))
            return
        finally:
            received.streams -= 1
        if not received.arrived:
            received.arrived = True
            if index in self._reducing:
                received.data = growing.data
            if marks is not None:
                self._marks_received[entry] = marks
        riders = self._bundles.get(index, {}).get(entry, ())
        self._outcomes.upload_arrived(index, bulk.remote, None, length, riders=riders)

    async def _as_it_grows(
        self,
        index: int,
        growing: Growing,
        work: Callable[[Chunk, memoryview], float],
        done: Growing | None = None,
    ) -> float:
        """Have a thread look at the chunks of a slice as soon as they are here.

        What it returns is added up; ``done`` follows behind. Raises ``Abandoned``.
        """
        start = self.cutting.data_of(index).start
        chunks = self.cutting.chunks[index]
        total = 0.0
        first = 0
        while first < len(chunks):
            while growing.filled < chunks[first].data.stop - start:
                await growing.beyond(growing.filled)
            last = first + 1
            while last < len(chunks) and chunks[last].data.stop - start <= growing.filled:
                last += 1
            parts = [
                (chunk, growing.data[chunk.data.start - start : chunk.data.stop - start])
                for chunk in chunks[first:last]
            ]
            total += await self._threads.run(_sum_over, work, parts)
            if done is not None:
                done.grow(chunks[last - 1].data.stop - start)
            first = last
        return total

    def _check_chunk(self, chunk: Chunk, data: memoryview) -> float:
        self._numbers.check(chunk, data, self._threads.scratch())
        return 0.0

    def _measure_chunk(self, chunk: Chunk, data: memoryview) -> float:
        self._check_chunk(chunk, data)
        return self._square_chunk(chunk, data)

    def _square_chunk(self, chunk: Chunk, data: memoryview) -> float:
        return float(self._numbers.squares(chunk, data).sum())

    async def _length(self, index: int, squares: float) -> Length | None:
        """Of an upload of a displacement, beside what is known of its slice."""
        if self.is_mix:
            return None
        usual = self._usual.norm(self.cutting.slices[index].units)
        harmless = await self._theta_norm(index) if usual is None else 0.0
        return Length(math.sqrt(squares), usual, harmless)

    async def _theta_norm(self, index: int) -> float:
        theta = self._theta()
        if theta is None:
            return 0.0
        if index not in self._theta_norms:
            piece = self.cutting.slices[index]
            sizes = self.cutting.fragment.unit_sizes[piece.units]
            self._theta_norms[index] = await self._threads.run(
                norm_at_most, theta[piece.values], sizes
            )
        return self._theta_norms[index]

    def refuse(self, index: int, entry: int, problem: str) -> None:
        """Do not take an upload, and say why to the round and, in time, to who sent it."""
        received = self._received[index, entry]
        if not received.arrived:
            peer = self.commit.members[entry].peer
            self.left_out(index, entry, problem)
            riders = self._bundles.get(index, {}).get(entry, ())
            self._outcomes.upload_arrived(index, peer, problem, riders=riders)

    def left_out(self, index: int, entry: int, problem: str) -> None:
        """Remember why an upload is not merged, for its sender and for the round's report."""
        received = self._received.get((index, entry))
        if received is not None:  # a rider's came in its delegate's
            received.problem = problem
        self.tally.refused[self.commit.members[entry].peer] = problem

    async def _report_broken(self, index: int, entry: int, reason: str) -> None:
        await asyncio.sleep(BROKEN_GRACE_S)
        received = self._received.get((index, entry))
        if received is not None and not received.arrived and not received.streams:
            self.refuse(index, entry, f"its upload broke off: {reason}")

    async def _receive_merged(self, bulk: Bulk, index: int) -> None:
        """A member who has the merged slice gives it to me, its new reducer."""
        growing = self._merged[index]
        marks = None
        if self.moves_states and index == 0:
            marks = await bulk.receive_frame(_MARKS_MAX_BYTES)
        data = self._arena.room(len(growing.data))
        digest = await self._receive_and_check_merged(bulk, index, data, marks)
        await self._stop_ahead(index)
        if not growing.filled:
            growing.data[:] = data
            growing.grow(len(data))
            self._here[index].set()
            self._outcomes.merged_arrived(index, digest)
        await bulk.grant()
        await bulk.finished()

    def merge(self, index: int, contributors: Sequence[int], weights: Sequence[float]) -> None:
        """Carry out ``Merge``; answering may follow on its heels."""
        bundles = self._bundles.get(index, {})
        payloads = shares(contributors, weights, bundles)
        for share in payloads:
            # An earlier try's problem, or an earlier verdict.
            self._received[index, share.carrier].problem = None
        self._answerable[index].set()
        self._start(
            self._merge(
                index,
                tuple(share.carrier for share in payloads),
                tuple(share.weight for share in payloads),
                tuple(share.members for share in payloads) if any(bundles.values()) else None,
            ),
            "merge",
        )

    def _merge_ahead(self, index: int) -> None:
        """Begin to merge behind the uploads, as the seal will have it if nobody drops out.

        Nothing of it is told or sent before the seal, and under another one it is made anew.
        """
        if index not in self._reducing or index in self._makings:
            return
        if self._answerable[index].is_set() or self._merged[index].filled:
            return
        if any(entry.delegate is not None for entry in self.commit.members):
            return  # who is in a bundle is not known before it is here
        sources: list[Growing] = []
        everybody = tuple(sorted(expected_of(self.commit)))
        for entry in everybody:
            if entry == self.entry:
                source = None if self._own is None else self._own[index]
            else:
                source = self._received.get((index, entry), Received()).checked
            if source is None:
                return
            sources.append(source)
        self._make(index, everybody, weights_of(self.commit, everybody), tuple(sources), None)

    def _make(
        self,
        index: int,
        contributors: tuple[int, ...],
        weights: tuple[float, ...],
        sources: tuple[Growing, ...],
        members: tuple[int, ...] | None,
    ) -> Making:
        made = Growing(self._merged[index].data)
        making = Making(contributors, weights, sources, members, made, blake3.blake3())
        self._makings[index] = making
        making.task = self._start(self._carry_out(index, making), "merge chunks")
        return making

    async def _stop_ahead(self, index: int) -> None:
        """The merged slice's memory is for others to write to, or for another seal."""
        making = self._makings.get(index)
        if making is not None and not making.sealed:
            del self._makings[index]
            await making.stop()

    async def _carry_out(self, index: int, making: Making) -> None:
        start = self.cutting.data_of(index).start
        chunks = self.cutting.chunks[index]
        first = 0
        while first < len(chunks):
            try:
                for source in making.sources:
                    while source.filled < chunks[first].data.stop - start:
                        await source.beyond(source.filled)
                ready = min(source.filled for source in making.sources)
                last = first + 1
                while last < len(chunks) and chunks[last].data.stop - start <= ready:
                    last += 1
                work = partial(self._merge_chunks, start, chunks[first:last], making)
                making.working = asyncio.ensure_future(
                    self._threads.run_telling(work, tell=making.made.grow)
                )
                making.working.add_done_callback(_hear_out)
                await asyncio.shield(making.working)
            except (Abandoned, NotFinite) as error:
                making.made.abandon(str(error))
                return
            first = last

    async def _merge(
        self,
        index: int,
        contributors: tuple[int, ...],
        weights: tuple[float, ...],
        members: tuple[int, ...] | None,
    ) -> None:
        """``contributors``: who brought the payloads, delegates for all of their site."""
        growing = self._merged[index]
        payloads = []
        for entry in contributors:
            data = self._received[index, entry].data
            assert data is not None, "the machine merges what has arrived"
            payloads.append(data)
        for (at, entry), received in self._received.items():
            if at == index and entry not in contributors:
                received.data = received.checked = None
        if self.moves_states and index == 0:
            united = MergedMap()
            for entry in contributors:
                united = united.united(_decode_marks(self._marks_received[entry]))
            self._marks_merged = _encode_marks(united)
        making = self._makings.get(index)
        if making is None or not making.is_of(contributors, weights, payloads):
            await self._stop_ahead(index)
            sources = tuple(Growing.whole(payload) for payload in payloads)
            making = self._make(index, contributors, weights, sources, members)
        making.sealed = True
        followed = 0
        try:
            while followed < len(growing.data):
                followed = await making.made.beyond(followed)
                growing.grow(max(followed, growing.filled))
        except Abandoned as error:
            # Each was finite; together they are not. Nobody will have this slice: void.
            growing.abandon(error.reason)
            return
        self._makings.pop(index, None)
        for entry in contributors:
            self._received[index, entry].data = self._received[index, entry].checked = None
        self.tally.merged_at = asyncio.get_running_loop().time()
        if self.moves_states and index == 0:
            making.hasher.update(self._marks_merged or b"")
        self._here[index].set()
        self._outcomes.slice_merged(index, making.hasher.digest())

    def _merge_chunks(
        self, start: int, chunks: Sequence[Chunk], making: Making, say: Callable[[int], None]
    ) -> None:
        """``start``: of the slice, where the chunks are counted from the payload's."""
        scratch = self._threads.scratch()
        for chunk in chunks:
            if making.stopped:
                return
            part = slice(chunk.data.start - start, chunk.data.stop - start)
            out = making.made.data[part]
            self._numbers.merge(
                chunk,
                [source.data[part] for source in making.sources],
                making.weights,
                out,
                scratch,
                members=making.members,
            )
            making.hasher.update(out)
            say(part.stop)

    def answer(self, index: int) -> None:
        """Carry out ``Answer``."""
        self._answerable[index].set()

    async def _answer(self, bulk: Bulk, index: int, entry: int) -> None:
        await self._answerable[index].wait()
        growing = self._merged[index]
        if self.moves_states and index == 0:
            await growing.beyond(0)
        received = self._received.get((index, entry))
        await self._give_merged(bulk, index, (received.problem if received else None) or "")

    async def _give_merged(self, bulk: Bulk, index: int, but: str) -> None:
        await bulk.grant(but=but)
        if self.moves_states and index == 0:
            await bulk.send_frame(self._marks_merged or b"")
        await _send_growing(bulk, self._merged[index])
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
        squares = np.zeros(len(self.cutting.fragment.units))
        for chunks in self.cutting.chunks:
            await self._threads.run(self._step_slice, chunks, state, theta, momentum, squares)
        if not self.is_mix:
            self._usual.merged(squares)
        merged = self.merged_marks()
        if merged is not None and self.commit.kind == "meld":
            merged = merged_after(merged, self.commit, seal)
        if merged is not None:
            standing = with_merged_map(standing, self.commit, merged)
        return standing.state(state.fragment, theta, momentum)

    def _step_slice(
        self,
        chunks: Sequence[Chunk],
        state: FragmentState,
        theta: Float32s,
        momentum: Float32s,
        squares: Float64s,
    ) -> None:
        """``squares``: filled with how far the merged slice moves each unit."""
        scratch = self._threads.scratch()
        for chunk in chunks:
            part = chunk.values
            if not self.moves_states and momentum is not state.momentum:
                np.copyto(momentum[part], state.momentum[part])
            data = self._merged_bytes[chunk.data]
            self._numbers.step(chunk, data, state.theta, theta, momentum, scratch)
            squares[chunk.first_unit : chunk.end_unit] = self._numbers.squares(chunk, data)


def _hear_out(work: asyncio.Future[None]) -> None:
    """Whoever waited for it may be gone: its error is nobody's then."""
    if not work.cancelled():
        work.exception()


def _sum_over(
    work: Callable[[Chunk, memoryview], float], parts: Sequence[tuple[Chunk, memoryview]]
) -> float:
    return sum(work(chunk, part) for chunk, part in parts)


async def _receive_behind(
    bulk: Bulk, growing: Growing, behind: Coroutine[Any, Any, float]
) -> float:
    """Fill ``growing`` while ``behind`` reads it; returns what that returns."""
    reading = asyncio.ensure_future(behind)
    try:
        await bulk.receive_growing(growing)
        return await reading
    finally:
        reading.cancel()
        await asyncio.wait((reading,))
        if not reading.cancelled():
            reading.exception()


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
