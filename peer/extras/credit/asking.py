"""The tally of a run, as a visitor asks a few of its peers for it, without proofs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress

from dht.errors import DhtError
from dht.host import Host
from dht.identity import PeerId, RunId
from peer.contributors import Contributor
from peer.extras.credit.accounting import wire
from peer.extras.credit.accounting.contributors import contributors
from peer.extras.credit.accounting.reports import day_of
from peer.extras.credit.accounting.tally import Part, confirmed, everything, unproven

ASKED_MAX = 3
ANSWERS_MAX = 8
"""Answers to ask each peer for until the tally is complete."""

ASK_TIMEOUT_S = 3.0


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
        if not tally.unite(confirmed(answers), today=day_of(time.time()), believes=everything):
            break
    return contributors(tally)
