"""One TCP port that dials and listens at once, so that two peers behind routers can meet.

A router lets a packet in that answers one which went out. Two peers that know each other's outer
addresses therefore dial each other at the same time, each from the port whose outer address the
other one knows: whichever SYN arrives second passes, and TCP makes one connection of both. The
port listens as well, for a router that lets the first SYN in, and for a peer whose router gives
every connection another port, which arrives from an address that nobody could dial.

Prediction: TCP works for every pair of routers but symmetric ones with symmetric or port-restricted
ones, where one side would have to guess a port. Result, in the namespaces of
``tests/integration/wan`` at 140 ms there and back, each pair with both sides at once and with
either side 80 ms late: exactly these two pairs fail; the others meet within 0.4 s, and within 1.3 s
where the first SYN was lost (address-restricted with a symmetric one). QUIC over UDP would need the
same addresses and fail for the same two pairs, and every byte would pass through Python: both ends
of an aioquic 1.7 connection on one core of a busy machine move 12 MB in a second of its processor
time, those of a lane 1,100 to 1,230 MB (30 MB over loopback, three turns each). That is less than
the 20 MB/s asked of it, and a hundredth of what the sealed frames of ``dht.libp2p.lane.lane`` do,
which go on as they are on these connections. Hence TCP.

This module knows nothing of peers: everybody who connects is a stranger until the lane has seen a
ticket.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

ATTEMPT_S = 1.0
"""Time after which a dial is begun anew, as the kernel sends its next SYN late."""

AGAIN_S = 0.1
"""Pause after a dial that was refused: the other side was not ready. It is doubled each time, up to
``ATTEMPT_S``, as the address may be that of somebody who has nothing to do with this."""

BACKLOG = 4


class Opening:
    """One TCP port of this machine. To be closed by its owner; connections outlive it."""

    def __init__(self) -> None:
        self._listener = _bound(0)
        self._listener.listen(BACKLOG)

    def __repr__(self) -> str:
        return f"Opening({self.port})"

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def close(self) -> None:
        self._listener.close()

    async def dial(self, ip: str, port: int) -> socket.socket:
        """A connection from this port. Raises ``OSError``."""
        dialling = _bound(self.port)
        try:
            await asyncio.get_running_loop().sock_connect(dialling, (ip, port))
        except BaseException:
            dialling.close()
            raise
        return dialling

    @asynccontextmanager
    async def meeting(self, ip: str, port: int) -> AsyncIterator[asyncio.Queue[socket.socket]]:
        """Dial an address and listen, as long as the block runs.

        The queue receives every connection. Those that nobody took from it are closed.
        """
        found: asyncio.Queue[socket.socket] = asyncio.Queue(BACKLOG)
        tasks = (
            asyncio.create_task(self._accept(found), name="accept at an opening"),
            asyncio.create_task(self._dial_until_met(ip, port, found), name="dial from an opening"),
        )
        try:
            yield found
        finally:
            for task in tasks:
                task.cancel()
            for task in tasks:
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            while not found.empty():
                found.get_nowait().close()

    async def _accept(self, found: asyncio.Queue[socket.socket]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(self._listener)
            except OSError:  # it was gone before it was accepted
                await asyncio.sleep(AGAIN_S)
                continue
            await _hand_over(accepted, found)

    async def _dial_until_met(
        self, ip: str, port: int, found: asyncio.Queue[socket.socket]
    ) -> None:
        pause_s = AGAIN_S
        while True:
            try:
                async with asyncio.timeout(ATTEMPT_S):
                    dialled = await self.dial(ip, port)
            except TimeoutError:
                continue
            except OSError:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, ATTEMPT_S)
                continue
            await _hand_over(dialled, found)
            return


async def _hand_over(connected: socket.socket, found: asyncio.Queue[socket.socket]) -> None:
    try:
        await found.put(connected)
    except BaseException:
        connected.close()
        raise


def _bound(port: int) -> socket.socket:
    """A socket for one end of a connection from this port, which others may share."""
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.setblocking(False)
        made.bind(("0.0.0.0", port))
    except BaseException:
        made.close()
        raise
    return made
