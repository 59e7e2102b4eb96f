"""The tally of a run for those who read it: in a peer's folder, or as a few peers tell it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from dht.errors import DhtError
from dht.host import Host
from dht.identity import PeerId, RunId
from dht.whole_files import write_whole
from peer.contributors import Contributor
from peer.extras.credit.accounting import wire
from peer.extras.credit.accounting.tally import (
    FRAGMENTS_MAX,
    Part,
    Tally,
    confirmed,
    contributors,
    everything,
    unproven,
)

TALLY_FILE = "tally"

ASKED_MAX = 3
ANSWERS_MAX = 8
"""Answers to ask each peer for until the tally is complete."""

ASK_TIMEOUT_S = 3.0


def save_tally(folder: Path, data: bytes) -> None:
    """Replace the tally in a peer's folder. Raises ``OSError``."""
    write_whole(folder / TALLY_FILE, data)


def load_tally(folder: Path, run: RunId, fragments: int) -> Tally:
    """The tally that a peer has kept; an empty one if there is none, or it cannot be read.

    It was proven when this peer took it, and it is not proven again.
    """
    tally = Tally(run, fragments)
    try:
        part = wire.decode((folder / TALLY_FILE).read_bytes())
    except (OSError, ValueError):
        return tally
    tally.follow(part.topic)
    tally.unite(part, believes=everything)
    return tally


def contributors_in(folder: Path, run: RunId) -> list[Contributor]:
    """All whose work is merged, the largest first, as a peer's folder has it."""
    return contributors(load_tally(folder, run, FRAGMENTS_MAX))


async def contributors_told(host: Host, run: RunId, peers: Sequence[PeerId]) -> list[Contributor]:
    """All whose work is merged, the largest first, as a few of the peers have it."""
    tally = unproven(run)

    async def ask(peer: PeerId) -> Part:
        with suppress(DhtError, ValueError):
            asked = wire.summary(tally)
            answers = await wire.CALL.ask(host, peer, run, asked, timeout_s=ASK_TIMEOUT_S)
            return wire.unpacked(answers)
        return Part()

    for _ in range(ANSWERS_MAX):  # one is enough, unless there are thousands
        parts = await asyncio.gather(*map(ask, peers[:ASKED_MAX]))
        answers = [part for part in parts if part != Part()]
        if not tally.unite(confirmed(answers), believes=everything):
            break
    return contributors(tally)
