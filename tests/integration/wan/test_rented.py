"""A rented container: ports of its provider's machine, with other numbers, lead inside."""

from __future__ import annotations

from pathlib import Path

import pytest

from peer.views.event_log import read_events
from tests.processes import Processes
from tests.swarms.commands import Swarm, address_of, load, run_text, tell, until
from tests.swarms.topology import Nat, Site, internet
from tests.swarms.wide_area import BOOTSTRAP, PORT, START_WITHIN_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

OUTER, INNER = 40001, 7701
LANE_OUTER, LANE_INNER = 40002, 7702


@pytest.mark.parametrize("told_by", ["variables", "options"])
def test_a_rented_container_is_dialled_at_ports_that_are_not_its_own(
    told_by: str, processes: Processes, tmp_path: Path
) -> None:
    """By one behind a router that lets nobody in, so no other connection can be between them."""
    places = [
        Site(BOOTSTRAP, one_way_ms=5),
        Site("rented", Nat.SYMMETRIC, one_way_ms=10),
        Site("home", Nat.SYMMETRIC, one_way_ms=15),
    ]
    with internet(places) as net:
        bulk = net.forward("rented", LANE_OUTER, LANE_INNER)
        messages = net.forward("rented", OUTER, INNER)
        at, public = net.address(BOOTSTRAP), net.address("rented")
        variables = {
            "RUNPOD_PUBLIC_IP": public,
            f"RUNPOD_TCP_PORT_{INNER}": str(OUTER),
            f"RUNPOD_TCP_PORT_{LANE_INNER}": str(LANE_OUTER),
        }
        announce = ("--announce", f"/ip4/{public}/tcp/{OUTER}")
        options = (*announce, "--lane", f"{LANE_INNER}:{LANE_OUTER}")
        by_variables = told_by == "variables"
        swarm = Swarm(processes, tmp_path)
        bootstrap = swarm.bootstrap(listen=f"/ip4/{at}/tcp/{PORT}", prefix=net.at(BOOTSTRAP))
        rented = swarm.start(
            "rented",
            run_text(address_of(bootstrap), width=64, cycle=60),
            listen=f"/ip4/0.0.0.0/tcp/{0 if by_variables else INNER}",
            prefix=net.at("rented"),
            environment=variables if by_variables else None,
            options=["--page", "off", *(() if by_variables else options)],
        )
        link = rented.link()
        assert f"/ip4/{public}/tcp/{OUTER}/p2p/" in link
        home = swarm.join(
            "home",
            link,
            listen=f"/ip4/0.0.0.0/tcp/{PORT}",
            prefix=net.at("home"),
            options=["--page", "off"],
        )
        home.ready(timeout_s=START_WITHIN_S)
        took_s = until(lambda: len(home.own_rounds()) >= 3, "three rounds of both", timeout_s=120)
        tell(f"{messages()} connections of libp2p, {bulk()} of the lane; {took_s:.0f} s; {load()}")
        assert messages() and bulk()
        tell(f"bulk data of the home: {home.progress()['paths']}")
        assert home.progress()["paths"]["direct"] == 1
        events = [*read_events(rented.directory / "events.jsonl")]
        verdicts = [each["reachable"] for each in events if each["event"] == "reachability"]
        assert verdicts and verdicts[-1] is True
        swarm.end()
