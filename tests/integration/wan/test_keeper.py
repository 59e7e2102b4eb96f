"""Learners in two homes behind routers merge through a keeper, which both can dial."""

from __future__ import annotations

from pathlib import Path

import pytest

from dht.identity import Identity
from peer.views.event_log import read_events
from tests.processes import Processes
from tests.swarms.commands import Swarm, address_of, load, run_text, tell, until
from tests.swarms.namespaces import reaches
from tests.swarms.topology import Nat, Site, internet
from tests.swarms.wide_area import START_WITHIN_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

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
        anna.ready(timeout_s=START_WITHIN_S)
        keeper_folder = tmp_path / "keeper"
        keeper = swarm.keep(
            keeper_folder, anna.link(), listen=f"/ip4/{public}/tcp/7701", prefix=at_public
        )
        boris = swarm.join("boris", anna.link(), **at_home[1])
        boris.ready(timeout_s=START_WITHIN_S)

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

        for home in both:  # the last one has nobody but the keeper
            home.stop()
            fates = home.end()["fates"]
            assert fates["merged"] == fates["processed"], "what it had not merged is handed over"
        keeper.stop()
        assert keeper.wait() == 130
        bootstrap.stop()
        bootstrap.wait()


def test_a_keeper_that_only_a_relay_reaches_has_every_version(
    processes: Processes, tmp_path: Path
) -> None:
    """No two of these routers let a connection between their homes through."""
    names = ("one", "other", "third")
    homes = [Site(name, Nat.SYMMETRIC, one_way_ms=15) for name in names]
    with internet([Site("public", one_way_ms=5), *homes]) as net:
        swarm = Swarm(processes, tmp_path)
        bootstrap = swarm.bootstrap(
            listen=f"/ip4/{net.address('public')}/tcp/7700",
            prefix=net.at("public"),
            options=("--relay-bulk", "10M"),
        )
        text = run_text(address_of(bootstrap), cycle=60)
        listen = "/ip4/0.0.0.0/tcp/7700"
        anna = swarm.start("anna", text, listen=listen, prefix=net.at("one"))
        anna.ready(timeout_s=START_WITHIN_S)
        boris = swarm.join("boris", anna.link(), listen=listen, prefix=net.at("other"))
        boris.ready(timeout_s=START_WITHIN_S)
        folder = tmp_path / "keeper"
        keeper = swarm.keep(folder, anna.link(), listen=listen, prefix=net.at("third"))
        until(lambda: len(boris.own_rounds()) >= 8, "the learners merge", timeout_s=150)
        versions: dict[int, int] = {}
        for event in read_events(boris.directory / "events.jsonl"):
            if event["event"] == "round" and event["outcome"] == "finished":
                versions[event["fragment"]] = event["version"]

        def steps() -> dict[int, list[tuple[int, int]]]:
            """From which version to which the keeper went, by fragment."""
            found: dict[int, list[tuple[int, int]]] = {}
            for event in read_events(folder / "events.jsonl"):
                if event["event"] == "state_adopted" and event["how"] == "replay":
                    each = event["from_version"], event["version"]
                    found.setdefault(event["fragment"], []).append(each)
            return found

        def is_there() -> bool:
            return all(steps().get(f, [(0, 0)])[-1][1] >= v for f, v in versions.items())

        took_s = until(is_there, "the keeper follows", timeout_s=60)
        tell(f"the keeper had all of {versions} {took_s:.0f} s later; {load()}")
        for went in steps().values():
            assert all(went[i][1] == went[i + 1][0] for i in range(len(went) - 1)), went
        keeper.stop()
        assert keeper.wait() in (0, 130)
