"""Claims that no honest peer makes: refused wherever they come from, before anybody acts on them.

**Heads.** A head names a version and a count of tokens, and both are its sender's word until its
rounds are replayed. They are compared with where this peer stands (``leap``). A leap that is
refused costs a liar nothing, but one that is taken could not be undone: counters only grow, and
those near the largest number that a message holds would leave no peer able to encode its next
version. An honest peer that was away for a year is far below the bounds.

**Work** (``overstated``). A join says how many steps its sender made since its last merged
contribution. Nobody can look into another's machine, but steps take time. A claim is credible for
this peer if so many steps fit into the time since it saw the sender's work merged last, or, before
that, since it saw the sender at all. Each may be ``STEP_RATIO_MAX`` times as short as the median
step of the peers in sight.

Nobody who is honest is hurt, because the ratio is large and a refusal is a delay. Optimizer steps
of a small laptop and of a rack differ by a few hundred times: an island of many devices makes
larger steps, not shorter ones. With a thousand, a peer that comes back with the work of a day, to
peers that did not see it leave, waits for a minute; its work stays pending. A restart, a rebase
and a partition only make the time longer that others saw pass. The leader refuses such a join. A
member, which may have seen less than the leader, declines a commit only at ``SLACK`` times as much.

The tokens of a claim are bounded by its steps and the run's largest step, and then by a multiple of
the round's median (``averaging.rules.weights.credited``).
"""

from __future__ import annotations

from typing import Final

from averaging.history.standing import tokens_of
from averaging.messages import Head

VERSIONS_AHEAD_MAX: Final = 1 << 24
"""Versions that another peer may be ahead: a year of one round in two seconds."""

COUNT_PLAUSIBLE_MAX: Final = 1 << 50
"""Largest version, and token count, of a peer that this one cannot compare with its own."""

RATE_RATIO_MAX: Final = 1 << 10
"""Tokens of each version of another peer, on average, as a multiple of those of the own ones."""


def leap(mine: Head | None, theirs: Head) -> str | None:
    """Return why a peer cannot be where it says; ``None`` if it can. ``mine``: the own head."""
    tokens = tokens_of(theirs)
    if mine is None or not mine.version:
        most = COUNT_PLAUSIBLE_MAX
        if theirs.version > VERSIONS_AHEAD_MAX or tokens > most:
            return f"version {theirs.version} with {tokens} tokens is not plausible"
        return None
    ahead = theirs.version - mine.version
    if ahead > VERSIONS_AHEAD_MAX:
        return f"version {theirs.version} is {ahead} ahead of mine, {mine.version}"
    merged = tokens_of(mine)
    most = merged + RATE_RATIO_MAX * -(-merged // mine.version) * theirs.version
    if merged and tokens > most:
        return f"{tokens} tokens at version {theirs.version}; I stand at {merged}, {mine.version}"
    return None


SIGHT_S: Final = 10.0
"""A peer may have been there for so long before this one saw it: two heartbeats cross."""

STEP_RATIO_MAX: Final = 1000.0
"""The median step over the shortest one that is credible."""

SLACK: Final = 8.0
"""Multiple of what a leader takes at which the other members decline."""


def overstated(
    steps: int, *, seen_s: float, median_step_s: float, slack: float = 1.0
) -> str | None:
    """Return why nobody made so many steps in the time; ``None`` if a peer can have made them.

    ``median_step_s``: 0 if it is not known; then nothing is said of anybody.
    """
    if median_step_s <= 0.0:
        return None
    most = slack * STEP_RATIO_MAX * (SIGHT_S + max(0.0, seen_s)) / median_step_s
    if steps <= most:
        return None
    return f"{steps} steps in {seen_s:.0f} s; {int(most)} are the most that I believe"
