"""Claims that no honest peer makes: refused wherever they come from, before anybody acts on them.

A head names a version and a count of tokens, and both are its sender's word until its rounds are
replayed. They are compared with where this peer stands. A leap that is refused costs a liar
nothing, but one that is taken could not be undone: counters only grow, and those near the largest
number that a message holds would leave no peer able to encode its next version. An honest peer that
was away for a year is far below the bounds.
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
