"""Sites: peers at one place merge among themselves first, and one of them crosses the slow link.

Members of a round that name the same ``site`` have a **delegate** among them, named in the commit:
the first in rank that can be dialled. The others are its **riders**. All control messages stay as
they are: riders join, vote on the seal, have an entry in the ledger and can be in doubt like any
member. Only bulk data takes another way. A rider uploads its slices to the delegate, which merges
them with its own into a **bundle**, a payload of the usual form, and uploads that; merged slices
come back the same way. Only delegates reduce. So the slow link carries what one peer would send.
Peers of a site are dealt into one group, as long as it then has room for as many others.

A bundle counts with the sum of its members' weights, in a meld with their number. Where no share is
capped the result is the merge of all members, except that it is encoded twice.

Nothing is merged twice or in parts: the delegate decides once who is in its bundle, before it sends
any of it, and says so with each slice, and a reducer counts all of them as complete or none. A
rider's contribution is in the bundle or nowhere. When a delegate dies, its riders fetch the merged
slices themselves; their work is not in the seal and is pending again. A delegate judges its riders'
uploads as a reducer does, or an absurd one would have the whole bundle refused. Storms with sites
(``test_sites.py``) compare the merged bytes with those of a separate merge.

A label is believed: any peer that names the site may become the delegate of others and sees their
work, so it should not be easy to guess. A frozen delegate costs its riders the version: they hear
that others have finished, and catch up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from averaging.messages import Commit, Join
from dht.identity import PeerId

SITE_SHARE = 0.25
"""Share of the uploads' time that a delegate waits for its riders."""


def delegates(roster: Sequence[PeerId], joins: Mapping[PeerId, Join]) -> dict[PeerId, int]:
    """Return the roster index of each rider's delegate, which must be a peer others can dial."""
    first: dict[str, int] = {}
    found: dict[PeerId, int] = {}
    for index, peer in enumerate(roster):  # peers that can be dialled come first in a roster
        site = joins[peer].site
        if site is None:
            continue
        if site in first:
            found[peer] = first[site]
        elif joins[peer].reachable:
            first[site] = index
    return found


def riders_of(commit: Commit, delegate: int) -> tuple[int, ...]:
    """Return the members whose contributions this member carries."""
    return tuple(i for i, entry in enumerate(commit.members) if entry.delegate == delegate)


def carries(commit: Commit, delegate: int | None, rider: int | None) -> bool:
    return delegate is not None and rider is not None and commit.members[rider].delegate == delegate


def may_still_upload(commit: Commit, gone: Iterable[int]) -> set[int]:
    """Return the members whose upload may still come: a rider's does not without its delegate."""
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
    """Roster index of the member that uploaded it."""
    weight: float
    members: int
    """Number of contributors that it stands for."""


def shares(
    contributors: Sequence[int],
    weights: Sequence[float],
    bundles: Mapping[int, Sequence[int]],
    *,
    on_probation: Sequence[int] = (),
) -> tuple[Share, ...]:
    """Return the payloads of a sealed merge: a bundle counts as much as all its members together.

    ``bundles`` holds, by delegate, the riders in its bundle. Members on probation stand for nobody:
    their states do not move those of the others.
    """
    weight_of = dict(zip(contributors, weights, strict=True))
    carried = {rider for riders in bundles.values() for rider in riders}
    found = []
    for index in contributors:
        if index in carried:
            continue
        inside = [index, *(rider for rider in bundles.get(index, ()) if rider in weight_of)]
        count = len(inside) if index not in on_probation else 0
        found.append(Share(index, sum(weight_of[i] for i in inside), count))
    return tuple(found)
