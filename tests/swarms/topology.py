"""Builds an internet of network namespaces.

In the middle is one namespace that stands for everything between the sites. A site is a public
machine, or a home: a router that translates addresses, and one or more computers behind it. Site
number n has the network ``11.78.n.0/24``, a public range for libp2p that exists only inside the
namespaces. All homes have the same private network, as homes do. Computers of a site with IPv6 have
public addresses in ``2a00:78:n::/48`` besides, and the router keeps out what nobody inside has
asked for.

Delay is made by ``delay_line``, which all packets between sites pass if any site has a distance.
Rates are made by a token bucket (tbf) in each direction of a site's line.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import TypeVar

from peer.errors import PeerError
from tests.processes import Child

AnyInternet = TypeVar("AnyInternet", bound="Internet")

NEEDED = ("ip", "nft", "sysctl", "tc")
BUFFER_MS = 200
"""Length of the queue in front of a line, as a time at its rate; packets beyond it are dropped."""

BURST_BYTES = 32 * 1024
BURST_MS = 1.0
"""Least length of a burst, as a time at the line's rate: fast lines are not limited by timers."""


class Nat(StrEnum):
    """Kinds of address translation. All keep packets out that nobody inside has asked for."""

    FULL_CONE = "full-cone"
    """A port, once used, is open to everybody."""

    ADDRESS_RESTRICTED = "address-restricted"
    """A port is open to the IP addresses to which something was sent from it."""

    PORT_RESTRICTED = "port-restricted"
    """A port is open to the IP addresses and ports to which something was sent from it."""

    SYMMETRIC = "symmetric"
    """Every connection gets another port, open to its other end only."""


@dataclass(frozen=True, slots=True)
class Site:
    """A place with one line to the internet."""

    name: str
    nat: Nat | None = None
    """``None``: a public machine."""

    computers: int = 1
    ipv6: bool = False
    one_way_ms: float = 0.0
    """Distance from the middle of the network."""

    up_mbit: float | None = None
    down_mbit: float | None = None
    """Rates of the line; ``None``: as fast as this machine."""


@cache
def cannot_build() -> str | None:
    """The reason why namespaces cannot be made here, if any."""
    if missing := [tool for tool in NEEDED if shutil.which(tool) is None]:
        return f"it needs {' and '.join(missing)} (iproute2, nftables, procps)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not Path("/dev/net/tun").exists():
        return "delays need TUN devices"
    probe = f"wan{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], check=False, capture_output=True)
    if made.returncode:
        return f"network namespaces are not allowed here: {made.stderr.decode().strip()}"
    try:
        rules = run_in(probe, "nft", "-f", "-", text=router_rules(Nat.FULL_CONE))
    finally:
        ip("netns", "del", probe)
    if rules.returncode:
        return f"address translation is not allowed here: {rules.stderr.strip()}"
    return None


class NetworkFailed(PeerError):
    """A command that builds or changes the network failed."""

    problem: str


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise NetworkFailed(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def inside(namespace: str) -> list[str]:
    """Beginning of a command that runs inside a namespace."""
    return ["ip", "netns", "exec", namespace]


def run_in(namespace: str, *command: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*inside(namespace), *command], check=False, input=text, capture_output=True, text=True
    )


def must_run_in(namespace: str, *command: str, text: str = "") -> str:
    done = run_in(namespace, *command, text=text)
    if done.returncode != 0:
        raise NetworkFailed(f"{' '.join(command)}: {done.stderr.strip()}\n{text}")
    return done.stdout


_OPEN_TO = {
    Nat.FULL_CONE: "{protocol} dport",
    Nat.ADDRESS_RESTRICTED: "{protocol} dport . ip saddr",
}


def router_rules(nat: Nat) -> str:
    """Rules of a home router for nftables.

    The kernel's own translation is that of a port-restricted router: it keeps the port of the
    computer inside if it can. For an open port the rules remember which computer uses it.
    """
    table, remember, arriving = "", "", ""
    if nat in _OPEN_TO:
        for protocol in ("tcp", "udp"):
            table += (
                f"  map {protocol}_ports {{ type inet_service : ipv4_addr . inet_service;"
                " flags dynamic,timeout; timeout 5m; }\n"
                f"  set {protocol}_asked {{ type inet_service . ipv4_addr;"
                " flags dynamic,timeout; timeout 5m; }\n"
            )
            used = f"update @{protocol}_ports {{ {protocol} sport : ip saddr . {protocol} sport }}"
            asked = f"update @{protocol}_asked {{ {protocol} sport . ip daddr }}"
            remember += f'    oifname "outer" {used}\n    oifname "outer" {asked}\n'
            known = "" if nat is Nat.FULL_CONE else f"@{protocol}_asked "
            condition = f"{_OPEN_TO[nat].format(protocol=protocol)} {known}" if known else ""
            arriving += (
                f'    iifname "outer" {condition}dnat ip to {protocol} dport'
                f" map @{protocol}_ports\n"
            )
    how = "masquerade fully-random" if nat is Nat.SYMMETRIC else "masquerade"
    return f"""\
table ip router {{
{table}  chain arriving {{
    type nat hook prerouting priority dstnat
{arriving}  }}
  chain outwards {{
    type nat hook postrouting priority srcnat
{remember}    oifname "outer" {how}
  }}
  chain through {{
    type filter hook forward priority filter
    iifname "outer" ct state new ct status & dnat == 0 drop
  }}
  chain inwards {{
    type filter hook input priority filter
    iifname "outer" ct state new drop
  }}
}}
"""


_ROUTER_RULES_IPV6 = """\
table ip6 router {
  chain through {
    type filter hook forward priority filter
    iifname "outer" ct state { new, invalid } drop
  }
}
"""


class Internet:
    """The namespaces of some sites. ``internet`` makes and removes them."""

    def __init__(self, tag: str, sites: Sequence[Site]) -> None:
        self.sites = {site.name: site for site in sites}
        self._tag = tag
        self._numbers = {site.name: number for number, site in enumerate(sites, start=1)}
        self._hosts = {site.name: 2 for site in sites}
        """Last byte of the public address of each site."""

        self.lines = dict(self.sites)
        """The sites with the rates that their lines have now."""

    @property
    def middle(self) -> str:
        return f"{self._tag}m"

    def edge(self, site: str) -> str:
        """Namespace with the site's public address: its router, or the public machine itself."""
        return f"{self._tag}e{self._numbers[site]}"

    def computer(self, site: str, index: int = 0) -> str:
        """Namespace of a computer of the site."""
        if self.sites[site].nat is None:
            return self.edge(site)
        return f"{self._tag}c{self._numbers[site]}x{index}"

    def at(self, site: str, index: int = 0) -> list[str]:
        """Beginning of a command that runs on a computer of the site."""
        return inside(self.computer(site, index))

    def address(self, site: str) -> str:
        """The public address of the site."""
        return f"{self._network(site)}.{self._hosts[site]}"

    def ipv6_address(self, site: str) -> str:
        """The public IPv6 address of the site's line."""
        return f"{self._ipv6_network(site)}::2"

    def private_address(self, index: int = 0) -> str:
        """Address of a computer inside its home."""
        return f"192.168.1.{2 + index}"

    def sent_bytes(self, site: str) -> int:
        """Bytes that the site has sent into its line, with all headers."""
        path = "/sys/class/net/outer/statistics/tx_bytes"
        return int(must_run_in(self.edge(site), "cat", path))

    # --- building ------------------------------------------------------------------------------

    def build(self) -> None:
        self._add_namespace(self.middle)
        # Packets come back from the delay line on another device than that of their sender.
        for where in ("all", "default"):
            must_run_in(self.middle, "sysctl", "-w", f"net.ipv4.conf.{where}.rp_filter=0")
        _forward_packets(self.middle)
        rules = "table ip middle { chain through { type filter hook forward priority filter; }; }"
        must_run_in(self.middle, "nft", "-f", "-", text=rules)
        for site in self.sites.values():
            self._add_site(site)
            if site.ipv6:
                self._add_ipv6(site)

    def _add_site(self, site: Site) -> None:
        edge, number = self.edge(site.name), self._numbers[site.name]
        self._add_namespace(edge)
        _link(self.middle, f"to{number}", edge, "outer")
        _give(self.middle, f"to{number}", f"{self._network(site.name)}.1/24")
        _give(edge, "outer", f"{self.address(site.name)}/24")
        ip("-n", edge, "route", "add", "default", "via", f"{self._network(site.name)}.1")
        self._shape(site)
        if site.nat is None:
            return
        _forward_packets(edge)
        ip("-n", edge, "link", "add", "inner", "type", "bridge")
        _give(edge, "inner", "192.168.1.1/24")
        for index in range(site.computers):
            computer = self.computer(site.name, index)
            self._add_namespace(computer)
            _link(edge, f"lan{index}", computer, "uplink")
            ip("-n", edge, "link", "set", f"lan{index}", "master", "inner", "up")
            _give(computer, "uplink", f"{self.private_address(index)}/24")
            ip("-n", computer, "route", "add", "default", "via", "192.168.1.1")
        must_run_in(edge, "nft", "-f", "-", text=router_rules(site.nat))

    def _add_ipv6(self, site: Site) -> None:
        edge, network = self.edge(site.name), self._ipv6_network(site.name)
        _give(self.middle, f"to{self._numbers[site.name]}", f"{network}::1/64")
        _give(edge, "outer", f"{self.ipv6_address(site.name)}/64")
        ip("-n", self.middle, "route", "add", f"{network}::/48", "via", f"{network}::2")
        ip("-n", edge, "route", "add", "default", "via", f"{network}::1")
        if site.nat is None:
            return
        must_run_in(edge, "nft", "-f", "-", text=_ROUTER_RULES_IPV6)
        _give(edge, "inner", f"{network}:1::1/64")
        for index in range(site.computers):
            computer = self.computer(site.name, index)
            _give(computer, "uplink", f"{network}:1::{2 + index:x}/64")
            ip("-n", computer, "route", "add", "default", "via", f"{network}:1::1")

    def _add_namespace(self, name: str) -> None:
        ip("netns", "add", name)
        ip("-n", name, "link", "set", "lo", "up")

    def _network(self, site: str) -> str:
        return f"11.78.{self._numbers[site]}"

    def _ipv6_network(self, site: str) -> str:
        return f"2a00:78:{self._numbers[site]:x}"

    def _shape(self, site: Site) -> None:
        self.lines[site.name] = site
        number = self._numbers[site.name]
        _limit(self.edge(site.name), "outer", site.up_mbit)
        _limit(self.middle, f"to{number}", site.down_mbit)

    def remove(self) -> None:
        listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True)
        names = [line.split()[0] for line in listed.stdout.splitlines() if line.strip()]
        for name in names:
            if name.startswith(self._tag) and not name[len(self._tag)].isdigit():
                ip("netns", "del", name)

    def delay_command(self, loss: float) -> list[str]:
        """Lead all packets between sites into the delay line; returns the command that is it."""
        ip("-n", self.middle, "tuntap", "add", "dev", "delay", "mode", "tun")
        ip("-n", self.middle, "link", "set", "delay", "txqueuelen", "10000", "up")
        ip("-n", self.middle, "route", "add", "default", "dev", "delay", "table", "100")
        ip("-n", self.middle, "-6", "route", "add", "default", "dev", "delay", "table", "100")
        for number in self._numbers.values():
            ip("-n", self.middle, "rule", "add", "iif", f"to{number}", "lookup", "100")
            ip("-n", self.middle, "-6", "rule", "add", "iif", f"to{number}", "lookup", "100")
        distances = [f"{self._numbers[s.name]}={s.one_way_ms}" for s in self.sites.values()]
        program = [sys.executable, "-m", "tests.swarms.delay_line"]
        return [*inside(self.middle), *program, "delay", str(loss), *distances]

    # --- changes -------------------------------------------------------------------------------

    def forward(self, site: str, outer: int, inner: int) -> Callable[[], int]:
        """Lead a TCP port of the site's public address to one of its first computer.

        Returns what counts the connections that came that way.
        """
        to = f"{self.private_address()}:{inner}"
        rule = f'add rule ip router arriving iifname "outer" tcp dport {outer} counter dnat to {to}'
        must_run_in(self.edge(site), "nft", "-f", "-", text=rule)

        def came() -> int:
            """The first packet of each connection alone passes the rules of a translation."""
            chain = ("list", "chain", "ip", "router", "arriving")
            rules = must_run_in(self.edge(site), "nft", *chain)
            found = re.search(rf"packets (\d+) bytes \d+ dnat to {re.escape(to)}\b", rules)
            assert found is not None, rules
            return int(found[1])

        return came

    def slow_down(self, site: str, mbit: float, *, only_up: bool = False) -> Callable[[], None]:
        """Make a site's line this slow in both directions, or outwards. Returns what ends it."""
        down_mbit = self.sites[site].down_mbit if only_up else mbit
        self._shape(replace(self.sites[site], up_mbit=mbit, down_mbit=down_mbit))
        return lambda: self._shape(self.sites[site])


@contextmanager
def internet(sites: Sequence[Site]) -> Iterator[Internet]:
    """An internet of these sites, as long as the block runs."""
    with raised(Internet(own_tag(), sites), loss=0.0) as built:
        yield built


def own_tag() -> str:
    """Return the beginning of the names of this process's namespaces."""
    return f"w{os.getpid() % 100_000}"


@contextmanager
def raised(built: AnyInternet, *, loss: float) -> Iterator[AnyInternet]:
    """Build an internet, and remove it after the block."""
    with ExitStack() as stack:
        stack.callback(built.remove)
        built.build()
        if loss or any(site.one_way_ms for site in built.sites.values()):
            stack.enter_context(_running(built.delay_command(loss)))
        yield built


@contextmanager
def _running(command: Sequence[str]) -> Iterator[None]:
    """A program that has said its first line, as long as the block runs."""
    with Child(program=command) as child:
        if not child.line():
            raise NetworkFailed(f"{' '.join(command)} ended")
        yield


def _link(one: str, one_end: str, other: str, other_end: str) -> None:
    ip("-n", one, "link", "add", one_end, "type", "veth", "peer", other_end, "netns", other)


def _give(namespace: str, device: str, address: str) -> None:
    # Nobody else has it, and looking for others would take seconds.
    at_once = ["nodad"] if ":" in address else []
    ip("-n", namespace, "addr", "add", address, "dev", device, *at_once)
    ip("-n", namespace, "link", "set", device, "up")


def _forward_packets(namespace: str) -> None:
    for setting in ("net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding"):
        must_run_in(namespace, "sysctl", "-w", f"{setting}=1")


def _limit(namespace: str, device: str, mbit: float | None) -> None:
    """Limit the rate at which a device sends."""
    if mbit is None:
        run_in(namespace, "tc", "qdisc", "del", "dev", device, "root")  # there may be none
        return
    burst = max(BURST_BYTES, round(mbit * 1e3 / 8 * BURST_MS))
    bucket = ["rate", f"{mbit}mbit", "burst", str(burst), "latency", f"{BUFFER_MS}ms"]
    must_run_in(namespace, "tc", "qdisc", "replace", "dev", device, "root", "tbf", *bucket)
