"""``python -m tests.integration.wan.floor``: what TCP itself costs where the experiment runs.

Every pair of sites of which one can be dialled exchanges bytes on one plain TCP connection, both
ways at once, paced to ``SHARE`` of their lines. The counters are those of the experiment, so the
difference to its extra bytes is what the peers themselves add. In the namespaces several segments
pass in one piece with one set of headers; on a line each has its own.
"""

from __future__ import annotations

import argparse
import socket
import sys
import threading
from contextlib import ExitStack
from itertools import combinations

from tests.integration.wan import accounting
from tests.swarms.hurt_internet import socket_in
from tests.swarms.topology import Internet, Nat, Site, cannot_build, internet
from tests.swarms.wide_area import BOOTSTRAP, PORT, sites

PIECE_BYTES = 512 * 1024
"""Frame of the lane."""

HEADERS_BYTES = 14 + 20 + 32
"""Ethernet, IP and TCP with timestamps."""

SHARE = 0.7
SO_MAX_PACING_RATE = 47
TIMEOUT_S = 60.0


def connected(net: Internet, one: Site, other: Site, stack: ExitStack) -> list[socket.socket]:
    """Both ends of a connection; the second site is public."""
    listener = stack.enter_context(socket_in(net.computer(other.name)))
    listener.bind((net.address(other.name), 0))
    listener.listen(1)
    dialler = stack.enter_context(socket_in(net.computer(one.name)))
    dialler.settimeout(TIMEOUT_S)
    dialler.connect(listener.getsockname())
    accepted = stack.enter_context(listener.accept()[0])
    accepted.settimeout(TIMEOUT_S)
    return [dialler, accepted]


def send(end: socket.socket, size: int) -> None:
    piece = bytes(PIECE_BYTES)
    for start in range(0, size, PIECE_BYTES):
        end.sendall(piece[: size - start])


def receive(end: socket.socket, size: int) -> None:
    while size:
        size -= len(end.recv(min(size, PIECE_BYTES)))


def exchange(net: Internet, size: int) -> int:
    """Send so many bytes each way between all pairs; returns their number in all."""
    learners = [site for site in net.sites.values() if site.name != BOOTSTRAP]
    pairs = [sorted(pair, key=lambda site: site.nat is None) for pair in combinations(learners, 2)]
    pairs = [pair for pair in pairs if pair[1].nat is None]
    with ExitStack() as stack:
        work = []
        for one, other in pairs:
            ends = connected(net, one, other, stack)
            for end, site, far in zip(ends, (one, other), (other, one), strict=True):
                mbit = min(site.up_mbit or 1e3, far.down_mbit or 1e3) / len(learners)
                rate = int(SHARE * mbit * 1e6 / 8)
                end.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, rate)
                work += [
                    threading.Thread(target=each, args=(end, size)) for each in (send, receive)
                ]
        for thread in work:
            thread.start()
        for thread in work:
            thread.join()
    return 2 * len(pairs) * size


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.integration.wan.floor")
    parser.add_argument("--megabytes", type=float, default=4.0, help="each way, of each pair")
    options = parser.parse_args()
    if (reason := cannot_build()) is not None:
        sys.stderr.write(f"wide-area networks cannot be made here: {reason}\n")
        return 2
    with internet(sites(3, [Nat.PORT_RESTRICTED] * 2)) as net:
        accounting.count_by_port(net, PORT)
        before, segments = accounting.counted(net), accounting.segments(net)
        sent = sum(net.sent_bytes(site) for site in net.sites)
        payload = exchange(net, int(options.megabytes * 1e6))
        counted = accounting.counted(net) - before
        segments = accounting.segments(net) - segments
        sent = sum(net.sent_bytes(site) for site in net.sites) - sent
    sys.stdout.write(
        f"{payload / 1e6:.1f} MB over plain TCP: {sent / payload - 1:.2%} extra, of which packets "
        f"without content {counted['lane_empty'] / payload:.2%}; "
        f"{segments['again']} of {segments['sent']} segments again; headers of all segments "
        f"{HEADERS_BYTES * segments['sent'] / payload:.2%}\n"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
