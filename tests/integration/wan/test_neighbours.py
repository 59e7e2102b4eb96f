"""Learners on two computers of one home exchange over the home's own network."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import Processes
from tests.swarms.commands import Swarm, address_of, load, run_text, tell, until
from tests.swarms.topology import Internet, Nat, Site, internet, must_run_in
from tests.swarms.wide_area import START_WITHIN_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LISTEN = "/ip4/0.0.0.0/tcp/7700"


def sent_at_home(net: Internet) -> int:
    """Bytes that the computers of the home have sent, to each other and outwards."""
    path = "/sys/class/net/uplink/statistics/tx_bytes"
    return sum(int(must_run_in(net.computer("flat", index), "cat", path)) for index in range(2))


@pytest.mark.parametrize("nat", [Nat.PORT_RESTRICTED, Nat.SYMMETRIC])
def test_two_learners_behind_one_router_keep_their_uploads_off_its_line(
    processes: Processes, tmp_path: Path, nat: Nat
) -> None:
    """The router does not lead packets for its own public address back inside."""
    flat = Site("flat", nat, computers=2, one_way_ms=15)
    with internet([Site("public", one_way_ms=5), flat]) as net:
        swarm = Swarm(processes, tmp_path)
        at = f"/ip4/{net.address('public')}/tcp/7700"
        bootstrap = swarm.bootstrap(listen=at, prefix=net.at("public"))
        text = run_text(address_of(bootstrap), cycle=40, layers=4, width=256)
        anna = swarm.start("anna", text, listen=LISTEN, prefix=net.at("flat", 0))
        anna.ready(timeout_s=START_WITHIN_S)
        boris = swarm.join("boris", anna.link(), listen=LISTEN, prefix=net.at("flat", 1))
        boris.ready(timeout_s=START_WITHIN_S)
        both = (anna, boris)
        outside, inside = net.sent_bytes("flat"), sent_at_home(net)
        enough = [len(home.own_rounds()) + 8 for home in both]
        until(
            lambda: all(len(h.own_rounds()) >= n for h, n in zip(both, enough, strict=True)),
            "both merge",
            timeout_s=120,
        )
        outside, inside = net.sent_bytes("flat") - outside, sent_at_home(net) - inside
        tell(f"{nat}: {inside} bytes at home, {outside} of them outwards; {load()}")
        assert outside < 0.25 * inside
