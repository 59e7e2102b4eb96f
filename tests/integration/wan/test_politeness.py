"""A full upload of the lane leaves room for others on a home line."""

from __future__ import annotations

import contextlib
import socket
import statistics
import threading
import time

import pytest

from tests.integration.wan.host_process import listening, start
from tests.processes import Processes
from tests.swarms.commands import load, tell
from tests.swarms.hurt_internet import socket_in
from tests.swarms.topology import Nat, Site, internet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PORT, PROBE_PORT = 7700, 7777
UP_MBIT = 10.0
SECONDS = 20.0
SETTLED_S = 3.0
"""Time from the first byte on after which the delay counts."""

PROBE_EVERY_S = 0.05


def echo(listener: socket.socket, stop: threading.Event) -> None:
    """Answer probes."""
    while not stop.is_set():
        with contextlib.suppress(TimeoutError):
            data, sender = listener.recvfrom(100)
            listener.sendto(data, sender)


def round_trips(probe: socket.socket, at: tuple[str, int], seconds: float) -> list[float]:
    """Round trips in seconds of small packets, one after the other. A lost one is left out."""
    found = []
    give_up_at = time.monotonic() + seconds
    number = 0
    while (sent_at := time.monotonic()) < give_up_at:
        number += 1
        probe.sendto(str(number).encode(), at)
        try:
            while probe.recv(100) != str(number).encode():
                pass  # the answer to an earlier one
        except TimeoutError:
            continue
        found.append(time.monotonic() - sent_at)
        time.sleep(PROBE_EVERY_S)
    return found


def test_a_probe_is_delayed_little_while_the_lane_uploads_at_the_full_rate(
    processes: Processes,
) -> None:
    sites = [
        Site("public", one_way_ms=10),
        Site("home", Nat.PORT_RESTRICTED, one_way_ms=15, up_mbit=UP_MBIT, down_mbit=50),
    ]
    with internet(sites) as net:
        at = f"/ip4/{net.address('public')}/tcp/{PORT}"
        _, address = listening(processes, net.at("public"), "sink", at)
        there = socket_in(net.edge("public"), socket.SOCK_DGRAM)
        there.bind(("0.0.0.0", PROBE_PORT))
        there.settimeout(0.5)
        stop = threading.Event()
        echoing = threading.Thread(target=echo, args=(there, stop))
        echoing.start()
        probe = socket_in(net.computer("home"), socket.SOCK_DGRAM)
        probe.settimeout(2.0)
        target = net.address("public"), PROBE_PORT
        try:
            base_s = statistics.median(round_trips(probe, target, 2.0))
            added_ms, late_ms, share = {}, {}, {}
            for polite in ("no", "yes"):
                words = "source", address, str(SECONDS), polite
                source = start(processes, net.at("home"), *words)
                processes.wait_for_line(source, "sending ", timeout_s=60)
                time.sleep(SETTLED_S)
                seen = round_trips(probe, target, SECONDS - SETTLED_S - 2.0)
                line = processes.wait_for_line(source, "sent ", timeout_s=60)
                share[polite] = float(line.split()[1]) * 8 / (UP_MBIT * 1e6)
                late_ms[polite] = 1000 * (statistics.quantiles(seen, n=20)[-1] - base_s)
                added_ms[polite] = 1000 * (statistics.median(seen) - base_s)
                tell(
                    f"polite {polite}: a probe takes {1000 * base_s:.0f} ms and "
                    f"{added_ms[polite]:.0f} ms more at the median, "
                    f"{late_ms[polite]:.0f} ms more at the 95th percentile; "
                    f"{share[polite]:.0%} of the line; {load()}"
                )
        finally:
            stop.set()
            echoing.join()
            there.close()
            probe.close()
        assert added_ms["no"] > 60, "without it the queue in front of the line is full"
        assert added_ms["yes"] < 50
        assert late_ms["yes"] < late_ms["no"] / 2, "it does not swing"
        assert share["yes"] >= 0.9 * share["no"]
