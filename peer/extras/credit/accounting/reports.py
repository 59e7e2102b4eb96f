"""Reports of days: a contributor's signed word on everybody's tokens at the end of a day.

Merged maps have no dates, because peers' clocks are their own. So every contributor signs, now and
then, how many tokens each peer has by its own count, with the day by its clock; the last report of
a day stands. Reports divide credit into days and add none to it: tokens that a later day does not
contain any more never count (``averaging.history.merged_map`` is the authority). Of several
contributors that report a day the second largest report counts, so one of them cannot move work
into another day. Of two or one, each alone dates its own work, and no other's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from dht.identity import Identity, PeerId, RunId, verify
from peer.extras.credit.accounting.proof import Totals
from peer.extras.credit.accounting.statements import Verify

KEPT_PER_DAY = 3
"""Reports of a day that are kept, of different peers, the largest first."""

DAYS_MAX = 400
"""Days that are kept. The work of older ones counts for the oldest of these."""

DAYS_TOLD = 4096
"""Days from the first to the last that a summary of a tally names. A report of a day before these,
by a clock that begins in 1970, is not kept: nobody would take a summary that reaches back to it."""

DAY_S = 86_400.0
CLOCK_DAYS = 1
"""Days that another peer's clock may be ahead."""


@dataclass(frozen=True, slots=True)
class Report:
    """The tokens of each peer on a day, by one contributor's count."""

    day: int
    """Days since 1970 in UTC."""
    peer: PeerId
    """The contributor that says so."""
    totals: Totals
    signature: bytes = b""

    @property
    def rank(self) -> tuple[int, bytes, PeerId]:
        return self.totals.total, self.totals.digest, self.peer


def report(identity: Identity, run: RunId, day: int, totals: Totals) -> Report:
    signature = identity.sign(_claim(run, day, identity.peer_id, totals))
    return Report(day, identity.peer_id, totals, signature)


def is_signed(report: Report, run: RunId, check: Verify = verify) -> bool:
    claim = _claim(run, report.day, report.peer, report.totals)
    return check(report.peer, claim, report.signature)


def _claim(run: RunId, day: int, peer: PeerId, totals: Totals) -> bytes:
    return b"shoal credit day 1 " + msgspec.msgpack.encode((run, day, peer, totals.digest))


def day_of(wall_time_s: float) -> int:
    return int(wall_time_s // DAY_S)


def united(reports: Iterable[Report]) -> tuple[Report, ...]:
    """The reports of one day that are kept of these: the largest of each peer, and of those few.

    The union of unions is the union of all, in any order.
    """
    best: dict[PeerId, Report] = {}
    for each in reports:
        if each.peer not in best or each.rank > best[each.peer].rank:
            best[each.peer] = each
    return tuple(sorted(best.values(), key=lambda r: r.rank, reverse=True)[:KEPT_PER_DAY])


def counted(reports: tuple[Report, ...]) -> Totals:
    """The totals that the reports of one day, the largest first, amount to."""
    if len(reports) >= KEPT_PER_DAY:
        return reports[1].totals
    own = {each.peer: each.totals.by_peer.get(each.peer, 0) for each in reports}
    if len(reports) == 1:
        return Totals.of(own)
    one, other = (each.totals.by_peer for each in reports)
    shared = {peer: min(one[peer], other[peer]) for peer in one.keys() & other.keys()}
    return Totals.of(shared | own)
