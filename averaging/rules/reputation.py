"""Reputation: what one peer holds against others, what follows from it, and when it is forgotten.

Nothing here is proved, and no other peer hears of it. A peer that does not hand out the uploads
that it must still have may hide a lie, or have crashed in between; one that does not answer may be
slow. So each ``Deed`` counts a little at the peer that saw it. The parts of a peer tell what they
saw and ask what follows; all its fragments share one ``Reputation``. What a signature proves is no
matter of opinion (``averaging.guard.rules.proofs``), and which peers can be reached now is told by
``averaging.round.opinions``.

Deeds count on one of six **grounds**, apart from each other: good work pays for no lie, and who
serves a state slowly may lead well.

==========  =========  ============================================================================
ground      half-life  what follows
==========  =========  ============================================================================
``CONDUCT`` 30 min     with three strikes a peer neither leads, reduces nor votes here
``WORK``    30 min     with three its uploads are refused; it has power again below half of that
``WORD``    30 min     with two false alarms nobody is checked because of its word
``STATES``  none       it is not asked for a state for twice as long each time, until it delivers
``LEAD``    none       it is passed over at twice as many versions each time, until it leads to one
``COMES``   none       it said that it comes and did not: not waited for until it joins
==========  =========  ============================================================================

``LEAD`` and ``COMES`` count by fragment, because each has its own leader.

**Conduct.** One restart is one case, however many audits find nothing of it: several pieces of a
round are audited, and the rounds of several fragments. An honest peer that was back half a second
after it had finished a round had four strikes at once, and was out. A peer that never shows
anything is out after a minute. A merged slice that does not come, or an own upload that one reducer
alone has not got, is often a slow line or a machine that sleeps, which several rounds notice at
once: that counts half, and once in a while.

**Work.** Power comes back later than work. Otherwise refusals of poisoners that were found at the
same time end at the same time, and before anybody has checked them again they lead and reduce
rounds with each other's work. Three of ten did so in two rounds near the end of 24 cycles, which
cost 3% of loss.

**States.** A source that wastes much time again and again is left alone for twice as long each
time, so that no liar, however slowly it answers, keeps a peer catching up for long.

**Leading.** One that wasted joins on purpose took three quarters of the rounds from three others
when it was asked anew at each version.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, NamedTuple

from dht.bounded_mapping import BoundedMapping
from dht.identity import PeerId

LIMIT: Final = 3.0
"""Strikes with which a peer loses its power, or its work is refused."""
HALF_LIFE_S: Final = 1800.0
ENTRIES_MAX: Final = 4096
"""Entries that are remembered, one for a peer and ground; those that count the least, faded, are
forgotten first."""
ROUNDING_S: Final = 1.0
DOUBLINGS_MAX: Final = 16
PASSED_OVER_MAX: Final = 16
"""Most versions at which a leader is passed over in a row."""


class Ground(Enum):
    """The aspect of a peer that a deed speaks of."""

    CONDUCT = auto()
    WORK = auto()
    WORD = auto()
    STATES = auto()
    LEAD = auto()
    COMES = auto()


class Bar(NamedTuple):
    """The limit of what is tolerated on a ground."""

    limit: float
    again: float
    """A peer that was over the limit has its power again below this."""
    half_life_s: float = HALF_LIFE_S


BARS: Final = {
    Ground.CONDUCT: Bar(LIMIT, LIMIT),
    Ground.WORK: Bar(LIMIT, LIMIT / 2),
    Ground.WORD: Bar(2.0, 2.0),
    Ground.STATES: Bar(1.0, 1.0, math.inf),
    Ground.LEAD: Bar(1.0, 1.0, math.inf),
    Ground.COMES: Bar(1.0, 1.0, math.inf),
}
OF_POWER: Final = (Ground.CONDUCT, Ground.WORK)
"""The grounds on which a peer loses its power: it neither leads, reduces nor votes here."""


class Deed(Enum):
    """A deed of a peer, as the one that saw it tells it: its ground, its weight, and the time in
    which it counts once."""

    IS_LATE = Ground.CONDUCT, 0.5, 10.0
    """It has not done what it had promised; a slow line or a sleeping machine may be the reason."""
    HIDES = Ground.CONDUCT, 1.0, 20.0
    """It does not show what it must still have. A live peer begins an audit at most so long after
    its round: all rounds that one restart loses make two strikes at most."""
    LIES = Ground.CONDUCT, 1.0, 0.0
    """It serves other bits than most, names no proof, or claims work beyond belief."""
    IS_UNREADABLE = Ground.CONDUCT, 0.0, 86_400.0
    """It sent something that cannot be read as a commit: said once a day."""
    HARMS = Ground.WORK, 0.4 * LIMIT, 0.0
    """Its work does not lower the loss, or it answers and does not show it: three of them, each at
    most eight minutes after the last, are a consequence."""
    IS_UNCLEAR = Ground.WORK, 0.5, 10.0
    """It has harmed before, and a check of its work came to nothing."""
    IS_NAMED = Ground.WORK, 0.0, 120.0
    """It is named to others, some of which may have come since it was named last."""
    HELPS = Ground.WORK, -0.4 * LIMIT, 0.0
    ALARMS_FALSELY = Ground.WORD, 1.0, 0.0
    ALARMS_RIGHTLY = Ground.WORD, -1.0, 0.0
    WASTES_TIME = Ground.STATES, 1.0, 0.0
    LEADS_NOWHERE = Ground.LEAD, 1.0, 0.0
    STAYS_AWAY = Ground.COMES, 1.0, 0.0

    def __init__(self, ground: Ground, weight: float, every_s: float) -> None:
        self.ground = ground
        self.weight = weight
        self.every_s = every_s


@dataclass(slots=True)
class Record:
    """The deeds of one peer on one ground."""

    count: float = 0.0
    at: float = 0.0
    """Time at which it was counted."""
    seen_at: dict[Deed, float] = field(default_factory=dict)
    """When each deed that counts once in a while was counted last."""
    was_over: bool = False
    """True if it was over the limit."""
    until: float = -math.inf
    """It is not asked before this: a time, or a number of versions."""

    def faded(self, half_life_s: float, now: float) -> float:
        return float(self.count * 0.5 ** (max(0.0, now - self.at) / half_life_s))


Key = tuple[PeerId, Ground, int]
"""Peer, ground and fragment."""


class Reputation:
    """The reputation of all peers at one of them. Times are on its own clock."""

    __slots__ = ("_longest_s", "_none_out_after", "_records", "_shortest_s")

    def __init__(self, *, retry_s: float = 12.0, retry_max_s: float = 600.0) -> None:
        """``retry_s``, ``retry_max_s``: how long a source of states that has not delivered is left
        alone, and how long at most where it has wasted more than the first again and again."""
        self._shortest_s = retry_s
        self._longest_s = retry_max_s
        self._records = BoundedMapping[Key, Record](
            "reputation",
            ENTRIES_MAX,
            # A number by which two can be compared at any time, as all fade alike.
            worth=lambda _, record: _log2(record.count) + record.at / HALF_LIFE_S,
        )
        self._none_out_after = -math.inf
        """Time at which all counts will have faded so far that every peer has its power."""

    # Telling

    def saw(self, peer: PeerId, deed: Deed, now: float, *, fragment: int = 0) -> bool:
        """A peer has done something. ``False``: that does not count again so soon."""
        key = peer, deed.ground, fragment
        if deed.weight < 0.0 and key not in self._records:
            return True
        record, bar = self._records.get(key, Record()), BARS[deed.ground]
        if now < record.seen_at.get(deed, -math.inf) + deed.every_s:
            return False
        if deed.every_s:
            record.seen_at[deed] = now
        record.count = max(0.0, record.faded(bar.half_life_s, now) + deed.weight)
        record.at = now
        record.was_over |= record.count >= bar.limit
        self._records[key] = record
        if deed.ground in OF_POWER and record.was_over and record.count >= bar.again:
            fades_s = bar.half_life_s * math.log2(record.count / bar.again) + ROUNDING_S
            self._none_out_after = max(self._none_out_after, now + fades_s)
        return True

    def wasted(self, source: PeerId, *, held_s: float, now: float) -> None:
        """A source did not deliver a state, after this peer had waited for ``held_s``."""
        if not self.may_ask(source, now):
            return  # another fragment has reported it
        key = source, Ground.STATES, 0
        wait_s = self._shortest_s
        if self.is_long(held_s):
            self.saw(source, Deed.WASTES_TIME, now)
            doublings = self.count(source, Ground.STATES, now) - 1
            wait_s = min(self._longest_s, held_s * 2.0 ** min(doublings, DOUBLINGS_MAX))
        record = self._records.get(key, Record(at=now))
        record.until = now + wait_s
        self._records[key] = record

    def led_nowhere(self, leader: PeerId, now: float, *, fragment: int, version: int) -> int:
        """A join with a leader led to no version. Returns at how many it is passed over from
        ``version`` on, a number that grows with each."""
        self.saw(leader, Deed.LEADS_NOWHERE, now, fragment=fragment)
        doublings = self.count(leader, Ground.LEAD, now, fragment=fragment) - 1
        versions = min(PASSED_OVER_MAX, 1 << min(max(0, int(doublings)), DOUBLINGS_MAX))
        if (record := self._records.get((leader, Ground.LEAD, fragment))) is not None:
            record.until = version + versions
        return versions

    def forgive(self, peer: PeerId, ground: Ground, *, fragment: int = 0) -> None:
        """A peer has done what it did not do before: it begins anew."""
        self._records.pop((peer, ground, fragment), None)

    def forgive_leaders(self, fragment: int) -> None:
        """No leader of a fragment is passed over any more."""
        for peer, ground, index in tuple(self._records):
            if ground is Ground.LEAD and index == fragment:
                self.forgive(peer, ground, fragment=fragment)

    # Asking

    def count(self, peer: PeerId, ground: Ground, now: float, *, fragment: int = 0) -> float:
        """How much a peer has on a ground, faded to the present: its strikes."""
        record = self._records.get((peer, ground, fragment))
        return record.faded(BARS[ground].half_life_s, now) if record is not None else 0.0

    def is_over(self, peer: PeerId, ground: Ground, now: float, *, fragment: int = 0) -> bool:
        """True if a peer has too much on a ground."""
        return self.count(peer, ground, now, fragment=fragment) >= BARS[ground].limit

    def has_power(self, peer: PeerId, now: float) -> bool:
        """True if a peer may lead, reduce and vote, as far as its reputation goes."""
        for ground in OF_POWER:
            record = self._records.get((peer, ground, 0))
            if record is not None and record.was_over:
                bar = BARS[ground]
                if record.faded(bar.half_life_s, now) >= bar.again:
                    return False
        return True

    def all_have_power(self, now: float) -> bool:
        """True if no peer can be out of favour, as hardly ever one is: then nobody need be looked
        at."""
        return now > self._none_out_after

    def refuses_work(self, peer: PeerId, now: float) -> bool:
        """True if nothing that a peer uploads is merged here for now."""
        return self.is_over(peer, Ground.WORK, now)

    def may_ask(self, source: PeerId, now: float) -> bool:
        """True if a peer may be asked for a state now."""
        record = self._records.get((source, Ground.STATES, 0))
        return record is None or now >= record.until

    def is_long(self, held_s: float) -> bool:
        """True if a wait of this length for a state counts as wasted time."""
        return held_s > self._shortest_s

    def passed_over(self, fragment: int, version: int) -> set[PeerId]:
        """The leaders that are passed over at a version of a fragment."""
        return {
            peer
            for (peer, ground, index), record in self._records.items()
            if ground is Ground.LEAD and index == fragment and version < record.until
        }


def _log2(count: float) -> float:
    return math.log2(count) if count > 0.0 else -math.inf
