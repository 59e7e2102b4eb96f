"""Catching up: whole states in verified pieces from several peers at once, and missed rounds.

No length that a peer announces is used here: lengths follow from the layout, and an answer that
does not fit ends that peer's part. A source that dies, stalls or lies is left out, by name; the
others go on where it stopped, and verified pieces are kept for another attempt.

The cost of a lying source is bounded by its bytes: a fetch takes at most 30 s and the time of its
bytes on a slow line. A source that did not deliver is avoided by all fragments, twice as long each
time.

Two sources begin, and another one joins for each answer that is quick, for each source that fails,
and while no answer comes: on a slow line more of them would only wait for one another. Each is
asked for half a second's worth of pieces at a time, and at least for one. When all pieces are asked
for, a source that has none to send is asked for one that is late at another.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

import blake3

from averaging.errors import AveragingError, BadPayload, LineageBroken
from averaging.history.lineage import Lineage
from averaging.history.manifest import (
    MANIFEST_MAX_BYTES,
    PIECE_BYTES,
    Manifest,
    Pieces,
    as_bytes,
    read_manifest,
)
from averaging.history.replay import ReplayEntry, ReplayHead
from averaging.history.standing import Standing
from averaging.history.state import FragmentState
from averaging.live.states.fetch_server import (
    AskManifest,
    AskPieces,
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
REQUEST_S = 0.5
"""A request is for as many pieces as its source sends in this time. A source that sends more than
one has two requests at a time, so that it never waits for one."""
PIECES_PER_REQUEST = 16
"""A request is for at most this many pieces."""
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


@dataclass(slots=True)
class _Attempt:
    """One attempt to fetch a state: what is asked for, and the answers of the peers."""

    fragment: int
    values: int
    trust: Trust
    reasons: dict[PeerId, str] = field(default_factory=dict)
    """The reason of each peer that gives nothing."""
    manifests: dict[PeerId, Manifest] = field(default_factory=dict)
    identities: dict[PeerId, bytes] = field(default_factory=dict)
    """Those of the states of all peers that answered. One behind a relay sends no manifest."""

    def holders(self, identity: bytes) -> set[PeerId]:
        """The peers that say they have this state."""
        return {peer for peer, theirs in self.identities.items() if theirs == identity}

    def votes(self, identity: bytes) -> int:
        """Number of peers that count and say they have this state."""
        return sum(map(self.trust.counts, self.holders(identity)))

    def failed(self) -> FetchFailed:
        return FetchFailed(self.fragment, self.reasons)

    def most_alike(self) -> int:
        """Number of peers that have the state that most of them have."""
        return max(Counter(self.identities.values()).values(), default=0)


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
    pieces_per_request: int = PIECES_PER_REQUEST
    has_momentum: bool = True
    """False for a reader of parameters alone: the momentum of its states is empty."""
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
        values: int,
        sources: Sequence[PeerId],
        *,
        trust: Trust,
        timeout_s: float,
    ) -> FragmentState:
        """The state that most sources have, of those that may be taken, from all who have it.

        Raises ``FetchFailed``; verified pieces are kept for the next call.
        """
        attempt = _Attempt(fragment, values, trust)
        try:
            async with asyncio.timeout(timeout_s), self._turns[fragment]:
                return await self._state(attempt, sources)
        except TimeoutError:
            attempt.reasons.setdefault(self.host.peer_id, f"not done within {timeout_s:g} s")
            raise attempt.failed() from None

    async def _state(self, attempt: _Attempt, sources: Sequence[PeerId]) -> FragmentState:
        fragment, trust = attempt.fragment, attempt.trust
        asked = list(dict.fromkeys(sources))[:SOURCES_MAX]
        await self._ask_all(asked, attempt)
        manifest = self._chosen(attempt)
        if attempt.votes(manifest.identity()) < trust.holders_min(manifest):
            # Each group of a large swarm has a state of its own: ask those who made this one.
            signers = [peer for peer in trust.signers(manifest) if peer not in asked]
            more = signers[:SOURCES_MAX]
            await self._ask_all(more, attempt)
            asked += more
            manifest = self._chosen(attempt)
        needed, holders = trust.holders_min(manifest), attempt.holders(manifest.identity())
        if (count := attempt.votes(manifest.identity())) < needed:
            for peer in holders:
                attempt.reasons[peer] = (
                    f"{count} of {needed} peers that must hold the same bits of "
                    f"version {manifest.version}"
                )
            raise attempt.failed()
        holders &= attempt.manifests.keys()
        partial = self._partials.get(fragment)
        if partial is None or partial.manifest != manifest:
            values, has_momentum = attempt.values, self.has_momentum
            partial = Partial.begin(manifest, values, self.floats, has_momentum=has_momentum)
            self._partials[fragment] = partial
        self.report(partial, len(holders))
        order = [peer for peer in asked if peer in holders]
        await _Download(self, partial, order, attempt.reasons).run()
        if not partial.done:
            raise attempt.failed()
        del self._partials[fragment]
        self._blame(manifest, attempt)
        return partial.state()

    def _blame(self, fetched: Manifest, attempt: _Attempt) -> None:
        """Name the sources that are outvoted about the lineage of a state that was fetched.

        A state that cannot be had accuses nobody.
        """
        right = fetched.identity()
        votes = attempt.votes(right)
        for peer, manifest in sorted(attempt.manifests.items()):
            theirs = attempt.identities[peer]
            differs = manifest.lineage == fetched.lineage and theirs != right
            if differs and is_outvoted(attempt.votes(theirs), by=votes):
                self.on_wrong_bits(peer, fetched.fragment, "it serves other bits than most")

    async def _ask_all(self, asked: Sequence[PeerId], attempt: _Attempt) -> None:
        """Ask for manifests; once most of those who were asked agree, the others have a moment."""

        async def ask(peer: PeerId) -> None:
            try:
                answer, signatures = await self._manifest(peer, attempt)
            except _SOURCE_ERRORS as error:
                attempt.reasons[peer] = str(error)
                return
            if isinstance(answer, Manifest):
                attempt.manifests[peer] = answer
                attempt.identities[peer] = answer.identity()
                attempt.trust.hear(answer, signatures)
            else:
                attempt.identities[peer] = answer
                attempt.reasons[peer] = RELAYED

        async with asyncio.TaskGroup() as tasks:
            pending = {tasks.create_task(ask(peer)) for peer in asked}
            patience_s: float | None = None
            while pending:
                done, pending = await asyncio.wait(
                    pending, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    break
                if 2 * attempt.most_alike() > len(asked):
                    patience_s = STRAGGLERS_S
            for each in pending:
                each.cancel()
        for peer in asked:
            if peer not in attempt.manifests:
                attempt.reasons.setdefault(
                    peer, "most of the others agreed long before it answered"
                )

    def _chosen(self, attempt: _Attempt) -> Manifest:
        """The state that most of the sources that count have, of those that may be taken."""
        reasons = attempt.reasons
        problem_with = cache(attempt.trust.problem)  # most manifests are equal
        camps: dict[bytes, Counter[Manifest]] = {}
        for peer in sorted(attempt.manifests):
            manifest = attempt.manifests[peer]
            problem = problem_with(manifest)
            if problem is None:
                camps.setdefault(attempt.identities[peer], Counter())[manifest] += 1
            else:
                reasons[peer] = problem
        if not camps:
            raise attempt.failed()

        def weight(identity: bytes) -> tuple[int, int, int, bytes]:
            manifest = next(iter(camps[identity]))
            return attempt.votes(identity), manifest.tip.tokens, manifest.version, identity

        best = max(camps, key=weight)
        ((chosen, _),) = camps[best].most_common(1)  # with the older links that most of them know
        for identity, known in camps.items():
            if identity == best:
                continue
            manifest = next(iter(known))
            for peer in sorted(attempt.holders(identity)):
                if manifest.lineage == chosen.lineage:
                    # Equal history and different bits: a bug, bad hardware, or a liar.
                    self.counters["digests_disagree"] += 1
                    reasons[peer] = "same lineage as the majority, other bits"
                    logger.warning(
                        "digests_disagree fragment=%d version=%d peer=%s",
                        attempt.fragment,
                        chosen.version,
                        peer,
                    )
                else:
                    reasons[peer] = f"it has version {manifest.version}, most have another"
        return chosen

    async def _manifest(
        self, peer: PeerId, attempt: _Attempt
    ) -> tuple[Manifest | bytes, Signatures]:
        """A manifest with its signatures. Over a relay its digest."""
        timeout_s = MANIFEST_TIMEOUT_S
        try:
            async with asyncio.timeout(timeout_s):
                return await self._all_of_manifest(peer, attempt.fragment, attempt.values)
        except TimeoutError:
            raise StreamBroken(peer, f"its manifest was not here within {timeout_s:g} s") from None

    async def _all_of_manifest(
        self, peer: PeerId, fragment: int, values: int
    ) -> tuple[Manifest | bytes, Signatures]:
        async with self.stream(peer, for_digest=True) as stream:
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
            manifest: Manifest | bytes = bytes(data)
            if not stream.relayed:
                manifest = read_manifest(bytes(data), fragment=fragment, values=values)
            return manifest, signatures

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
        manifest = partial.manifest
        self.on_progress(
            FetchProgress(
                manifest.fragment, manifest.version, len(partial.here), partial.count, sources
            )
        )

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
    runs: list[list[int]] = field(default_factory=list)
    """Runs of pieces that were asked for and are not here, the oldest first."""
    piece_s: float | None = None
    """Seconds per piece in its last run."""


class _Download:
    """The missing pieces of a state on their way from several sources."""

    def __init__(
        self,
        fetcher: Fetcher,
        partial: Partial,
        holders: Sequence[PeerId],
        reasons: dict[PeerId, str],
    ) -> None:
        """``holders``: in the order in which they begin; every reader has another. ``reasons``:
        where the reason of each that failed is put."""
        self._fetcher = fetcher
        self._partial = partial
        self._spare = deque(holders)
        self._reasons = reasons
        self._tasks = asyncio.TaskGroup()
        self._working: set[asyncio.Task[None]] = set()
        self._asked_at: dict[int, float] = {}
        """The pieces that were asked for and are not here, and when."""
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Return when everything is here, or every source has failed."""
        async with self._tasks:
            for _ in range(SOURCES_AT_FIRST):
                self._begin_another()

    def _begin_another(self) -> None:
        if self._spare and not self._partial.done:
            task = self._tasks.create_task(self._work(_Source(self._spare.popleft())))
            self._working.add(task)
            task.add_done_callback(self._working.discard)

    async def _work(self, source: _Source) -> None:
        """Have pieces sent by one source until all are here."""
        try:
            while not self._partial.done:
                await self._until_wanted(source)
                await self._receive(source)
        except _SOURCE_ERRORS as error:
            self._reasons[source.peer] = str(error)
            self._fetcher.counters["sources_left"] += 1
            fragment = self._partial.manifest.fragment
            said = "source_left fragment=%d peer=%s reason=%s"
            logger.info(said, fragment, source.peer, error)
            self._begin_another()
        if self._partial.done:  # nobody waits for the last words of a source
            for task in self._working - {asyncio.current_task()}:
                task.cancel()

    def _late_after_s(self, source: _Source) -> float:
        """Time after which a piece is late, as far as this source can tell."""
        if source.piece_s is None:
            return HURRY_S + len(self._working) * PIECE_BYTES / SLOWEST_LINE_BYTES_S
        return HURRY_S + SLOWER_MAX * source.piece_s

    async def _until_wanted(self, source: _Source) -> None:
        """Wait until a piece is missing, or late at another source."""
        while not self._partial.missing and not self._partial.done:
            late_at = min(self._asked_at.values()) + self._late_after_s(source)
            if late_at <= _now():
                return
            with suppress(TimeoutError):
                async with asyncio.timeout_at(late_at):
                    await self._changed.wait()

    def _next_run(self, source: _Source) -> list[int]:
        """The pieces to ask a source for: what it sends in a short time, and a fair share; or one
        that is late at another one."""
        length = 1
        if source.piece_s is not None:
            share = len(self._partial.missing) / (2 * len(self._working))
            sends = min(REQUEST_S / max(source.piece_s, 1e-6), share)
            length = max(1, min(int(sends), self._fetcher.pieces_per_request))
        run, now = self._partial.take(length), _now()
        if not run and not source.runs:
            late_s = self._late_after_s(source)
            late = [piece for piece, asked_at in self._asked_at.items() if asked_at + late_s <= now]
            run = sorted(late)[:1]
        self._asked_at.update(dict.fromkeys(run, now))
        return run

    async def _ask(self, stream: Stream, source: _Source) -> None:
        run = self._next_run(source)
        if run:
            source.runs.append(run)
            manifest = self._partial.manifest
            first, count = run[0], len(run)
            await ask(stream, AskPieces(manifest.fragment, manifest.lineage, first, count))

    async def _receive(self, source: _Source) -> None:
        """Have pieces sent as long as there are any to ask for."""
        loop = asyncio.get_running_loop()
        try:
            async with self._fetcher.stream(source.peer) as stream:
                await self._ask(stream, source)
                while source.runs:
                    began, count = _now(), len(source.runs[0])
                    if source.piece_s is not None and source.piece_s < REQUEST_S:
                        await self._ask(stream, source)
                    late = loop.call_later(self._late_after_s(source), self._begin_another)
                    try:
                        while source.runs[0]:
                            await self._receive_piece(stream, source)
                    finally:
                        late.cancel()
                    del source.runs[0]
                    size, now = count * PIECE_BYTES, _now()
                    self._fetcher.line.transferred(source.peer, size, began=began, ended=now)
                    source.piece_s = (now - began) / count
                    if source.piece_s < HURRY_S:
                        self._begin_another()
                    if not source.runs:
                        await self._ask(stream, source)
        finally:
            owed = [piece for run in source.runs for piece in run]
            for piece in owed:
                self._asked_at.pop(piece, None)
            self._partial.put_back(owed)
            source.runs.clear()
            self._something_changed()

    async def _receive_piece(self, stream: Stream, source: _Source) -> None:
        fetcher, partial = self._fetcher, self._partial
        piece, frame = source.runs[0][0], await next_data(stream)
        if piece not in partial.here:
            wrong = await fetcher.threads.run(partial.place, piece, frame)
            if wrong is not None:
                fetcher.counters["pieces_refused"] += 1
                fetcher.on_wrong_bits(source.peer, partial.manifest.fragment, wrong)
                raise BadMessage(wrong)
            partial.here.add(piece)
            self._asked_at.pop(piece, None)
            fetcher.report(partial, len(self._working))
            if partial.done:
                self._something_changed()
        source.runs[0].remove(piece)

    def _something_changed(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _now() -> float:
    return asyncio.get_running_loop().time()


@dataclass(slots=True, eq=False)
class Partial:
    """A state on its way: verified pieces stay, whoever they came from."""

    manifest: Manifest
    theta: Float32s
    momentum: Float32s
    count: int
    """Number of pieces that are wanted."""
    missing: list[int]
    """Pieces that nobody is fetching, in descending order."""
    here: set[int] = field(default_factory=set)
    """Pieces that are verified and in their place."""

    @classmethod
    def begin(
        cls,
        manifest: Manifest,
        values: int,
        floats: Callable[[int], Float32s],
        *,
        has_momentum: bool = True,
    ) -> Partial:
        """``floats(count)``: memory for so many values."""
        pieces = Pieces(values)
        count = pieces.count if has_momentum else pieces.of_theta
        return cls(
            manifest,
            floats(values),
            floats(values if has_momentum else 0),
            count,
            list(range(count))[::-1],
        )

    @property
    def done(self) -> bool:
        return len(self.here) == self.count

    def take(self, most: int) -> list[int]:
        """A run of consecutive missing pieces, for one request."""
        taken: list[int] = []
        while self.missing and len(taken) < most:
            if taken and self.missing[-1] != taken[-1] + 1:
                break
            piece = self.missing.pop()
            if piece not in self.here:  # it was asked for twice, and one who failed had it, too
                taken.append(piece)
        return taken

    def put_back(self, indices: Iterable[int]) -> None:
        self.missing = sorted({*self.missing, *indices} - self.here, reverse=True)

    def place(self, index: int, data: bytes | memoryview) -> str | None:
        """Verify a piece and put it where it belongs; returns what is wrong with it, if so."""
        pieces = Pieces(self.theta.size)
        target = pieces.view(index, as_bytes(self.theta), as_bytes(self.momentum))
        if len(data) != len(target):
            return f"piece {index} has {len(data)} bytes, not {len(target)}"
        if blake3.blake3(data).digest() != self.manifest.piece_digest(index):
            return f"piece {index} has other bits than its manifest says"
        target[:] = data
        return None

    def state(self) -> FragmentState:
        assert self.done
        manifest = self.manifest
        return FragmentState(
            manifest.fragment,
            manifest.version,
            manifest.lineage,
            manifest.chain(),
            self.theta,
            self.momentum,
            manifest.merged(),
            manifest.history,
        )
