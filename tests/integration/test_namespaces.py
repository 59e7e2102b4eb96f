"""Peers that cannot be dialled: two network namespaces that reach only that of the relay."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.integration.loopback import identity
from tests.processes import Processes
from tests.swarms.namespaces import reaches
from tests.swarms.topology import ip

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PUBLIC_IP = "11.77.0.1"
"""A public address for libp2p, which exists only inside the namespaces."""

PEER = "tests.integration.namespace_peer"


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str, str]]:
    """The public namespace and two hidden ones, each with its own link to the public one."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need Linux, iproute2 and root")
    tag = f"s{os.getpid() % 100_000}"
    public, *hidden = names = (f"{tag}p", f"{tag}l", f"{tag}r")
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
        for index, name in enumerate(hidden, start=1):
            inner, outer = f"{tag}i{index}", f"{tag}o{index}"
            ip("-n", public, "link", "add", outer, "type", "veth", "peer", inner, "netns", name)
            ip("-n", public, "addr", "add", f"10.77.{index}.1/30", "dev", outer)
            ip("-n", name, "addr", "add", f"10.77.{index}.2/30", "dev", inner)
            ip("-n", public, "link", "set", outer, "up")
            ip("-n", name, "link", "set", inner, "up")
            ip("-n", name, "addr", "add", f"11.88.0.{1 + index}/32", "dev", "lo")
            ip("-n", name, "route", "add", f"{PUBLIC_IP}/32", "via", f"10.77.{index}.1")
        yield public, hidden[0], hidden[1]
    finally:
        for name in made:
            ip("netns", "del", name)


def test_two_peers_that_reach_only_the_relay_are_full_members(
    namespaces: tuple[str, str, str], processes: Processes
) -> None:
    public, left, right = namespaces
    assert reaches(left, PUBLIC_IP)
    assert reaches(right, PUBLIC_IP)
    assert not reaches(left, "10.77.2.2"), "the namespaces must not see each other"

    def start(name: str, *arguments: str) -> subprocess.Popen[bytes]:

        command = ["ip", "netns", "exec", name, sys.executable, "-m", PEER]
        return processes.start([*command, *arguments])

    relay = start(public, "relay", f"/ip4/{PUBLIC_IP}/tcp/7700")
    address = processes.wait_for_line(relay, "relay ", timeout_s=30).split()[1]
    peers = {
        2: start(left, "hidden", "2", "3", address),
        3: start(right, "hidden", "3", "2", address),
    }
    for process in peers.values():
        processes.wait_for_line(process, "bulk ", timeout_s=120)
    for number, process in peers.items():
        output = processes.output_of(process)
        other = identity(5 - number).peer_id
        assert "reachability dial-out only" in output
        assert f"found {other}" in output
        assert "answered relayed=True" in output
        assert "lane to the other: no connected peer can tell this peer's outer" in output
        assert re.search(r"^direct 1$", output, re.MULTILINE), "who only dials out may use a lane"
        assert re.search(r"^bulk 8388608 relayed=False$", output, re.MULTILINE)
        line = f"swallowed {identity(number).peer_id} 8388608 relayed=False"
        assert processes.wait_for_line(relay, line, timeout_s=5)
