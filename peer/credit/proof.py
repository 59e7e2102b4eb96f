"""The merged map of a version of one fragment, with what proves it.

A lineage binds the merged map of its state, and a link is certified by the signatures of peers that
have stood on it (``averaging.round.certificates``). So whoever is shown a map with its link can
tell whether those peers hold it, and nobody can add a token to it that no seal has merged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from averaging.history.lineage import bound
from averaging.history.merged_map import MergedMap
from averaging.history.parent_maps import ParentMap
from averaging.messages import Link, Signatures

Rank: TypeAlias = tuple[int, int, bytes]
"""Tokens, version and lineage: a total order of the versions of a fragment."""


@dataclass(frozen=True, slots=True)
class ProvenMap:
    """The merged map of one version of a fragment."""

    fragment: int
    link: Link
    map: ParentMap
    signatures: Signatures = ()
    """Those of peers that have stood on the link."""

    @property
    def merged(self) -> MergedMap:
        return self.map.merged

    @property
    def rank(self) -> Rank:
        """The heavier side of a fork wins, as it does in the run (``standing.relate``)."""
        return self.merged.tokens, self.link.version, self.link.lineage

    @property
    def is_bound(self) -> bool:
        """True if the map is the one that the lineage of the link binds."""
        return bound(self.map.history, self.merged.digest()) == self.link.lineage


Believes: TypeAlias = Callable[[ProvenMap], bool]
"""True if the link of a map is certified for this peer, or part of its own history."""
