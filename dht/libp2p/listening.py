"""Whether a libp2p host listens at an address, found out without the daemon.

go-libp2p dials no address for 5 + n² seconds after n dials that failed, up to five minutes, whoever
asks. After an outage of a minute two peers stayed apart for another one. So where a peer has not
answered, a plain TCP connection shows first that somebody speaks libp2p there again.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from multiaddr import Multiaddr

from dht import addresses as address_rules

GREETING = b"\x13/multistream/1.0.0\n"
"""What a libp2p host says first on every TCP connection."""


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
