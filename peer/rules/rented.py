"""The public ports of a rented container, which its provider tells in variables.

Such a container has no address of its own. Ports of its provider's machine lead to ports inside,
and have other numbers. dstack and SkyPilot tell internal addresses only: above these providers
their variables are there, too, and elsewhere a machine has the same ports inside and outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network

PROVIDERS = (
    ("RunPod", "RUNPOD_PUBLIC_IP", "RUNPOD_TCP_PORT_"),
    ("Vast.ai", "PUBLIC_IPADDR", "VAST_TCP_PORT_"),
)
OF_CARRIERS = IPv4Network("100.64.0.0/10")
"""Addresses of machines behind the router of a carrier, to which no port leads from outside."""

PORT_MAX = 65_535
PORT_MIN = 1024
"""Ports below are those of root, such as the one of ssh."""


@dataclass(frozen=True, slots=True)
class Container:
    """A rented container, and how it can be dialled."""

    provider: str
    ip: str
    outer: Mapping[int, int]
    """The public TCP port that leads to each port inside."""

    @property
    def usable(self) -> tuple[int, ...]:
        """The ports inside that a peer may listen at, lowest first."""
        return tuple(port for port in self.outer if port >= PORT_MIN)

    def announced(self, ports: Iterable[int]) -> tuple[str, ...]:
        """The addresses outside of these ports, as far as there are any."""
        outer = (self.outer[port] for port in ports if port in self.outer)
        return tuple(f"/ip4/{self.ip}/tcp/{port}" for port in outer)

    def shown(self, port: int) -> str:
        return f"{self.ip}:{self.outer[port]} to port {port}"


@dataclass(frozen=True, slots=True)
class PublicPorts:
    """Settings of a peer that is dialled through public ports."""

    listen: tuple[str, ...]
    announce: tuple[str, ...]
    lane: str
    text: str


def container_of(environment: Mapping[str, str]) -> Container | None:
    """The container in which a program with these variables runs; ``None``: in no such one."""
    for provider, address, prefix in PROVIDERS:
        try:
            ip = IPv4Address(environment.get(address, ""))
        except ValueError:
            continue
        if ip in OF_CARRIERS:
            continue
        outer: dict[int, int] = {}
        for name, text in environment.items():
            inner = name.removeprefix(prefix)
            if inner == name or not (inner.isdecimal() and text.isdecimal()):
                continue
            if 0 < int(text) <= PORT_MAX:
                # A number above all ports asks for one that is the same on both sides.
                outer[int(inner) if int(inner) <= PORT_MAX else int(text)] = int(text)
        return Container(provider, str(ip), dict(sorted(outer.items())))
    return None


def public_ports(
    container: Container,
    *,
    listen: Sequence[str],
    announce: Sequence[str],
    lane: str,
    is_free: Callable[[int], bool],
) -> PublicPorts | None:
    """The settings with the container's ports where they leave the choice, or name such a port.

    ``None``: they stay as they are, as they do where they say what to announce.
    """
    if announce:
        return None
    wished = {*map(_port, listen), int(lane) if lane.isdecimal() else 0}
    free = (port for port in container.usable if port not in wished and is_free(port))
    ports = [_port(address) or next(free, 0) for address in listen]
    lane_port = int(lane) if lane.isdecimal() else next(free, 0) if lane == "auto" else 0
    shown = [container.shown(port) for port in ports if port in container.outer]
    if lane_port in container.outer:
        lane = f"{lane_port}:{container.outer[lane_port]}"
        shown.append(f"{container.shown(lane_port)} for bulk data")
    if not shown:
        return None
    return PublicPorts(
        listen=tuple(
            f"{address.rpartition('/')[0]}/{port}"
            for address, port in zip(listen, ports, strict=True)
        ),
        announce=container.announced(ports),
        lane=lane,
        text=f"{container.provider} leads {', '.join(shown)}: others dial this peer there",
    )


def _port(address: str) -> int:
    _, _, port = address.rpartition("/tcp/")
    return int(port) if port.isdecimal() else 0
