"""Two hosts behind routers of all kinds open direct connections with the help of a relay."""

from __future__ import annotations

import pytest

from tests.integration.wan.host_process import listening, start
from tests.processes import Processes
from tests.swarms.commands import load, tell
from tests.swarms.topology import Nat, Site, internet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PORT = 7700

KINDS = tuple(Nat)
CANNOT_MEET = frozenset({(Nat.SYMMETRIC, Nat.SYMMETRIC), (Nat.SYMMETRIC, Nat.PORT_RESTRICTED)})
"""Pairs in which one side would have to guess a port of the other side's router."""


def can_meet(one: Nat, other: Nat) -> bool:
    return not {(one, other), (other, one)} & CANNOT_MEET


@pytest.mark.parametrize("lane", ["on", "off", "relaying"])
def test_homes_meet_through_every_pair_of_routers_that_can_be_met_through(
    processes: Processes, lane: str
) -> None:
    """``lane``: whether a peer outside can tell the homes the outer addresses of their ports.

    ``relaying``: it also passes bulk data on for the pairs that cannot meet.
    """
    sites = [Site("public", one_way_ms=5)]
    sites += [
        Site(f"{side}{index}", kind, one_way_ms=20)
        for side in "ab"
        for index, kind in enumerate(KINDS)
    ]
    with internet(sites) as net:
        at = f"/ip4/{net.address('public')}/tcp/{PORT}"
        _, address = listening(processes, net.at("public"), "relay", at, lane)
        homes = {}
        numbers = {name: str(number) for number, name in enumerate(net.sites, start=1)}
        called = [numbers[f"b{index}"] for index in range(len(KINDS))]
        for name, number in numbers.items():
            if name != "public":
                others = called if name.startswith("a") else []
                homes[name] = start(processes, net.at(name), "home", number, address, *others)
        kinds = {numbers[name]: net.sites[name].nat for name in homes}
        for index, own in enumerate(KINDS):
            caller = homes[f"a{index}"]
            processes.wait_for_line(caller, "finished ", timeout_s=180)
            for line in processes.output_of(caller).splitlines():
                word, number, *rest = line.split()
                if word not in ("met", "apart"):
                    continue
                other = kinds[number]
                assert other is not None
                tell(f"{own} calls {other}: {line}")
                if can_meet(own, other):
                    assert (word, rest[1]) == ("met", "PUNCHED"), f"{own} calls {other}: {line}"
                elif lane == "relaying":
                    assert (word, rest[1]) == ("met", "RELAYED"), f"{own} calls {other}: {line}"
                else:
                    assert word == "apart" and "routers" in line
        tell(load())


def test_homes_with_ipv6_meet_over_it_where_ipv4_does_not_get_through(
    processes: Processes,
) -> None:
    """The relay has no IPv6: nobody tells the homes their addresses there."""
    sites = [
        Site("public", one_way_ms=5),
        Site("called", Nat.SYMMETRIC, ipv6=True, one_way_ms=20),
        Site("caller", Nat.SYMMETRIC, ipv6=True, one_way_ms=20),
        Site("without", Nat.SYMMETRIC, one_way_ms=20),
    ]
    with internet(sites) as net:
        at = f"/ip4/{net.address('public')}/tcp/{PORT}"
        _, address = listening(processes, net.at("public"), "relay", at, "on")
        start(processes, net.at("called"), "home", "2", address)
        for number, (name, result) in enumerate((("caller", "met 2 "), ("without", "apart 2 "))):
            home = start(processes, net.at(name), "home", str(3 + number), address, "2")
            line = processes.wait_for_line(home, result, timeout_s=120)
            tell(f"{name} calls called: {line}")
            assert ("PUNCHED" in line) == (name == "caller")


def test_a_home_that_is_connected_over_ipv6_meets_one_without_it(processes: Processes) -> None:
    """The relay still tells the home its address of IPv4."""
    sites = [
        Site("public", ipv6=True, one_way_ms=5),
        Site("called", Nat.PORT_RESTRICTED, one_way_ms=20),
        Site("caller", Nat.PORT_RESTRICTED, ipv6=True, one_way_ms=20),
    ]
    with internet(sites) as net:
        at = f"/ip4/{net.address('public')}/tcp/{PORT},/ip6/{net.ipv6_address('public')}/tcp/{PORT}"
        _, address = listening(processes, net.at("public"), "relay", at, "on")
        start(processes, net.at("called"), "home", "2", address)
        ipv6_first = ",".join(reversed(address.split(",")))
        caller = start(processes, net.at("caller"), "home", "3", ipv6_first, "2")
        line = processes.wait_for_line(caller, "finished ", timeout_s=120)
        said = processes.output_of(caller)
        assert "met 2 " in said and "PUNCHED" in said, said
        tell(line)


def test_two_computers_behind_one_router_need_no_meeting_and_call_homes_elsewhere(
    processes: Processes,
) -> None:
    """The router has to give the same ports of both computers to one of them only."""
    sites = [
        Site("public", one_way_ms=5),
        Site("flat", Nat.PORT_RESTRICTED, computers=2, one_way_ms=20),
        Site("house", Nat.PORT_RESTRICTED, one_way_ms=30),
    ]
    with internet(sites) as net:
        at = f"/ip4/{net.address('public')}/tcp/{PORT}"
        _, address = listening(processes, net.at("public"), "relay", at, "on")
        start(processes, net.at("house"), "home", "2", address)
        callers = [
            start(processes, net.at("flat", index), "home", str(3 + index), address, "2")
            for index in range(2)
        ]
        for caller in callers:
            line = processes.wait_for_line(caller, "met 2 ", timeout_s=120)
            assert "PUNCHED" in line


def test_the_kind_of_each_router_is_told_with_the_help_of_two_addresses_outside(
    processes: Processes,
) -> None:
    sites = [Site("one"), Site("other")]
    sites += [Site(f"home{index}", kind) for index, kind in enumerate(KINDS)]
    with internet(sites) as net:
        outside = []
        for number, name in enumerate(("one", "other"), start=1):
            at = f"/ip4/{net.address(name)}/tcp/{PORT}"
            outside.append(listening(processes, net.at(name), "relay", at, "on", str(number))[1])
        for index, kind in enumerate(KINDS):
            looking = start(processes, net.at(f"home{index}"), "look", str(3 + index), *outside)
            line = processes.wait_for_line(looking, "router ", timeout_s=60)
            tell(f"{kind}: {line}")
            found = "symmetric" if kind is Nat.SYMMETRIC else "cone"
            assert line.removeprefix("router ").startswith(found)
