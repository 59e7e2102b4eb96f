"""Proxies between the peers of a swarm, which impair or cut their links without root.

Every peer listens on a port of its own and announces that of its proxy, so that each connection
goes through the proxy of the dialled peer. The dialling peer is identified by its source port. The
proxies run in a thread with an event loop of its own; rules may be set from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tests.processes import free_port

PIECE_BYTES = 16 << 10
QUEUE_PIECES = 64
END = b""
NARROW_BYTES_S = 125_000.0
DISTANT_S = 0.2
TORN_SHARE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRule:
    """Treatment of the connections of a peer."""

    bytes_per_s: float | None = None
    """Bandwidth in each direction."""
    delay_s: float = 0.0
    torn_share: float = 0.0
    """Share of connections that are closed after a random time, in the middle of their data."""


CLEAR = LinkRule()
RULES = {
    "narrow": LinkRule(bytes_per_s=NARROW_BYTES_S),
    "distant": LinkRule(delay_s=DISTANT_S),
    "torn": LinkRule(torn_share=TORN_SHARE),
    "all": LinkRule(bytes_per_s=NARROW_BYTES_S, delay_s=DISTANT_S, torn_share=TORN_SHARE),
}
"""The links of the ``slow`` scenario: 1 Mbit/s, 200 ms, 5% of connections reset."""


@dataclass(slots=True, eq=False)
class _Pair:
    """One connection through a proxy."""

    dialler: str | None
    dialled: str
    close: Callable[[], None]


class Proxies:
    """The proxies of one swarm, made when first asked for."""

    def __init__(self) -> None:
        self._ports: dict[tuple[str, str], tuple[int, int]] = {}
        self._rules: dict[str, LinkRule] = {}
        self._sides: dict[str, int] = {}
        """The side of each peer during a partition."""
        self._diallers: Callable[[int], str | None] = lambda port: None
        self._pairs: set[_Pair] = set()
        self._rng = np.random.default_rng(0)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxies", daemon=True)
        self._thread.start()
        self._servers: list[asyncio.Server] = []
        self.carried_bytes = 0
        self.torn = 0
        self.refused = 0

    def find_diallers(self, diallers: Callable[[int], str | None]) -> None:
        """Set the function that finds the peer which dialled from a local port."""
        self._diallers = diallers

    def ports(self, name: str, line: str = "daemon") -> tuple[int, int]:
        """The ports on which a peer and its proxy listen.

        ``line`` names one of several ports of a peer; its rule holds for all of them.
        """
        key = name, line
        if key not in self._ports:
            inner = free_port()
            outer = asyncio.run_coroutine_threadsafe(self._serve(name, inner), self._loop)
            self._ports[key] = (inner, outer.result(10.0))
        return self._ports[key]

    def listener_at(self, port: int) -> str | None:
        """The peer that listens at this port, behind its proxy."""
        return next((name for (name, _), (inner, _) in self._ports.items() if inner == port), None)

    def set_rule(self, name: str, rule: LinkRule) -> None:
        """Set the rule for a peer's present and future connections."""
        self._rules[name] = rule

    def cut(self, sides: dict[str, int]) -> None:
        """Cut all connections between peers of different sides, and refuse new ones."""
        self._loop.call_soon_threadsafe(self._cut, dict(sides))

    def heal(self) -> None:
        self._loop.call_soon_threadsafe(self._cut, {})

    def close(self) -> None:
        """End everything."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10.0)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10.0)
            self._loop.close()

    # --- in the loop ----------------------------------------------------------------------------

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        for pair in list(self._pairs):
            pair.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=5.0)

    def _cut(self, sides: dict[str, int]) -> None:
        self._sides = sides
        for pair in list(self._pairs):
            if self._is_cut(pair):
                pair.close()

    def _is_cut(self, pair: _Pair) -> bool:
        if not self._sides:
            return False
        here = self._sides.get(pair.dialler or "")
        return here is None or here != self._sides.get(pair.dialled)

    async def _serve(self, name: str, inner: int) -> int:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await self._carry(name, inner, reader, writer)
            finally:
                writer.transport.abort()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        self._servers.append(server)
        port: int = server.sockets[0].getsockname()[1]
        return port

    async def _carry(
        self, name: str, inner: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        source = writer.get_extra_info("peername")[1]
        dialler = await asyncio.to_thread(self._diallers, source)
        tasks: list[asyncio.Task[None]] = []

        def end() -> None:
            for task in tasks:
                task.cancel()

        pair = _Pair(dialler, name, end)
        if self._is_cut(pair):
            self.refused += 1
            return
        try:
            onward_reader, onward_writer = await asyncio.open_connection("127.0.0.1", inner)
        except OSError:
            return
        self._pairs.add(pair)
        try:
            for a, b in ((reader, onward_writer), (onward_reader, writer)):
                tasks.append(asyncio.create_task(self._pump(pair, a, b)))
            torn = max(self._rule(pair).torn_share, 0.0)
            if torn and self._rng.random() < torn:
                self.torn += 1
                timeout = float(self._rng.uniform(0.05, 3.0))
            else:
                timeout = None
            await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._pairs.discard(pair)
            end()
            try:
                await asyncio.wait(tasks)
            finally:  # the proxies may be closed during the wait
                onward_writer.transport.abort()

    def _rule(self, pair: _Pair) -> LinkRule:
        """The worst of both ends' rules."""
        rules = [self._rules.get(name or "", CLEAR) for name in (pair.dialler, pair.dialled)]
        rates = [rule.bytes_per_s for rule in rules if rule.bytes_per_s is not None]
        return LinkRule(
            bytes_per_s=min(rates) if rates else None,
            delay_s=max(rule.delay_s for rule in rules),
            torn_share=max(rule.torn_share for rule in rules),
        )

    async def _pump(
        self, pair: _Pair, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        loop = asyncio.get_running_loop()
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(QUEUE_PIECES)

        async def deliver() -> None:
            while True:
                at, data = await waiting.get()
                await asyncio.sleep(max(0.0, at - loop.time()))
                if data == END:
                    return
                writer.write(data)
                await writer.drain()

        delivering = asyncio.create_task(deliver())
        free_at = 0.0
        try:
            with contextlib.suppress(OSError):
                while data := await reader.read(PIECE_BYTES):
                    rule = self._rule(pair)
                    self.carried_bytes += len(data)
                    now = loop.time()
                    free_at = max(now, free_at)
                    if rule.bytes_per_s is not None:
                        free_at += len(data) / rule.bytes_per_s
                        if free_at - now > 0.5:  # the buffer of a narrow link is full
                            await asyncio.sleep(free_at - now - 0.5)
                    # The queue keeps the order, even when the delay has just been reduced.
                    await waiting.put((free_at + rule.delay_s, data))
                    if delivering.done():
                        break
                if not delivering.done():
                    await waiting.put((loop.time(), END))
                    await asyncio.wait([delivering])
        finally:
            delivering.cancel()
            await asyncio.wait([delivering])
            if not delivering.cancelled():
                delivering.exception()
