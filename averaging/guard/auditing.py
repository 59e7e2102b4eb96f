"""Audits by a live peer: uploads are shown to others, pieces of others' merges made again.

``averaging.guard.rules`` decides; this module moves the bytes, on streams of a protocol of its own.
A member keeps what it has sent for a while after a round (``KEPT_S``), and shows each peer of
the round as much as a fair audit needs. After a round it draws pieces, asks the reducer for the
claims and the members for the bytes, and checks. A proof of a lie bans the liar here, is kept, and
is shown to every peer that comes into view: each of them checks it anew.

The same streams serve spot checks (``averaging.guard.spot_checking``): whole uploads, and
what their authors have read.

A peer that cannot be reached is not blamed. One that answers that it does not have what it must
have costs itself a strike (``averaging.rules.reputation``). One that is asked has as long to show
an upload as that had to arrive in the round. One that is silent for longer, or sends drop by drop,
costs itself half a strike: it would keep all other audits from being made, and its lies unseen.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict, defaultdict
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import TypeVar

import msgspec
from msgspec import Struct

from averaging.guard.kept_proofs import (
    PROOFS_BYTES_MAX,
    Kept,
    KeptProofs,
    ProofShelf,
    Verdict,
)
from averaging.guard.rules import selection
from averaging.guard.rules.proofs import (
    HEAD_MAX_BYTES,
    BadProof,
    Court,
    FalseMerge,
    Guilty,
    Path,
    Proof,
    Right,
    check,
    decode_head,
    size_of_data,
)
from averaging.guard.rules.spot_checks import BACK_MAX
from averaging.guard.rules.witness import Proved, Witness
from averaging.history.claims import Claim, authors, decode_claims, encode_claims, hash_of
from averaging.history.readings import Reading, decode_reading, encode_reading
from averaging.live.guard import Gate, Guard
from averaging.live.services import Services
from averaging.live.settings import topic_of
from averaging.live.slices.evidence import Uploads
from averaging.live.slices.parts import Parts
from averaging.live.streams.fair_shares import ServedPlace, ServedPlaces
from averaging.live.streams.questions import (
    DATA,
    REFUSE_WITHIN_S,
    RELAYED,
    STALL_MAX_S,
    WORLD,
    Busy,
    NotHere,
    answer_requests,
    ask,
    in_frames,
    next_data,
    read_exactly,
    stream_to,
    tell_busy,
)
from averaging.messages import Accused, BadMessage, Digest, Index, Indices, Message, unpacked
from averaging.numbers.arrays import Float32s
from averaging.numbers.chunks import Cutting, leads_to, path_to
from averaging.rules.electors import Electors
from averaging.rules.reputation import Deed, Ground
from dht.errors import StreamBroken
from dht.host import Stream
from dht.identity import PeerId, RunId
from dht.wrapped_host import refuse

CLAIMS_MAX_BYTES = 64 << 10
SHOWN_OF_UPLOADS = 3.0
"""How much of a round's uploads each peer of the round is shown: audits of merges, audits of the
bundles of sites and a spot check ask for each piece once at most."""


KEPT_S = 60.0
"""Time after a round for which its uploads are kept: their memory is not used again meanwhile, and
fresh memory costs processor time. They are let go sooner if those of all rounds together take more
than ``AveragerSettings.uploads_bytes_max``."""
AUDITS_MAX = 2
"""Audits under way at once."""
ASKED_BYTES = 4 << 20
"""Uploads of a piece that all members are asked for at once, of several slices as far as they fit:
a stream to each member takes as long as merging 16 384 values does."""
WAITING_MAX = 32
"""Audits that wait for their turn; those drawn beyond it are not made, ..."""
WAITING_S = 20.0
"""... nor those that have waited for so long: others may not have kept the round."""
PROOF_HEAD_S = 5.0
"""A proof's head has so long, ..."""
PROOF_ANSWER_S = 30.0
PROOF_BYTES_S = 62.5e3
"""... and the rest so long, and the time of its bytes at this rate."""
SERVED_MAX = 16
SERVED_PER_PEER_MAX = 4
IDLE_MAX_S = 2.0
"""A place on which nothing was asked for so long is given to a peer that comes."""
BUSY_AGAIN_S = 3.0
"""A peer that is busy is asked again after so long."""
SPREAD_EVERY_S = 10.0
TELL_AGAIN_S = 60.0
"""A peer that has not named a proof itself is told of it again after this."""
FETCHES_MAX = 4
"""Proofs that are fetched at once, one of each peer that names some."""


T = TypeVar("T")


def _court(around: Services) -> Court:
    run, layout = around.terms.run, around.terms.layout
    return Court(
        topic_of(run, layout),
        layout,
        around.around.verify,
        topic_after=lambda rollback: topic_of(run, layout, rollback),
    )


class _Request(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """A question about a round, or about a lie."""


class AskSources(_Request, frozen=True):
    """The claims in slices that you have merged, or in those of your bundle: a frame for each."""

    round: Digest
    slices: Indices
    merged: bool


class AskUpload(_Request, frozen=True):
    """The piece of this number of the uploads of some slices that you have sent. ``alone``: of your
    own contribution to a bundle. Answered by their headers and then by the pieces."""

    round: Digest
    slices: Indices
    piece: Index
    alone: bool


class AskReading(_Request, frozen=True):
    """Question: the data of the step ``back`` steps before the last one in your contribution."""

    round: Digest
    back: Index


class AskProof(_Request, frozen=True):
    proof: Digest


Request = AskSources | AskUpload | AskReading | AskProof

REQUESTS: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)


class _Header(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A piece of an upload is shown with its claim, and the path from the piece to its digest."""

    claim: Claim
    path: Path


_headers = msgspec.msgpack.Decoder(tuple[_Header, ...])


def read_headers(frame: bytes | memoryview) -> tuple[_Header, ...]:
    """Decode the headers ahead of pieces of uploads. Raises ``BadMessage``."""
    return unpacked(frame, _headers, "claims about uploads", max_bytes=HEAD_MAX_BYTES)


def audit_protocol(run: RunId) -> str:
    return f"shoal/{run}/audit/1"


@dataclass(frozen=True, slots=True)
class Shown:
    """A piece of an upload, as its sender shows it."""

    claim: Claim
    path: Path
    data: memoryview


@dataclass(slots=True, eq=False)
class _Case:
    """A piece that is audited."""

    head: FalseMerge
    """Without the claims of the sources, until they are here, and without the paths to them."""
    result: memoryview
    shown: list[Shown] = field(default_factory=list)

    @property
    def proof(self) -> Proof:
        paths = (*(each.path for each in self.shown), *self.head.paths)
        data = b"".join((*(each.data for each in self.shown), self.result))
        return Proof(msgspec.structs.replace(self.head, paths=paths), data)

    def bundles(self) -> Iterator[_Case]:
        """The bundles among the uploads: each is audited like a merged slice."""
        for source, shown in zip(self.head.sources, self.shown, strict=True):
            if source.sources:  # without any it has no riders in it
                changed = {"merged": False, "claim": source, "sources": (), "paths": (shown.path,)}
                yield _Case(msgspec.structs.replace(self.head, **changed), shown.data)


@dataclass(slots=True, eq=False)
class _Kept:
    """The bytes of a round that is over, for auditors."""

    uploads: Uploads
    until: float


class TooSlow(TimeoutError):
    """A peer that was reached has not shown in time what it was asked for."""


class Auditing(Guard):
    """A guard by audits and proofs: of one peer in one run."""

    def __init__(
        self,
        around: Services,
        electors: Electors,
        gate: Gate | None = None,
        *,
        shelf: ProofShelf | None = None,
        reading_of: Callable[[int], Awaitable[Reading | None]] | None = None,
        on_convicted: Callable[[PeerId, str], None] = lambda peer, what: None,
    ) -> None:
        """``shelf``: where proofs outlive a restart; ``None``: they are in memory. ``reading_of``:
        the data of the own learner's steps; ``None``: nobody checks. ``on_convicted`` hears that a
        peer is proved to have lied, now or before a restart."""
        super().__init__(electors, gate)
        court = _court(around)
        self.kept_bytes_max = around.settings.uploads_bytes_max
        self.kept_proofs = KeptProofs(around.worth, shelf, around.spawn, self._not_written)
        self._host = around.host
        self._protocol = audit_protocol(around.terms.run)
        self._around = around
        self._court = court
        self._rate = around.terms.policy.audit_rate
        self._reading_of = reading_of
        self._sign = around.me.identity.sign
        self._on_convicted = on_convicted
        self._witness = Witness(court, around.worth)
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()
        self._proofs: Mapping[bytes, Kept] = self.kept_proofs.proofs
        self._told: dict[bytes, dict[PeerId, float]] = {}
        """When a peer is to be told of a proof again."""
        self._fetching: dict[PeerId, bytes] = {}
        """The proof that is fetched from each peer."""
        self._turn = asyncio.Semaphore(AUDITS_MAX)
        self._waiting = 0
        self._served = ServedPlaces(
            SERVED_MAX,
            SERVED_PER_PEER_MAX,
            grace_s=10.0,
            slow_bytes_s=0.0,
            preferred=around.is_established,
            idle_max_s=IDLE_MAX_S,
            on_idle=partial(
                around.strike,
                deed=Deed.IS_LATE,
                reason="it holds places and asks nothing",
                fragment=0,
            ),
        )

    async def start(self) -> None:
        await self._host.serve_streams(self._protocol, self._serve)
        for verdict in tuple(self.convicted.values()):
            self._ban(verdict.peer, verdict.what)
        self._around.spawn(self._spread_for_ever(), "spread proofs")

    @property
    def convicted(self) -> Mapping[PeerId, Verdict]:
        return self.kept_proofs.verdicts

    def lie_of(self, peer: PeerId) -> str | None:
        verdict = self.convicted.get(peer)
        return None if verdict is None else verdict.what

    def _ban(self, peer: PeerId, what: str) -> None:
        """The messages of a peer count no more, and it is as good as gone."""
        self._on_convicted(peer, what)
        self._around.cut_off(peer, what)

    # What is kept of rounds

    def forgot(self, round_id: bytes, parts: Parts | None) -> None:
        self._witness.round_is_over(round_id)
        if parts is not None:
            self._keep(parts)

    def _keep(self, parts: Parts) -> None:
        """Keep the uploads of a round that is over, as long as auditors may ask."""
        uploads = parts.uploads
        wanted = self._rate or self._reading_of is not None
        if not wanted or not (uploads.size or parts.evidence.sources):
            return
        self._drop_old()
        until = self._around.now() + KEPT_S
        self._kept[parts.round] = _Kept(uploads, until)
        while sum(kept.uploads.size for kept in self._kept.values()) > self.kept_bytes_max:
            self._kept.popitem(last=False)

    def must_be_kept(self, parts: Parts) -> bool:
        """True if all members keep the uploads of a round for auditors until now.

        They have room for as much as this peer, and so for this round beside those that are over
        since. One more may be over at others and not here, and uploads to bundles take twice the
        room.
        """
        size = 2 * parts.cutting.data_size
        if parts.round not in self._kept:
            is_under_way = self._around.uploads_of(parts.round) is not None
            return is_under_way and size <= self.kept_bytes_max
        for round_id in reversed(self._kept):
            size += self._kept[round_id].uploads.size
            if round_id == parts.round:
                break
        return size <= self.kept_bytes_max

    def _drop_old(self) -> None:
        now = self._around.now()
        while self._kept and next(iter(self._kept.values())).until < now:
            self._kept.popitem(last=False)

    def _uploads_of(self, round_id: bytes, asker: PeerId) -> Uploads:
        self._drop_old()
        kept = self._kept.get(round_id)
        uploads = kept.uploads if kept is not None else self._around.uploads_of(round_id)
        if uploads is None or uploads.commit.index(asker) is None:
            raise NotHere("no round of yours with that name is kept here")
        return self._around.shows(asker, uploads)

    # Showing

    async def _serve(self, stream: Stream) -> None:
        peer, now = stream.remote, self._around.now()
        if stream.relayed:
            await refuse(stream, RELAYED, timeout_s=REFUSE_WITHIN_S)
            return
        place = self._served.admit(peer, now=now, end=stream.abort)
        if place is None:
            await tell_busy(stream)
            return
        place.idle_since = now
        try:
            await answer_requests(stream, REQUESTS, partial(self._answer_at, place, stream))
        finally:
            self._served.leave(place)

    async def _answer_at(self, place: ServedPlace, stream: Stream, request: Request) -> None:
        place.idle_since = math.inf
        await self._answer(stream, request)
        place.idle_since = self._around.now()

    async def _answer(self, stream: Stream, request: Request) -> None:
        match request:
            case AskSources(round_id, indices, merged):
                evidence = self._uploads_of(round_id, stream.remote).evidence
                there = evidence.sources if merged else evidence.sources_of_own
                if not all(map(there.get, indices)):
                    raise NotHere("that slice was not made here")
                for index in indices:
                    await self._tell(stream, encode_claims(there[index]))
            case AskUpload():
                await self._show(stream, request)
            case AskReading():
                await self._tell(stream, encode_reading(await self._read_by_me(stream, request)))
            case AskProof(name):
                proof = await self.kept_proofs.read(name)
                if proof is None and self.kept_proofs.has_convicted_by(name):
                    raise Busy(self._host.peer_id)  # given up since it was named, which is no lie
                if proof is None:
                    raise NotHere("that proof is not kept here")
                await self._tell(stream, proof.encode_head())
                await self._tell_all(stream, memoryview(proof.data).cast("B"))

    async def _show(self, stream: Stream, request: AskUpload) -> None:
        uploads = self._uploads_of(request.round, stream.remote)
        found = _shown_of(uploads, request.slices, request.piece, alone=request.alone)
        size = sum(len(each.data) for each in found)
        if uploads.shown[stream.remote] + size > SHOWN_OF_UPLOADS * uploads.size:
            raise NotHere("you were shown as much of this round as an audit needs")
        uploads.shown[stream.remote] += size
        began = self._around.now()
        headers = [_Header(each.claim, each.path) for each in found]
        await self._tell(stream, msgspec.msgpack.encode(headers))
        await self._tell_all(stream, memoryview(b"".join(each.data for each in found)))
        self._around.moved(sent=size, since=began)

    async def _read_by_me(self, stream: Stream, request: AskReading) -> Reading | None:
        commit = self._uploads_of(request.round, stream.remote).commit
        entry = commit.index(self._host.peer_id)
        if entry is None or self._reading_of is None:
            raise NotHere("nothing of mine is in that round")
        if not 0 <= request.back < min(BACK_MAX, max(1, commit.members[entry].steps)):
            raise NotHere("that step is not in what I contributed")
        return await self._reading_of(commit.members[entry].mark - request.back)

    async def _tell(self, stream: Stream, *parts: bytes | memoryview) -> None:
        await stream.send(DATA, *parts, timeout_s=STALL_MAX_S)

    async def _tell_all(self, stream: Stream, data: memoryview) -> None:
        for part in in_frames(data):
            await self._tell(stream, part)

    # Auditing

    def finished(
        self, parts: Parts, lineage: bytes, seal: Iterable[int], theta: Float32s, step: int | None
    ) -> None:
        """Draw the pieces to audit, and begin."""
        if not self._rate or parts.entry is None:
            return
        who = authors(parts.commit)
        others = {
            index: said
            for index, said in parts.evidence.merged.items()
            if who[said.by] != parts.me and who[said.by] not in self.convicted
        }
        ticket = self._sign(selection.ticket_text(lineage))
        chance = selection.chance(self._rate, len(parts.commit.members) - 1)
        pieces = {index: len(parts.cutting.chunks[index]) for index in others}
        for piece, indices in selection.drawn(ticket, pieces, chance=chance):
            places = [parts.cutting.place(index, piece) for index in indices]
            of_one = len(parts.commit.members) * max(each.stop - each.start for each in places)
            together = max(1, ASKED_BYTES // of_one)
            for first in range(0, len(indices), together):
                if self._waiting >= WAITING_MAX:
                    return
                self._waiting += 1
                work = self._audit(parts, indices[first : first + together], piece)
                self._around.spawn(work, f"audit {parts.round.hex()[:8]}")

    async def _audit(self, parts: Parts, indices: Sequence[int], piece: int) -> None:
        drawn_at = self._around.now()
        try:
            async with self._turn:
                if self._around.now() - drawn_at > WAITING_S:
                    return
                merged = [_case(parts, index, piece) for index in indices]
                found = await self._inquire(parts, merged)
                bundles: list[_Case] = []
                for case in found:
                    some = list(case.bundles())
                    if all(
                        parts.evidence.is_signed(each.head.slice, each.head.claim, merged=False)
                        for each in some
                    ):
                        bundles += some
                    else:  # the reducer made it up, and whoever is asked for it has none to show
                        await self._try(case.proof, parts.cutting, in_full=True)
                await self._inquire(parts, bundles)
        finally:
            self._waiting -= 1

    async def _inquire(self, parts: Parts, cases: Iterable[_Case]) -> list[_Case]:
        """Collect the uploads of one piece of some slices, and merge it again. Returns the cases of
        which all is here.

        Anybody who is shown what this finds runs the same code on the same bytes.
        """
        who, by_author = authors(parts.commit), defaultdict[PeerId, list[_Case]](list)
        for case in cases:
            by_author[who[case.head.claim.by]].append(case)
        accused = {
            peer: some
            for peer, some in by_author.items()
            if peer != parts.me and peer not in self.convicted
        }
        answers = (
            self._answers(parts, peer, some, self._add_sources(parts, some, peer))
            for peer, some in accused.items()
        )
        # At once: one that is silent would keep the others from being audited in time.
        answered = zip(await asyncio.gather(*answers), accused.values(), strict=True)
        found = [case for is_here, some in answered if is_here for case in some]
        for entry in sorted({each.by for case in found for each in case.head.sources}):
            wants = [case for case in found if any(entry == each.by for each in case.head.sources)]
            if wants:
                peer = parts.commit.members[entry].peer
                asked = self._add_uploads(parts, wants, entry)
                if not await self._answers(parts, peer, wants, asked):
                    found = [case for case in found if case not in wants]
        for case in found:
            await self._try(case.proof, parts.cutting)
        return found

    async def _answers(
        self, parts: Parts, peer: PeerId, cases: Sequence[_Case], asked: Awaitable[None]
    ) -> bool:
        """True if a peer shows what these audits need; else it has the blame that is due."""
        try:
            await asked
        except NotHere as error:
            for case in cases:
                if await self._try(Proof(case.head), parts.cutting, in_full=True):
                    return False  # the accused has made up what this sender is said to have sent
            self.strike(peer, str(error), parts)
        except TooSlow as error:
            self._around.strike(peer, Deed.IS_LATE, str(error), fragment=parts.commit.fragment)
        except WORLD:
            pass
        else:
            return True
        return False

    async def _add_sources(self, parts: Parts, cases: Sequence[_Case], accused: PeerId) -> None:
        claims = {case.head.slice: case.head.claim for case in cases}
        found = await self.sources_of(accused, parts, claims, merged=cases[0].head.merged)
        for case, sources in zip(cases, found, strict=True):
            case.head = msgspec.structs.replace(case.head, sources=sources)
            senders = [source.by for source in sources]
            if senders != sorted(set(senders)) or senders[-1] >= len(parts.commit.members):
                raise NotHere("it lists claims that prove alone what it has done")

    async def _add_uploads(self, parts: Parts, cases: Sequence[_Case], entry: int) -> None:
        """Add what a member has uploaded."""
        head, peer = cases[0].head, parts.commit.members[entry].peer
        uploads = {
            case.head.slice: next(each for each in case.head.sources if each.by == entry)
            for case in cases
        }
        shown = await self._shown_by(peer, parts, uploads, head.piece, alone=not head.merged)
        for case, each in zip(cases, shown, strict=True):
            case.shown.append(each)

    async def _try(self, proof: Proof, cutting: Cutting, *, in_full: bool = False) -> bool:
        """Judge what is here. ``True``: there is nothing left to ask."""
        try:
            guilty = await self._around.threads.run(self._check, proof, not in_full, cutting)
        except Right:
            self.counters["audits"] += 1
            return True
        except BadProof:
            return False
        self.counters["audits"] += 1
        self.convict(guilty, proof)
        return True

    def _check(
        self, proof: Proof, merges_first: bool = False, cutting: Cutting | None = None
    ) -> Guilty:
        scratch = self._around.threads.scratch()
        return check(proof, self._court, scratch, merges_first=merges_first, cutting=cutting)

    def strike(self, peer: PeerId, reason: str, parts: Parts) -> None:
        """An audit came to nothing because of this peer, which answers."""
        if not self.must_be_kept(parts):
            return
        around, now = self._around, self._around.now()
        around.reputation.saw(peer, Deed.HIDES, now)
        strikes = around.reputation.count(peer, Ground.CONDUCT, now)
        fragment = parts.commit.fragment
        around.event("audit_refused", peer=peer, reason=reason, fragment=fragment, strikes=strikes)

    # Asking

    async def sources_of(
        self, peer: PeerId, parts: Parts, claims: Mapping[int, Claim], *, merged: bool
    ) -> list[tuple[Claim, ...]]:
        """The sources of a peer's claims, by slice, which it has signed with them."""

        async def ask_once() -> list[tuple[Claim, ...]]:
            async with self.stream(peer, parts.commit.upload_s) as (stream, _):
                await ask(stream, AskSources(parts.round, tuple(claims), merged))
                return [_claims_in(await next_data(stream)) for _ in claims]

        found = await self._asked(ask_once)
        for claim, sources in zip(claims.values(), found, strict=True):
            if not sources or hash_of(sources) != claim.sources:
                raise NotHere("it lists other claims than those that it has signed")
        return found

    async def _shown_by(
        self, peer: PeerId, parts: Parts, uploads: Mapping[int, Claim], piece: int, *, alone: bool
    ) -> list[Shown]:
        if peer == parts.me:
            return _shown_of(self._uploads_of(parts.round, peer), uploads, piece, alone=alone)

        async def ask_once() -> list[Shown]:
            async with self.stream(peer, parts.commit.upload_s) as (stream, _):
                return await self.shown_on(stream, parts, uploads, piece, alone=alone)

        return await self._asked(ask_once)

    async def _asked(self, ask_once: Callable[[], Awaitable[T]]) -> T:
        """Ask a peer once more if it is busy. Raises ``TooSlow`` for one that is busy again.

        Others may hold its places, so that costs it no more than a slow line does; a liar would be
        busy whenever it is asked.
        """
        try:
            return await ask_once()
        except Busy:
            await asyncio.sleep(BUSY_AGAIN_S)
        try:
            return await ask_once()
        except Busy as error:
            raise TooSlow("it was busy, and again when it was asked once more") from error

    async def shown_on(
        self,
        stream: Stream,
        parts: Parts,
        uploads: Mapping[int, Claim],
        piece: int,
        *,
        alone: bool = False,
    ) -> list[Shown]:
        """Ask for the piece of this number of a peer's uploads, by slice, which were merged."""
        await ask(stream, AskUpload(parts.round, tuple(uploads), piece, alone))
        headers = read_headers(await next_data(stream))
        if len(headers) != len(uploads):
            raise BadMessage(f"{len(headers)} claims about uploads of {len(uploads)} slices")
        places, began = [parts.cutting.place(index, piece) for index in uploads], self._around.now()
        ends = list(accumulate((place.stop - place.start for place in places), initial=0))
        data = await read_exactly(stream, ends[-1])
        self._around.moved(received=len(data), since=began)
        found = [
            Shown(header.claim, header.path, data[start:end])
            for header, (start, end) in zip(headers, pairwise(ends), strict=True)
        ]
        for (index, merged), shown in zip(uploads.items(), found, strict=True):
            count = len(parts.cutting.chunks[index])
            if not leads_to(merged.made, shown.path, shown.data, index=piece, count=count):
                if parts.evidence.is_signed(index, shown.claim, merged=False):
                    for each in (merged, shown.claim):  # perhaps it signed both
                        self.saw_claim(parts.encoded_commit, index, each, False)
                raise NotHere("it shows another upload than the one that was merged")
        return found

    async def reading_on(self, stream: Stream, parts: Parts, back: int) -> Reading | None:
        """The data of an author's step, ``back`` steps before the last one in its contribution."""
        return decode_reading(await self._answer_of(stream, AskReading(parts.round, back)))

    @asynccontextmanager
    async def stream(
        self, peer: PeerId, within_s: float
    ) -> AsyncIterator[tuple[Stream, asyncio.Timeout]]:
        """Open a stream on which a peer answers one question after the other, until a deadline that
        counts from when it is open.

        Raises ``NotHere`` (also for an invalid answer), ``TooSlow``, and what the network raises.
        """
        async with stream_to(self._host, peer, self._protocol) as stream:
            if stream.relayed:
                raise StreamBroken(peer, RELAYED)
            began = self._around.now()
            try:
                async with asyncio.timeout(within_s) as deadline:
                    yield stream, deadline
            except BadMessage as error:
                raise NotHere(str(error)) from error
            except (StreamBroken, TimeoutError) as error:
                took_s = self._around.now() - began
                if isinstance(error, TimeoutError) or took_s >= STALL_MAX_S:
                    raise TooSlow(f"it did not show within {took_s:.0f} s what it has") from error
                raise

    async def _answer_of(self, stream: Stream, request: Request) -> bytes:
        await ask(stream, request)
        return bytes(await next_data(stream))

    # Statements that contradict each other

    def saw(self, peer: PeerId, message: Message) -> bool:
        if isinstance(message, Accused):
            self.heard_of(peer, message)
            return True
        self._prove(self._witness.sees(peer, message))
        return False

    def saw_commit(self, encoded: bytes, signature: bytes) -> None:
        self._prove(self._witness.sees_commit(encoded, signature))

    def saw_claim(self, encoded: bytes, index: int, said: Claim, merged: bool) -> None:
        self._prove(self._witness.sees_claim(encoded, index, said, merged=merged))

    def _prove(self, proved: Iterable[Proved]) -> None:
        for guilty, proof in proved:
            self.convict(guilty, proof)

    # Proofs

    def convict(self, guilty: Guilty, proof: Proof) -> None:
        """A proof holds: ban its author, keep the proof, and show it to the others."""
        if guilty.peer in self.convicted or guilty.peer == self._host.peer_id:
            return
        self.kept_proofs.keep(guilty, proof, shown=self._matters(guilty.peer))
        self._around.event(
            "convicted", peer=guilty.peer, reason=guilty.what, proof=proof.digest.hex()
        )
        self._ban(guilty.peer, guilty.what)
        self.spread()

    def _not_written(self, peer: PeerId, reason: str) -> None:
        self._around.event("proof_not_kept", peer=peer, reason=reason)

    def _matters(self, peer: PeerId) -> bool:
        """True if others are to hear what is proved against a peer.

        Keys cost nothing, and each can sign what convicts it: all peers would fetch, keep and pass
        on such proofs for ever.
        """
        return self._around.counts(peer) or self._around.worth(peer) > 0.0

    def spread(self) -> None:
        """Name the proofs to the peers that have not named them themselves.

        To those that have a link with this one, or are established: keys in view may be thousands.
        """
        around, now = self._around, self._around.now()
        linked = set(around.transport.linked())
        hearers = [peer for peer in around.others if peer in linked or around.is_established(peer)]
        for name, kept in self._proofs.items():
            told = self._told.setdefault(name, {})
            for peer in hearers:
                if peer not in self.convicted and told.get(peer, -math.inf) <= now:
                    told[peer] = now + TELL_AGAIN_S
                    around.send(peer, Accused(0, name, kept.about))
            for gone in told.keys() - set(hearers):
                del told[gone]
        for name in self._told.keys() - self._proofs.keys():
            del self._told[name]

    async def _spread_for_ever(self) -> None:
        """Show the proofs to peers that come, and to those whom a message did not reach."""
        while True:
            await asyncio.sleep(SPREAD_EVERY_S)
            self._drop_old()
            self.spread()

    def heard_of(self, peer: PeerId, message: Accused) -> None:
        """Another peer names a proof: fetch it, if it is news about a peer that counts here.

        A proof about a peer that is not here is named again when it comes.
        """
        if message.proof in self._proofs:
            self._told.setdefault(message.proof, {})[peer] = math.inf
        accused, around = message.peer, self._around
        known = message.proof in self._proofs or accused in self.convicted
        if known or not around.is_here(accused):
            return
        is_out = around.reputation.is_over(peer, Ground.CONDUCT, around.now())
        if not around.is_established(peer) or is_out or not self._matters(accused):
            return
        fetched = self._fetching.values()
        if peer in self._fetching or message.proof in fetched or len(fetched) >= FETCHES_MAX:
            return  # a peer names its proof again
        self._fetching[peer] = message.proof
        around.spawn(self._fetch_proof(peer, message), "fetch a proof")

    async def _fetch_proof(self, peer: PeerId, message: Accused) -> None:
        name = message.proof
        try:
            async with self.stream(peer, PROOF_HEAD_S) as (stream, deadline):
                frame = await self._answer_of(stream, AskProof(name))
                if len(frame) > HEAD_MAX_BYTES:
                    raise BadProof("its head is too large")
                head = decode_head(frame)
                size = await self._around.threads.run(size_of_data, head, self._court)
                if size > PROOFS_BYTES_MAX:
                    raise BadProof("nobody keeps one that is so large")
                now = asyncio.get_running_loop().time()
                deadline.reschedule(now + PROOF_ANSWER_S + size / PROOF_BYTES_S)
                data = await read_exactly(stream, size)
            proof = Proof(head, data)
            if proof.digest != name:
                raise BadProof("it is another one than was named")
            guilty = await self._around.threads.run(self._check, proof)
            if guilty.peer != message.peer:
                raise BadProof("it convicts another peer than was named")
        except (BadProof, NotHere) as error:
            self._around.reputation.saw(peer, Deed.LIES, self._around.now())
            self._around.event("proof_refused", peer=peer, reason=str(error))
        except TooSlow as error:
            self._around.strike(peer, Deed.IS_LATE, str(error), fragment=0)
        except WORLD:
            self.counters["proofs_not_had"] += 1
        else:
            self.convict(guilty, proof)
        finally:
            self._fetching.pop(peer, None)


def _shown_of(uploads: Uploads, indices: Iterable[int], piece: int, *, alone: bool) -> list[Shown]:
    """A piece of the uploads of some slices. Raises ``NotHere``."""
    found = []
    for index in indices:
        upload = uploads.of(index, alone=alone)
        if upload is None or piece >= len(uploads.cutting.chunks[index]):
            raise NotHere("that upload is not kept here")
        data, said, leaves = upload
        found.append(Shown(said, path_to(piece, leaves), data[uploads.cutting.place(index, piece)]))
    return found


def _claims_in(frame: memoryview) -> tuple[Claim, ...]:
    if len(frame) > CLAIMS_MAX_BYTES:
        raise NotHere("it lists too much")
    return decode_claims(bytes(frame))


def _case(parts: Parts, index: int, piece: int) -> _Case:
    """The audit of a slice that another peer has merged."""
    leaves = parts.evidence.merged_leaves.get(index, [])
    head = FalseMerge(
        commit=parts.encoded_commit,
        slice=index,
        merged=True,
        claim=parts.evidence.merged[index],
        sources=(),
        piece=piece,
        paths=(path_to(piece, leaves),),
    )
    return _Case(head, parts.merged[index].data[parts.cutting.place(index, piece, merged=True)])
