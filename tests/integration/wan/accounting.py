"""Counts of a trial's bytes and processor time, by what they are spent on.

Bytes are counted in each site's namespace by the ports of the packets: those of the daemons, and
all others, which are the lane's. Packets without content carry acknowledgements. Processor time is
counted by the kind of process, so that a limit of the machine can be told from one of the peers.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.swarms.topology import Internet, must_run_in

KINDS = {
    "hivemind_cli/p2pd": "daemons",
    "network.delay_line": "delay line",
    "peer.agent": "agents",
    "peer.cli": "trainers",
}
"""A part of the command line, and what such processes are."""

EMPTY_MAX_BYTES = 84
"""Largest IP packet without content: two headers with all options in use."""


def segments(net: Internet) -> Counter[str]:
    """TCP segments that all computers have sent, and those of them that were sent again."""
    found: Counter[str] = Counter()
    for site in net.sites.values():
        for index in range(site.computers):
            shown = must_run_in(net.computer(site.name, index), "cat", "/proc/net/snmp")
            names, values = (each.split() for each in shown.splitlines() if each[:4] == "Tcp:")
            told = dict(zip(names, values, strict=True))
            found.update(sent=int(told["OutSegs"]), again=int(told["RetransSegs"]))
    return found


def count_by_port(net: Internet, port: int) -> None:
    """Begin to count what each site sends."""
    for site in net.sites:
        must_run_in(net.edge(site), "nft", "-f", "-", text=counting_rules(port))


def counted(net: Internet) -> Counter[str]:
    """Bytes that all sites have sent since ``count_by_port``, by kind."""
    command = ("nft", "-j", "list", "counters", "table", "ip", "counting")
    each = (counted_bytes(must_run_in(net.edge(site), *command)) for site in net.sites)
    return sum(each, Counter())


def counting_rules(port: int) -> str:
    """Rules for nftables that count what leaves a site, by this port of its daemon."""
    names = ("daemon", "daemon_empty", "lane", "lane_empty")
    counters = "\n".join(f"  counter {name} {{ }}" for name in names)
    daemon = f"tcp sport {port}", f"tcp dport {port}"
    empty = f"ip length <= {EMPTY_MAX_BYTES}"
    lines = [f"{ports} {empty} counter name daemon_empty return" for ports in daemon]
    lines += [f"{ports} counter name daemon return" for ports in daemon]
    lines += [f"{empty} counter name lane_empty return", "counter name lane"]
    rules = "\n".join(f'    oifname "outer" {line}' for line in lines)
    return f"""\
table ip counting {{
{counters}
  chain outwards {{
    type filter hook postrouting priority raw
{rules}
  }}
}}
"""


def counted_bytes(listed: str) -> Counter[str]:
    """The bytes of each counter in the output of ``nft -j list counters``."""
    found: Iterable[Mapping[str, Any]] = json.loads(listed)["nftables"]
    counters = (each["counter"] for each in found if "counter" in each)
    return Counter({each["name"]: each["bytes"] for each in counters})


@dataclass(frozen=True, slots=True)
class Used:
    """Processor seconds since the machine was started."""

    at: float
    busy_s: float
    """Time of all processors together."""

    by_kind: Mapping[str, float]
    """Time of this process's descendants; "others": of all that is none of these kinds."""

    @classmethod
    def now(cls) -> Used:
        ticks = os.sysconf("SC_CLK_TCK")
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
        user, nice, system, _, _, irq, softirq, steal = (int(each) / ticks for each in fields)
        busy_s = user + nice + system + irq + softirq + steal
        by_kind: dict[str, float] = {}
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                command, times = " ".join(process.cmdline()), process.cpu_times()
                if kind := next((kind for part, kind in KINDS.items() if part in command), None):
                    by_kind[kind] = by_kind.get(kind, 0.0) + times.user + times.system
        by_kind["others"] = busy_s - sum(by_kind.values())
        return cls(time.monotonic(), busy_s, by_kind)

    def since(self, before: Used) -> str:
        """The load of the processors since then, as text."""
        cores, passed_s = os.cpu_count() or 1, self.at - before.at
        parts = ", ".join(
            f"{kind} {used_s / passed_s:.2f}"
            for kind in (*KINDS.values(), "others")
            if (used_s := self.by_kind.get(kind, 0.0) - before.by_kind.get(kind, 0.0)) > 0
        )
        busy = (self.busy_s - before.busy_s) / passed_s
        return f"{busy:.2f} of {cores} cores: {parts}"
