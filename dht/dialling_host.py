"""A host that dials a peer where its record says it is, if the network has forgotten it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from multiaddr import Multiaddr

from dht.errors import PeerUnreachable
from dht.forwarding_host import ForwardingHost
from dht.host import Host, Stream
from dht.identity import PeerId


class DiallingHost(ForwardingHost):
    """A host that opens streams to peers of which it only knows the addresses, too."""

    def __init__(self, host: Host, addresses: Callable[[PeerId], Sequence[Multiaddr]]) -> None:
        """``addresses``: those at which a peer says that it can be dialled."""
        super().__init__(host)
        self._addresses = addresses

    async def open_stream(
        self, peer: PeerId, protocol: str, *, timeout_s: float, bulk: bool = False
    ) -> Stream:
        try:
            return await self._host.open_stream(peer, protocol, timeout_s=timeout_s, bulk=bulk)
        except PeerUnreachable:
            if not (addresses := self._addresses(peer)):
                raise
            await self._host.connect(peer, addresses, timeout_s=timeout_s)
            return await self._host.open_stream(peer, protocol, timeout_s=timeout_s, bulk=bulk)
