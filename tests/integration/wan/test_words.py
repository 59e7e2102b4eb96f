"""Messages to people about a run whose peers are behind routers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.processes import Processes
from tests.swarms.commands import Command, Swarm, address_of, run_text, until
from tests.swarms.topology import Internet, Nat, internet
from tests.swarms.wide_area import BOOTSTRAP, PORT, START_WITHIN_S
from tests.swarms.wide_area import sites as usual_sites

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def seen_from(net: Internet, site: str, processes: Processes, link: str) -> dict[str, Any]:
    """The output of ``shoal status`` on a computer of this site."""
    asking = Command(processes, ["status", link, "--json"], prefix=net.at(site))
    assert asking.wait(timeout_s=60) == 0, asking.output
    shown: dict[str, Any] = json.loads(asking.output)
    return shown


def test_peers_behind_routers_are_listed_counted_and_told_what_they_lack(
    processes: Processes, tmp_path: Path
) -> None:
    with internet(usual_sites(1, [Nat.SYMMETRIC, Nat.SYMMETRIC])) as net:
        swarm = Swarm(processes, tmp_path)
        at = f"/ip4/{net.address(BOOTSTRAP)}/tcp/{PORT}"
        bootstrap = swarm.bootstrap(listen=at, prefix=net.at(BOOTSTRAP))
        text = run_text(address_of(bootstrap), cycle=40)
        listen = f"/ip4/0.0.0.0/tcp/{PORT}"
        anna = swarm.start("anna", text, listen=listen, prefix=net.at("home0"))
        anna.ready(timeout_s=START_WITHIN_S)
        boris = swarm.join("boris", anna.link(), listen=listen, prefix=net.at("home1"))
        for home in (anna, boris):
            told = home.wait_for(
                lambda record: record.get("event") == "nobody_reduces",
                "it says that nobody reduces",
                timeout_s=120,
            )
            assert "2 peers are here" in told["text"] and "shoal keep" in told["text"]

        clara = swarm.join("clara", anna.link(), listen=listen, prefix=net.at("public0"))
        clara.ready(timeout_s=START_WITHIN_S)
        until(lambda: all(home.own_rounds() for home in (anna, boris)), "all merge", timeout_s=120)
        # From a home with a peer of the run, from another machine, and from a home without any.
        for site in ("home0", BOOTSTRAP):
            shown = seen_from(net, site, processes, anna.link())
            names = {peer["name"] for peer in shown["peers"]}
            assert names == {"anna", "boris", "clara"}, shown["silent"]
        swarm.end()
        bootstrap.stop()
        bootstrap.wait()
