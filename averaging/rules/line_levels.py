"""Codec, length of the cycle and versions of each peer that the lines of a run can carry.

**Levels.** A run may allow smaller codecs and longer cycles than those it prefers. They form a list
of *levels*, from the most bytes per step to the fewest: first smaller codecs, which cost little
loss, then longer cycles, which cost more. Each peer says in its signed ``Join`` which level its own
line needs, and a commit takes the highest of its members' levels. So it follows from the joins,
like the rest of the commit, and no leader can choose it. Two kinds of members are not asked: those
on lines that are slow beside the others', and from five members on the fifth (rounded down) with
the highest levels, who may be wrong or lie. They take part in every k-th version.

A peer's level rises as soon as its line needs it and falls only with a margin, since measured
speeds vary and lie below what a line can do.

**Every k-th version.** A round waits for the slowest line that is in it. A peer whose line is busy
for longer than a share of a cycle (``line_share`` of a run file, 0.7 unless set) with the rounds of
a cycle takes part in every k-th version only, and so does one whose rounds would make the others'
cycle longer by ``COST_MAX`` or more. In between it says so when it is called, follows by replays,
and its work stays pending.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from averaging.rules.line_speed import slow_lines
from dht.identity import PeerId

LEVELS_MAX: Final = 64

CYCLE_RATIO: Final = 1.25
"""Length of a level's cycle over that of the level before it, where the codecs are the same."""

FALL_MARGIN: Final = 1.3
"""A level, or k, falls only to one that a load this many times larger would allow."""

UNASKED_SHARE: Final = 0.2
"""Share of the members, rounded down, whose levels are ignored because they are the highest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """The exchange of a fragment's rounds: the codecs of both ways and the cycle."""

    codec: str
    codec_down: str
    cycle_steps: int

    def __str__(self) -> str:
        codec, down = self.codec, self.codec_down
        codecs = codec if codec == down else f"{codec} up and {down} down"
        return f"{codecs} every {self.cycle_steps} steps"


def ladder(first: Level, smaller: Sequence[tuple[str, str]], *, cycle_max: int) -> list[Level]:
    """Return the levels of a run that prefers ``first`` and allows these codecs and cycles."""
    levels = [
        first,
        *(Level(codec=up, codec_down=down, cycle_steps=first.cycle_steps) for up, down in smaller),
    ]
    last = levels[-1]
    steps = last.cycle_steps
    while steps < cycle_max and len(levels) < LEVELS_MAX:
        steps = min(cycle_max, max(steps + 1, round(CYCLE_RATIO * steps)))
        levels.append(Level(codec=last.codec, codec_down=last.codec_down, cycle_steps=steps))
    return levels


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A peer's knowledge of its line and of the rounds that it carries."""

    bytes_per_s: float
    """0: it is not known."""
    step_s: float
    """Duration of a step of the median peer; 0: it is not known."""
    fragments: int
    members: int
    """Number of peers that share a round."""
    share_max: float
    """Share of the line that rounds may take, in each direction."""

    def share_of(self, encoded_bytes: Callable[[str], int], level: Level) -> float:
        """Return the share of the line that this level takes.

        A member that reduces its part sends ``(n - 1) / n`` of an upload and of a merged fragment.
        """
        both = encoded_bytes(level.codec) + encoded_bytes(level.codec_down)
        cycle_bytes = self.fragments * both * (1 - 1 / max(2, self.members))
        return cycle_bytes / (self.bytes_per_s * self.step_s * level.cycle_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """The level that one line needs."""

    level: int
    reason: str


FROM_THE_START: Final = Need(
    level=0, reason="no transfer has measured this peer's line yet, so the largest level holds"
)


def needed(
    before: Need, line: Line, levels: Sequence[Level], encoded_bytes: Callable[[str], int]
) -> Need:
    """Return the first level that the line carries; the last one if it carries none."""
    if not (line.bytes_per_s > 0.0 and line.step_s > 0.0):
        return before
    shares = [line.share_of(encoded_bytes, level) for level in levels]
    last = len(levels) - 1
    least, most = (
        next((i for i, share in enumerate(shares) if load * share <= line.share_max), last)
        for load in (1.0, FALL_MARGIN)
    )
    level = max(least, min(before.level, most))
    taken = f"{levels[level]} takes {shares[level]:.0%} of the line"
    if shares[level] > line.share_max:
        return Need(level=level, reason=f"{taken}, and the run allows nothing smaller")
    if level == 0:
        return Need(level=level, reason=taken)
    return Need(level=level, reason=f"{taken}, {levels[level - 1]} {shares[level - 1]:.0%}")


def agreed(wanted: Mapping[PeerId, int], speeds: Mapping[PeerId, float], *, levels: int) -> int:
    """Return the level of a commit, from what its members need and the speeds of their lines."""
    slow = slow_lines(speeds)
    ranked = sorted(level for peer, level in wanted.items() if peer not in slow)
    unasked = int(UNASKED_SHARE * len(ranked))
    return min(levels - 1, ranked[len(ranked) - 1 - unasked])


COST_MAX: Final = 0.1
"""Share by which one peer may lengthen the others' cycles on average."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Every:
    """The decision to take part in every k-th version."""

    versions: int
    """k; 1: in all of them."""
    reason: str


IN_EVERY_ROUND: Final = Every(
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
        return IN_EVERY_ROUND
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


def merges_at_once(transfer_s: float, *, upload_s: float) -> int:
    """Return the number of fragments that a peer offers at once before it leaves.

    ``transfer_s``: time that its line takes for the upload of the largest one. Rounds that are
    begun together share the line, and each has ``upload_s`` and twice the time of its own bytes
    (``averaging.round.gathering.roster``). Four uploads of 20 s at once all missed that deadline.
    """
    return 2 + int(upload_s / max(transfer_s, 1e-3))
