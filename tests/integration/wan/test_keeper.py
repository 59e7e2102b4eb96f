"""Learners in two homes behind routers merge through a keeper, which both can dial."""

from __future__ import annotations

from pathlib import Path

import pytest

from dht.identity import Identity
from peer.views.event_log import read_events
from tests.integration.namespaces import reaches
from tests.integration.swarm_processes import Swarm, address_of, run_text, until
from tests.integration.wan.topology import Nat, Site, internet
from tests.processes import Processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

HOMES = ("one", "other")


def test_two_homes_behind_nat_merge_with_the_help_of_a_keeper_that_they_can_dial(
    processes: Processes, tmp_path: Path
) -> None:
    homes = [Site(name, Nat.PORT_RESTRICTED, one_way_ms=15) for name in HOMES]
    with internet([Site("public", one_way_ms=5), *homes]) as net:
        public = net.address("public")
        for site, other in (HOMES, HOMES[::-1]):
            assert reaches(net.computer(site), public)
            assert not reaches(net.edge("public"), net.address(site)), "its router lets nothing in"
            assert not reaches(net.computer(site), net.address(other)), "homes see no other home"

        swarm = Swarm(processes, tmp_path)
        at_public = net.at("public")
        bootstrap = swarm.bootstrap(listen=f"/ip4/{public}/tcp/7700", prefix=at_public)
        text = run_text(address_of(bootstrap), cycle=40)
        at_home = [{"listen": "/ip4/0.0.0.0/tcp/0", "prefix": net.at(site)} for site in HOMES]
        anna = swarm.start("anna", text, **at_home[0])
        anna.ready()
        keeper_folder = tmp_path / "keeper"
        keeper = swarm.keep(
            keeper_folder, anna.link(), listen=f"/ip4/{public}/tcp/7701", prefix=at_public
        )
        boris = swarm.join("boris", anna.link(), **at_home[1])
        boris.ready()

        both = (anna, boris)
        until(
            lambda: all(len(home.own_rounds()) >= 4 for home in both), "both merge", timeout_s=120
        )
        keeper_id = Identity.load(keeper_folder / "identity.key").peer_id
        for home in both:
            events = list(read_events(home.directory / "events.jsonl"))
            verdicts = [e["reachable"] for e in events if e["event"] == "reachability"]
            assert True not in verdicts, "the routers drop incoming connections"
            rounds = [e for e in events if e["event"] == "round" and e["outcome"] == "finished"]
            assert {done["leader"] for done in rounds} == {keeper_id}
            for done in rounds:
                assert len(done["members"]) == 2 and keeper_id not in done["members"]
                assert keeper_id not in done["contributors"]
            assert not [e for e in events if e["event"] == "not_a_commit"]
        closed = [e for e in read_events(keeper_folder / "events.jsonl") if e["event"] == "closed"]
        assert closed and all(e["live"] == e["members"] == 2 for e in closed), (
            "it counts none but them"
        )

        keeper.stop()
        assert keeper.wait() == 130
        swarm.end()
        bootstrap.stop()
        bootstrap.wait()
