"""Counts of a trial's bytes and processor time, by what they are spent on.

Bytes are counted in each site's namespace by the ports of the packets: those of the daemons, and
all others, which are the lane's. Packets without content carry acknowledgements. Processor time is
counted by the kind of process, so that a limit of the machine can be told from one of the peers.

Over a whole run an uplink cannot be used by more than what the rounds have to send. While an
exchange is under way it can be full: a quarter of a second in which more than a tenth of the line
was used counts as part of an upload, and so does a shorter pause between two of them.

The event logs tell the causes of a phase's extra bytes and of its missed member-rounds.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tests.swarms.hurt_internet import HurtInternet
from tests.swarms.topology import Internet, must_run_in

KINDS = {
    "hivemind_cli/p2pd": "daemons",
    "swarms.delay_line": "delay line",
    "peer.agent": "agents",
    "peer.cli": "trainers",
}
"""A part of the command line, and what such processes are."""

EMPTY_MAX_BYTES = 84
"""Largest IP packet without content: two headers with all options in use."""


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


# --- uplinks --------------------------------------------------------------------------------------

EVERY_S = 0.25
USED_SHARE = 0.1
PAUSE_MAX_S = 0.5
"""Longer times without an upload are between two exchanges."""


@dataclass(frozen=True, slots=True)
class Uploading:
    """The use of one uplink."""

    time_share: float
    """Share of the time in which something was uploaded."""

    line_share: float
    """Share of the line that was used in that time; 0 without any."""

    @classmethod
    def of(cls, counts: Sequence[tuple[float, int]], bytes_per_s: float) -> Uploading:
        """``counts``: bytes that had been sent at each time."""
        spans = [
            (later - earlier, after - before)
            for (earlier, before), (later, after) in pairwise(counts)
        ]
        used = [size > USED_SHARE * bytes_per_s * seconds for seconds, size in spans]
        _close_pauses(used, [seconds for seconds, _ in spans])
        inside = [span for span, counted in zip(spans, used, strict=True) if counted]
        seconds, size = (sum(column) for column in zip(*inside, strict=True)) if inside else (0, 0)
        whole = sum(span[0] for span in spans)
        return cls(
            seconds / whole if whole else 0.0, size / seconds / bytes_per_s if seconds else 0.0
        )


def _close_pauses(used: list[bool], seconds: Sequence[float]) -> None:
    """Count short pauses between uploads as parts of them."""
    last = None
    for index, counted in enumerate(used):
        if not counted:
            continue
        if last is not None and sum(seconds[last + 1 : index]) <= PAUSE_MAX_S:
            used[last + 1 : index] = [True] * (index - last - 1)
        last = index


@contextmanager
def watched(net: HurtInternet) -> Iterator[list[tuple[float, Mapping[str, int]]]]:
    """Times, and the bytes that had arrived from each site, as long as the block runs."""
    seen: list[tuple[float, Mapping[str, int]]] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(EVERY_S):
            seen.append((time.monotonic(), net.arrived_bytes()))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield seen
    finally:
        over.set()
        watching.join()


# --- causes ---------------------------------------------------------------------------------------

Events = Sequence[Mapping[str, Any]]

CAUSES = ("too_late", "turned_away", "passed_over", "declined", "upload_refused", "behind")
"""Events of a peer that tell why it is not in a round, and those after which it was not ready."""


def sent_for(logs: Iterable[Events], began: float, ended: float) -> Counter[str]:
    """Bytes on the line that all peers sent in a period, by purpose.

    Each round's event tells the bytes so far; between two of them they grow evenly.
    """
    found: Counter[str] = Counter()
    for log in logs:
        told = [(event["at"], event["sent_for"]) for event in log if "sent_for" in event]
        times = [at for at, _ in told]
        for purpose in {each for _, counts in told for each in counts}:
            sizes = [counts.get(purpose, 0) for _, counts in told]
            before, after = np.interp([began, ended], times, sizes)
            found[purpose] += round(after - before)
    return found


def why_missed(log: Events, fragment: int, since: float, at: float) -> str:
    """Return the last event by which a peer was not in a round of a fragment.

    ``since``, ``at``: the ends of the round before and of this one.
    """
    causes = [
        event["event"]
        for event in log
        if event["event"] in CAUSES
        and event.get("fragment") == fragment
        and since < event["at"] < at
    ]
    return causes[-1] if causes else "no join"
