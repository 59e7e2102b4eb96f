"""The tally: what one peer knows of everybody's contributions, and how it is united with another's.

It has three parts, each a join-semilattice: uniting is commutative, associative and idempotent, so
gossip in any order, repeated or with losses, ends in the same tally everywhere.

**Maps.** For each fragment the heaviest certified version that is known, with its merged map. A
merged map already counts each seal once per lineage: a round adds its contributors' tokens to the
map of the state that it makes, a meld takes the maximum of its parents' maps, and a rebase
leaves the map of the lighter side behind, together with the work that is lost with it. So the tally
does not fold seals a second time. Records of seals, keyed by (lineage, version, peer), would be
70 bytes for each contribution: a run of 24 fragments and 16 peers makes 2.7 MB of them in a hundred
cycles, they can never be dropped, and those of a side that was given up would have to be found and
taken back. A map is 20 to 50 bytes for each peer and fragment, however many thousands of rounds
there were, and it comes with its own proof (module ``proof``). The total of a peer is the
largest of its counts in all maps, which is the run's own count of tokens.

**Reports** divide the totals into days (module ``reports``): for each day at most three lists
of tokens by peer, 9 to 15 bytes for each contributor. The totals of a day are bounded by those of
all later days, so tokens lost with a lineage count on no day, and the days sum to the total. For a
thousand contributors and 24 fragments, the reports of 400 days are 3.6 MB and the maps 0.4 MB.

**Statements** are the peers' own words on names and keys (module ``statements``), the newest
of each peer. Those of peers without merged tokens are not kept: strangers cannot fill the tally.

A newcomer's or a liar's claims change nothing: an unproven map is not taken, a report adds no
tokens and is only taken from a contributor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dht.identity import Identity, PeerId, RunId, verify
from peer.extras.credit.accounting import reports as days
from peer.extras.credit.accounting import statements as words
from peer.extras.credit.accounting.proof import Believes, ProvenMap, Totals
from peer.extras.credit.accounting.reports import CLOCK_DAYS, DAYS_MAX, DAYS_TOLD, Report
from peer.extras.credit.accounting.statements import Statement, Verify


@dataclass(frozen=True, slots=True)
class Part:
    """Some of what a peer knows, to be united with what another one knows."""

    maps: tuple[ProvenMap, ...] = ()
    reports: tuple[Report, ...] = ()
    statements: tuple[Statement, ...] = ()
    topic: bytes = b""
    """The topic of the run in which the maps were proven."""


@dataclass(slots=True)
class Tally:
    """One peer's knowledge of the contributions to a run of so many fragments."""

    run: RunId
    me: PeerId | None
    """This peer, whose own statement is kept in any case; ``None`` for somebody who only reads."""
    fragments: int
    maps: dict[int, ProvenMap] = field(default_factory=dict)
    reports: dict[int, tuple[Report, ...]] = field(default_factory=dict)
    """The reports of each day, the largest first."""
    statements: dict[PeerId, Statement] = field(default_factory=dict)
    topic: bytes = b""
    """The topic under which peers of the run sign links; empty until it is known."""
    check: Verify = verify
    _totals: Totals | None = None

    def __repr__(self) -> str:
        return f"Tally({self.run[:8]}, {len(self.totals.peers)} peers, {self.totals.total} tokens)"

    @property
    def totals(self) -> Totals:
        """Tokens of each contributor: the largest count of any fragment."""
        if self._totals is None:
            self._totals = Totals.of_maps(each.merged for each in self.maps.values())
        return self._totals

    @property
    def part(self) -> Part:
        """All of it."""
        listed = (each for day in sorted(self.reports) for each in self.reports[day])
        stated = (self.statements[peer] for peer in sorted(self.statements))
        maps = (self.maps[fragment] for fragment in sorted(self.maps))
        return Part(tuple(maps), tuple(listed), tuple(stated), self.topic)

    def copied(self) -> Tally:
        """A copy, to be read in a thread while this one changes."""
        return Tally(
            self.run,
            self.me,
            self.fragments,
            dict(self.maps),
            dict(self.reports),
            dict(self.statements),
            self.topic,
            self.check,
        )

    def follow(self, topic: bytes) -> None:
        """Go by this topic. Where the run goes on under another one, no signature from before
        counts any more, and neither does any map: its work may be none of the run's now."""
        if self.topic not in (b"", topic):
            self.maps.clear()
            self._totals = None
        self.topic = topic

    def unite(self, part: Part, *, today: int, believes: Believes) -> bool:
        """Take what is new and proven. Returns whether anything was."""
        strange = part.topic and self.topic and part.topic != self.topic
        news = [self._take_map(each, believes) for each in part.maps if not strange]
        if any(news):
            self._totals = None
        news.append(self._take_reports(part.reports, today))
        news += [self._take_statement(each) for each in part.statements]
        return any(news)

    def _take_map(self, proven: ProvenMap, believes: Believes) -> bool:
        known = self.maps.get(proven.fragment)
        if known is not None and proven.rank <= known.rank:
            return False
        if proven.fragment >= self.fragments or not proven.is_bound or not believes(proven):
            return False
        self.maps[proven.fragment] = proven
        return True

    def _take_reports(self, reports: Iterable[Report], today: int) -> bool:
        contributors, last = self.totals.by_peer, today + CLOCK_DAYS
        first = max(0, last + 1 - DAYS_TOLD)
        by_day: dict[int, list[Report]] = {}
        for each in reports:
            if each.peer in contributors and first <= each.day <= last:
                by_day.setdefault(each.day, []).append(each)
        news = False
        for day, given in by_day.items():
            known = self.reports.get(day, ())
            new = [r for r in days.united((*known, *given)) if r not in known]
            signed = [each for each in new if days.is_signed(each, self.run, self.check)]
            if signed:
                self.reports[day] = days.united((*known, *signed))
                news = True
        kept = [day for day in self.reports if day >= first]
        if 2 * len(kept) <= len(self.reports):
            # Most days would go. So it is this clock that is wrong, by years.
            kept = list(self.reports)
        self.reports = {day: self.reports[day] for day in sorted(kept)[-DAYS_MAX:]}
        return news

    def _take_statement(self, statement: Statement) -> bool:
        peer = statement.peer
        if peer != self.me and peer not in self.totals.by_peer:
            return False
        known = self.statements.get(peer)
        if known is not None and statement.rank <= known.rank:
            return False
        if not words.is_signed(statement, self.run, self.check):
            return False
        self.statements[peer] = statement
        return True

    def report(self, identity: Identity, day: int) -> bool:
        """Report the day so far, if this peer is a contributor. Returns whether that is news."""
        if identity.peer_id not in self.totals.by_peer:
            return False
        known = {each.peer: each for each in self.reports.get(day, ())}
        own = known.get(identity.peer_id)
        if own is not None and own.totals == self.totals:
            return False
        return self._take_reports([days.report(identity, self.run, day, self.totals)], day)

    def state(self, identity: Identity, name: str, keys: Collection[PeerId], now: float) -> bool:
        """State this peer's name and other keys, unless that is what it said last.

        Raises ``ValueError`` for what other peers would not take.
        """
        known = self.statements.get(identity.peer_id)
        wanted = (name, tuple(sorted(set(keys))))
        if known is None and wanted == ("", ()):
            return False
        if known is not None and (known.name, known.keys) == wanted:
            return False
        sequence = max(int(now), 0 if known is None else known.sequence + 1)
        return self._take_statement(words.state(identity, self.run, sequence, name, keys))

    def by_day(self) -> dict[int, Mapping[PeerId, int]]:
        """Tokens of each peer on each day that has a report; they sum to ``totals``.

        Work since the last report counts for its day.
        """
        ordered = sorted(self.reports)
        ends: dict[int, Mapping[PeerId, int]] = {}
        later = self.totals.by_peer
        for day in reversed(ordered):
            last = day == ordered[-1]
            ends[day] = later if last else days.counted(self.reports[day]).at_most(later)
            later = ends[day]
        made: dict[int, Mapping[PeerId, int]] = {}
        before: Mapping[PeerId, int] = {}
        for day in ordered:
            gained = {peer: n - before.get(peer, 0) for peer, n in ends[day].items()}
            made[day] = {peer: count for peer, count in gained.items() if count}
            before = ends[day]
        return made


FRAGMENTS_MAX = 2**16


def unproven(run: RunId) -> Tally:
    """An empty tally of somebody who only reads."""
    return Tally(run, None, FRAGMENTS_MAX)


def everything(proven: ProvenMap) -> bool:
    """Believe what ``confirmed`` has chosen."""
    return True


def confirmed(parts: Sequence[Part]) -> Part:
    """The tally of a reader outside the run, who has seen nobody work and can prove nothing.

    It asks several peers, and takes of each fragment the second heaviest map that they tell of: one
    of them alone can add no tokens. Where a single peer answers, its word is all there is.
    """
    by_fragment: dict[int, list[ProvenMap]] = {}
    for part in parts:
        for each in part.maps:
            by_fragment.setdefault(each.fragment, []).append(each)
    chosen = []
    for _, statements in sorted(by_fragment.items()):
        ranked = sorted(statements, key=lambda each: each.rank, reverse=True)
        chosen.append(ranked[min(1, len(ranked) - 1)])
    return Part(
        tuple(chosen),
        tuple(each for part in parts for each in part.reports),
        tuple(each for part in parts for each in part.statements),
    )
