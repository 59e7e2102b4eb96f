"""The tally in rows for people: one for each owner, with its share and its tokens of each day."""

from __future__ import annotations

from collections.abc import Sequence

from dht.identity import PeerId
from peer.contributors import PER_MILLE, Contributor
from peer.extras.credit.accounting.statements import owners
from peer.extras.credit.accounting.tally import Tally
from peer.quantities import count_text, rounded_shares


def contributors(tally: Tally) -> list[Contributor]:
    """All contributors, the largest first."""
    tokens = tally.totals.by_peer
    days = tally.by_day()
    groups = sorted(
        set(owners(tokens, tally.statements).values()),
        key=lambda keys: (-sum(tokens[peer] for peer in keys), min(keys)),
    )
    sums = [sum(tokens[peer] for peer in keys) for keys in groups]
    shares = rounded_shares(sums, whole=PER_MILLE)
    rows = []
    for keys, total, share in zip(groups, sums, shares, strict=True):
        ordered = tuple(sorted(keys, key=lambda peer: (-tokens[peer], peer)))
        worked = {day: sum(gained.get(peer, 0) for peer in keys) for day, gained in days.items()}
        by_day = {day: count for day, count in worked.items() if count}
        rows.append(Contributor(ordered, _name(tally, keys), total, share, by_day))
    return rows


def _name(tally: Tally, keys: frozenset[PeerId]) -> str:
    """The name that was stated last by a key of an owner; a key without one says nothing."""
    known = (tally.statements[key] for key in sorted(keys) if key in tally.statements)
    stated = [each for each in known if each.name]
    newest = max(stated, key=lambda each: each.sequence, default=None)
    return "" if newest is None else newest.name


def tokens_by_day(tally: Tally) -> dict[int, int]:
    """Tokens of all peers on each day, the oldest first."""
    return {day: sum(gained.values()) for day, gained in sorted(tally.by_day().items())}


def lines(rows: Sequence[Contributor]) -> list[str]:
    """A table for terminals."""
    if not rows:
        return ["nothing is merged yet"]
    made = [f"{'contributor':32} {'tokens':>9} {'share':>7}  days"]
    for row in rows:
        keys = "" if len(row.peers) == 1 else f", {len(row.peers)} keys"
        made.append(
            f"{row.shown[:32]:32} {count_text(row.tokens):>9} {row.share:>7}  "
            f"{len(row.by_day)}{keys}"
        )
    return made
