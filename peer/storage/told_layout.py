"""The layout of a model that only programs have, as the peers of its run tell it."""

from __future__ import annotations

from collections.abc import Sequence

from averaging.numbers.layout import Layout
from dht.errors import DhtError
from dht.identity import PeerId
from peer.errors import PeerError
from peer.joining.link import Link
from peer.joining.visit import Visitor, visit
from peer.rules.foundings import heaviest
from peer.run_file.sections import RunFile
from peer.status import PeerStatus
from peer.storage.credentials import owners_invite

LOOK_S = 15.0
"""Time to find peers that have the run's state."""


class NotDownloaded(PeerError):
    """No peer that is on line gives the parameters of the run."""

    exit_code = 3
    run: str
    reason: str
    message = (
        "the parameters of run {run!r} cannot be downloaded: {reason}; the part that "
        "is here is kept: run the command again"
    )


async def layout_of_peers(link: Link, run: RunFile) -> Layout:
    """The layout of a model that only programs have. Raises what ``download`` raises."""
    async with visit(link, own_invite=owners_invite) as visitor:
        seen = await visitor.look(timeout_s=LOOK_S)
        seen.check_admitted()
        holders = [each for each in seen.peers if each.versions]
        return await told_layout(visitor, holders, run)


async def told_layout(visitor: Visitor, holders: Sequence[PeerStatus], run: RunFile) -> Layout:
    """The layout of the run's heaviest founding, as one of its peers describes it."""
    founding = heaviest(holders)
    reasons = []
    for each in holders:
        if each.founding != founding or run.model.layout_hash not in (None, each.layout):
            continue
        try:
            layout = await visitor.layout(PeerId(each.peer), run.outer.fragments)
        except (DhtError, ValueError) as error:
            reasons.append(f"{each.name}: {error}")
            continue
        if layout.hash.hex() == each.layout:
            return layout
        reasons.append(f"{each.name}: its description does not give its layout")
    problems = "; ".join(reasons) or "none is here that has its state"
    raise NotDownloaded(run.name, f"no peer describes the model ({problems})")
