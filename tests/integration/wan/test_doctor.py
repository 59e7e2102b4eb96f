"""``shoal doctor LINK`` in a home: the kind of its router, and which peers of the run it meets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peer.views.event_log import read_events
from tests.processes import Processes
from tests.swarms.commands import Command, Swarm, address_of, run_text, tell, until
from tests.swarms.topology import Nat, internet
from tests.swarms.wide_area import BOOTSTRAP, PORT, START_WITHIN_S
from tests.swarms.wide_area import sites as usual_sites

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_doctor_names_the_router_and_whether_it_meets_the_peers_of_the_run(
    processes: Processes, tmp_path: Path
) -> None:
    kinds = [Nat.PORT_RESTRICTED, Nat.FULL_CONE, Nat.PORT_RESTRICTED, Nat.SYMMETRIC]
    with internet(usual_sites(0, kinds)) as net:
        swarm = Swarm(processes, tmp_path)
        at = f"/ip4/{net.address(BOOTSTRAP)}/tcp/{PORT}"
        # It has a lane then, which shows routers what they do.
        options = ("--relay-bulk", "10M")
        bootstrap = swarm.bootstrap(listen=at, prefix=net.at(BOOTSTRAP), options=options)
        text = run_text(address_of(bootstrap), cycle=60, layers=1, width=64)
        listen = f"/ip4/0.0.0.0/tcp/{PORT}"
        anna = swarm.start("anna", text, listen=listen, prefix=net.at("home0"))
        anna.ready(timeout_s=START_WITHIN_S)
        boris = swarm.join("boris", anna.link(), listen=listen, prefix=net.at("home1"))
        boris.ready(timeout_s=START_WITHIN_S)
        logs = [learner.directory / "events.jsonl" for learner in (anna, boris)]
        until(
            lambda: all("reachability" in {e["event"] for e in read_events(log)} for log in logs),
            "both know that they can only dial out",
            timeout_s=120,
        )

        def found_at(home: str) -> dict[str, tuple[str, str]]:
            """The findings of the doctor there, by check: state and text."""
            command = Command(processes, ["doctor", anna.link(), "--json"], prefix=net.at(home))
            assert command.wait(timeout_s=150) == 0, command.output
            found = {
                finding["check"]: (finding["state"], finding["text"])
                for finding in json.loads(command.output)["findings"]
            }
            for check in ("router", "meeting", "reachability"):
                tell(f"{home}: {check}: {': '.join(found[check])}")
            return found

        found = found_at("home2")
        assert found["router"][1].startswith("cone")
        assert found["meeting"] == ("ok", "direct connections open to 2 of 2 peers behind routers")
        # One in the same home sees the router as the learner there does.
        found = found_at("home1")
        assert found["router"][1].startswith("cone")
        verdict = [e for e in read_events(logs[1]) if e["event"] == "reachability"][-1]
        assert ("can dial" in found["reachability"][1]) == bool(verdict["reachable"])
        found = found_at("home3")
        assert found["router"][0] == "warning" and "symmetric" in found["router"][1]
        assert found["meeting"] == (
            "ok",
            "direct connections open to 1 of 2 peers behind routers, and 1 can be met through a "
            "relay, which is slower, by a member of the run",
        )
        swarm.end()
        bootstrap.stop()
        bootstrap.wait()
