"""The share of a fragment's rounds that a peer takes part in: as many as its line carries.

A round waits for the slowest line that is in it. A peer whose line is busy for longer than a share
of a cycle (``line_share`` of a run file, 0.7 unless set) with the rounds of a cycle takes part in
every k-th version only, and so does one whose rounds would make the others' cycle longer by
``COST_MAX`` or more. In between it says so when it is called, follows by replays, and its work
stays pending.

Each peer decides for itself by its measured line, so nothing is agreed. k rises at once and falls
with a margin; it is never above the number of versions after which work may be stale. It is a whole
number: with quarters (two versions of three) members sit out different versions, and three
simulated homes used 44% of their lines in place of 82%. A line that does not even carry one payload
in a cycle cannot follow; the reason says so.

A cycle is counted as one payload in each direction. A member that reduces sends up to twice as
much. Where that is a third more than its line carries it misses a fifth of the rounds (simulated);
if it were counted, it would sit out half of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

COST_MAX: Final = 0.1
"""Share by which one peer may lengthen the others' cycles on average."""

FALL_MARGIN: Final = 1.3
"""k falls only to what a load this many times larger would allow: measured speeds vary."""

SLOW_EXCHANGES_MAX: Final = 4
"""Rounds that exchange at once on a slow line. Three homes at 1 Mbit/s used 65% of their uplinks
with one, 80% with two and 87% with three or four, and took part in 73, 87 and 99% of the rounds.
Where their cycles ask for all that the lines carry they missed 7% with three, which left the fourth
fragment's rounds without them and the line to replays, and 2.5% with four."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Every:
    """The decision to take part in every k-th version."""

    versions: int
    """k; 1: in all of them."""
    reason: str


FROM_THE_START: Final = Every(
    versions=1, reason="no transfer has measured this peer's line yet, so it joins every round"
)


def every(
    before: Every,
    *,
    bytes_per_s: float,
    fragment_bytes: int,
    fragments: int,
    cycle_s: float,
    share_max: float,
    versions_max: int,
) -> Every:
    """Return how often a peer takes part. 0 for a speed or a cycle: it is not known.

    ``fragment_bytes``: the encoded size of the fragment; the others are about as large.
    ``share_max``: share of a cycle for which the line may be busy with rounds, in each direction.
    """
    if not (bytes_per_s > 0.0 and cycle_s > 0.0):
        return FROM_THE_START
    payload_s = fragments * fragment_bytes / bytes_per_s
    busy = payload_s / cycle_s
    # Slow lines carry one round at a time: up, and down again. Shorter ones delay nobody.
    longer = 2 * busy / fragments - 1
    needed = max(busy / share_max, longer / COST_MAX)
    least, most = (max(1, math.ceil(load * needed)) for load in (1.0, FALL_MARGIN))
    versions = min(max(least, min(before.versions, most)), max(1, versions_max))
    line = f"the line takes {payload_s:.1f} s for the payload of a cycle of {cycle_s:.1f} s"
    if busy > 1.0:
        line += "; it cannot follow all versions, and needs longer cycles or a faster codec"
    return Every(versions=versions, reason=line)


def exchanges_at_once(bytes_per_s: float, *, most: int, slow_bytes_s: float) -> int:
    """Return the number of rounds that may exchange at once at a peer: fewer on a slow line.

    With one at a time the line stands idle while a round gathers, seals and reports, and the peer
    misses the rounds of other fragments meanwhile. With many they share it, and all end late.
    """
    return min(most, SLOW_EXCHANGES_MAX) if 0.0 < bytes_per_s < slow_bytes_s else most


def merges_at_once(transfer_s: float, *, upload_s: float) -> int:
    """Return the number of fragments that a peer offers at once before it leaves.

    ``transfer_s``: time that its line takes for the upload of the largest one. Rounds that are
    begun together share the line, and each has ``upload_s`` and twice the time of its own bytes
    (``averaging.rules.deadlines``). Four uploads of 20 s at once all missed that deadline.
    """
    return 2 + int(upload_s / max(transfer_s, 1e-3))
