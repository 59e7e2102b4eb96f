"""Work of a peer on line that is beside taking part: ``peer.extras`` has it, and names it here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any, Protocol, TypeAlias

from averaging.live.averager import Averager
from peer.optional import extras


class Service(Protocol):
    """One piece of such work, from the moment at which a peer is on line until it leaves."""

    name: str

    async def open(self, stack: AsyncExitStack) -> None:
        """Answer others from now on. What is put on the stack is closed before the host is."""

    async def run(self, averager: Averager) -> None:
        """Work for ever, once there is an averager."""

    async def save(self) -> None:
        """Write down what is to last, when the work is over."""

    def note(self, name: str, fields: Mapping[str, Any]) -> None:
        """Hear of an event that a keeper tells people."""


Begin: TypeAlias = Callable[[Any], Service]
"""Gets the ``OnlinePeer`` that the service belongs to."""


def of_every_peer() -> list[Begin]:
    """The services that no setting asks for."""
    return [module.begin for module in extras("credit.service")]
