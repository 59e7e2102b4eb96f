"""Spreading the rounds of a peer's fragments over a cycle.

The first due times of fragments are spread evenly (``averaging.rules.due``). After that each of
them counts from its own closings, so fragments whose closings came together once stay together:
those of a peer that waited alone are all overdue when the second peer comes, and so are all after
a time without a quorum. Their rounds then begin in one moment, share the line, or wait for each
other on a slow one, and leave it idle for the rest of the cycle.

So each fragment moves back to its place in a cycle, which is given by the last closing of fragment
0. It moves by a share of the distance and of a cycle at a time: peers that hear of a closing at
different moments, or not at all, still meet, as one that is due calls all that have half a cycle of
work.
"""

from __future__ import annotations

from typing import Final

SHIFT_SHARE: Final = 0.5
"""Share of its distance to its place by which a fragment moves in a cycle."""

SHIFT_OF_CYCLE_MAX: Final = 0.125
"""Bound of one move, as a share of the cycle."""


class Spacing:
    """The last closings of all fragments of one peer, in its own steps."""

    __slots__ = ("_first_closed_at",)

    def __init__(self) -> None:
        self._first_closed_at: int | None = None
        """The step at which fragment 0 closed last."""

    def closed(self, fragment: int, step: int, *, fragments: int, interval: int) -> int:
        """Note a closing. Returns the steps by which the next cycle is longer; negative: shorter.

        ``interval``: own steps in one cycle.
        """
        if fragment == 0:
            self._first_closed_at = step
        if self._first_closed_at is None:
            return 0
        place = self._first_closed_at - fragment * interval // fragments
        late = (step - place) % interval
        if late > interval // 2:
            late -= interval
        most = int(SHIFT_OF_CYCLE_MAX * interval)
        return -max(-most, min(round(SHIFT_SHARE * late), most))
