"""Trying to listen at an address, with advice if that fails."""

from __future__ import annotations

import errno
import socket
from contextlib import suppress

from multiaddr import Multiaddr

from peer.errors import Unusable
from peer.storage.address import listen_briefly

USUAL_PORT = 7700


def all_interfaces(port: int) -> tuple[Multiaddr, ...]:
    """The addresses at which all networks of this machine can be listened to."""
    listen = [Multiaddr(f"/ip4/0.0.0.0/tcp/{port}")]
    with suppress(OSError), socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
        probe.bind(("::1", 0))  # IPv6 may be compiled in but disabled
        listen.append(Multiaddr(f"/ip6/::/tcp/{port}"))
    return tuple(listen)


def try_to_listen(address: Multiaddr, *, option: str) -> None:
    """Listen at an address for a moment, before anything starts.

    ``option``: the option that sets the port. Raises ``Unusable``.
    """
    kind = "ip6" if "ip6" in {protocol.name for protocol in address.protocols()} else "ip4"
    try:
        address.value_for_protocol(kind)
        port = int(address.value_for_protocol("tcp") or 0)
    except LookupError:
        raise Unusable(
            f"--listen: {address} is not an address to listen at: use "
            f"/ip4/0.0.0.0/tcp/{USUAL_PORT}",
            section="setting-error",
        ) from None
    try:
        listen_briefly(address)
    except OSError as error:
        reason, remedy = _listen_trouble(error, port, option)
        raise Unusable(
            f"cannot listen at {address}: {reason}; {remedy}",
            section="cannot-listen",
        ) from error


def _listen_trouble(error: OSError, port: int, option: str) -> tuple[str, str]:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} is taken by another program",
            f"stop it (`ss -ltnp 'sport = :{port}'` names it) or choose another {option}",
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return (
            f"this user may not listen on port {port}",
            f"ports below 1024 belong to root: choose another {option}, such as {USUAL_PORT}",
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            "this machine does not have that address",
            "listen at /ip4/0.0.0.0/tcp/PORT, and give the outer address with --announce",
        )
    return error.strerror or str(error), "choose another --listen"
