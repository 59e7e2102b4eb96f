"""The port and the link of a peer, kept in its folder so that a link outlives a restart.

A peer that may listen at any port takes the one that it had before. The link is there to be printed
again (``shoal link``), also while the peer does not run.
"""

from __future__ import annotations

import logging
import socket
from pathlib import Path

from multiaddr import Multiaddr

from dht import addresses
from dht.whole_files import write_whole

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
