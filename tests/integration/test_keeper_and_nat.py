"""Learners in two homes behind routers merge through a keeper, which both can dial.

Each home is a network namespace behind another one, its router, which translates addresses and
drops unsolicited packets, as home routers do.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dht.identity import Identity
from peer.views.event_log import read_events
from tests.integration.namespaces import ip, reaches
from tests.integration.swarm_processes import Swarm, address_of, run_text, until
from tests.processes import Processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PUBLIC_IP = "11.77.0.1"
"""A public address for libp2p, which exists only inside the namespaces."""

HOME_IP = "192.168.1.2"
"""Address in both homes, as private networks are alike."""

ROUTER = """\
table ip router {
  chain outwards {
    type nat hook postrouting priority srcnat
    oifname "outer" masquerade
  }
  chain through {
    type filter hook forward priority filter
    iifname "outer" ct state new drop
  }
  chain inwards {
    type filter hook input priority filter
    iifname "outer" ct state new drop
  }
}
"""


@dataclass(frozen=True)
class Internet:
    public: str
    homes: tuple[str, str]

    @staticmethod
    def inside(namespace: str) -> list[str]:
        return ["ip", "netns", "exec", namespace]


def link(one: str, one_end: str, other: str, other_end: str) -> None:
    ip("-n", one, "link", "add", one_end, "type", "veth", "peer", other_end, "netns", other)


def give(namespace: str, device: str, address: str) -> None:
    ip("-n", namespace, "addr", "add", address, "dev", device)
    ip("-n", namespace, "link", "set", device, "up")


def forward_packets(namespace: str) -> None:
    command = [*Internet.inside(namespace), "sysctl", "-w", "net.ipv4.ip_forward=1"]
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def internet() -> Iterator[Internet]:
    """A public machine, and two homes that each reach it through their own router."""
    if missing := [tool for tool in ("ip", "nft", "sysctl") if shutil.which(tool) is None]:
        pytest.skip(f"homes behind NAT need {' and '.join(missing)} (iproute2, nftables, procps)")
    if os.geteuid() != 0:
        pytest.skip("homes behind NAT need root, to make network namespaces")
    tag = f"k{os.getpid() % 100_000}"
    public, *rest = names = (f"{tag}p", f"{tag}r1", f"{tag}r2", f"{tag}h1", f"{tag}h2")
    routers, homes = rest[:2], rest[2:]
    made = []
    try:
        for name in names:
            try:
                ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"network namespaces are not allowed here: {error.stderr.strip()}")
            made.append(name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", public, "addr", "add", f"{PUBLIC_IP}/32", "dev", "lo")
        forward_packets(public)
        for number, (router, home) in enumerate(zip(routers, homes, strict=True), start=1):
            link(public, f"to{number}", router, "outer")
            give(public, f"to{number}", f"11.78.{number}.1/30")
            give(router, "outer", f"11.78.{number}.2/30")
            ip("-n", router, "route", "add", "default", "via", f"11.78.{number}.1")
            link(router, "inner", home, "uplink")
            give(router, "inner", "192.168.1.1/24")
            give(home, "uplink", f"{HOME_IP}/24")
            ip("-n", home, "route", "add", "default", "via", "192.168.1.1")
            forward_packets(router)
            rules = subprocess.run(
                [*Internet.inside(router), "nft", "-f", "-"],
                check=False,
                input=ROUTER,
                capture_output=True,
                text=True,
            )
            if rules.returncode:
                pytest.skip(f"address translation is not allowed here: {rules.stderr.strip()}")
        yield Internet(public, (homes[0], homes[1]))
    finally:
        for name in made:
            ip("netns", "del", name)


def test_two_homes_behind_nat_merge_with_the_help_of_a_keeper_that_they_can_dial(
    internet: Internet, processes: Processes, tmp_path: Path
) -> None:
    for home, own_router, other_router in zip(
        internet.homes, ("11.78.1.2", "11.78.2.2"), ("11.78.2.2", "11.78.1.2"), strict=True
    ):
        assert reaches(home, PUBLIC_IP)
        assert not reaches(internet.public, own_router), "its router lets nothing in"
        assert not reaches(home, other_router), "the homes must not see each other"

    swarm = Swarm(processes, tmp_path)
    at_public = internet.inside(internet.public)
    bootstrap = swarm.bootstrap(listen=f"/ip4/{PUBLIC_IP}/tcp/7700", prefix=at_public)
    text = run_text(address_of(bootstrap), cycle=40)
    at_home = [
        {"listen": "/ip4/0.0.0.0/tcp/0", "prefix": internet.inside(home)} for home in internet.homes
    ]
    anna = swarm.start("anna", text, **at_home[0])
    anna.ready()
    keeper_folder = tmp_path / "keeper"
    keeper = swarm.keep(
        keeper_folder, anna.link(), listen=f"/ip4/{PUBLIC_IP}/tcp/7701", prefix=at_public
    )
    boris = swarm.join("boris", anna.link(), **at_home[1])
    boris.ready()

    for home in (anna, boris):
        until(lambda home=home: len(home.own_rounds()) >= 4, f"{home.name} merges", timeout_s=120)
    keeper_id = Identity.load(keeper_folder / "identity.key").peer_id
    for home in (anna, boris):
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
    assert closed and all(e["live"] == e["members"] == 2 for e in closed), "it counts none but them"

    keeper.stop()
    assert keeper.wait() == 130
    swarm.end()
    bootstrap.stop()
    bootstrap.wait()
