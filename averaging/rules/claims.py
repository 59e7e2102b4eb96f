"""Claims of work that nobody can have done in the time that others saw pass.

A join says how many steps its sender made since its last merged contribution. Nobody can look into
another's machine, but steps take time. A claim is **credible** for this peer if so many steps fit
into the time since it saw the sender's work merged last, or, before that, since it saw the sender
at all. Each may be ``STEP_RATIO_MAX`` times as short as the median step of the peers in sight.

**Nobody who is honest is hurt**, because the ratio is large and a refusal is a delay. Optimizer
steps of a small laptop and of a rack differ by a few hundred times: an island of many devices makes
larger steps, not shorter ones. With a thousand, a peer that comes back with the work of a day, to
peers that did not see it leave, waits for a minute; its work stays pending. A restart, a rebase
and a partition only make the time longer that others saw pass. The leader refuses such a join. A
member, which may have seen less than the leader, declines a commit only at ``SLACK`` times as much.

The tokens of a claim are bounded by its steps and the run's largest step, and then by a multiple of
the round's median (``averaging.rules.weights.credited``).
"""

from __future__ import annotations

from typing import Final

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
