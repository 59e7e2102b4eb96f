"""How long a peer that leaves stays for its pending work to be merged: as its line needs.

It is told to leave within some time. Merging what is pending on a fast line is a matter of seconds.
On a slow one it takes as long as the bytes do, and the peer stays for up to ``SLACK`` times that,
as a line carries other traffic and a round may fail once. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SLACK: Final = 3.0
WAY_BACK: Final = 1.25
"""Time for the bytes of both directions, relative to those of one. They pass at the same time but
for the last of them: two homes at 20 s per fragment handed four over in 91 s."""

UNKNOWN_BYTES_S: Final = 625_000.0
"""Speed that a line counts as that was not measured (5 Mbit/s)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastOffers:
    """Pending work of a peer that leaves, and the line that has to carry it."""

    encoded_bytes: int
    bytes_per_s: float
    """Speed of its line in the slower direction; 0: not known."""
    company_s: float = 0.0
    """Time that the others may need until they have steps of their own for a round."""

    @property
    def expected_s(self) -> float:
        """Time that it takes."""
        speed = self.bytes_per_s or UNKNOWN_BYTES_S
        return self.company_s + WAY_BACK * self.encoded_bytes / speed

    def patience_s(self, *, least_s: float, most_s: float) -> float:
        """Time to stay for it at most."""
        return max(least_s, min(most_s, SLACK * self.expected_s))
