"""UPnP: asks a router for a TCP port as an Internet Gateway Device, with ``miniupnpc`` (an extra).

The library reads, in C, whatever a machine of the local network answers to its search, and fetches
the description that the answer names. So it works in a process of its own, this module run as a
script, which is ended after ``WITHIN_S``. Only a control point on the default gateway is asked to
map a port.

Mappings have a lease, so that one ends by itself after a crash. Routers that grant permanent ones
only are left alone.
"""

from __future__ import annotations

import asyncio
import importlib.util
import secrets
import sys
from urllib.parse import urlsplit

from dht.libp2p.lane.nat_pmp import LIFE_S, Mapped, NotMapped
from dht.libp2p.lane.punching import own_address_towards

LIBRARY = "miniupnpc"
WITHIN_S = 15.0
"""Time for one question, the search for the router among it."""

SEARCH_MS = 1000
"""Time in which a router answers the search; its removal at the end takes that long, too."""

OTHER_PORTS = range(49152, 65536)
"""Outer ports to choose from when the wanted one is taken, as by another computer at home."""

PORTS_TRIED_MAX = 4
TAKEN = "ConflictInMappingEntry"
"""The library's words for a router where the outer port leads elsewhere already."""


class Upnp:
    """One router, asked over UPnP."""

    name = "UPnP"

    def __init__(self, router: str) -> None:
        self._router = router

    async def map(self, port: int, *, outer_port: int) -> Mapped:
        """Ask for a mapping, from another outer port if that one is taken.

        Raises ``NotMapped`` or ``OSError``.
        """
        return Mapped(int(await self._ask("map", port, outer_port)), LIFE_S)

    async def remove(self, port: int, *, outer_port: int) -> None:
        await self._ask("remove", port, outer_port)

    async def _ask(self, *words: str | int) -> str:
        """The answer of this module as a script. Raises ``NotMapped`` or ``OSError``."""
        if importlib.util.find_spec(LIBRARY) is None:
            raise NotMapped(f"{LIBRARY} is not installed: `pip install 'shoal[upnp]'`")
        asking = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", __name__, self._router, *map(str, words)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            async with asyncio.timeout(WITHIN_S):
                told, _ = await asking.communicate()
        finally:
            if asking.returncode is None:
                asking.kill()
                await asking.wait()
        answer = told.decode("utf-8", "replace").strip().rpartition("\n")[2]
        if asking.returncode:
            raise NotMapped(answer or f"{LIBRARY} ended with status {asking.returncode}")
        return answer


def ask(router: str, what: str, port: int, outer_port: int) -> int:
    """Have a router map a port, or remove the mapping. Returns the outer port.

    Raises ``NotMapped``, or ``Exception`` with what the library says.
    """
    from miniupnpc import UPnP  # an extra, in this process only

    known = UPnP(multicastif=own_address_towards(router), discoverdelay=SEARCH_MS)
    known.discover()
    control = known.selectigd()
    if urlsplit(control).hostname != router:
        raise NotMapped(f"{control} answers, which is not on the router {router}")
    if what == "remove":
        known.deleteportmapping(outer_port, "TCP")
        return outer_port
    for tries_left in reversed(range(PORTS_TRIED_MAX)):
        try:
            known.addportmapping(outer_port, "TCP", known.lanaddr, port, "shoal", "", LIFE_S)
            break
        except Exception as error:  # the library has no class of its own
            if str(error) != TAKEN or not tries_left:
                raise
            outer_port = secrets.choice(OTHER_PORTS)
    return outer_port


def main() -> None:
    """Ask as the arguments say, and print the outer port, or why there is none."""
    router, what, port, outer_port = sys.argv[1:]
    try:
        said = str(ask(router, what, int(port), int(outer_port)))
    except Exception as error:
        sys.exit(f"no port is mapped over UPnP: {error}")
    sys.stdout.write(said)


if __name__ == "__main__":
    main()
