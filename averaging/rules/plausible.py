"""Claims that no honest peer makes: refused wherever they come from, before anybody acts on them.

A head names a version and a count of tokens, and both are its sender's word until its rounds are
replayed. They are compared with where this peer stands. A leap that is refused costs a liar
nothing, but one that is taken could not be undone: counters only grow, and those near the largest
number that a message holds would leave no peer able to encode its next version. An honest peer that
was away for a year is far below the bounds.

A merged map is compared with the commit under which it travels: with the tokens of what its sender
claimed to stand on, and with what each member offers, of which nobody can have merged more.
"""

from __future__ import annotations

from typing import Final

from averaging.history.merged_map import MergedMap
from averaging.history.standing import tokens_of
from averaging.messages import Commit, Head

VERSIONS_AHEAD_MAX: Final = 1 << 24
"""Versions that another peer may be ahead: a year of one round in two seconds."""

COUNT_PLAUSIBLE_MAX: Final = 1 << 50
"""Largest version, and token count, of a peer that this one cannot compare with its own."""

RATE_RATIO_MAX: Final = 1 << 10
"""Tokens of each version of another peer, on average, as a multiple of those of the own ones."""

MAP_RATIO_MAX: Final = 2
"""Tokens in a merged map, as a multiple of those in the link of the chain that it belongs to.

They are equal, except that a mix counts a few tokens twice in its link where chains are thinned.
"""


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


def invented(merged: MergedMap, commit: Commit, entry: int | None) -> str | None:
    """Return why this member cannot have this merged map; ``None`` if it can.

    ``entry``: its index in the roster; ``None``: the map is that of all members together.
    """
    if entry is None:
        stood_on = sum(parent.tokens for parent in commit.parents)
        if capped(merged, commit) != merged:
            return "its merged map has more of a member than that offers"
    else:
        stood_on = commit.parents[commit.members[entry].parent].tokens
    if merged.tokens > MAP_RATIO_MAX * stood_on:
        return f"its merged map has {merged.tokens} tokens, its state {stood_on}"
    return None


def capped(merged: MergedMap, commit: Commit) -> MergedMap:
    """Return the map with no more of any member than that member offers.

    A mark beyond that was invented by somebody, perhaps long ago and elsewhere: its owner is here
    and knows. It is put right and not refused, because the member that has it may be honest.
    """
    works = []
    for member in commit.members:
        mark, most = merged.get(member.peer), (member.incarnation, member.mark)
        if mark is not None and (mark.incarnation, mark.step) > most:
            works.append((member.peer, *most, 0))
    return merged.with_works(works) if works else merged
