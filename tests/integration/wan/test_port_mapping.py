"""A home's router leads the lane's port inside, as long as the home asks it to."""

from __future__ import annotations

import sys

import pytest

from peer.lab.network.topology import Nat, Site, internet, must_run_in
from peer.lab.network.topology import inside as inside_of
from tests.integration.swarm_processes import load, tell
from tests.integration.wan.mapping_router import SHIFT
from tests.processes import Processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

PORT, LANE_PORT = 7700, 7710
PREFIX = [sys.executable, "-m"]
PEER = "tests.integration.wan.mapping_peer"


@pytest.mark.parametrize("speaks", [True, False])
def test_a_peer_outside_dials_the_lane_of_a_home_whose_router_speaks_nat_pmp(
    processes: Processes, speaks: bool
) -> None:
    """Where it does not, both dial each other."""
    home = Site("home", Nat.PORT_RESTRICTED, one_way_ms=10)
    with internet([Site("public", one_way_ms=5), home]) as net:
        if speaks:
            command = [*PREFIX, "tests.integration.wan.mapping_router", "192.168.1.1"]
            # The router's own rules let nobody outside ask.
            router = processes.start([*inside_of(net.edge("home")), *command])
            processes.wait_for_line(router, "router ", timeout_s=30)
        at = f"/ip4/{net.address('public')}/tcp/{PORT}"
        outside = processes.start([*net.at("public"), *PREFIX, PEER, "outside", at])
        address = processes.wait_for_line(outside, "outside ", timeout_s=60).split()[1]
        inside = processes.start([*net.at("home"), *PREFIX, PEER, "home", str(LANE_PORT), address])
        told = processes.wait_for_line(inside, "home ", timeout_s=90).split()[1]
        line = processes.wait_for_line(outside, "reached ", timeout_s=60)
        tell(f"NAT-PMP {speaks}: told port {told}, {line}; {load()}")
        if not speaks:
            assert (told, line) == (str(LANE_PORT), "reached PUNCHED")
            return
        assert (told, line) == (str(LANE_PORT + SHIFT), "reached DIRECT")
        rules = must_run_in(net.edge("home"), "nft", "list", "chain", "ip", "router", "arriving")
        assert f":{LANE_PORT}" in rules
        inside.terminate()
        processes.wait_for_line(router, f"removed {LANE_PORT} ", timeout_s=30)
        rules = must_run_in(net.edge("home"), "nft", "list", "chain", "ip", "router", "arriving")
        assert f":{LANE_PORT}" not in rules
