"""Findings of the doctor on a simulated network and on this machine."""

from __future__ import annotations

import asyncio
import shutil
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from multiaddr import Multiaddr

from dht.bounded_mapping import BoundedMapping, by_age
from dht.identity import PeerId, RunId
from dht.libp2p.lane.connection import Path as LanePath
from dht.libp2p.lane.meetings import APART
from dht.libp2p.lane.observers import RouterView
from dht.libp2p.lane.relaying import MEMBERS_ONLY
from dht.memory.host import MemoryHost, MemoryNetwork, identity_of
from dht.memory.virtual_loop import run
from dht.presence.presence import Presence
from dht.presence.this_peer import Events, PresenceEvent, Profile
from peer.errors import Unusable
from peer.extras.compiled import loading
from peer.extras.doctor import this_machine
from peer.extras.doctor.network import (
    Plan,
    TryLane,
    check_router,
    describe_meetings,
    describe_router,
    examine_network,
    plan_of,
)
from peer.extras.doctor.this_machine import (
    Finding,
    as_record,
    check_codecs,
    check_container,
    check_disk,
    check_memory,
    check_port,
    check_torch,
    exit_code,
)
from peer.rules.rented import Container
from peer.run_file.sections import RunFile
from tests.processes import Processes, descendants, described, still_running

EMPTY = Plan(data_directory=Path("/tmp"))


class Network(MemoryNetwork):
    """A simulated network with a presence on each of some hosts."""

    def __init__(self) -> None:
        super().__init__()
        self.presences: list[Presence] = []


def all_network_findings(
    prepare: Callable[[Network], Coroutine[Any, Any, Plan]],
    *,
    wall_offset_s: float = 0.0,
    dial_out_only: bool = False,
    try_lane: TryLane | None = None,
) -> list[Finding]:
    """Findings of a host named ``patient`` on a simulated network."""

    async def main() -> list[Finding]:
        network = Network()
        for name in ("seed", "other", "third"):
            host = network.host(name)
            presence = Presence(
                host,
                identity_of(name),
                Profile(None, role="bootstrap"),
                seeds=await seeds(network),
            )
            await presence.start()
            network.presences.append(presence)
        await asyncio.sleep(30)
        plan = await prepare(network)
        patient = network.host("patient", wall_offset_s=wall_offset_s)
        network.simulated.dial_out_only(patient.peer_id, only=dial_out_only)
        examined = examine_network(
            patient,
            identity_of("patient"),
            plan,
            open_fresh=lambda: network.host("fresh"),
            try_lane=try_lane,
        )
        found = [finding async for finding in examined]
        await asyncio.sleep(40)  # who took it for a member would miss it by now
        for presence in network.presences:
            await presence.close()
        for host in list(network._hosts.values()):
            await host.close()
        return found

    return run(main(), time_max_s=600)


def network_findings(
    prepare: Callable[[Network], Coroutine[Any, Any, Plan]],
    *,
    wall_offset_s: float = 0.0,
    dial_out_only: bool = False,
) -> dict[str, Finding]:
    """The findings by name, the last one of each name."""
    found = all_network_findings(prepare, wall_offset_s=wall_offset_s, dial_out_only=dial_out_only)
    return {finding.check: finding for finding in found}


def host_of(network: MemoryNetwork, name: str) -> MemoryHost:
    return network._hosts[identity_of(name).peer_id]


async def seeds(network: MemoryNetwork) -> tuple[Multiaddr, ...]:
    return (await host_of(network, "seed").addresses())[:1]


async def with_seed(network: MemoryNetwork) -> Plan:
    return replace(EMPTY, seeds=await seeds(network))


def test_a_healthy_machine_passes_every_check() -> None:
    found = network_findings(with_seed)
    assert {name: finding.state for name, finding in found.items()} == {
        "seed": "ok",
        "DHT": "ok",
        "reachability": "ok",
        "clock": "ok",
    }
    assert found["seed"].took_s is not None
    assert 0 < found["seed"].took_s < 1


def test_without_seeds_network_checks_are_skipped_with_advice() -> None:
    async def nobody(network: MemoryNetwork) -> Plan:
        return EMPTY

    found = network_findings(nobody)
    assert {finding.state for finding in found.values()} == {"skipped"}
    assert "shoal doctor LINK" in (found["DHT"].remedy or "")


def test_a_run_file_without_seeds_is_not_taken_for_no_run_file() -> None:
    async def only_the_run(network: MemoryNetwork) -> Plan:
        return replace(EMPTY, run=RunId("ab" * 32))

    found = network_findings(only_the_run)
    assert "without an address of a peer" in found["DHT"].text
    assert "shoal doctor LINK" in (found["DHT"].remedy or "")


def test_an_unreachable_seed_has_a_reason_and_a_remedy() -> None:
    async def gone(network: MemoryNetwork) -> Plan:
        peer = identity_of("nobody").peer_id
        return replace(EMPTY, seeds=(Multiaddr(f"/ip4/10.9.9.9/tcp/7700/p2p/{peer}"),))

    found = network_findings(gone)
    assert found["seed"].state == "failed"
    assert "/ip4/10.9.9.9/tcp/7700" in found["seed"].text
    assert "shoal docs no-peer-answers" in (found["seed"].remedy or "")
    assert found["DHT"].state == "skipped"
    assert exit_code(found.values()) == 3


def test_each_seed_is_tried_by_itself_and_one_that_answers_is_enough() -> None:
    async def both(network: MemoryNetwork) -> Plan:
        peer = identity_of("nobody").peer_id
        gone = Multiaddr(f"/ip4/10.9.9.9/tcp/7700/p2p/{peer}")
        return replace(EMPTY, seeds=(gone, *await seeds(network)))

    found = network_findings(both)
    assert found["seed"].state == "ok"  # the last one
    assert found["DHT"].state == "ok"
    bad = Finding("seed", "failed", "x")
    assert exit_code([bad, *found.values()]) == 0


@pytest.mark.parametrize("right_first", [True, False])
def test_two_addresses_of_one_peer_are_told_apart(right_first: bool) -> None:
    async def twice(network: MemoryNetwork) -> Plan:
        (right,) = await seeds(network)
        wrong = Multiaddr(f"/ip4/10.9.9.9/tcp/7700/p2p/{identity_of('seed').peer_id}")
        return replace(EMPTY, seeds=(right, wrong) if right_first else (wrong, right))

    tried = [f for f in all_network_findings(twice) if f.check == "seed"]
    assert [f.state for f in tried] == (["ok", "failed"] if right_first else ["failed", "ok"])
    assert [f.text.split()[0].strip(":").split("/")[2] for f in tried] == (
        ["10.0.0.0", "10.9.9.9"] if right_first else ["10.9.9.9", "10.0.0.0"]
    )


def test_the_doctor_examines_a_run_without_being_seen_by_members() -> None:
    file = RunFile()
    heard: list[PresenceEvent] = []

    async def closed_at_first(peer: PeerId) -> LanePath | str:
        tried.append(peer)
        return "its port is closed" if len(tried) == 1 else LanePath.DIRECT

    tried: list[PeerId] = []

    async def with_members(network: Network) -> Plan:
        for name in ("anna", "boris"):
            member = Presence(
                network.host(name),
                identity_of(name),
                Profile(file.run_id, run_file=file.canonical()),
                seeds=await seeds(network),
                events=Events(heard.append),
            )
            await member.start()
            network.presences.append(member)
        await asyncio.sleep(60)
        heard.clear()
        return replace(EMPTY, seeds=await seeds(network), run=file.run_id)

    findings = all_network_findings(with_members, try_lane=closed_at_first)
    found = {finding.check: finding for finding in findings}
    assert found["run"].state == "ok"
    assert "live: 2 peers" in found["run"].text
    assert found["direct lane"].state == "ok"
    assert tried[1] in found["direct lane"].text
    assert found["reachability"].state == "ok"
    assert not [event for event in heard if event.name.startswith("peer_")]


def test_a_symmetric_router_is_no_obstacle_to_peers_that_both_have_ipv6() -> None:
    seen = ("203.0.113.7", 4001), ("203.0.113.7", 4002)
    for has_ipv6 in (False, True):
        finding = describe_router(RouterView(4000, seen, has_ipv6=has_ipv6), [])
        assert finding.remedy is not None
        assert ("unless the peers there have IPv6" in finding.remedy) == has_ipv6


def test_an_address_that_leads_to_this_machine_is_its_own_only_if_the_machine_has_it() -> None:
    """Earlier, a full-cone router was none to the doctor: its address was announced."""
    for at, text in (("203.0.113.7", "cone: "), ("127.0.0.1", "none: 127.0.0.1 is ")):

        async def examine(at: str = at) -> RouterView:
            return RouterView(4000, ((at, 4000), (at, 4000)))

        assert asyncio.run(check_router(examine)).text.startswith(text)


def test_the_kind_of_router_follows_from_what_several_peers_see() -> None:
    at, own = "203.0.113.7", ["192.168.1.2"]

    def found(*seen: tuple[str, int], ips: Sequence[str] = own) -> tuple[str, str]:
        finding = describe_router(RouterView(4000, seen), ips)
        return finding.state, finding.text

    assert found()[0] == "skipped"
    assert found((at, 4000), ips=[at]) == (
        "ok",
        f"none: {at} is this machine's own (one peer asked)",
    )
    both = (at, 4000), (at, 4000)
    state, text = found(*both)
    assert state == "ok" and text.startswith("cone: it keeps the number of a port")
    assert "it changes the number of a port" in found((at, 61000), (at, 61000))[1]
    state, text = found((at, 61000), (at, 61001))
    assert state == "warning" and text.startswith("symmetric")
    state, text = found((at, 61000))
    assert state == "warning" and "may be symmetric (one peer asked)" in text


def test_peers_behind_routers_to_which_no_direct_connection_opens_are_named() -> None:
    async def apart(peer: PeerId) -> LanePath | str:
        return "routers let nothing through"

    async def with_a_hidden_member(network: Network) -> Plan:
        file = RunFile()
        anna = network.host("anna")
        network.simulated.dial_out_only(anna.peer_id)
        member = Presence(
            anna,
            identity_of("anna"),
            Profile(file.run_id, name="anna", run_file=file.canonical()),
            seeds=await seeds(network),
        )
        await member.start()
        network.presences.append(member)
        await asyncio.sleep(60)
        return replace(EMPTY, seeds=await seeds(network), run=file.run_id)

    findings = all_network_findings(with_a_hidden_member, try_lane=apart)
    (found,) = (finding for finding in findings if finding.check == "meeting")
    assert found.state == "warning" and "shoal keep" in (found.remedy or "")
    assert found.text == (
        "direct connections open to 0 of 1 peers behind routers; not to anna: nothing answers at "
        "its address; it may be gone, or behind a router or firewall"
    )


def test_a_peer_on_this_machine_proves_nothing_about_direct_connections() -> None:
    """The peer can only dial out, and a neighbour of its machine connects to it without a
    router."""

    async def opens(peer: PeerId) -> LanePath | str:
        tried.append(peer)
        return LanePath.DIRECT

    tried: list[PeerId] = []
    anna = identity_of("anna").peer_id

    async def on_this_machine(network: Network) -> Plan:
        file = RunFile()
        network.place(anna, Multiaddr("/ip4/10.1.2.3/tcp/7701"))
        network.place(identity_of("patient").peer_id, Multiaddr("/ip4/10.1.2.3/tcp/7702"))
        network.simulated.dial_out_only(anna)
        member = Presence(
            network.host("anna"),
            identity_of("anna"),
            Profile(file.run_id, name="anna", run_file=file.canonical()),
            seeds=await seeds(network),
        )
        await member.start()
        network.presences.append(member)
        await asyncio.sleep(60)
        assert member.reachable is False
        network.simulated.dial_out_only(anna, only=False)  # the router is not between the two
        return replace(EMPTY, seeds=await seeds(network), run=file.run_id)

    found = {each.check: each for each in all_network_findings(on_this_machine, try_lane=opens)}
    assert "live: 1 peer" in found["run"].text
    assert not tried
    for check in ("direct lane", "meeting"):
        assert found[check].state == "skipped" and "another machine" in found[check].text


def test_peers_that_cannot_be_met_for_one_reason_are_told_together() -> None:
    apart = "both are behind routers"
    paths: list[tuple[str, LanePath | str]] = [
        ("anna", apart),
        ("boris", LanePath.PUNCHED),
        ("clara", apart),
        ("dora", "gone"),
    ]
    assert describe_meetings(paths).text == (
        "direct connections open to 1 of 4 peers behind routers; "
        "not to anna, clara: both are behind routers; not to dora: gone"
    )


def test_a_peer_that_a_relay_would_pass_to_a_member_is_told_as_one_that_can_be_met() -> None:
    refused = f"{APART}; no relay: QmRelay refused: {MEMBERS_ONLY}, and QmDoctor is none"
    found = describe_meetings([("anna", refused), ("boris", LanePath.DIRECT)])
    assert found.state == "ok"
    assert found.text == (
        "direct connections open to 1 of 2 peers behind routers, and 1 can be met through a relay, "
        "which is slower, by a member of the run"
    )


def test_a_wrong_clock_is_a_warning_with_the_offset() -> None:
    found = network_findings(with_seed, wall_offset_s=-90.0)
    assert found["clock"].state == "warning"
    assert "90.0" in found["clock"].text
    assert "behind" in found["clock"].text
    assert "set-ntp" in (found["clock"].remedy or "")


def test_a_machine_that_cannot_be_dialled_can_take_part() -> None:
    found = network_findings(with_seed, dial_out_only=True)
    assert found["reachability"].state == "warning"
    assert "dial-out only" in found["reachability"].text
    assert "can take full part" in (found["reachability"].remedy or "")
    assert exit_code(found.values()) == 0


def test_a_run_that_nobody_serves_is_a_failure_of_the_link() -> None:
    async def dead_run(network: MemoryNetwork) -> Plan:
        return replace(EMPTY, seeds=await seeds(network), run=RunId("ab" * 32))

    found = network_findings(dead_run)
    assert found["run"].state == "failed"
    assert "link is outdated" in (found["run"].remedy or "")
    assert exit_code(found.values()) == 3


# This machine.


def test_free_space_is_that_of_the_nearest_existing_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    for free, state in ((6 << 30, "ok"), (1 << 30, "warning"), (1 << 20, "failed")):
        found = usage._replace(free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda path, found=found: found)
        finding = check_disk(tmp_path / "not" / "there" / "yet")
        assert finding.state == state
        assert (finding.remedy is None) == (state == "ok")
    assert check_disk(Path("/proc/nothing")).state == "failed"


def test_memory_is_limited_by_the_container(tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    limit.write_text("max\n")
    assert "container" not in check_memory(tmp_path).text
    limit.write_text(f"{600 << 20}\n")
    (tmp_path / "memory.current").write_text(f"{100 << 20}\n")
    finding = check_memory(tmp_path)
    assert finding.state == "failed"
    assert "0.5 GiB available of 0.6 GiB, the limit of this container" in finding.text


def test_a_port_in_use_is_a_failure_with_a_remedy() -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen(1)
        port = other.getsockname()[1]
        finding = check_port(port)
        assert finding.state == "failed"
        assert str(port) in (finding.remedy or "")
    assert check_port(0).state == "ok"


def test_torch_is_asked_in_a_process_of_its_own_that_may_crash() -> None:
    answer = """print('{"version": "9", "device": "cuda", "name": "H9", "memory": 1073741824}')"""
    finding = asyncio.run(check_torch(answer))
    assert str(finding) == "ok    torch          torch 9 on H9 with 1.0 GiB"
    finding = asyncio.run(check_torch("import os; os.abort()"))
    assert finding.state == "failed"
    finding = asyncio.run(check_torch("raise ImportError('libcudart.so.13')"))
    assert "libcudart.so.13" in finding.text


def test_a_host_without_torch_is_told_that_it_cannot_train(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    finding = asyncio.run(check_torch())
    assert (finding.state, finding.text[:14]) == ("skipped", "not installed:")


def test_the_doctor_says_which_codecs_a_peer_would_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_machine, "can_compile", lambda: True)
    monkeypatch.setattr(loading, "IMPORT", "")
    finding = asyncio.run(check_codecs())
    assert (finding.state, finding.text[:8]) == ("ok", "compiled")
    monkeypatch.setattr(loading, "IMPORT", "raise ImportError('Numba needs NumPy 2.4 or less')")
    finding = asyncio.run(check_codecs())
    assert finding.state == "warning" and "Numba needs NumPy 2.4 or less" in finding.text
    monkeypatch.setattr(this_machine, "can_compile", lambda: False)
    finding = asyncio.run(check_codecs())
    assert finding.state == "ok" and "shoal[fast]" in finding.text


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills children with a parent")
def test_a_driver_that_hangs_is_not_left_behind_when_the_doctor_is_killed(
    processes: Processes, tmp_path: Path
) -> None:
    there = tmp_path / "there"
    hangs = f"open({str(there)!r}, 'w').close(); import time; time.sleep(600)"
    asking = (
        "import asyncio, sys; from peer.extras.doctor.this_machine import check_torch; "
        "asyncio.run(check_torch(sys.argv[1]))"
    )
    examining = processes.python("-c", asking, hangs)
    deadline = time.monotonic() + 60
    while not there.exists():
        assert examining.poll() is None, processes.output_of(examining)
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert descendants(examining.pid)
    left = still_running(processes.kill_hard(examining), timeout_s=30.0)
    assert not left, described(left)


def test_a_failed_check_of_this_machine_exits_with_2_and_a_warning_with_0() -> None:
    assert exit_code([Finding("disk", "failed", "full")]) == 2
    assert exit_code([Finding("disk", "failed", ""), Finding("seed", "failed", "")]) == 2
    assert exit_code([Finding("clock", "warning", "")]) == 0


def test_scripts_get_stable_names() -> None:
    found = as_record([Finding("disk", "failed", "full", "free some space")])
    assert found == {
        "ok": False,
        "findings": [
            {
                "check": "disk",
                "state": "failed",
                "text": "full",
                "remedy": "free some space",
                "took_s": None,
            }
        ],
        "tables": found["tables"],
    }


def test_scripts_get_the_use_of_tables_of_what_others_can_cause() -> None:
    table = BoundedMapping[int, None]("of the doctor", 2, worth=by_age)
    table |= dict.fromkeys(range(3))
    tables = as_record([])["tables"]
    assert isinstance(tables, dict)
    assert tables["of the doctor"] == {
        "tables": 1,
        "places": 2,
        "entries": 2,
        "bytes": 512,
        "dropped": 1,
    }


def test_a_link_gives_the_run_and_its_seeds_and_a_run_file_its_seeds(tmp_path: Path) -> None:
    peer = identity_of("seed").peer_id
    seed = f"/ip4/203.0.113.7/tcp/7700/p2p/{peer}"
    link = f"shoal://{'ab' * 32}?seed={seed}"
    plan = plan_of([link, seed], port=0, data_directory=tmp_path)
    assert plan.run == "ab" * 32
    assert [str(address) for address in plan.seeds] == [seed]
    with pytest.raises(Unusable, match="neither a link"):
        plan_of(["missing.toml"], port=0, data_directory=tmp_path)


def test_a_rented_container_is_told_which_ports_lead_to_it_and_what_it_lacks() -> None:
    finding = check_container(Container("RunPod", "203.0.113.7", {7701: 40001, 7702: 40002}))
    assert finding.state == "ok"
    assert "203.0.113.7:40001 to port 7701, 203.0.113.7:40002 to port 7702" in finding.text
    finding = check_container(Container("RunPod", "203.0.113.7", {22: 40022}))
    assert finding.state == "warning"
    assert "no port above 1023" in finding.text and "7701 and 7702" in str(finding.remedy)
