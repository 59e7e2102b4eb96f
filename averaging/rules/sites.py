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

A delegate sees the work of its riders and answers for it, so nobody becomes one of peers that did
not agree. The label of a site is a secret of its peers, and the seed of a key. A ``Join`` shows a
**pass**: the public half of that key, and its signature of the peer's id. So everybody can check
that peers share a label, and nobody else can say so; it should not be easy to guess. Records name
the site by a part of the public half, after which peers are dealt into groups.

A frozen delegate costs its riders the version: they hear that others have finished, and catch up.
"""

from __future__ import annotations

from base64 import b64encode
from binascii import a2b_base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from blake3 import blake3

from averaging.messages import Commit, Join
from dht.identity import Identity, PeerId, verify

SITE_SHARE = 0.25
"""Share of the uploads' time that a delegate waits for its riders."""


_NAME = slice(8, 24)
"""The part of a site's public key that is its name. All keys begin alike."""


@lru_cache(maxsize=16)
def _key_of(label: str) -> Identity:
    return Identity.from_seed(blake3(label.encode(), derive_key_context="shoal site 1").digest())


def site_name(label: str | None) -> str | None:
    """The public name of the site with this label."""
    return None if label is None else _key_of(label).peer_id[_NAME]


def name_shown(site: str) -> str:
    """The name in a pass; a name is its own."""
    key, is_pass, _ = site.partition("/")
    return key[_NAME] if is_pass else site


@lru_cache(maxsize=4096)
def site_pass(label: str | None, peer: PeerId) -> str | None:
    """The proof that this peer knows the label; ``None`` without one."""
    if label is None:
        return None
    key = _key_of(label)
    return f"{key.peer_id}/{b64encode(key.sign(_passed(peer))).decode()}"


@lru_cache(maxsize=4096)
def site_of(shown: str | None, peer: PeerId) -> str | None:
    """The public key of the site that a peer proves to be at; ``None``: at none."""
    key, _, signature = (shown or "").partition("/")
    try:
        right = verify(PeerId(key), _passed(peer), a2b_base64(signature, strict_mode=True))
    except ValueError:
        return None
    return key if right else None


def _passed(peer: PeerId) -> bytes:
    return b"shoal site\0" + peer.encode()


def delegates(roster: Sequence[PeerId], joins: Mapping[PeerId, Join]) -> dict[PeerId, int]:
    """Return the roster index of each rider's delegate, which must be a peer others can dial."""
    first: dict[str, int] = {}
    found: dict[PeerId, int] = {}
    for index, peer in enumerate(roster):  # peers that can be dialled come first in a roster
        site = site_of(joins[peer].site, peer)
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


def may_bring(commit: Commit, delegate: int, riders: Sequence[int]) -> bool:
    """True if a member's upload may name these as the riders in it: its own, each once, in order.

    The weights of a merge and the proofs of a false one follow from what an upload names.
    """
    own = riders_of(commit, delegate)
    return list(riders) == [rider for rider in own if rider in riders]


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


def carriers(contributors: Sequence[int], bundles: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
    """Return the contributors to a sealed merge whose payloads are not in another one's bundle."""
    carried = {rider for riders in bundles.values() for rider in riders}
    return tuple(index for index in contributors if index not in carried)


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
    found = []
    for index in carriers(contributors, bundles):
        inside = [index, *(rider for rider in bundles.get(index, ()) if rider in weight_of)]
        count = len(inside) if index not in on_probation else 0
        found.append(Share(index, sum(weight_of[i] for i in inside), count))
    return tuple(found)
