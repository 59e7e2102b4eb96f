"""An internet of network namespaces that is hurt: sites are cut off, addresses change."""

from __future__ import annotations

import ctypes
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from tests.swarms.topology import (
    Internet,
    Site,
    ip,
    must_run_in,
    own_tag,
    raised,
    router_rules,
)

_Made = TypeVar("_Made")

CLONE_NEWNET = 0x40000000


def socket_in(namespace: str, kind: int = socket.SOCK_STREAM) -> socket.socket:
    """An IPv4 socket of a namespace, for this process: it stays in the namespace it was made in."""
    return _made_in(namespace, lambda: socket.socket(socket.AF_INET, kind))


def _made_in(namespace: str, make: Callable[[], _Made]) -> _Made:
    """Call ``make`` inside a namespace, and return its result."""
    made: list[_Made] = []

    def enter() -> None:
        with Path("/run/netns", namespace).open("rb") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")
        made.append(make())

    thread = threading.Thread(target=enter)  # its namespace ends with it
    thread.start()
    thread.join()
    return made[0]


class HurtInternet(Internet):
    """An internet in which faults can be injected."""

    def __init__(self, tag: str, sites: Sequence[Site]) -> None:
        super().__init__(tag, sites)
        self._drops: dict[str, str] = {}
        """Rules of the faults that are under way, by the name of the fault."""

    def arrived_bytes(self) -> dict[str, int]:
        """Bytes that have come out of each site's line, with all headers. Starts no process."""
        shown = _made_in(self.middle, Path("/proc/thread-self/net/dev").read_text)
        names = {f"to{number}": site for site, number in self._numbers.items()}
        rows = (line.partition(":") for line in shown.splitlines())
        return {
            names[device.strip()]: int(counts.split()[0])
            for device, _, counts in rows
            if device.strip() in names
        }

    def cut(self, site: str) -> Callable[[], None]:
        """Drop everything from and to a site. Returns what ends it."""
        network = f"{self._network(site)}.0/24"
        return self._drop(f"cut {site}", f"ip saddr {network} drop; ip daddr {network} drop")

    def split(self, some: Sequence[str]) -> Callable[[], None]:
        """Drop everything between these sites and the others. Returns what ends it."""
        near = ", ".join(f"{self._network(site)}.0/24" for site in some)
        there = [site for site in self.sites if site not in some]
        far = ", ".join(f"{self._network(site)}.0/24" for site in there)
        one, other = f"ip saddr {{ {near} }} ip daddr", f"ip saddr {{ {far} }} ip daddr"
        return self._drop(f"split {near}", f"{one} {{ {far} }} drop; {other} {{ {near} }} drop")

    def readdress(self, site: str) -> None:
        """Give a site another public address, and let its router forget its connections."""
        old = self.address(site)
        self._hosts[site] += 1
        self._restart(site, old)

    def forget(self, site: str) -> None:
        """Let a site's router forget its connections, as one does that was restarted."""
        self._restart(site, self.address(site))

    def _restart(self, site: str, old: str) -> None:
        edge, nat = self.edge(site), self.sites[site].nat
        if nat is not None:
            must_run_in(edge, "nft", "delete", "table", "ip", "router")
        # The kernel forgets what it translated to an address that is removed.
        ip("-n", edge, "addr", "del", f"{old}/24", "dev", "outer")
        ip("-n", edge, "addr", "add", f"{self.address(site)}/24", "dev", "outer")
        ip("-n", edge, "route", "replace", "default", "via", f"{self._network(site)}.1")
        if nat is not None:
            must_run_in(edge, "nft", "-f", "-", text=router_rules(nat))

    def _drop(self, name: str, rules: str) -> Callable[[], None]:
        self._drops[name] = rules

        def end() -> None:
            del self._drops[name]
            self._write_drops()

        self._write_drops()
        return end

    def _write_drops(self) -> None:
        rules = "\n".join(self._drops.values()).replace("; ", "\n")
        lines = [f"add rule ip middle through {rule}" for rule in rules.splitlines()]
        text = "\n".join(["flush chain ip middle through", *lines]) + "\n"
        must_run_in(self.middle, "nft", "-f", "-", text=text)


@contextmanager
def hurt_internet(sites: Sequence[Site], *, loss: float = 0.0) -> Iterator[HurtInternet]:
    """An internet of these sites, as long as the block runs."""
    with raised(HurtInternet(own_tag(), sites), loss=loss) as built:
        yield built
