"""Contributors of a run and their shares, in rows for people. ``peer.extras.credit`` counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dht.identity import PeerId
from peer.quantities import plural

SHORT_ID = 8
LISTED_MAX = 5
PER_MILLE = 1000


@dataclass(frozen=True, slots=True)
class Contributor:
    """A peer whose work is merged."""

    peer: PeerId
    name: str
    """Chosen by itself; empty if it has chosen none."""
    tokens: int
    per_mille: int
    """Share of all merged tokens; the shares of all contributors sum to 1000."""

    @property
    def shown(self) -> str:
        """The contributor's name, or the end of its key, which differs where beginnings are
        alike."""
        return self.name or f"peer {self.peer[-SHORT_ID:]}"

    @property
    def share(self) -> str:
        return f"{self.per_mille / 10:.1f}%"


def plain(rows: Sequence[Contributor]) -> list[dict[str, object]]:
    """The rows for ``--json`` and pages."""
    return [
        {
            "name": row.shown,
            "peer": row.peer,
            "tokens": row.tokens,
            "share": row.per_mille / PER_MILLE,
        }
        for row in rows
    ]


def sentence(rows: Sequence[Contributor]) -> str:
    """``contributors: anna 61.2%, boris 30.0%, and 3 others``; empty without any."""
    if not rows:
        return ""
    named = [f"{row.shown} {row.share}" for row in rows[:LISTED_MAX]]
    more = len(rows) - len(named)
    if more:
        named.append(f"and {plural(more, 'other')}")
    return "contributors: " + ", ".join(named)
