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
from peer.extras.credit.accounting.tally import Tally, contributors

TALLY_FILE = "tally"

ASKED_MAX = 3
ASK_TIMEOUT_S = 3.0


def save_tally(folder: Path, data: bytes) -> None:
    """Replace the tally in a peer's folder. Raises ``OSError``."""
    write_whole(folder / TALLY_FILE, data)


def load_tally(folder: Path, run: RunId) -> Tally:
    """The tally that a peer has kept; an empty one if there is none, or it cannot be read."""
    try:
        return _tally(run, wire.decode((folder / TALLY_FILE).read_bytes()))
    except (OSError, ValueError):
        return Tally(run)


def _tally(run: RunId, found: wire.Packed) -> Tally:
    tally = Tally(run, found.totals)
    tally.unite(found.statements)
    return tally


def contributors_in(folder: Path, run: RunId) -> list[Contributor]:
    """All whose work is merged, the largest first, as a peer's folder has it."""
    return contributors(load_tally(folder, run))


async def contributors_told(host: Host, run: RunId, peers: Sequence[PeerId]) -> list[Contributor]:
    """The largest contributors, as a few of the peers have them."""

    async def ask(peer: PeerId) -> wire.Packed:
        with suppress(DhtError, ValueError):
            return await wire.CALL.ask(host, peer, run, wire.NONE, timeout_s=ASK_TIMEOUT_S)
        return wire.Packed()

    return contributors(read(run, await asyncio.gather(*map(ask, peers[:ASKED_MAX]))))


def read(run: RunId, answers: Sequence[wire.Packed]) -> Tally:
    """The tally of a reader outside the run, who has no states to read it off.

    It asks several peers, and takes the second heaviest of their answers: one of them alone can add
    no tokens. Where a single peer answers, its word is all there is.
    """
    told = sorted(
        (each for each in answers if each.totals),
        key=lambda each: (sum(each.totals.values()), sorted(each.totals.items())),
        reverse=True,
    )
    tally = Tally(run, told[min(1, len(told) - 1)].totals if told else {})
    tally.unite(said for each in answers for said in each.statements)
    return tally
