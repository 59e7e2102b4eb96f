"""How fast a peer's line is in one direction, from the transfers that it made anyway.

Nobody sends anything to find out. A transfer is as slow as the slower of its two ends, or as who
makes the bytes, so its rate says "at least"; transfers at the same time share the line, so their
rates are added up; and of many, one of the fastest counts.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

TRANSFER_MIN_BYTES = 128 << 10
"""Less than this may pass through buffers without having been on the line. It is half of the
smallest slice that is worth a reducer of its own."""

TRANSFERS_KEPT = 12
"""Few, so that a line that has become slow is soon known for it: deadlines go by that."""

FASTEST_IGNORED = 0.25
"""So many of the fastest are not believed: a busy machine finds bytes in its buffers."""


@dataclass(frozen=True, slots=True)
class _Transfer:
    rate: float
    began: float
    ended: float


class LineSpeed:
    """Of one direction. Times are those of the caller's clock."""

    __slots__ = ("_transfers",)

    def __init__(self) -> None:
        self._transfers: deque[_Transfer] = deque(maxlen=TRANSFERS_KEPT)

    def __repr__(self) -> str:
        return f"LineSpeed({self.bytes_per_s} B/s of {len(self._transfers)} transfers)"

    def transferred(self, count: int, *, began: float, ended: float) -> None:
        """So many bytes have gone from one end to the other between these times.

        Of a transfer that was cut, what had passed: else who is too slow for its rounds' deadlines
        would never find out.
        """
        if count >= TRANSFER_MIN_BYTES and ended > began:
            self._transfers.append(_Transfer(count / (ended - began), began, ended))

    @property
    def bytes_per_s(self) -> float | None:
        """``None`` as long as nothing was large enough to tell."""
        if not self._transfers:
            return None
        rates = sorted(
            sum(other.rate for other in self._transfers if other.began <= middle <= other.ended)
            for middle in ((each.began + each.ended) / 2 for each in self._transfers)
        )
        return rates[-1 - int(FASTEST_IGNORED * len(rates))]
