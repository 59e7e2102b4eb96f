"""A program that delays packets: a TUN device that sends each one back after a time.

The routing table in the middle of the network sends the packets of every site into the device.
Reading a packet, the program looks up the distances of both sites from the middle, keeps the
packet for their sum, and writes it back into the device, from where it is routed to its
destination. Packets between two sites keep their order.

Usage: python -m tests.swarms.delay_line DEVICE LOSS SITE=ONE_WAY_MS...

SITE is the third byte of the site's IPv4 addresses, and the sixth of its IPv6 addresses; LOSS is
the share of packets that is dropped.
"""

from __future__ import annotations

import fcntl
import os
import random
import select
import struct
import sys
import time
from heapq import heappop, heappush

TUNSETIFF = 0x400454CA
IFF_TUN = 0x0001
IFF_NO_PI = 0x1000
PACKET_MAX_BYTES = 65536
PACKETS_AT_ONCE = 256
WAITING_MAX = 100_000
"""Packets beyond this number are dropped, as by a router whose memory is full."""

SITES_AT = {4: (14, 18), 6: (13, 29)}
"""Positions of the bytes of both sites in a packet's header: of the source and the destination."""


def open_device(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    request = struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI)
    fcntl.ioctl(device, TUNSETIFF, request)
    return device


def packets(device: int) -> list[bytes]:
    """The packets that can be read at once."""
    found: list[bytes] = []
    while len(found) < PACKETS_AT_ONCE:
        try:
            found.append(os.read(device, PACKET_MAX_BYTES))
        except BlockingIOError:
            break
    return found


def carry(device: int, one_way_s: dict[int, float], loss: float) -> None:
    """Delay packets for ever."""
    rng = random.Random(0)
    waiting: list[tuple[float, int, bytes]] = []
    count = 0
    while True:
        pause_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        if select.select([device], [], [], pause_s)[0]:
            now = time.monotonic()
            for packet in packets(device):
                sites_at = SITES_AT.get(packet[0] >> 4, ())
                if not sites_at or len(waiting) >= WAITING_MAX or rng.random() < loss:
                    continue
                delay_s = sum(one_way_s.get(packet[at], 0.0) for at in sites_at)
                count += 1
                heappush(waiting, (now + delay_s, count, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            os.write(device, heappop(waiting)[2])


def main() -> None:
    name, loss, *sites = sys.argv[1:]
    one_way_s = {}
    for site in sites:
        number, _, one_way_ms = site.partition("=")
        one_way_s[int(number)] = float(one_way_ms) / 1000
    device = open_device(name)
    sys.stdout.write("carrying\n")
    sys.stdout.flush()
    carry(device, one_way_s, float(loss))


if __name__ == "__main__":
    main()
