"""Addresses at which peers can be dialled: libp2p multiaddrs, checked strictly and ranked.

An address has one of the forms that our daemon listens on and dials:

    /(ip4|ip6|dns4|dns6)/HOST/tcp/PORT[/p2p/PEER]
    /(ip4|ip6|dns4|dns6)/HOST/tcp/PORT/p2p/RELAY/p2p-circuit[/p2p/PEER]

Only TCP is used, because the daemon loses the end of streams over QUIC. The ``multiaddr`` package
does the encoding; it accepts many addresses that cannot be dialled, so the grammar above is checked
here, and an error names the component that breaks it. Nothing is resolved and nothing is dialled.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Iterable
from enum import IntEnum
from functools import lru_cache

from multiaddr import Multiaddr
from multiaddr.exceptions import BinaryParseError

from dht.errors import AddressError
from dht.identity import PeerId, parse_peer_id
from dht.public_ip import is_public

TEXT_MAX = 512

_HOSTS = ("ip4", "ip6", "dns4", "dns6")
_KNOWN = (*_HOSTS, "tcp", "p2p", "p2p-circuit")
_SERVED_OVER_TCP_ONLY = ("udp", "quic", "quic-v1", "webtransport", "ws", "wss", "webrtc-direct")
_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")

_LOCAL_NETWORKS = tuple(
    ipaddress.ip_network(text)
    for text in (
        *("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"),  # RFC 1918
        "100.64.0.0/10",  # behind a carrier's NAT, and virtual private networks
        *("169.254.0.0/16", "fe80::/10"),  # link-local
        "fc00::/7",  # unique local
    )
)
_SITE_PREFIX = 16
"""Private IPv4 addresses with this many leading bits in common may belong to one site."""

_LINK_PREFIX = 64
"""IPv6 addresses with this many leading bits in common are on one link (RFC 4291, 2.5.4)."""


_OWNED_PREFIX = {4: 24, 6: 48}
"""Bits that the addresses of one owner have in common at least: smaller networks of IPv4 are not
routed, and a site has up to a /48 of IPv6 (RFC 6177)."""


class Scope(IntEnum):
    """The part of the network that can use an address. A wider scope contains the narrower ones."""

    MACHINE = 0
    """This machine only: loopback addresses, and addresses of its own."""

    NETWORK = 1
    """One local network: private, link-local and carrier NAT addresses."""

    INTERNET = 2


@lru_cache(maxsize=4096)
def parse(text: str) -> Multiaddr:
    """Read an address. Raises ``AddressError``, which names the component that is wrong."""
    _components(text)
    try:
        return Multiaddr(text)
    except ValueError as error:  # stricter than the grammar: about a host name's code points
        raise AddressError(text, "", str(error)) from error


def parse_seed(text: str) -> Multiaddr:
    """Read an address that names its peer. Raises ``AddressError``."""
    address = parse(text)
    if peer_of(address) is None:
        raise no_seed(address)
    return address


def no_seed(address: Multiaddr) -> AddressError:
    """The error for an address that does not name its peer."""
    reason = "does not name its peer: it has to end in /p2p/PEER"
    return AddressError(str(address), "", reason)


def _components(text: str) -> list[tuple[str, str]]:
    """The (protocol, value) pairs of an address that follows the grammar at the top."""
    if len(text) > TEXT_MAX:
        raise AddressError(text[:40] + "...", "", f"is over {TEXT_MAX} characters long")
    if not text.startswith("/"):
        raise AddressError(text, "", "does not begin with '/', as in /ip4/203.0.113.7/tcp/7700")
    parts = text[1:].split("/")
    components: list[tuple[str, str]] = []
    while parts:
        name = parts.pop(0)
        if name == "p2p-circuit":
            components.append((name, ""))
            continue
        if name not in _KNOWN:
            raise AddressError(text, name, _unknown(name))
        if not parts or not parts[0]:
            raise AddressError(text, name, "lacks its value")
        value = parts.pop(0)
        _check_value(text, name, value)
        components.append((name, value))
    _check_order(text, components)
    return components


def _unknown(name: str) -> str:
    if name in _SERVED_OVER_TCP_ONLY:
        return "is not supported: peers connect over /tcp only"
    if name == "":
        return "is empty: two slashes in a row, or one at the end"
    if name in ("dns", "dnsaddr"):
        return "is ambiguous; write dns4 or dns6"
    nearest = difflib.get_close_matches(name.lower(), _KNOWN, n=1)
    hint = f"; did you mean {nearest[0]}?" if nearest else f"; known are {', '.join(_KNOWN)}"
    return f"is no protocol of an address{hint}"


def _check_value(text: str, name: str, value: str) -> None:
    if name in ("ip4", "ip6"):
        try:
            if name == "ip4":
                ipaddress.IPv4Address(value)
            elif "%" in value:  # a zone means something on this machine alone
                raise ValueError
            else:
                ipaddress.IPv6Address(value)
        except ValueError:
            raise AddressError(text, value, f"is no IPv{name[-1]} address") from None
    elif name in ("dns4", "dns6"):
        if len(value) > 253 or not all(_LABEL.fullmatch(part) for part in value.split(".")):
            raise AddressError(text, value, "is no host name")
        if value.rsplit(".", 1)[-1].isdigit():
            raise AddressError(text, value, f"is no host name; a number goes after /ip{name[-1]}")
    elif name == "tcp":
        if not (value.isascii() and value.isdigit()) or len(value) > 5 or int(value) > 65535:
            raise AddressError(text, value, "is no port between 0 and 65535")
    else:
        try:
            parse_peer_id(value)
        except ValueError as error:
            raise AddressError(text, value, f"is no peer id: {error}") from None


def _check_order(text: str, components: list[tuple[str, str]]) -> None:
    expected: list[tuple[str, ...]] = [_HOSTS, ("tcp",), ("p2p",), ("p2p-circuit",), ("p2p",)]
    for position, (name, value) in enumerate(components):
        if position >= len(expected):
            raise AddressError(text, value or name, "comes after the end of the address")
        if name not in expected[position]:
            wanted = " or ".join(expected[position])
            raise AddressError(text, name, f"stands where {wanted} should be")
    if len(components) < 2:
        missing = "tcp" if components else "ip4"
        raise AddressError(text, "", f"ends before its /{missing} component")


def pack(address: Multiaddr) -> bytes:
    """The binary form of libp2p, which ``unpack`` reads."""
    return bytes(address.to_bytes())


@lru_cache(maxsize=4096)
def unpack(data: bytes) -> Multiaddr:
    """Read an untrusted binary address. Raises ``AddressError``."""
    if len(data) > TEXT_MAX:
        raise AddressError(data[:20].hex() + "...", "", f"has over {TEXT_MAX} bytes")
    try:
        address = parse(str(Multiaddr(data)))
    except BinaryParseError as error:
        raise AddressError(data.hex(), "", str(error)) from error
    if address.to_bytes() != data:  # the package reads missing bytes of an IPv4 address as zeros
        raise AddressError(str(address), "", "is not written in the canonical way")
    return address


def unpack_all(packed: Iterable[bytes]) -> tuple[Multiaddr, ...]:
    """The valid ones of another peer's addresses, in its order. The others are skipped."""
    good: list[Multiaddr] = []
    for data in packed:
        try:
            good.append(unpack(data))
        except AddressError:
            continue  # addresses are hints: the others may still be right
    return tuple(good)


def peer_of(address: Multiaddr) -> PeerId | None:
    """The peer that an address names; ``None`` if it names none."""
    last_name, last_value = _pairs(address)[-1]
    return PeerId(last_value) if last_name == "p2p" else None


@lru_cache(maxsize=4096)
def with_peer(address: Multiaddr, peer: PeerId) -> Multiaddr:
    """The address ending in ``/p2p/PEER``. Raises ``ValueError`` if it leads to another peer."""
    known = peer_of(address)
    if known is None:
        return parse(f"{_text(address)}/p2p/{peer}")
    if known != peer:
        raise ValueError(f"address {address} leads to peer {known}, not to {peer}")
    return address


@lru_cache(maxsize=4096)
def without_peer(address: Multiaddr) -> Multiaddr:
    """The address without the id of the peer at its end. A relay's id inside it stays."""
    peer = peer_of(address)
    return address if peer is None else parse(_text(address).removesuffix(f"/p2p/{peer}"))


def is_relayed(address: Multiaddr) -> bool:
    """Say whether an address leads through a relay, whose connections are cut after 128 KiB."""
    return any(name == "p2p-circuit" for name, _ in _pairs(address))


def ip_of(address: Multiaddr) -> str | None:
    """The IP address of the host; ``None`` if the host is a name."""
    name, host = _pairs(address)[0]
    return None if name.startswith("dns") else str(_ip(host))


@lru_cache(maxsize=4096)
def network_of(address: Multiaddr) -> str | None:
    """The network of an address, which may have one owner; of a relayed one that of the relay.

    ``None`` for names, and for local networks: strangers are in none of them.
    """
    if (text := ip_of(address)) is None or scope_of(address) is Scope.NETWORK:
        return None
    ip = _ip(text)
    return str(_around(ip, _OWNED_PREFIX[ip.version]))


def place_of(ip: str) -> str:
    """The place at which limits count an address: itself, or its IPv6 network (/48).

    One owner may have all of that network; of IPv4 even one address may belong to many.
    """
    if ":" not in ip:
        return ip
    in_any_zone = ip.partition("%")[0]
    return str(_around(in_any_zone, _OWNED_PREFIX[6]))


def port_of(address: Multiaddr) -> int:
    """The TCP port of the host."""
    return int(_pairs(address)[1][1])


def host_of(address: Multiaddr) -> tuple[str, str]:
    """The kind of the host, as ``ip4`` or ``dns4``, and the host. Raises ``AddressError``."""
    return _pairs(address)[0]


def with_ip(address: Multiaddr, ip: str) -> Multiaddr:
    """The address with its host replaced by this IP address."""
    kind = "ip6" if ":" in ip else "ip4"
    _, _, _, rest = _text(address).split("/", 3)
    return parse(f"/{kind}/{ip}/{rest}")


def is_loopback(address: Multiaddr) -> bool:
    """Say whether an address leads to this machine itself."""
    name, host = _pairs(address)[0]
    if name.startswith("dns"):
        return host.lower() == "localhost"
    return _ip(host).is_loopback


def is_private(address: Multiaddr) -> bool:
    """Say whether an address is valid in a local network only, as of RFC 1918 or a carrier NAT."""
    name, host = _pairs(address)[0]
    if name.startswith("dns"):
        return host.lower().endswith((".local", ".lan", ".internal"))
    ip = _ip(host)
    return not (is_public(host) or ip.is_loopback or ip.is_unspecified)


def scope_of(address: Multiaddr) -> Scope:
    """The scope of an address by itself; for a relayed address, the scope of the relay."""
    name, host = _pairs(address)[0]
    if is_loopback(address):
        return Scope.MACHINE
    if name.startswith("dns"):
        return Scope.NETWORK if is_private(address) else Scope.INTERNET
    ip = _ip(host)
    return Scope.NETWORK if any(ip in network for network in _LOCAL_NETWORKS) else Scope.INTERNET


@lru_cache(maxsize=16_384)
def scope_seen(remote: Multiaddr, own: tuple[Multiaddr, ...]) -> Scope:
    """The scope of a connected peer, judged by the remote address of its connection.

    ``own``: the addresses of this peer. A peer with one of their IP addresses is on this machine
    or behind the same router, and one with the same IPv6 prefix is on the same link: a public
    address does not make either of them an outsider.
    """
    scope = scope_of(remote)
    if ip_of(remote) is None:
        return scope
    ip = _ip(_pairs(remote)[0][1])
    for mine in _ips(own):
        if ip == mine:
            return Scope.MACHINE
        if ip.version == mine.version == 6 and ip in _around(mine, _LINK_PREFIX):
            scope = min(scope, Scope.NETWORK)
    return scope


@lru_cache(maxsize=16_384)  # as many members as a table has, and as many again
def scope_guessed(announced: tuple[Multiaddr, ...], own: tuple[Multiaddr, ...]) -> Scope | None:
    """The scope of a peer that was never connected, by its addresses; ``None`` without any.

    A private address counts as one of our network only if it resembles one of ours.
    """
    widest: Scope | None = None
    for address in announced:
        scope = scope_seen(address, own)
        if scope is Scope.NETWORK and not is_relayed(address) and ip_of(address) is not None:
            ip = _ip(_pairs(address)[0][1])
            near = (ip in _around(mine, _SITE_PREFIX) for mine in _ips(own))
            scope = Scope.NETWORK if any(near) else Scope.INTERNET
        widest = scope if widest is None else max(widest, scope)
    return widest


def is_dialable(address: Multiaddr) -> bool:
    """Say whether an address can be dialled at all: not 0.0.0.0, not multicast, not port 0."""
    (name, host), (_, port) = _pairs(address)[:2]
    if port == "0":
        return False
    return name.startswith("dns") or not (_ip(host).is_unspecified or _ip(host).is_multicast)


def deduplicate(addresses: Iterable[Multiaddr]) -> tuple[Multiaddr, ...]:
    """The addresses without repetitions, in the order of first occurrence."""
    return tuple({pack(address): address for address in addresses}.values())


def rank(addresses: Iterable[Multiaddr]) -> tuple[Multiaddr, ...]:
    """Sort: public, then private, then loopback, then relayed. Equals keep their order."""

    def place(address: Multiaddr) -> tuple[bool, bool, bool]:
        return is_relayed(address), is_loopback(address), is_private(address)

    return tuple(sorted(addresses, key=place))


def _ips(own: Iterable[Multiaddr]) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The IP addresses of this peer's direct addresses."""
    direct = (address for address in own if not is_relayed(address))
    return [_ip(_pairs(address)[0][1]) for address in direct if ip_of(address) is not None]


def _around(
    ip: ipaddress.IPv4Address | ipaddress.IPv6Address | str, bits: int
) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    """The network of the addresses that have so many leading bits in common with this one."""
    return ipaddress.ip_network((ip, bits), strict=False)


@lru_cache(maxsize=4096)
def _pairs(address: Multiaddr) -> tuple[tuple[str, str], ...]:
    # Through the text, so that an address which did not come from ``parse`` is checked as well.
    return tuple(_components(_text(address)))


@lru_cache(maxsize=4096)
def _text(address: Multiaddr) -> str:
    # The package computes the text each time; each heartbeat asks for the same few addresses.
    return str(address)


@lru_cache(maxsize=4096)
def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    ip = ipaddress.ip_address(host)
    mapped = getattr(ip, "ipv4_mapped", None)  # ::ffff:10.0.0.1 is 10.0.0.1
    return ip if mapped is None else ipaddress.IPv4Address(mapped)
