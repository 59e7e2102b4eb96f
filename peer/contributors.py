"""Contributors of a run and their shares, in rows for people. ``peer.extras.credit`` counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta

from dht.identity import PeerId
from peer.quantities import plural

SHORT_ID = 8
LISTED_MAX = 5
PER_MILLE = 1000


@dataclass(frozen=True, slots=True)
class Contributor:
    """One owner of merged work, with all of its keys."""

    peers: tuple[PeerId, ...]
    """The contributor's keys, the one with the most tokens first."""
    name: str
    """Chosen by itself; empty if it has chosen none."""
    tokens: int
    per_mille: int
    """Share of all merged tokens; the shares of all contributors sum to 1000."""
    by_day: Mapping[int, int]
    """Tokens by day since 1970, in UTC."""

    @property
    def shown(self) -> str:
        """The contributor's name, or the end of its key, which differs where beginnings are
        alike."""
        return self.name or f"peer {self.peers[0][-SHORT_ID:]}"

    @property
    def share(self) -> str:
        return f"{self.per_mille / 10:.1f}%"


def date_of(day: int) -> str:
    """A day since 1970, in UTC."""
    return (date(1970, 1, 1) + timedelta(days=day)).isoformat()


def plain(rows: Sequence[Contributor]) -> list[dict[str, object]]:
    """The rows for ``--json`` and pages."""
    return [
        {
            "name": row.shown,
            "peers": list(row.peers),
            "tokens": row.tokens,
            "share": row.per_mille / PER_MILLE,
            "by_day": {date_of(day): count for day, count in sorted(row.by_day.items())},
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
