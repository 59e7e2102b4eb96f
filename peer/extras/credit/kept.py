"""The tally of contributions in a peer's folder, and its owner's wishes of how to be shown."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from pathlib import Path

import msgspec

from dht.identity import PeerId, RunId
from dht.whole_files import read_json, write_whole
from peer.contributors import Contributor
from peer.extras.credit.accounting import wire
from peer.extras.credit.accounting.contributors import contributors
from peer.extras.credit.accounting.reports import Report
from peer.extras.credit.accounting.tally import Part, Tally, everything

TALLY_FILE = "tally"
WISHES_FILE = "credit.json"


class Wishes(msgspec.Struct, frozen=True, kw_only=True):
    """How the owner of a peer wants its work to be shown."""

    name: str | None = None
    """``None``: by the name that it has among the peers, if somebody chose that; empty: none."""
    keys: tuple[PeerId, ...] = ()
    """Other peers of the same owner."""


def read_wishes(folder: Path) -> Wishes | None:
    return read_json(folder / WISHES_FILE, Wishes)


def write_wishes(folder: Path, wishes: Wishes) -> None:
    """Replace what the owner wants; the peer reads it while it runs. Raises ``OSError``."""
    write_whole(folder / WISHES_FILE, msgspec.json.encode(wishes))


def save_tally(folder: Path, data: bytes) -> None:
    """Replace the tally in a peer's folder. Raises ``OSError``."""
    write_whole(folder / TALLY_FILE, data)


def load_tally(folder: Path, run: RunId, me: PeerId | None, fragments: int) -> Tally:
    """The tally that a peer has kept; an empty one if there is none, or it cannot be read.

    It was proven when this peer took it, and it is not proven again.
    """
    tally = Tally(run, me, fragments)
    try:
        data = (folder / TALLY_FILE).read_bytes()
        part = wire.decode(data)
    except (OSError, ValueError):
        return tally
    tally.follow(part.topic)
    tally.unite(replace(part, reports=()), today=0, believes=everything)
    # Day by day, as they came: one of a clock that was years ahead refuses none of those before it.
    for day, reports in groupby(sorted(part.reports, key=_day), _day):
        tally.unite(Part(reports=tuple(reports)), today=day, believes=everything)
    return tally


def _day(report: Report) -> int:
    return report.day


def contributors_in(folder: Path, run: RunId, fragments: int) -> list[Contributor]:
    """All whose work is merged, the largest first, as a peer's folder has it."""
    return contributors(load_tally(folder, run, None, fragments))
