"""Catching up: whole states in verified pieces from several peers at once, and missed rounds.

No length that a peer announces is used here: lengths follow from the layout, and an answer that
does not fit ends that peer's part. A source that dies, stalls or lies is left out, by name; the
others go on where it stopped, and verified pieces are kept for another attempt.

The cost of a lying source is bounded by its bytes: a fetch takes at most 30 s and the time of its
bytes on a slow line. A source that did not deliver is avoided by all fragments, twice as long each
time.

A source is asked for its manifest and, on the same stream, for pieces, one by one: it holds the
state for the stream. Two sources begin, and another one joins for each answer that is quick, for
each source that fails, and while no answer comes: on a slow line more of them would only wait for
one another. When all pieces are asked for, a source that has none to send is asked for one that is
late at another.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Protocol

import blake3

from averaging.errors import AveragingError, BadPayload, LineageBroken
from averaging.history.lineage import Lineage
from averaging.history.manifest import MANIFEST_MAX_BYTES, Manifest, read_manifest
from averaging.history.replay import ReplayEntry, ReplayHead
from averaging.history.standing import Standing
from averaging.history.state import PIECE_BYTES, FragmentState, Pieces, as_bytes
from averaging.live.states.fetch_server import (
    AskManifest,
    AskPiece,
    AskReplay,
    fetch_protocol,
)
from averaging.live.streams.questions import (
    END_WITHIN_S,
    RELAYED,
    STALL_MAX_S,
    NotHere,
    ask,
    next_data,
    read_exactly,
    stream_to,
)
from averaging.live.streams.threads import Threads
from averaging.messages import BadMessage, Signatures, decode_signatures
from averaging.numbers.arrays import Float32s, uninitialised_floats
from averaging.round.fetched_states import is_outvoted
from averaging.round.gathering.catching_up import SLOWEST_LINE_BYTES_S
from averaging.rules.line_speed import LineSpeed
from dht.errors import HostClosed, PeerUnreachable, StreamBroken
from dht.host import Messaging, Stream
from dht.identity import PeerId, RunId

logger = logging.getLogger(__name__)

SOURCES_MAX = 8
"""Peers asked at once."""
MANIFEST_TIMEOUT_S = 60.0
"""All of a manifest. The source reads its whole state to answer the first one who asks."""
STRAGGLERS_S = 3.0
"""Once most of those who were asked agree, the others have so long to answer."""
SOURCES_AT_FIRST = 2
"""Sources that are asked for pieces before any has answered."""
HURRY_S = 2.0
"""Time that a piece may take before it is late, beside ``SLOWER_MAX`` times that of a piece from
another source; or, while nothing was measured, that of all pieces on the way on the slowest line.
Answers below it are quick."""
SLOWER_MAX = 8.0
AHEAD_S = 0.5
"""A source that sends a piece in less has two requests at a time, so that it never waits for one.
"""
REPLAYS_MAX = 64
"""More rounds than this are not replayed one by one: the state is smaller."""

DIGEST_BYTES = 32


class FetchFailed(AveragingError):
    """No source could, or would, give what was asked. ``reasons``: one for each source."""

    fragment: int
    reasons: Mapping[PeerId, str]

    def __str__(self) -> str:
        reasons = "; ".join(f"{peer}: {reason}" for peer, reason in sorted(self.reasons.items()))
        return f"fragment {self.fragment} could not be fetched: {reasons or 'nobody to ask'}"


_SOURCE_ERRORS = (PeerUnreachable, StreamBroken, HostClosed, BadMessage, NotHere)
"""The failures of a source. It is left, the others go on."""


class Trust(Protocol):
    """The states that a reader takes, and the peers that it believes."""

    def holders_min(self, manifest: Manifest) -> int:
        """Sources that count and must hold the same bits. A lineage is signed, its bits are not."""
        ...

    def counts(self, peer: PeerId) -> bool: ...

    def hear(self, manifest: Manifest, signatures: Signatures) -> None:
        """Keep the signatures that a source shows under its state's newest link."""
        ...

    def problem(self, manifest: Manifest) -> str | None:
        """The reason not to take this state; ``None``: it may be taken."""
        ...

    def signers(self, manifest: Manifest) -> Sequence[PeerId]:
        """Peers that have signed for this state: they hold it, or held it lately."""
        ...


@dataclass(frozen=True, slots=True)
class FetchProgress:
    """Progress in fetching one fragment."""

    fragment: int
    version: int
    verified_pieces: int
    pieces: int
    sources: int


@dataclass(slots=True, eq=False)
class Fetcher:
    """Fetches what a peer lacks of one run: all fragments, one state at a time of each."""

    host: Messaging
    run: RunId
    threads: Threads
    on_progress: Callable[[FetchProgress], None] = lambda progress: None
    on_wrong_bits: Callable[[PeerId, int, str], None] = lambda peer, fragment, reason: None
    """Hears of a peer that serves other bits than it should, of a fragment."""
    line: LineSpeed = field(default_factory=LineSpeed)
    """Speed of the own line downwards, which downloads help to measure."""
    counters: Counter[str] = field(default_factory=Counter)
    parameters_alone: bool = False
    """True for a reader of parameters: its states have no momentum in any run."""
    floats: Callable[[int], Float32s] = uninitialised_floats
    """Gives the memory of states."""
    _partials: dict[int, Partial] = field(default_factory=dict)
    _turns: defaultdict[int, asyncio.Lock] = field(
        default_factory=lambda: defaultdict(asyncio.Lock)
    )
    """The turn to fetch a fragment's state: two calls would share its verified pieces, and
    each would look in vain for those that the other one has asked for."""

    async def state(
        self,
        fragment: int,
        pieces: Pieces,
        sources: Sequence[PeerId],
        *,
        trust: Trust,
        timeout_s: float,
    ) -> FragmentState:
        """The state that most sources have, of those that may be taken, from all who have it.

        Raises ``FetchFailed``; verified pieces are kept for the next call.
        """
        fetch = _Fetch(self, fragment, pieces, trust)
        try:
            async with asyncio.timeout(timeout_s), self._turns[fragment]:
                partial = await fetch.run(list(dict.fromkeys(sources))[:SOURCES_MAX])
        except TimeoutError:
            fetch.reasons.setdefault(self.host.peer_id, f"not done within {timeout_s:g} s")
            partial = None
        if partial is None:
            raise FetchFailed(fragment, fetch.reasons)
        del self._partials[fragment]
        return partial.state()

    def partial(self, manifest: Manifest, pieces: Pieces) -> Partial:
        """The pieces of a state that are here."""
        partial = self._partials.get(manifest.fragment)
        if partial is None or partial.manifest != manifest:
            wanted = replace(pieces, momentum=0) if self.parameters_alone else pieces
            partial = Partial.begin(manifest, wanted, self.floats)
            self._partials[manifest.fragment] = partial
        return partial

    async def replay(
        self,
        fragment: int,
        sizes: Sequence[int],
        source: PeerId,
        standing: Standing,
        *,
        target: Lineage,
        timeout_s: float,
    ) -> tuple[ReplayEntry, ...]:
        """The rounds that lead from ``standing`` to ``target``, every one of them verified.

        Raises ``FetchFailed``: then only a whole state will do.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await self._replay(fragment, sizes, source, standing, target)
        except (*_SOURCE_ERRORS, LineageBroken, BadPayload) as error:
            self.counters["replays_failed"] += 1
            if isinstance(error, BadPayload):
                self.on_wrong_bits(source, fragment, str(error))
            raise FetchFailed(fragment, {source: str(error)}) from error
        except TimeoutError:
            raise FetchFailed(fragment, {source: f"not done within {timeout_s:g} s"}) from None

    async def _replay(
        self,
        fragment: int,
        sizes: Sequence[int],
        source: PeerId,
        standing: Standing,
        target: Lineage,
    ) -> tuple[ReplayEntry, ...]:
        entries: list[ReplayEntry] = []
        async with self.stream(source) as stream:
            await ask(stream, AskReplay(fragment, standing.version, standing.lineage))
            while standing.lineage != target:
                if len(entries) >= REPLAYS_MAX:
                    raise BadMessage(f"more than {REPLAYS_MAX} rounds to replay")
                began = _now()
                head = ReplayHead.decode(bytes(await next_data(stream)))
                if head.commit.fragment != fragment:
                    raise BadMessage(f"a round of fragment {head.commit.fragment}")
                # All of it is under the lineage that we arrive at, or do not.
                standing = head.after(standing)
                payload = await read_exactly(stream, head.payload_size(sizes))
                self.line.transferred(source, len(payload), began=began, ended=_now())
                entry = ReplayEntry(head, payload)
                await self.threads.run(
                    lambda entry=entry: entry.check(sizes, self.threads.scratch())  # type: ignore[misc]
                )
                entries.append(entry)
                self.counters["entries_fetched"] += 1
            with suppress(*_SOURCE_ERRORS):
                if await next_data(stream, timeout_s=END_WITHIN_S):
                    stream.abort()  # rounds since then would follow
        return tuple(entries)

    def report(self, partial: Partial, sources: int) -> None:
        manifest, here, count = partial.manifest, len(partial.here), partial.pieces.count
        self.on_progress(FetchProgress(manifest.fragment, manifest.version, here, count, sources))

    @asynccontextmanager
    async def stream(self, peer: PeerId, *, for_digest: bool = False) -> AsyncIterator[Stream]:
        async with stream_to(self.host, peer, fetch_protocol(self.run)) as stream:
            if stream.relayed and not for_digest:
                raise NotHere(RELAYED)
            yield stream


@dataclass(slots=True, eq=False)
class _Source:
    """A peer from which pieces are fetched."""

    peer: PeerId
    asked: deque[int] = field(default_factory=deque)
    """Pieces that were asked for and are not here, the oldest first."""
    piece_s: float | None = None
    """Time that its last piece took."""


class _Fetch:
    """One attempt to fetch a state: what its sources say, and the pieces on their way."""

    def __init__(self, fetcher: Fetcher, fragment: int, pieces: Pieces, trust: Trust) -> None:
        self.reasons: dict[PeerId, str] = {}
        """The reason of each peer that gives nothing."""
        self._fetcher = fetcher
        self._fragment = fragment
        self._pieces = pieces
        self._trust = trust
        self._manifests: dict[PeerId, Manifest] = {}
        self._identities: dict[PeerId, bytes] = {}
        """Those of the states of all peers that answered. One behind a relay sends no manifest."""
        self._partial: Partial | None = None
        """The state that is fetched, once it is chosen."""
        self._is_chosen = False
        """True when it is known which state is fetched, if any is."""
        self._tasks = asyncio.TaskGroup()
        self._talking: dict[PeerId, asyncio.Task[None]] = {}
        self._working: set[PeerId] = set()
        """Those that are asked for pieces."""
        self._spare: deque[PeerId] = deque()
        """Other holders, in the order in which they begin; every reader has another."""
        self._asked_at: dict[int, float] = {}
        """The pieces that were asked for and are not here, and when."""
        self._changed = asyncio.Event()

    async def run(self, asked: list[PeerId]) -> Partial | None:
        """The state that most sources have, whole. ``None``: all have failed."""
        async with self._tasks:
            await self._ask_all(asked)
            manifest = self._choose()
            if manifest is not None and self._votes(manifest) < self._trust.holders_min(manifest):
                # Each group of a large swarm has a state of its own: ask those who made this one.
                signers = [peer for peer in self._trust.signers(manifest) if peer not in asked]
                more = signers[:SOURCES_MAX]
                await self._ask_all(more)
                asked += more
                manifest = self._choose()
            if manifest is not None and self._is_held_by_enough(manifest):
                self._partial = self._fetcher.partial(manifest, self._pieces)
                holders = self._holders(manifest.identity()) & self._manifests.keys()
                self._fetcher.report(self._partial, len(holders))
                self._spare.extend(peer for peer in asked if peer in holders)
                for _ in range(SOURCES_AT_FIRST):
                    self._begin_another()
            self._is_chosen = True
            self._something_changed()
        if self._partial is None or not self._partial.done:
            return None
        self._blame(self._partial.manifest)
        return self._partial

    # What the sources have

    def _holders(self, identity: bytes) -> set[PeerId]:
        """The peers that say they have this state."""
        return {peer for peer, theirs in self._identities.items() if theirs == identity}

    def _votes(self, manifest: Manifest) -> int:
        """Number of peers that count and say they have this state."""
        return sum(map(self._trust.counts, self._holders(manifest.identity())))

    def _is_held_by_enough(self, manifest: Manifest) -> bool:
        needed, count = self._trust.holders_min(manifest), self._votes(manifest)
        if count >= needed:
            return True
        for peer in self._holders(manifest.identity()):
            self.reasons[peer] = (
                f"{count} of {needed} peers that must hold the same bits of "
                f"version {manifest.version}"
            )
        return False

    def _blame(self, fetched: Manifest) -> None:
        """Name the sources with the lineage of a state that was fetched, and other bits: by a bug,
        bad hardware or a lie. Those that are outvoted are struck.

        A state that cannot be had accuses nobody.
        """
        right, votes = fetched.identity(), self._votes(fetched)
        for peer, manifest in sorted(self._manifests.items()):
            if manifest.lineage != fetched.lineage or self._identities[peer] == right:
                continue
            self._fetcher.counters["digests_disagree"] += 1
            told = self._fragment, fetched.version, peer
            logger.warning("digests_disagree fragment=%d version=%d peer=%s", *told)
            if is_outvoted(self._votes(manifest), by=votes):
                self._fetcher.on_wrong_bits(peer, self._fragment, "it serves other bits than most")

    async def _ask_all(self, asked: Sequence[PeerId]) -> None:
        """Ask for manifests; once most of those who were asked agree, the others have a moment."""
        for peer in asked:
            self._talk(peer)
        patience_s: float | None = None
        while silent := [peer for peer in asked if not self._has_answered(peer)]:
            try:
                async with asyncio.timeout(patience_s):
                    await self._changed.wait()
            except TimeoutError:
                break
            if 2 * max(Counter(self._identities.values()).values(), default=0) > len(asked):
                patience_s = STRAGGLERS_S
        for peer in silent:
            self._talking[peer].cancel()
            self.reasons[peer] = "most of the others agreed long before it answered"

    def _has_answered(self, peer: PeerId) -> bool:
        return peer in self._identities or peer in self.reasons

    def _choose(self) -> Manifest | None:
        """The state that most of the sources that count have, of those that may be taken."""
        reasons = self.reasons
        problem_with = cache(self._trust.problem)  # most manifests are equal
        camps: dict[bytes, Counter[Manifest]] = {}
        for peer in sorted(self._manifests):
            manifest = self._manifests[peer]
            problem = problem_with(manifest)
            if problem is None:
                camps.setdefault(self._identities[peer], Counter())[manifest] += 1
            else:
                reasons[peer] = problem
        if not camps:
            return None

        def weight(identity: bytes) -> tuple[int, int, int, bytes]:
            manifest = next(iter(camps[identity]))
            return self._votes(manifest), manifest.tip.tokens, manifest.version, identity

        best = max(camps, key=weight)
        ((chosen, _),) = camps[best].most_common(1)  # with the older links that most of them know
        for identity, known in camps.items():
            if identity == best:
                continue
            version = next(iter(known)).version
            for peer in self._holders(identity):
                reasons[peer] = f"it has version {version}, most have another state"
        return chosen

    # One source

    def _talk(self, peer: PeerId) -> None:
        self._talking[peer] = self._tasks.create_task(self._ask(peer))

    async def _ask(self, peer: PeerId) -> None:
        """Ask a source for its manifest and, if it is one of those that begin, for pieces."""
        works = peer in self._working
        try:
            async with self._fetcher.stream(peer, for_digest=True) as stream:
                await self._hear_manifest(stream, peer)
                self._something_changed()
                while not self._is_chosen:
                    await self._changed.wait()
                    works = peer in self._working
                if works and self._partial is not None:
                    await self._receive(stream, _Source(peer), self._partial)
        except _SOURCE_ERRORS as error:
            self.reasons[peer] = str(error)
            if works:
                self._left(peer, error)
        self._something_changed()
        if self._partial is not None and self._partial.done:
            for task in self._talking.values():  # nobody waits for the last words of a source
                if task is not asyncio.current_task():
                    task.cancel()

    def _left(self, peer: PeerId, error: Exception) -> None:
        self._working.discard(peer)
        self._fetcher.counters["sources_left"] += 1
        said = "source_left fragment=%d peer=%s reason=%s"
        logger.info(said, self._fragment, peer, error)
        self._begin_another()

    async def _hear_manifest(self, stream: Stream, peer: PeerId) -> None:
        """Hear which state a source has. Over a relay it tells the state's digest alone."""
        try:
            async with asyncio.timeout(MANIFEST_TIMEOUT_S):
                signatures, data = await _all_of_manifest(stream, self._fragment)
        except TimeoutError:
            late = f"its manifest was not here within {MANIFEST_TIMEOUT_S:g} s"
            raise StreamBroken(peer, late) from None
        if stream.relayed:
            self._identities[peer] = data
            raise NotHere(RELAYED)
        manifest = read_manifest(data, fragment=self._fragment, pieces=self._pieces)
        if self._partial is not None:
            if manifest.identity() != self._partial.manifest.identity():
                raise NotHere(f"it has gone on to version {manifest.version}")
            return
        self._manifests[peer], self._identities[peer] = manifest, manifest.identity()
        self._trust.hear(manifest, signatures)

    # Pieces

    def _begin_another(self) -> None:
        if self._partial is None or self._partial.done or not self._spare:
            return
        self._working.add(peer := self._spare.popleft())
        if self._is_chosen:  # the streams of the others have ended
            self._talk(peer)

    def _late_after_s(self, source: _Source) -> float:
        """Time after which a piece is late, as far as this source can tell."""
        if source.piece_s is None:
            return HURRY_S + len(self._working) * PIECE_BYTES / SLOWEST_LINE_BYTES_S
        return HURRY_S + SLOWER_MAX * source.piece_s

    async def _want(self, stream: Stream, source: _Source, partial: Partial) -> None:
        """Ask for a missing piece, if there is one; or, by a source that has no other to send, for
        one that is late at another source."""
        piece = partial.take()
        while piece is None and not source.asked and not partial.done:
            piece = min(self._asked_at, key=self._asked_at.__getitem__)
            late_at = self._asked_at[piece] + self._late_after_s(source)
            if late_at > _now():
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(late_at):
                        await self._changed.wait()
                piece = partial.take()
        if piece is not None:
            source.asked.append(piece)
            self._asked_at[piece] = _now()
            await ask(stream, AskPiece(piece))

    async def _receive(self, stream: Stream, source: _Source, partial: Partial) -> None:
        """Have pieces sent until all are here."""
        loop = asyncio.get_running_loop()
        try:
            await self._want(stream, source, partial)
            while source.asked:
                if source.piece_s is not None and source.piece_s < AHEAD_S:
                    await self._want(stream, source, partial)
                began = _now()
                late = loop.call_later(self._late_after_s(source), self._begin_another)
                try:
                    frame = await next_data(stream)
                finally:
                    late.cancel()
                size = len(frame)
                self._fetcher.line.transferred(source.peer, size, began=began, ended=_now())
                await self._place(source, partial, frame)
                source.piece_s = _now() - began
                if source.piece_s < HURRY_S:
                    self._begin_another()
                if not source.asked:
                    await self._want(stream, source, partial)
        finally:
            for piece in source.asked:
                self._asked_at.pop(piece, None)
            partial.put_back(source.asked)

    async def _place(self, source: _Source, partial: Partial, frame: memoryview) -> None:
        """Verify the piece that was asked for first, and put it where it belongs."""
        fetcher, piece = self._fetcher, source.asked[0]
        if piece not in partial.here:
            wrong = await fetcher.threads.run(partial.place, piece, frame)
            if wrong is not None:
                fetcher.counters["pieces_refused"] += 1
                fetcher.on_wrong_bits(source.peer, self._fragment, wrong)
                raise BadMessage(wrong)
            partial.here.add(piece)
            self._asked_at.pop(piece, None)
            fetcher.report(partial, len(self._working))
            if partial.done:
                self._something_changed()
        source.asked.popleft()

    def _something_changed(self) -> None:
        self._changed.set()
        self._changed.clear()


async def _all_of_manifest(stream: Stream, fragment: int) -> tuple[Signatures, bytes]:
    """The signatures under a state's newest link, and its manifest or, over a relay, its digest."""
    await ask(stream, AskManifest(fragment))
    data = bytearray()
    timeout_s = MANIFEST_TIMEOUT_S
    signatures = decode_signatures(bytes(await next_data(stream, timeout_s=timeout_s)))
    while frame := await next_data(stream, timeout_s=timeout_s):
        data += frame
        most = DIGEST_BYTES if stream.relayed else MANIFEST_MAX_BYTES
        if len(data) > most:
            raise BadMessage(f"a manifest over {most} bytes")
        timeout_s = STALL_MAX_S
    return signatures, bytes(data)


def _now() -> float:
    return asyncio.get_running_loop().time()


@dataclass(slots=True, eq=False)
class Partial:
    """A state on its way: verified pieces stay, whoever they came from."""

    manifest: Manifest
    theta: Float32s
    momentum: Float32s
    pieces: Pieces
    """Those that are wanted."""
    missing: list[int]
    """Pieces that nobody is fetching, in descending order."""
    here: set[int] = field(default_factory=set)
    """Pieces that are verified and in their place."""

    @classmethod
    def begin(
        cls, manifest: Manifest, pieces: Pieces, floats: Callable[[int], Float32s]
    ) -> Partial:
        """``floats(count)``: memory for so many values."""
        theta, momentum = floats(pieces.theta), floats(pieces.momentum)
        return cls(manifest, theta, momentum, pieces, list(range(pieces.count))[::-1])

    @property
    def done(self) -> bool:
        return len(self.here) == self.pieces.count

    def take(self) -> int | None:
        """A missing piece, to be asked for; ``None``: there is none."""
        while self.missing:
            piece = self.missing.pop()
            if piece not in self.here:  # it was asked for twice, and one who failed had it, too
                return piece
        return None

    def put_back(self, indices: Iterable[int]) -> None:
        self.missing = sorted({*self.missing, *indices} - self.here, reverse=True)

    def place(self, index: int, data: bytes | memoryview) -> str | None:
        """Verify a piece and put it where it belongs; returns what is wrong with it, if so."""
        target = self.pieces.view(index, as_bytes(self.theta), as_bytes(self.momentum))
        if len(data) != len(target):
            return f"piece {index} has {len(data)} bytes, not {len(target)}"
        if blake3.blake3(data).digest() != self.manifest.piece_digest(index):
            return f"piece {index} has other bits than its manifest says"
        target[:] = data
        return None

    def state(self) -> FragmentState:
        assert self.done
        return self.manifest.standing().state(self.manifest.fragment, self.theta, self.momentum)
