"""Steps before the daemon dials an address, and the meaning of what it says afterwards.

- The daemon may open no socket to look up a host name (``dht.libp2p.confinement``), so ``by_ip``
  does.
- go-libp2p dials no address for 5 + n² seconds after n dials that failed, up to five minutes,
  whoever asks. After an outage of a minute two peers stayed apart for another one. So where a peer
  has not answered, a plain TCP connection shows first that somebody speaks libp2p there again
  (``why_silent``).
- ``in_short`` is the daemon's description of a failure for people.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import Iterable, Sequence

from multiaddr import Multiaddr

from dht import addresses as address_rules
from dht.errors import ANOTHER_PEER

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


GREETING = b"\x13/multistream/1.0.0\n"
"""The first bytes of a libp2p host on every TCP connection."""


async def why_silent(addresses: Sequence[Multiaddr], *, within_s: float) -> str | None:
    """``None`` if a libp2p host answers at one of these addresses, which have IP addresses."""
    tries = [asyncio.create_task(_try(address)) for address in addresses]
    reason: str | None = f"no answer within {within_s:g} s"
    try:
        for answer in asyncio.as_completed(tries, timeout=within_s):
            reason = await answer
            if reason is None:
                break
    except TimeoutError:
        pass
    finally:
        for attempt in tries:
            attempt.cancel()
    return reason


async def _try(address: Multiaddr) -> str | None:
    ip, port = address_rules.ip_of(address), address_rules.port_of(address)
    try:
        reader, writer = await asyncio.open_connection(ip, port)
    except OSError as error:
        return os.strerror(error.errno).lower() if error.errno else str(error)
    try:
        greeting = await reader.readexactly(len(GREETING))
    except (OSError, asyncio.IncompleteReadError):
        greeting = b""
    finally:
        writer.close()
    return None if greeting == GREETING else "nobody speaks libp2p there"


_NO_NEWS = re.compile(r"^(failed to dial( \w+)?: )+")
_MISMATCH = re.compile(r".*peer id mismatch: expected \S+, but remote key matches (\S+)")
_DIALLED = re.compile(r"^\s*\* \[([^]]*)\] (.+)$", re.MULTILINE)


def in_short(said: str, tried: Sequence[Multiaddr]) -> str:
    """The daemon's description of a failure, on one line.

    After a failed dial the daemon lists every address that it remembers of the peer, each on a
    line ``* [ADDRESS] reason``. Only the addresses that were asked for matter, if they are listed.
    """
    asked = {str(address) for address in tried}
    outcomes = _DIALLED.findall(said)
    reasons = [reason for address, reason in outcomes if address in asked]
    reasons = reasons or [reason for _, reason in outcomes] or [said]
    reasons = [_MISMATCH.sub(rf"{ANOTHER_PEER}: \1", reason) for reason in reasons]
    return "; ".join(dict.fromkeys(" ".join(_NO_NEWS.sub("", r.strip()).split()) for r in reasons))
