"""The port and the link of a peer, kept in its folder so that a link outlives a restart.

A peer that may listen at any port takes the one that it had before. The link is there to be printed
again (``shoal status``), also while the peer does not run.

The links of this user's other peers of a run on this machine are found in the same way, and one
more joins them: whoever starts with a run file that names nobody would found the run again beside
them. A folder is registered before its peer has an address, so one that starts a moment later waits
for the link.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from multiaddr import Multiaddr

from dht import addresses
from dht.identity import RunId
from dht.whole_files import write_whole
from peer.joining.link import parse_link
from peer.storage.home import Occupant, running_peers

logger = logging.getLogger(__name__)

PORT_FILE = "port"
LINK_FILE = "link"


def kept_port(folder: Path) -> int | None:
    """The port at which the peer of this folder listened before; ``None`` if it is not known."""
    try:
        port = int((folder / PORT_FILE).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return port if 0 < port < 65536 else None


def keep_port(folder: Path, port: int) -> None:
    _keep(folder / PORT_FILE, str(port))


def kept_link(folder: Path) -> str | None:
    """The last link of the peer of this folder; ``None`` if it never had one."""
    try:
        return (folder / LINK_FILE).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def keep_link(folder: Path, link: str) -> None:
    _keep(folder / LINK_FILE, link)


def _keep(path: Path, text: str) -> None:
    try:
        write_whole(path, text.encode())
    except OSError as error:  # a full disk is no reason not to train
        logger.warning("address_not_kept path=%s reason=%s", path, error)


def with_port(listen: tuple[Multiaddr, ...], port: int) -> tuple[Multiaddr, ...]:
    """The only address to listen at, with ``port`` if it leaves the choice; else unchanged."""
    if len(listen) != 1 or addresses.port_of(listen[0]) != 0:
        return listen
    return (addresses.parse(f"{str(listen[0]).removesuffix('/0')}/{port}"),)


def is_free(port: int) -> bool:
    """Return whether this user may listen at the TCP port now."""
    try:
        listen_briefly(Multiaddr(f"/ip4/0.0.0.0/tcp/{port}"))
    except OSError:
        return False
    return True


def listen_briefly(address: Multiaddr) -> int:
    """Listen at an address for a moment, because the daemon does not report a port that is taken.

    Returns the port. Raises ``OSError``.
    """
    ip = addresses.ip_of(address) or ""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        probe.bind((ip, addresses.port_of(address)))
        probe.listen(1)
        return int(probe.getsockname()[1])


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
