"""The peers of this user that take part in a run on this machine. One more joins them.

Whoever starts with a run file that names nobody would found the run again beside them. A folder is
registered before its peer has an address, so one that starts a moment later waits for the link.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from multiaddr import Multiaddr

from dht.identity import RunId
from peer.joining.link import parse_link
from peer.storage.address import LINK_FILE, kept_link
from peer.storage.home import Occupant, running_peers

LINK_WITHIN_S = 30.0
"""Time within which a peer that starts knows an address of its own."""

LOOKS_FIRST_S = 5.0
"""Time for which a run that is under way already is looked for, where anybody is known to ask."""

LOOK_EVERY_S = 0.1


def peers_here(run_id: RunId, *, before: Path | None = None) -> dict[Path, Occupant]:
    """The folders of this user's peers that take part in a run now.

    ``before``: only those that began before the peer of this folder, so that of two that start at
    one moment one waits for the other.
    """
    here = {folder: who for folder, who in running_peers().items() if who.run_id == run_id}
    if before is None or (mine := here.pop(before.absolute(), None)) is None:
        return here
    order = mine.since, before.absolute()
    return {folder: who for folder, who in here.items() if (who.since, folder) < order}


def with_own_peers(run_id: RunId, seeds: Sequence[Multiaddr]) -> tuple[Multiaddr, ...]:
    """These seeds, and the addresses in the links of this user's peers of a run: a run file may
    lack any."""
    links = map(kept_link, peers_here(run_id))
    own = [seed for link in links if link is not None for seed in parse_link(link).seeds]
    return tuple(dict.fromkeys((*seeds, *own)))


def met_here(run_id: RunId, folder: Path, *, stopped: Callable[[], bool]) -> list[Path]:
    """The folders of the peers to join here, once their links are known or ``LINK_WITHIN_S`` is
    over. Empty: the peer of ``folder`` is the first on this machine."""
    deadline = time.monotonic() + LINK_WITHIN_S
    while True:
        here = peers_here(run_id, before=folder)
        arriving = [each for each, who in here.items() if not _has_link(each, since=who.since)]
        if not arriving or stopped() or time.monotonic() > deadline:
            return list(here)
        time.sleep(LOOK_EVERY_S)


def _has_link(folder: Path, *, since: float) -> bool:
    """True if the peer that has held a folder since then has said where it is."""
    try:
        return (folder / LINK_FILE).stat().st_mtime >= since
    except OSError:
        return False
