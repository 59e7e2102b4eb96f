"""Catching up: whole states in verified pieces from several peers at once, and missed rounds.

No length that a peer announces is used here: lengths follow from the layout, and an answer that
does not fit ends that peer's part. A source that dies, stalls or lies is left out, by name; the
others go on where it stopped, and verified pieces are kept for another attempt.

The cost of a lying source is bounded by its bytes: a fetch takes at most 30 s and the time of its
bytes on a slow line. A source that did not deliver is avoided by all fragments, twice as long each
time. An idle source takes over from one that answers slowly, after 2 s and the time of a request at
500 kB/s, or eight times the fastest source's time. Where the fastest is slower than that, the
reader's own line is slow, and the others may take twice as long.

Sources send at the rates of their lines: each is asked for half a second's worth of pieces at a
time, and at least for one. Two begin, and one more for each that answers quickly: on a slow line
more of them would only wait for one another, until all are given up.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol

from averaging.errors import AveragingError, BadPayload, LineageBroken
from averaging.history.lineage import Lineage
from averaging.history.manifest import MANIFEST_MAX_BYTES, PIECE_BYTES, Manifest, read_manifest
from averaging.history.replay import ReplayEntry, ReplayHead
from averaging.history.standing import Standing
from averaging.history.state import FragmentState
from averaging.live.states.fetch_server import (
    SLOW_BYTES_S,
    AskManifest,
    AskPieces,
    AskReplay,
    fetch_protocol,
)
from averaging.live.states.partial_state import Partial
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
from dht.host import Host, Stream
from dht.identity import PeerId, RunId

logger = logging.getLogger(__name__)

SOURCES_MAX = 8
"""Peers asked at once."""
MANIFEST_TIMEOUT_S = 60.0
"""All of a manifest. The source reads its whole state to answer the first one who asks."""
STRAGGLERS_S = 3.0
"""Once most of those who were asked agree, the others have so long to answer."""
HURRY_S = 2.0
"""Time that a request may take when another source has nothing to do, beside the time of its bytes
at ``SLOW_BYTES_S``. Less if ``SLOWER_MAX`` says so."""
SLOWER_MAX = 8.0
"""Multiple of the fastest source's time that a request may take then."""
REQUEST_S = 0.5
"""A request is for as many pieces as its source sends in this time."""
PIECES_PER_REQUEST = 16
"""A request is for at most this many pieces."""
REPLAYS_MAX = 64
"""More rounds than this are not replayed one by one: the state is smaller."""
ACTIVE_AT_FIRST = 2
"""Sources that are asked for pieces before any has answered."""

OWN_LINE_SLOWER_MAX = 2.0
"""A source may always take so many times as long as the fastest."""

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
    digests: dict[PeerId, bytes] = field(default_factory=dict)
    """Digests of the manifests of peers behind a relay. These hold the state, and send none."""

    def holders(self, identity: bytes) -> set[PeerId]:
        """The peers that say they have this state."""
        found = {peer for peer, digest in self.digests.items() if digest == identity}
        return found | {p for p, each in self.manifests.items() if each.identity() == identity}

    def votes(self, identity: bytes) -> int:
        """Number of peers that count and say they have this state."""
        return sum(map(self.trust.counts, self.holders(identity)))

    def failed(self) -> FetchFailed:
        return FetchFailed(self.fragment, self.reasons)

    def most_alike(self) -> int:
        """Number of peers that have the state that most of them have."""
        alike = Counter(manifest.identity() for manifest in self.manifests.values())
        alike.update(self.digests.values())
        return max(alike.values(), default=0)


@dataclass(slots=True, eq=False)
class _Source:
    """One peer of several from whom pieces are fetched: what it owes, and how fast it is."""

    peer: PeerId
    task: asyncio.Task[None] | None = None
    waiting: list[list[int]] = field(default_factory=list)
    """Runs of pieces that were asked for and are not here, the oldest first."""
    owed: int = 0
    """Pieces in the oldest run, when it was asked for."""
    asked_at: float = 0.0
    """Time of the last question; or the time at which the piece before it was here."""
    piece_s: float | None = None
    """Seconds per piece in its fastest run."""
    last_s: float | None = None
    """Seconds per piece in its last run."""
    too_slow: str | None = None
    """The reason why it was told to stop."""

    @property
    def is_quick(self) -> bool:
        return self.last_s is not None and self.last_s < HURRY_S

    def asks(self, pieces: list[int], now: float) -> None:
        self.waiting.append(pieces)
        if len(self.waiting) == 1:
            self.owed, self.asked_at = len(pieces), now

    def has_answered(self, now: float) -> None:
        """The oldest run is here."""
        self.last_s = (now - self.asked_at) / self.owed
        self.piece_s = self.last_s if self.piece_s is None else min(self.last_s, self.piece_s)
        del self.waiting[0]
        if self.waiting:
            self.owed, self.asked_at = len(self.waiting[0]), now


class _Crew:
    """The sources of one state. An idle source takes over from a slow one."""

    def __init__(self, partial: Partial, pieces_per_request: int) -> None:
        self.sources: list[_Source] = []
        self._partial = partial
        self._pieces_per_request = pieces_per_request
        self._changed = asyncio.Event()
        self._active = 0
        self._active_max = ACTIVE_AT_FIRST
        self._answers = 0

    def something_changed(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _allowed_s(self, owed: int) -> float:
        """Time that a run of pieces may take while another source is idle."""
        measured = [source.piece_s for source in self.sources if source.piece_s is not None]
        if not measured:
            waiting = sum(len(run) for source in self.sources for run in source.waiting)
            coming = max(1, self._active, waiting)
            return HURRY_S + coming * PIECE_BYTES / SLOWEST_LINE_BYTES_S
        fastest_s = min(measured)
        slow_s = max(PIECE_BYTES / SLOW_BYTES_S, OWN_LINE_SLOWER_MAX * fastest_s)
        return HURRY_S + owed * min(slow_s, SLOWER_MAX * fastest_s)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait until one more source would not only slow down the others, as far as is known."""
        while self._active >= self._active_max:
            answers = self._answers
            try:
                async with asyncio.timeout(self._allowed_s(1)):
                    await self._changed.wait()
            except TimeoutError:
                # No answer at all: the sources that were asked are slow.
                self._active_max += answers == self._answers
        self._active += 1
        try:
            yield
        finally:
            self._active -= 1
            self.something_changed()

    def run_length(self, source: _Source) -> int:
        """Number of pieces to ask a source for: what it sends in a short time, and a fair share."""
        if source.last_s is None:
            return 1
        share = len(self._partial.missing) / (2 * len(self.sources))
        length = min(REQUEST_S / max(source.last_s, 1e-6), share)
        return max(1, min(int(length), self._pieces_per_request))

    def has_answered(self, source: _Source) -> None:
        """A run of pieces is here from this source."""
        source.has_answered(asyncio.get_running_loop().time())
        self._answers += 1
        if source.is_quick:
            self._active_max += 1
            self.something_changed()

    def may_ask_again(self, source: _Source) -> bool:
        """True if another request may be under way, so that the source does not wait for it."""
        return not source.waiting or source.is_quick

    def dismiss(self) -> None:
        """Everything is here: nobody waits for the last words of a source."""
        for source in self.sources:
            if source.task is not None and source.task is not asyncio.current_task():
                source.task.cancel()

    async def look_at_the_slowest(self, *, besides: _Source) -> None:
        """Return when there may be something to do. Ends a source that had its time."""
        changed = self._changed
        owing = [source for source in self.sources if source.waiting and source is not besides]
        assert owing, "a piece that is neither here nor missing is owed by somebody"
        slowest = min(owing, key=lambda source: source.asked_at + self._allowed_s(source.owed))
        left_s = slowest.asked_at + self._allowed_s(slowest.owed)
        left_s -= asyncio.get_running_loop().time()
        if left_s <= 0.0 and slowest.task is not None and slowest.too_slow is None:
            slowest.too_slow = (
                f"it took over {self._allowed_s(slowest.owed):.1f} s for {slowest.owed} pieces, "
                "and others had nothing to do"
            )
            slowest.task.cancel()
        try:
            async with asyncio.timeout(max(left_s, 0.0) if slowest.too_slow is None else None):
                await changed.wait()
        except TimeoutError:
            return


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

    host: Host
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
    """Whose turn it is to fetch a fragment's state: two calls would share its verified pieces, and
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
        holders -= attempt.digests.keys()
        partial = self._partials.get(fragment)
        if partial is None or partial.manifest != manifest:
            values, has_momentum = attempt.values, self.has_momentum
            partial = Partial.begin(manifest, values, self.floats, has_momentum=has_momentum)
            self._partials[fragment] = partial
        self._report(partial, len(holders))
        while not partial.done:
            if not holders:
                raise attempt.failed()
            await self._pieces_from_all(partial, holders, attempt.reasons, asked)
        del self._partials[fragment]
        self._blame(manifest, attempt)
        return partial.state()

    def _blame(self, fetched: Manifest, attempt: _Attempt) -> None:
        """Name the sources that are outvoted about the lineage of a state that was fetched.

        A state that cannot be had accuses nobody.
        """
        votes = attempt.votes(fetched.identity())
        for peer, theirs in sorted(attempt.manifests.items()):
            differs = theirs.lineage == fetched.lineage and theirs.identity() != fetched.identity()
            if differs and is_outvoted(attempt.votes(theirs.identity()), by=votes):
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
                attempt.trust.hear(answer, signatures)
            else:
                attempt.digests[peer] = answer
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
        camps: dict[bytes, Counter[Manifest]] = {}
        for peer in sorted(attempt.manifests):
            manifest = attempt.manifests[peer]
            problem = attempt.trust.problem(manifest)
            if problem is None:
                camps.setdefault(manifest.identity(), Counter())[manifest] += 1
            else:
                reasons[peer] = problem
        if not camps:
            raise attempt.failed()

        def weight(identity: bytes) -> tuple[int, int, int, bytes]:
            manifest = next(iter(camps[identity]))
            return attempt.votes(identity), manifest.links[-1][2], manifest.version, identity

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
                    said = "digests_disagree fragment=%d version=%d peer=%s"
                    logger.warning(said, attempt.fragment, chosen.version, peer)
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
        async with self._stream(peer, for_digest=True) as stream:
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

    async def _pieces_from_all(
        self,
        partial: Partial,
        holders: set[PeerId],
        reasons: dict[PeerId, str],
        asked: Sequence[PeerId],
    ) -> None:
        """Every holder takes runs of pieces until none is left; a holder that fails leaves
        ``holders``.

        ``asked``: the order in which they begin. Every reader has another.
        """
        order = [peer for peer in asked if peer in holders]
        crew = _Crew(partial, self.pieces_per_request)

        async def work(source: _Source) -> None:
            peer = source.peer
            try:
                while not partial.done:
                    if partial.missing:
                        async with crew.turn():
                            await self._pieces(partial, source, crew, len(holders))
                    else:
                        await crew.look_at_the_slowest(besides=source)
            except _SOURCE_ERRORS as error:
                left(peer, str(error))
            except asyncio.CancelledError:
                if source.too_slow is not None:
                    left(peer, source.too_slow)
                elif not partial.done:
                    raise
            finally:
                if partial.done:
                    crew.dismiss()

        def left(peer: PeerId, reason: str) -> None:
            reasons[peer] = reason
            holders.discard(peer)
            self.counters["sources_left"] += 1
            logger.info(
                "source_left fragment=%d peer=%s reason=%s", partial.manifest.fragment, peer, reason
            )

        async with asyncio.TaskGroup() as tasks:
            for peer in order:
                source = _Source(peer)
                source.task = tasks.create_task(work(source))
                crew.sources.append(source)

    async def _pieces(
        self, partial: Partial, source: _Source, crew: _Crew, sources_count: int
    ) -> None:
        """On a fast line two requests are under way, so that the source never waits for one."""
        manifest = partial.manifest

        async def request(stream: Stream) -> None:
            if not crew.may_ask_again(source):
                return
            taken = partial.take(crew.run_length(source))
            if taken:
                source.asks(taken, asyncio.get_running_loop().time())
                first, count = taken[0], len(taken)
                await ask(stream, AskPieces(manifest.fragment, manifest.lineage, first, count))

        if not partial.missing:
            return
        try:
            async with self._stream(source.peer) as stream:
                await request(stream)
                while source.waiting:
                    await request(stream)
                    for index in list(source.waiting[0]):
                        frame = await next_data(stream)
                        wrong = await self.threads.run(partial.place, index, frame)
                        if wrong is not None:
                            self.counters["pieces_refused"] += 1
                            fragment = partial.manifest.fragment
                            self.on_wrong_bits(source.peer, fragment, wrong)
                            raise BadMessage(wrong)
                        partial.verified += 1
                        source.waiting[0].remove(index)
                        self._report(partial, sources_count)
                    size, began = source.owed * PIECE_BYTES, source.asked_at
                    crew.has_answered(source)
                    self.line.transferred(source.peer, size, began=began, ended=_now())
                    if not source.waiting:
                        await request(stream)
        finally:
            partial.put_back(index for run in source.waiting for index in run)
            source.waiting.clear()
            crew.something_changed()

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
        async with self._stream(source) as stream:
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

    def _report(self, partial: Partial, sources: int) -> None:
        manifest = partial.manifest
        self.on_progress(
            FetchProgress(
                manifest.fragment, manifest.version, partial.verified, partial.count, sources
            )
        )

    @asynccontextmanager
    async def _stream(self, peer: PeerId, *, for_digest: bool = False) -> AsyncIterator[Stream]:
        async with stream_to(self.host, peer, fetch_protocol(self.run)) as stream:
            if stream.relayed and not for_digest:
                raise NotHere(RELAYED)
            yield stream


def _now() -> float:
    return asyncio.get_running_loop().time()
