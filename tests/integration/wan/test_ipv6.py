"""Homes whose routers let no IPv4 connection through merge over IPv6."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import Processes
from tests.swarms.commands import Swarm, address_of, run_text, tell, until
from tests.swarms.topology import Internet, Nat, Site, internet, ip
from tests.swarms.wide_area import START_WITHIN_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

HOMES = ("one", "other")


def without_ipv4(net: Internet, site: str) -> None:
    ip("-n", net.edge(site), "-4", "addr", "flush", "dev", "outer")
    if net.sites[site].nat is not None:
        ip("-n", net.computer(site), "-4", "addr", "flush", "dev", "uplink")


@pytest.mark.parametrize("ipv4", [True, False], ids=["both", "ipv6 alone"])
def test_homes_behind_symmetric_routers_merge_over_ipv6(
    processes: Processes, tmp_path: Path, ipv4: bool
) -> None:
    """Nobody relays bulk data for them."""
    homes = [Site(name, Nat.SYMMETRIC, ipv6=True, one_way_ms=15) for name in HOMES]
    with internet([Site("public", ipv6=True, one_way_ms=5), *homes]) as net:
        if not ipv4:
            for site in net.sites:
                without_ipv4(net, site)
        at = f"/ip4/{net.address('public')}" if ipv4 else f"/ip6/{net.ipv6_address('public')}"
        swarm = Swarm(processes, tmp_path)
        bootstrap = swarm.bootstrap(listen=f"{at}/tcp/7700", prefix=net.at("public"))
        text = run_text(address_of(bootstrap), cycle=40)
        at_home = [{"listen": "/ip4/0.0.0.0/tcp/0", "prefix": net.at(site)} for site in HOMES]
        anna = swarm.start("anna", text, **at_home[0])
        anna.ready(timeout_s=START_WITHIN_S)
        boris = swarm.join("boris", anna.link(), **at_home[1])
        boris.ready(timeout_s=START_WITHIN_S)
        until(
            lambda: all(len(home.own_rounds()) >= 4 for home in (anna, boris)),
            "both merge",
            timeout_s=120,
        )
        tell(f"rounds: {[len(home.own_rounds()) for home in (anna, boris)]}")
        for home in (anna, boris):
            assert all(done["members"] == 2 for done in home.own_rounds())
