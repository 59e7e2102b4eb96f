"""A home's router leads the lane's port inside, as long as the home asks it to."""

from __future__ import annotations

import subprocess
import sys

import pytest
from multiaddr import Multiaddr

from dht.addresses import ip_of, port_of
from dht.libp2p.lane.port_mapping import OTHER_PORTS
from tests.integration.wan.host_process import listening, start
from tests.integration.wan.mapping_router import SHIFT
from tests.processes import Processes
from tests.swarms.commands import load, tell
from tests.swarms.topology import Internet, Nat, Site, internet, must_run_in
from tests.swarms.topology import inside as inside_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

PORT, LANE_PORT = 7700, 7710


def dialled(net: Internet, processes: Processes) -> tuple[str, str, subprocess.Popen[bytes]]:
    """The port that the home tells, how it is reached at that port, and the process at home."""
    at = f"/ip4/{net.address('public')}/tcp/{PORT}"
    outside, address = listening(processes, net.at("public"), "outside", at)
    inside = start(processes, net.at("home"), "mapped", str(LANE_PORT), address)
    told = processes.wait_for_line(inside, "mapped ", timeout_s=90).split()[1]
    return told, processes.wait_for_line(outside, "reached ", timeout_s=60), inside


def two_sites() -> list[Site]:
    return [Site("public", one_way_ms=5), Site("home", Nat.PORT_RESTRICTED, one_way_ms=10)]


def test_both_dial_each_other_where_the_router_maps_no_ports(processes: Processes) -> None:
    with internet(two_sites()) as net:
        told, line, inside = dialled(net, processes)
        assert processes.wait_for_line(inside, "dialled at", timeout_s=5) == "dialled at"
        assert (told, line) == (str(LANE_PORT), "reached PUNCHED")


@pytest.mark.parametrize("speaks", ["NAT-PMP", "UPnP"])
def test_a_peer_outside_dials_the_lane_of_a_home_whose_router_maps_ports(
    processes: Processes, speaks: str
) -> None:
    if speaks == "UPnP":
        pytest.importorskip("miniupnpc")
    with internet(two_sites()) as net:
        options = ["upnp", str(LANE_PORT)] if speaks == "UPnP" else []
        program = [sys.executable, "-m", "tests.integration.wan.mapping_router"]
        # The router's own rules let nobody outside ask.
        router = processes.start([*inside_of(net.edge("home")), *program, "192.168.1.1", *options])
        processes.wait_for_line(router, "router ", timeout_s=30)
        told, line, inside = dialled(net, processes)
        tell(f"{speaks}: told port {told}, {line}; {load()}")
        assert line == "reached DIRECT"
        address = Multiaddr(processes.wait_for_line(inside, "dialled at ", timeout_s=5).split()[2])
        assert ip_of(address) == net.address("home"), "the daemon's port is mapped as well"
        there = f"import socket; socket.create_connection(('{ip_of(address)}', {port_of(address)}))"
        must_run_in(net.edge("public"), sys.executable, "-c", there)
        assert told == str(LANE_PORT + SHIFT) or (speaks == "UPnP" and int(told) in OTHER_PORTS)
        rules = must_run_in(net.edge("home"), "nft", "list", "chain", "ip", "router", "arriving")
        assert f":{LANE_PORT}" in rules
        inside.terminate()
        processes.wait_for_line(router, f"removed {LANE_PORT} ", timeout_s=30)
        rules = must_run_in(net.edge("home"), "nft", "list", "chain", "ip", "router", "arriving")
        assert f":{LANE_PORT}" not in rules
