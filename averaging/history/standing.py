"""A standing is a peer's state of one fragment without the numbers: version, lineage, chain, marks.

Two peers compare their standings by the chains that they show each other, which tells whether one
is behind the other or the two are apart. Versions are never compared across lineages; merged tokens
are. The module also computes the standing after a round. Theta and momentum belong to the driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import msgspec

from averaging.history.chain import Chain
from averaging.history.lineage import Lineage, after_fold, after_round, bound, seal_digest
from averaging.history.merged_map import MergedMap
from averaging.history.state import FragmentState
from averaging.messages import LINKS_MAX, Commit, Head, Link
from averaging.numbers.arrays import Float32s
from dht.identity import PeerId

LINKS_SHOWN = 24
"""Links of a chain in a message; below ``LINKS_MAX``, the most that a reader accepts."""
assert LINKS_SHOWN <= LINKS_MAX

LINKS_BRIEF = 4
"""Links in a message that is mostly read by peers on the same link: the newest ones. Half of the
bytes of all messages of rounds were older links that nobody needed."""

LIGHT_SHARE = 0.25
"""A side with a smaller share of the tokens since the fork gives way. Others are melded: that
takes a round that members of both sides join, with their states."""

LIGHT_SHARE_OF_YOUNG = 0.45
"""The same for a fork so young that the side that gives way can offer all its work again: two of
five peers, which a partition kept from the others, do so with the first message that they exchange.
With this share for every fork, foundings that met after ten versions gave work up, and so did
groups, which are apart at every round."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A peer's state of one fragment, as the round machine sees it."""

    version: int
    lineage: Lineage
    chain: Chain
    merged: MergedMap
    history: bytes = b""
    """The lineage is this and the merged map (``averaging.history.lineage.bound``)."""
    _head: list[Head] = field(default_factory=list, init=False, repr=False, compare=False)
    """The head, once it was asked for; it is shown to many peers."""

    @classmethod
    def of(cls, state: FragmentState) -> Standing:
        return cls(state.version, state.lineage, state.chain, state.merged, state.history)

    def state(self, fragment: int, theta: Float32s, momentum: Float32s) -> FragmentState:
        """Return the state with this standing and these numbers."""
        return FragmentState(
            fragment,
            self.version,
            self.lineage,
            self.chain,
            theta,
            momentum,
            self.merged,
            self.history,
        )

    def head(self) -> Head:
        if not self._head:
            links = self.chain.thinned(LINKS_SHOWN)
            self._head.append(Head(self.version, self.lineage, links))
        return self._head[0]


@dataclass(frozen=True, slots=True)
class Same:
    """The lineages are equal, hence the bits are."""


@dataclass(frozen=True, slots=True)
class TheyAreBehind:
    """The other peer's lineage is in this peer's chain."""


@dataclass(frozen=True, slots=True)
class IAmBehind:
    """This peer's lineage is in their chain."""


@dataclass(frozen=True, slots=True)
class Apart:
    """Neither lineage is in the other's chain."""

    ancestor: int | None
    """The last version that both chains are known to share."""
    mine: int
    """Tokens merged on this side since then; a few too many where chains are thinned out."""
    theirs: int
    founded_apart: bool = False
    """The run was founded twice: the chains begin at different versions 0 and share nothing."""
    light_share: float = LIGHT_SHARE
    """A side with a smaller share of the tokens since then gives way."""

    @property
    def i_am_light(self) -> bool:
        return self.mine < self.light_share * (self.mine + self.theirs)

    @property
    def they_are_light(self) -> bool:
        return self.theirs < self.light_share * (self.mine + self.theirs)


@dataclass(frozen=True, slots=True)
class Unclear:
    """They are not behind, and show too little of their chain to tell more: they are to be asked
    for the rest, by showing them where this peer stands."""


Relation: TypeAlias = Same | TheyAreBehind | IAmBehind | Apart | Unclear


def relate(mine: Head, chain: Chain, theirs: Head, *, young_versions: int = 0) -> Relation:
    """Compare two peers' heads. ``chain`` is this peer's whole chain.

    ``young_versions``: those since a fork up to which all work on either side can be offered again.

    A common ancestor found in thinned-out chains may be older than the last one. That adds the same
    tokens to both sides. It can turn a rebase into a meld, but never into a rebase of the wrong
    side.
    """
    if theirs.lineage == mine.lineage:
        return Same()
    if chain.find(theirs.version, theirs.lineage) is not None:
        return TheyAreBehind()
    if theirs.version > mine.version and any(link.lineage == mine.lineage for link in theirs.links):
        return IAmBehind()
    ancestor = chain.common_ancestor(theirs.links)
    if ancestor is None and _is_brief(theirs):
        return Unclear()
    since = ancestor.tokens if ancestor is not None else 0
    newest = max(mine.version, theirs.version)
    is_young = ancestor is not None and newest - ancestor.version <= young_versions
    return Apart(
        ancestor=None if ancestor is None else ancestor.version,
        mine=max(0, tokens_of(mine) - since),
        theirs=max(0, tokens_of(theirs) - since),
        founded_apart=ancestor is None and _shows_root(mine) and _shows_root(theirs),
        light_share=LIGHT_SHARE_OF_YOUNG if is_young else LIGHT_SHARE,
    )


def brief(head: Head) -> Head:
    """Return a head with its newest links alone."""
    return msgspec.structs.replace(head, links=head.links[:LINKS_BRIEF])


def _is_brief(head: Head) -> bool:
    return len(head.links) <= LINKS_BRIEF and not _shows_root(head)


def _shows_root(head: Head) -> bool:
    """Return whether a head shows the founder's state that its history began with."""
    return any(link.version == 0 for link in head.links)


def after_commit(
    standing: Standing,
    commit: Commit,
    round_id: bytes,
    seal: Sequence[int],
    digests: Sequence[bytes],
) -> Standing:
    """Return the standing of a member after this round.

    After a meld ``merged`` is not known yet, and with it the lineage (until then the
    history stands for it) and the tokens of its link in the chain: complete it by
    ``with_merged_map``.
    """
    # Members of a merge stay on their own lineage.
    parents = sealed_parents(commit, seal) if commit.melds else [standing.lineage]
    version, history = commit.version, after_round(parents, round_id, seal_digest(seal), digests)
    if not commit.melds:
        return extended(standing, version, history, merged_after(standing.merged, commit, seal))
    shown = [
        link
        for parent, links in zip(commit.parents, commit.ancestors, strict=True)
        if parent.lineage in parents
        for link in links
        if link.version < version
    ]
    tip = Link(version, history, standing.merged.tokens)
    chain = standing.chain.united(shown).extended(tip)
    return Standing(version, history, chain, standing.merged, history)


def extended(standing: Standing, version: int, history: bytes, merged: MergedMap) -> Standing:
    """Return the standing of a version that was made of this one."""
    lineage = bound(history, merged.digest())
    chain = standing.chain.extended(Link(version, lineage, merged.tokens))
    return Standing(version, lineage, chain, merged, history)


def sealed_parents(commit: Commit, seal: Sequence[int]) -> tuple[Lineage, ...]:
    """Return the lineages that the round continues: those of its contributors."""
    there = {commit.members[index].parent for index in seal}
    return tuple(commit.parents[index].lineage for index in sorted(there))


def merged_after(united: MergedMap, commit: Commit, seal: Sequence[int]) -> MergedMap:
    """Return the merged map after a round: the united maps of its parents, and the new work."""
    entries = [commit.members[index] for index in seal]
    return united.with_works(
        (entry.peer, entry.incarnation, entry.mark, entry.tokens) for entry in entries
    )


def with_merged_map(standing: Standing, merged: MergedMap) -> Standing:
    """Complete ``after_commit``'s standing of a meld, once the merged map is known."""
    before = replace(standing, chain=standing.chain.before_tip())
    return extended(before, standing.version, standing.history, merged)


def after_folding(
    standing: Standing, peer: PeerId, *, incarnation: int, mark: int, tokens: int
) -> Standing:
    """Return the standing of a lone peer after it made its own parameters the state."""
    history = after_fold(standing.lineage, peer, incarnation, mark)
    merged = standing.merged.with_work(peer, incarnation, mark, tokens)
    return extended(standing, standing.version + 1, history, merged)


def tokens_of(head: Head) -> int:
    """Return the tokens of all peers that were merged up to this head."""
    for link in head.links:
        if link.lineage == head.lineage:
            return link.tokens
    return 0
