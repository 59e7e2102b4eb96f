"""Spot checks by a live peer: the loss with another's contribution, on that author's own data.

``averaging.guard.rules.spot_checks`` decides whom to check and what follows. This module brings
together what a check needs: after a round, the author's upload of all slices, as the reducers have
signed that they merged it; what the author has read before one of its steps; and the learner's
judgement of two states of the fragment, the one that the round began with, and that with the
contribution. While it is not known what is usual, the learner judges its own contribution to the
round as well.

One check is under way at a time. Reducers and author each have as long to show what was uploaded as
it had to arrive in the round, so that a slow one holds no check for long. A failure of the network
or of the own learner costs a strike only to an author that has failed before. Not checked: riders
and delegates of a site, whose uploads travel together, and fragments of statistics.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from averaging.guard.auditing import Auditing
from averaging.guard.rules.spot_checks import SpotChecks, expected
from averaging.history.claims import Claim, authors
from averaging.history.readings import Reading
from averaging.live.services import Services
from averaging.live.slices.evidence import Uploads
from averaging.live.slices.parts import Parts
from averaging.live.streams.questions import WORLD, NotHere
from averaging.messages import Suspected
from averaging.numbers.arithmetic import Moved
from averaging.numbers.arrays import Float32s
from averaging.numbers.chunks import Chunk
from dht.host import Stream
from dht.identity import PeerId


@dataclass(frozen=True, slots=True)
class Trial:
    """Two states of a fragment, for the learner to compare on its author's data."""

    fragment: int
    author: PeerId
    reading: Reading
    before: Float32s
    after: Float32s


@dataclass(frozen=True, slots=True)
class Losses:
    """The loss of the learner's model with each of the two states."""

    before: float
    after: float
    seconds: float = 0.0
    """Time for which training waited."""


class OtherData:
    """The learner reads other sequences there than the author says."""


class Judge(Protocol):
    """A learner that judges contributions, and says what it has read itself."""

    @property
    def same_data(self) -> bool:
        """True if the run fixes every byte of its data, so that nobody may have another."""
        ...

    @property
    def judges(self) -> bool:
        """False while nothing can be tried: a check would be for nothing."""
        ...

    async def reading_of(self, step: int) -> Reading | None:
        """The data of a step of the learner; ``None``: it was none of the run's recipe."""
        ...

    async def judge(self, trial: Trial) -> Losses | OtherData | None:
        """``None``: it cannot tell. Returns within a bounded time."""
        ...


class _Uncheckable(Exception):
    """A contribution cannot be checked here, and nobody is to blame for it."""


class SpotChecking:
    """The spot checks of one peer with a learner."""

    def __init__(
        self, judge: Judge, checks: SpotChecks, *, audits: Auditing, around: Services
    ) -> None:
        self.counters = audits.counters
        self._judge = judge
        self._checks = checks
        self._audits = audits
        self._around = around
        self._busy = False

    def draw(self, parts: Parts, seal: Iterable[int], theta: Float32s, *, step: int) -> None:
        """Draw a contribution to a round that is over, and check it. ``theta``: that of the state
        which the round began with."""
        if self._busy or not self._judge.judges or parts.entry is None:
            return
        if not self._audits.must_be_kept(parts):
            return
        members = parts.commit.members
        there = {
            members[entry].peer: entry
            for entry in seal
            if entry != parts.entry and members[entry].peer not in self._audits.convicted
        }
        now = self._around.now()
        author = self._checks.draw(there, step, now, fragment=parts.commit.fragment)
        if author is not None:
            self._busy = True
            check = self._check(parts, parts.uploads, there[author], theta)
            self._around.spawn(check, f"spot check {parts.round.hex()[:8]}")

    async def _check(self, parts: Parts, uploads: Uploads, drawn: int, before: Float32s) -> None:
        entry = parts.commit.members[drawn]
        author, fragment = entry.peer, parts.commit.fragment
        indices, within_s = range(len(parts.cutting.slices)), parts.commit.upload_s
        asked = False
        try:
            async with asyncio.timeout(within_s):
                sources = [await self._source(parts, index, drawn) for index in indices]
            asked = True
            async with self._audits.stream(author, within_s) as (stream, _):
                step = self._checks.step_to_read(entry.mark, entry.steps)
                reading = await self._audits.reading_on(stream, parts, entry.mark - step)
                if reading is None:
                    raise _OtherDataThere("it does not read the run's data, or cannot say where")
                after = await self._with_contribution(parts, before, stream, sources)
            own = await self._expected(parts, uploads, before, steps=entry.steps)
            trial = Trial(fragment, author, reading, before, after)
            losses = await self._judge.judge(trial)
            if isinstance(losses, OtherData):
                raise _OtherDataThere("it has read other data than the run's")
            if losses is None:
                raise _Uncheckable
        except _OtherDataThere as error:
            if self._judge.same_data:
                self._evaded(author, fragment, str(error))
            else:
                self.counters["spot_checks_of_other_data"] += 1
        except NotHere as error:
            self._evaded(author, fragment, str(error))
        except (*WORLD, _Uncheckable):
            self.counters["spot_checks_without_answer"] += 1
            if asked and self._checks.unanswered(author, self._around.now()):
                self._tell_evaded(
                    author, fragment, "it has failed before, and this came to nothing"
                )
        else:
            self._conclude(author, fragment, losses, own, parts.cutting.data_size)
        finally:
            self._busy = False

    async def _expected(
        self, parts: Parts, uploads: Uploads, before: Float32s, *, steps: int
    ) -> float | None:
        """Return the fall of the loss that the own contribution lets expect of so many steps.

        ``None``: it is known what is usual, or the own contribution cannot be measured.
        """
        assert parts.entry is not None
        entry, fragment = parts.commit.members[parts.entry], parts.commit.fragment
        if not self._checks.asks_own(fragment, self._around.now()):
            return None
        after = await self._around.threads.run(before.copy)
        for index in range(len(parts.cutting.slices)):
            found = uploads.of(index, alone=True)
            if found is None or found[1].members != (parts.entry,):
                return None  # others have carried it
            for chunk, place in parts.cutting.pieces(index):
                data = found[0][place]
                await self._around.threads.run(self._add, parts, chunk, before, after, data)
        try:
            step = self._checks.step_to_read(entry.mark, entry.steps)
            reading = await self._judge.reading_of(step)
        except TimeoutError:
            return None
        if reading is None:
            return None
        losses = await self._judge.judge(Trial(fragment, parts.me, reading, before, after))
        if not isinstance(losses, Losses):
            return None
        self.counters["own_contributions_judged"] += 1
        return expected(losses.before, losses.after, own_steps=entry.steps, steps=steps)

    def _conclude(
        self,
        author: PeerId,
        fragment: int,
        losses: Losses,
        own: float | None,
        received_bytes: int,
    ) -> None:
        now = self._around.now()
        passed = self._checks.checked(
            author, losses.before, losses.after, now, fragment=fragment, own=own
        )
        self.counters["spot_checks"] += 1
        fields = {
            "peer": author,
            "before": losses.before,
            "after": losses.after,
            "seconds": losses.seconds,
            "received_bytes": received_bytes,
        }
        if passed:
            self._around.event("spot_check_passed", fragment=fragment, **fields)
        else:
            strikes = self._checks.strikes_of(author, now)
            self._around.event("spot_check_failed", fragment=fragment, **fields, strikes=strikes)
            self._name(author, now)

    def _name(self, author: PeerId, now: float) -> None:
        """Tell the others whom this peer suspects, if it has reason enough."""
        if self._checks.names(author, now):
            self.counters["peers_named"] += 1
            for peer in self._around.others:
                if peer != author:
                    self._around.send(peer, Suspected(0, author))

    def heard_of(self, sender: PeerId, message: Suspected) -> None:
        """Another peer suspects somebody: the next check is of that one, if it may be told.

        Taken from established peers, and about peers that are there: words about inventions would
        push out all others.
        """
        known = self._around.is_here(message.peer) and self._around.is_established(sender)
        if known and sender not in self._audits.convicted:
            self._checks.named(message.peer, sender, self._around.now())

    def _evaded(self, author: PeerId, fragment: int, reason: str) -> None:
        self._checks.evaded(author, self._around.now())
        self._tell_evaded(author, fragment, reason)

    def _tell_evaded(self, author: PeerId, fragment: int, reason: str) -> None:
        self.counters["spot_checks_evaded"] += 1
        strikes = self._checks.strikes_of(author, self._around.now())
        self._around.event(
            "spot_check_evaded", peer=author, fragment=fragment, reason=reason, strikes=strikes
        )

    async def _with_contribution(
        self, parts: Parts, before: Float32s, stream: Stream, sources: Sequence[Claim]
    ) -> Float32s:
        """The state with the contribution, as it was merged. Raises ``NotHere`` or a ``WORLD``."""
        after = await self._around.threads.run(before.copy)
        for index, source in enumerate(sources):
            for number, chunk in enumerate(parts.cutting.chunks[index]):
                (each,) = await self._audits.shown_on(stream, parts, {index: source}, number)
                await self._around.threads.run(self._add, parts, chunk, before, after, each.data)
        return after

    async def _source(self, parts: Parts, index: int, entry: int) -> Claim:
        """The claim of a member's upload that went into a merged slice."""
        merged = parts.evidence.merged.get(index)
        if merged is None:
            raise _Uncheckable
        reducer = authors(parts.commit)[merged.by]
        if reducer == parts.me:
            sources = parts.evidence.sources[index]
        else:
            try:
                claims = {index: merged}
                (sources,) = await self._audits.sources_of(reducer, parts, claims, merged=True)
            except NotHere as error:
                self._audits.strike(reducer, str(error), parts)
                raise _Uncheckable from error
        found = (each for each in sources if each.by == entry and each.members == (entry,))
        source = next(found, None)
        if source is None:
            raise _Uncheckable  # it came in the bundle of a site
        if not parts.evidence.is_signed(index, source, merged=False):
            # Otherwise a reducer could have an honest author shown to be another's.
            self._audits.strike(reducer, "it lists a claim that its author has not signed", parts)
            raise _Uncheckable
        return source

    def _add(
        self, parts: Parts, chunk: Chunk, before: Float32s, after: Float32s, data: memoryview
    ) -> None:
        # As error feedback does with the own contribution: the values that it stands for.
        parts.numbers.leave_rest(chunk, Moved(before, after), data, self._around.threads.scratch())


class _OtherDataThere(Exception):
    """A contribution cannot be checked, because of what its author says of its data."""
