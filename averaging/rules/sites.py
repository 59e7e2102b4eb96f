"""Peers at one place reduce among themselves first, and one of them crosses the slow link.

Members of a round that say the same ``site`` have a **delegate** among them, named in the commit:
the first in rank that can be dialled. The others are its **riders**. In everything that is said
they are members like all others: they join, vote on the seal, stand in the ledger and are in doubt.
Only bulk takes another way. A rider uploads its slices to the delegate, who merges them with its
own, as if nobody else took part, into a **bundle**: a payload like any other, and uploads that.
Merged slices come back the same way. So what crosses the slow link is what one peer would send.

Why nothing is merged twice or in parts: the delegate decides once who is in its bundle, before it
sends any of it, and says so with each slice. Its reducers count all of them as complete or none.
A rider's contribution travels in the bundle or not at all: should the delegate die, the rider only
fetches merged slices itself, its work is not in the seal, and is pending again.

Pure: who carries whom, and how much a payload counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from averaging.messages import Commit, Join
from dht.identity import PeerId

SITE_SHARE = 0.25
"""A delegate waits for its riders during this share of the time that uploads have."""


def delegates(roster: Sequence[PeerId], joins: Mapping[PeerId, Join]) -> dict[PeerId, int]:
    """By rider: its delegate's index in the roster. Who can be dialled by nobody carries nobody."""
    first: dict[str, int] = {}
    found: dict[PeerId, int] = {}
    for index, peer in enumerate(roster):  # those who can be dialled come first in it
        site = joins[peer].site
        if site is None:
            continue
        if site in first:
            found[peer] = first[site]
        elif joins[peer].reachable:
            first[site] = index
    return found


def riders_of(commit: Commit, delegate: int) -> tuple[int, ...]:
    """Whose contributions this member carries."""
    return tuple(i for i, entry in enumerate(commit.members) if entry.delegate == delegate)


def carries(commit: Commit, delegate: int | None, rider: int | None) -> bool:
    return delegate is not None and rider is not None and commit.members[rider].delegate == delegate


def may_still_upload(commit: Commit, gone: Iterable[int]) -> set[int]:
    """Members of whom an upload may still come: a rider's does not without its delegate."""
    down = set(gone)
    return {
        index
        for index, entry in enumerate(commit.members)
        if index not in down and entry.delegate not in down
    }


@dataclass(frozen=True, slots=True)
class Share:
    """One payload in the merge of a slice."""

    carrier: int
    """Roster index of whoever uploaded it."""
    weight: float
    members: int
    """For how many contributors it stands."""


def shares(
    contributors: Sequence[int],
    weights: Sequence[float],
    bundles: Mapping[int, Sequence[int]],
) -> tuple[Share, ...]:
    """The payloads of a sealed merge: a bundle counts as much as all whom it carries.

    ``bundles``: by delegate, its riders in it. Where no share is capped the mean of bundles is the
    mean of all, but for being encoded twice.
    """
    weight_of = dict(zip(contributors, weights, strict=True))
    carried = {rider for riders in bundles.values() for rider in riders}
    found = []
    for index in contributors:
        if index in carried:
            continue
        inside = [index, *(rider for rider in bundles.get(index, ()) if rider in weight_of)]
        found.append(Share(index, sum(weight_of[i] for i in inside), len(inside)))
    return tuple(found)
