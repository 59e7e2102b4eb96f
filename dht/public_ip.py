"""Which IP addresses are public: the one answer for what is downloaded, dialled and announced."""

from __future__ import annotations

from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

_UNICAST = IPv6Network("2000::/3")
"""All addresses of IPv6 that are given out for the internet; among others fec0::/10, multicast,
::/96 and the networks' own 64:ff9b:1::/48 are none of them."""

_NAT64 = IPv6Network("64:ff9b::/96")


@lru_cache(maxsize=4096)
def is_public(ip: str) -> bool:
    """Return whether this is an IP address that is reached from anywhere.

    One of IPv6 that stands for one of IPv4 is public if that is: a gateway passes on what is sent
    to it. A name of a host is not an IP address.
    """
    try:
        address = ip_address(ip)
    except ValueError:
        return False
    if (inner := ipv4_within(address)) is not None:
        address = inner
    if isinstance(address, IPv4Address):
        return address.is_global and not address.is_multicast
    return address in _UNICAST and address.is_global and address.scope_id is None


def ipv4_within(address: IPv4Address | IPv6Address) -> IPv4Address | None:
    """The address of IPv4 that one of IPv6 stands for: mapped, NAT64 or 6to4."""
    if isinstance(address, IPv4Address):
        return None
    if address in _NAT64:
        return IPv4Address(address.packed[-4:])
    return address.ipv4_mapped or address.sixtofour
