"""A home's router that maps ports: ``mapping_router OWN_ADDRESS``, started in its namespace.

Answers requests of the computers inside, for TCP only, with a rule for nftables in the table of
``tests.swarms.topology``: with NAT-PMP (RFC 6886), or over UPnP if ``upnp PORT`` follows
the address. With NAT-PMP the outer port is ``SHIFT`` above the one inside, over UPnP the outer port
of this number leads to another computer: a peer which tells its own port is not reached. Prints
each mapping and each removal.
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
import subprocess
import sys
import time

from tests.integration.wan.gateway_device import GatewayDevice
from tests.processes import say

PORT = 5351
SHIFT = 1000
_REQUEST = struct.Struct("!BBHHHI")


def nft(command: str) -> str:
    done = subprocess.run(["nft", *command.split()], check=True, capture_output=True, text=True)
    return done.stdout


def forward(ip: str, inner: int, outer: int) -> None:
    nft(f"add rule ip router arriving iifname outer tcp dport {outer} dnat to {ip}:{inner}")


def stop_forwarding(ip: str, inner: int) -> None:
    rules = nft("-a list chain ip router arriving")
    for handle in re.findall(rf"dnat to {re.escape(ip)}:{inner} # handle (\d+)", rules):
        nft(f"delete rule ip router arriving handle {handle}")


def answer_nat_pmp(address: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listening:
        listening.bind((address, PORT))
        say("router", PORT)
        while True:
            data, asking = listening.recvfrom(100)
            if len(data) != _REQUEST.size or data[:2] != b"\x00\x02":
                continue
            *_, inner, _, life_s = _REQUEST.unpack(data)
            stop_forwarding(asking[0], inner)
            outer = inner + SHIFT if life_s else 0
            if life_s:
                forward(asking[0], inner, outer)
            passed_s = int(time.monotonic())
            answer = struct.pack("!BBHIHHI", 0, 130, 0, passed_s, inner, outer, life_s)
            listening.sendto(answer, asking)
            say("mapped" if life_s else "removed", inner, outer)


async def answer_upnp(address: str, taken: int) -> None:
    """``taken``: an outer port that leads elsewhere already."""

    def added(ip: str, inner: int, outer: int, life_s: int) -> None:
        stop_forwarding(ip, inner)
        forward(ip, inner, outer)
        say("mapped", inner, outer)

    def removed(ip: str, inner: int, outer: int) -> None:
        stop_forwarding(ip, inner)
        say("removed", inner, outer)

    device = GatewayDevice(address, added=added, removed=removed)
    device.mapped[taken] = "192.168.1.200", taken, 0
    await device.open()
    say("router", device.port)
    await asyncio.Event().wait()


def main() -> None:
    address, *words = sys.argv[1:]
    if words:
        asyncio.run(answer_upnp(address, int(words[1])))
    else:
        answer_nat_pmp(address)


if __name__ == "__main__":
    main()
