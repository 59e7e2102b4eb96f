"""The speed of a peer's line in one direction, measured by the transfers that it makes anyway.

Nothing is sent to find out. Downloads are timed from the header, or the grant, to the last byte.
Uploads are timed from the first byte to the word that all is there, or of an answer to its ACK,
because bytes that the kernel takes at once say nothing about the line. A transfer is as slow as the
slower of its two ends, or as its source, so its rate is a lower bound. Transfers at the same time
share the line, so a transfer's rate is that of all bytes which the line carried meanwhile,
including those that are no measurement by themselves: small slices, and fetches of others. One of
the faster of the last transfers counts, transfers that were cut included with the bytes that had
passed. Each partner has an equal share in these, so a line is as fast as it was with anybody: one
partner on a slow line made all five peers of a run take their lines for slow, and led on. The
owner's limits cap the result. A line of unknown speed counts as 5 Mbit/s.

A peer on a slow line takes part in few rounds, so it uploads little, while it downloads every
version. When the line recovers, its downloads show it and its uploads do not. So the speed of one
direction is outdated once the other one has become much faster since (``paired``).

Slices follow these speeds, and a line below a quarter of the usual speed neither leads nor reduces
(``slow_lines``). With one member ten times slower, four peers wait 8.2 s for a round instead of
11.3 s, and eight wait 7.7 s instead of 13.0 s. The slow member itself ends later (15.5 s instead of
11.3 s, 13.7 s instead of 13.0 s): on a full-duplex line equal slices keep both directions busy, but
then all wait for what it has to send as a reducer (``tests/averaging/simulated/line_experiment.py``
of commit 7c8660cd).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

from dht.identity import PeerId

CARRIED_MIN_BYTES = 128 << 10
"""Fewer bytes may pass through buffers without having been on the line. So a transfer says nothing
while which the line carried less, of itself and of others: several slices of 90 KB at once do.
"""

TRANSFER_MIN_BYTES = 16 << 10
"""Smaller transfers are load beside others only."""

TRANSFERS_COUNTED = 12
"""Few, so that a line that has become slow is soon known for it: deadlines depend on it."""

COUNTED_OF_PARTNER_MIN = 2
"""Transfers of each partner that count where there are many partners."""

TRANSFERS_KEPT = 2 * TRANSFERS_COUNTED
"""A partner counts until so many transfers with others have followed its last one."""

LOAD_KEPT = 64
"""Enough for what passes beside that many transfers."""

FASTEST_IGNORED = 0.25
"""Share of the fastest transfers that is ignored: a busy machine finds bytes in its buffers."""

FASTEST_IGNORED_DOWN = 0.1
"""The same of downloads. Most are as slow as the uplinks of their sources: homes that had nobody
but each other took their downlinks of 50 Mbit/s for slower than their uplinks of 1 Mbit/s."""

CHANGED_RATIO = 3.0
"""A direction that has become this many times faster is on another line than before."""

SLOW_SHARE = 0.25
"""A line slower than this share of the median is slow. Short transfers make lines look alike, so
measured speeds differ by less than lines do."""


def slow_lines(speeds: Mapping[PeerId, float | None]) -> frozenset[PeerId]:
    """Return the peers whose measured lines are slow beside the others'.

    At least one peer is not slow, and a line of unknown speed (``None`` or 0) never is. The median
    is that of the measured lines, the lower one of two: among three, one that claims an absurd
    speed makes nobody slow.
    """
    known = [speed for speed in speeds.values() if speed]
    if not known:
        return frozenset()
    least = SLOW_SHARE * median_low(known)
    return frozenset(peer for peer, speed in speeds.items() if speed and speed < least)


@dataclass(slots=True, eq=False)
class _Transfer:
    partner: PeerId | None
    count: int
    began: float
    ended: float
    carried: float = 0.0
    """Bytes that the line carried while it lasted, of itself and of others."""

    def within(self, other: _Transfer) -> float:
        """Bytes that passed while ``other`` lasted, as if they had passed at an even rate."""
        seconds = min(self.ended, other.ended) - max(self.began, other.began)
        return self.count * max(0.0, seconds) / (self.ended - self.began)


class LineSpeed:
    """The speed of one direction. Times are those of the caller's clock."""

    __slots__ = ("_ignored", "_load", "_measured", "_other", "_other_then", "_transfers")

    def __init__(self, *, fastest_ignored: float = FASTEST_IGNORED) -> None:
        self._ignored = fastest_ignored
        self._transfers: deque[_Transfer] = deque(maxlen=TRANSFERS_KEPT)
        self._load: deque[_Transfer] = deque(maxlen=LOAD_KEPT)
        """Bytes that passed besides."""
        self._measured: float | None = None
        self._other: LineSpeed | None = None
        self._other_then: float | None = None
        """Speed of the other direction at the last transfer."""

    def transferred(self, partner: PeerId, count: int, *, began: float, ended: float) -> None:
        """Record that ``count`` bytes passed between this peer and ``partner`` between these times.

        For a transfer that was cut, pass the bytes that had passed: otherwise a peer that is too
        slow for its rounds' deadlines would never find out.
        """
        if count < TRANSFER_MIN_BYTES or ended <= began:
            self.carried(count, began=began, ended=ended)
            return
        if self._is_outdated:
            self._transfers.clear()
        new = _Transfer(partner, count, began, ended, count)
        new.carried += sum(other.within(new) for other in (*self._transfers, *self._load))
        self._pass_beside(new)
        self._transfers.append(new)
        self._other_then = None if self._other is None else self._other._measured
        self._measure()

    def carried(self, count: int, *, began: float, ended: float) -> None:
        """Record bytes that were handed to the line between these times.

        When they arrived is not known, so they are no measurement, but load beside those that are.
        """
        if ended > began:
            new = _Transfer(None, count, began, ended)
            self._load.append(new)
            self._pass_beside(new)
            self._measure()

    @property
    def bytes_per_s(self) -> float | None:
        """``None`` until a transfer was large enough, and while the last measurement is
        outdated."""
        return None if self._is_outdated else self._measured

    @property
    def _is_outdated(self) -> bool:
        now = None if self._other is None else self._other._measured
        then = self._other_then
        return now is not None and then is not None and now > CHANGED_RATIO * then

    def _pass_beside(self, new: _Transfer) -> None:
        for each in self._transfers:
            each.carried += new.within(each)

    def _measure(self) -> None:
        telling = [each for each in self._transfers if each.carried >= CARRIED_MIN_BYTES]
        if telling:
            newest = _newest_of_each(telling)
            rates = sorted(each.carried / (each.ended - each.began) for each in newest)
            self._measured = rates[-1 - int(self._ignored * len(rates))]


def _newest_of_each(transfers: Sequence[_Transfer]) -> list[_Transfer]:
    """The newest transfers with each partner, as many of each."""
    partners = {each.partner for each in transfers}
    share = max(COUNTED_OF_PARTNER_MIN, TRANSFERS_COUNTED // len(partners))
    counted: Counter[PeerId | None] = Counter()
    newest = []
    for each in reversed(transfers):
        counted[each.partner] += 1
        if counted[each.partner] <= share:
            newest.append(each)
    return newest


def paired() -> tuple[LineSpeed, LineSpeed]:
    """The speeds of the two directions of one line: up and down."""
    up, down = LineSpeed(), LineSpeed(fastest_ignored=FASTEST_IGNORED_DOWN)
    up._other, down._other = down, up
    return up, down
