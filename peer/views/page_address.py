"""The address at which a process serves its pages. Nothing here serves or imports a server."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from dataclasses import dataclass, replace

from peer.errors import PeerError

DEFAULT_PAGE = "127.0.0.1:9100"

ANY_PAGE = "auto"
"""The first free one of several ports on the loopback interface."""

ANY_PAGE_PORT = 7777
ANY_PAGE_TRIES = 32

_OF_ALL_INTERFACES = {
    "0.0.0.0": (socket.AF_INET, "192.0.2.1", "127.0.0.1"),
    "::": (socket.AF_INET6, "2001:db8::1", "::1"),
}
"""Hosts that stand for all addresses of one family; an address of it that is nobody's (RFC 5737,
3849), and loopback."""


@dataclass(frozen=True, slots=True)
class PageAddress:
    """The address of the pages."""

    host: str
    port: int
    tries: int = 1
    """Number of ports to try, from ``port`` on."""

    @property
    def is_local(self) -> bool:
        """``True`` if only this machine can reach the address."""
        return is_local(self.host)

    @property
    def url(self) -> str:
        """Address to open in a browser: of all addresses of this machine, one that others use."""
        unspecific = _OF_ALL_INTERFACES.get(self.host)
        served = self if unspecific is None else replace(self, host=_own_address(*unspecific))
        return f"http://{served}/"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class PageError(PeerError):
    """The pages cannot be served at an address."""

    exit_code = 2
    address: str
    reason: str
    option: str = "--page"
    message = (
        "the page cannot be served at {address}: {reason}; "
        "choose another address with {option} HOST:PORT, or none with {option} off"
    )


def parse_page(text: str, option: str = "--page") -> PageAddress:
    """Parse ``HOST:PORT``, ``[::1]:9100`` or ``auto``. Raises ``PageError``, which names the
    option."""
    if text == ANY_PAGE:
        return PageAddress("127.0.0.1", ANY_PAGE_PORT, ANY_PAGE_TRIES)
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise PageError(repr(text), f"it is not HOST:PORT, such as {DEFAULT_PAGE}", option)
    return PageAddress(host, int(port))


def try_page(address: PageAddress) -> None:
    """Listen at an address for a moment, before anything starts. Raises ``PageError``."""
    if address.tries > 1:
        return
    refused: OSError | None = None
    try:
        for family, *_, place in socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            try:
                socket.create_server(place[:2], family=family).close()
                return
            except OSError as error:  # a family that is off; the host's other address may do
                refused = error
    except socket.gaierror as error:
        refused = error
    assert refused is not None, "a name that is known has addresses"
    raise PageError(str(address), reason_of(refused)) from refused


def reason_of(error: OSError) -> str:
    """The reason why nothing can listen at an address, in words."""
    if isinstance(error, socket.gaierror):
        return "the name of its host is not known"
    if error.errno == errno.EADDRINUSE:
        return "another program uses this port"
    if error.errno == errno.EADDRNOTAVAIL:
        return "it is not an address of this machine"
    return os.strerror(error.errno) if error.errno else str(error)


def is_local(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _own_address(family: socket.AddressFamily, outside: str, loopback: str) -> str:
    """The address of this machine from which its connections go out; without one, loopback."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((outside, 1))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return loopback
