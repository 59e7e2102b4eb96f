"""How a run that ends by tokens ends with one model, however many groups its peers are dealt into.

A fragment is done when ``merged`` has reached the run's tokens. Where everybody fits into one group
the first such version is **final**: whoever follows the lineage finds it, whenever it looks.
Several groups reach the tokens each on a lineage of its own. So who stands on such a version there,
or hears of one, **closes ranks**: from then on all meet in one group, as far as a roster can be
long, and come whenever they are called. They mix, and what comes of it is final: a version that
grew out of one with the run's tokens. Groups only mix from there, so no other version does. Of two
final ones, should there be more peers than a roster holds or a partition between them, everybody
takes the heavier.

Pure: when a version is final, and who gives way to whom. ``averaging.round.machine`` closes the
ranks.
"""

from __future__ import annotations

from itertools import islice

from averaging.history.chain import Chain
from averaging.history.standing import tokens_of
from averaging.messages import Commit, Head

LINKS_SEARCHED = 1024
"""A version that reached the run's tokens is no further back than so many links of a chain: a mix
of 64 lineages adds some of each."""


def grew_from(chain: Chain, tokens_end: int) -> bool:
    """Whether a version behind the newest one had the run's tokens already."""
    before = islice(reversed(chain.before_tip()), LINKS_SEARCHED)
    return any(link.tokens >= tokens_end for link in before)


def has_reached(head: Head, tokens_end: int) -> bool:
    """Whether whoever stands here has the run's tokens."""
    return tokens_of(head) >= tokens_end


def shows_final(head: Head, tokens_end: int) -> bool:
    """Whether it is final as well, where ranks are closed, by what it shows of its chain."""
    return has_reached(head, tokens_end) and any(
        link.tokens >= tokens_end for link in head.links if link.lineage != head.lineage
    )


def gives_way(mine: Head, theirs: Head, tokens_end: int) -> bool:
    """Whether I take their state, for it is final and mine is not, or lighter."""
    if not shows_final(theirs, tokens_end):
        return False
    if not shows_final(mine, tokens_end):
        return True
    return (tokens_of(mine), mine.lineage) < (tokens_of(theirs), theirs.lineage)


def goes_on(commit: Commit, tokens_end: int) -> bool:
    """Whether a round leaves lineages apart, or melds some of many, where all should mix."""
    reached = any(parent.tokens >= tokens_end for parent in commit.parents)
    return reached and len(commit.parents) > 1 and commit.kind != "mix"
