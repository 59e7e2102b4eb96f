"""Value types that NAT-PMP and UPnP share: a mapped port, its lease, and a refusal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

LIFE_S = 1200
"""Lifetime that is asked for. A router that was restarted has lost the mapping for half of it."""

LIFE_MIN_S = 120
"""A router that grants less is asked again no sooner than after half of this."""


class NotMapped(Exception):
    """The router did not map the port."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """A port of the router's public address that leads here."""

    port: int
    life_s: int


class Way(Protocol):
    """A protocol for asking one router."""

    @property
    def name(self) -> str: ...

    async def map(self, port: int, *, outer_port: int) -> Mapped:
        """Map a port, if possible from this outer port. Raises ``NotMapped`` or ``OSError``."""
        ...

    async def remove(self, port: int, *, outer_port: int) -> None:
        """Ask once to remove a mapping, which would end by itself. Raises like ``map``."""
        ...
