"""Host names in addresses are looked up here, since the daemon may open no socket for it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable

from multiaddr import Multiaddr

from dht import addresses as address_rules

_FAMILIES = {"dns4": socket.AF_INET, "dns6": socket.AF_INET6}


async def by_ip(addresses: Iterable[Multiaddr], *, within_s: float) -> list[Multiaddr]:
    """The addresses, with IP addresses in place of host names. Names without any are left out.

    Raises ``OSError`` if that leaves none at all. All names are looked up at once: no name server
    may answer.
    """
    addresses = list(addresses)
    hosts = [address_rules.host_of(address) for address in addresses]
    wanted = sorted({host for host in hosts if host[0] in _FAMILIES})
    answers = await asyncio.gather(*(_ips_of(*name, within_s) for name in wanted))
    known = dict(zip(wanted, answers, strict=True))
    found: list[Multiaddr] = []
    for address, host in zip(addresses, hosts, strict=True):
        answer = known.get(host)
        if answer is None:
            found.append(address)
        elif isinstance(answer, list):
            found += [address_rules.with_ip(address, ip) for ip in answer]
    if addresses and not found:
        raise next(answer for answer in answers if isinstance(answer, OSError))
    return found


async def _ips_of(kind: str, name: str, within_s: float) -> list[str] | OSError:
    """The addresses behind a name, or the reason why there are none."""
    try:
        async with asyncio.timeout(within_s):
            answers = await asyncio.get_running_loop().getaddrinfo(
                name, None, family=_FAMILIES[kind], type=socket.SOCK_STREAM
            )
    except TimeoutError:
        return OSError(f"the name {name} cannot be resolved (no answer within {within_s:g} s)")
    except OSError as error:
        return OSError(f"the name {name} cannot be resolved ({error.strerror or error})")
    # An address of this link alone has a zone, which no multiaddr has.
    ips = dict.fromkeys(str(answer[4][0]) for answer in answers)
    return [ip for ip in ips if "%" not in ip] or OSError(f"the name {name} has no usable address")
