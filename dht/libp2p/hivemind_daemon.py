"""One run of the libp2p daemon: start it, send it requests, notice its end, stop it.

The daemon never outlives this process: it exits by itself when our last connection to it closes,
and on Linux the kernel kills it with the thread that started it (``confinement``, which leaves no
process in between, and keeps it from QUIC). It gets a session of its own, so that Ctrl-C does not
reach it and this process can still say goodbye through it.

The daemon runs on at most two processors and on half of them: Go's scheduler looks for work on
every idle processor, which took a quarter of the daemon's time from the trainer on two busy cores.
``GOMAXPROCS`` in the environment overrides this, for a bootstrap host.

This module restarts nothing: ``hivemind_host`` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib.resources
import logging
import math
import os
import shutil
import signal
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import IO, Any

from multiaddr import Multiaddr

from dht import addresses
from dht.errors import HostClosed
from dht.identity import PeerId
from dht.libp2p import confinement
from dht.libp2p.framing.frame_stream import FrameStream
from dht.libp2p.hivemind_calls import (
    UnaryCalls,
    accepted,
    delimited,
    read_delimited,
    read_response,
)
from dht.libp2p.hivemind_imports import HivemindMultiaddr, P2PDaemonError, PeerID, p2pd_pb2

_logger = logging.getLogger("dht.p2pd")

START_TIMEOUT_S = 30.0
DAEMON_TIMEOUT_S = 10.0
"""Time limit for requests that our own daemon answers from memory."""

LAST_LINES = 20

CONNECTIONS = 512, 768
BOOTSTRAP_CONNECTIONS = 4096, 6144
"""The daemon closes connections down to the first number when there are more than the second."""

SOCKET_PATH_MAX_BYTES = 100
"""``sockaddr_un`` holds 104 bytes on macOS and 108 on Linux."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonSettings:
    """Settings by which the daemon listens and lets itself be found."""

    listen: tuple[Multiaddr, ...]
    announce: tuple[Multiaddr, ...] = ()
    """Addresses announced in place of all others. Empty: the daemon chooses."""

    is_bootstrap: bool = False
    """A host for all runs. It can be dialled by definition, which the daemon does not try to find
    out; it has places for peers behind routers, and more connections than a member of a run."""

    port_mapping: bool = True

    def __post_init__(self) -> None:
        for address in (*self.listen, *self.announce):
            codes = {protocol.name for protocol in address.protocols()}
            if "tcp" not in codes or codes & {"udp", "quic", "quic-v1"}:
                # Over QUIC the daemon loses the end of streams.
                raise ValueError(f"address {address}: only /tcp addresses are used here")

    def flags(self) -> dict[str, object]:
        """The daemon's command-line flags for these settings."""
        connections_low, connections_high = (
            BOOTSTRAP_CONNECTIONS if self.is_bootstrap else CONNECTIONS
        )
        flags: dict[str, object] = {
            "hostAddrs": ",".join(map(str, self.listen)),
            # It dials for strangers, and punches holes, which such a host never needs. Who asks
            # whether others can dial it asks for our own dial-backs.
            "autonat": not self.is_bootstrap,
            "connManager": True,
            "connLo": connections_low,
            "connHi": connections_high,
            # On Linux the host maps the port: the daemon has no UDP for it.
            "natPortMap": self.port_mapping and sys.platform != "linux",
            "relay": True,
            "relayService": self.is_bootstrap,
            "tls": True,
            "dhtServer": 1,
            # A daemon without its client is of no use: it exits if we do not reconnect.
            "idleTimeout": "30s",
        }
        if not self.listen:
            flags["noListenAddrs"] = 1
            del flags["hostAddrs"]
        if self.announce:
            flags["announceAddrs"] = ",".join(map(str, self.announce))
        if self.is_bootstrap:
            flags["forceReachabilityPublic"] = 1
        return flags


def processors(count: int) -> int:
    """Number of processors that the daemon may use, of ``count``.

    One processor moves 3 Gbit/s each way, encrypted.
    """
    return max(1, min(2, count // 2))


class RunDirectory:
    """A private directory for sockets. The next host removes it if this one is killed."""

    def __init__(self) -> None:
        base = Path(tempfile.gettempdir())
        if len(os.fsencode(base)) + 30 > SOCKET_PATH_MAX_BYTES:
            base = Path("/tmp")  # mkdtemp makes it ours alone
        _remove_stale(base)
        self.path, self._lock = _make_locked(base)
        self._count = 0

    def new_socket(self, kind: str) -> Path:
        self._count += 1
        return self.path / f"{kind}{self._count}"

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


_PREFIX = "shoal-p2p-"
_LOCK = "lock"


def _make_locked(base: Path) -> tuple[Path, IO[str]]:
    """Make a directory and lock it. Repeated if another host removes it as stale in between."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        with contextlib.suppress(FileNotFoundError):
            lock = (path / _LOCK).open("w")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if (path / _LOCK).exists():
                    return path, lock
            except BlockingIOError:
                pass
            lock.close()


def _remove_stale(base: Path) -> None:
    """Remove the directories of processes that were killed: no process holds their locks."""
    for path in base.glob(f"{_PREFIX}*"):
        try:
            if path.stat().st_uid != os.getuid():
                continue
            with (path / _LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        except OSError:
            continue  # in use, being made, or just removed by another process


@cache
def daemon_path() -> str:
    """The daemon's binary, as installed with hivemind."""
    return str(importlib.resources.files("hivemind.hivemind_cli").joinpath("p2pd"))


def _guard() -> tuple[str, ...]:
    """Command prefix by which the daemon is confined, and killed when we die (Linux only)."""
    if sys.platform != "linux":
        _tell_unconfined(f"there are no filters for {sys.platform}")
        return ()
    return (sys.executable, "-I", "-S", confinement.__file__, str(os.getpid()))


@cache  # a process that starts several daemons says it once
def _tell_unconfined(reason: str) -> None:
    _logger.warning("daemon_unconfined reason=%r: it may speak QUIC, which has known flaws", reason)


class Daemon:
    """A running daemon and the connections to it."""

    def __init__(self, directory: RunDirectory) -> None:
        self.control_path = directory.new_socket("d")
        self.streams_path = directory.new_socket("c")
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self.calls = UnaryCalls()
        """Unary calls to other peers, and theirs."""

        self.peer_id: Any = None
        """The peer id that the daemon calls its own, as hivemind has it."""

        self._child: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._server: asyncio.Server | None = None

    @property
    def pid(self) -> int:
        assert self._child is not None, "it was started"
        return self._child.pid

    @classmethod
    async def start(
        cls,
        settings: DaemonSettings,
        *,
        key_file: Path,
        directory: RunDirectory,
        on_stream: Callable[[FrameStream, bytes], None],
    ) -> Daemon:
        """Start the daemon and wait until it listens. Raises ``HostClosed``."""
        self = cls(directory)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._start(settings, key_file, on_stream)
        except (TimeoutError, OSError, P2PDaemonError, asyncio.IncompleteReadError) as error:
            await self.stop()
            reason = str(error) or f"it did not start within {START_TIMEOUT_S:g} s"
            said = f"; it said: {self.last_lines[-1]}" if self.last_lines else ""
            raise HostClosed(f"libp2p daemon: {reason}{said}") from error
        except BaseException:
            await self.stop()
            raise
        return self

    async def _start(
        self,
        settings: DaemonSettings,
        key_file: Path,
        on_stream: Callable[[FrameStream, bytes], None],
    ) -> None:
        flags = {"listen": f"/unix{self.control_path}", "id": key_file, **settings.flags()}
        arguments = [*_guard(), daemon_path(), *(f"-{name}={flags[name]}" for name in flags)]
        _logger.debug("daemon_starts arguments=%s", arguments)
        loop = asyncio.get_running_loop()
        spawning = loop.create_task(
            asyncio.create_subprocess_exec(
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env={
                    "GOMAXPROCS": str(processors(os.cpu_count() or 1)),
                    **os.environ,
                    "GOLOG_LOG_LEVEL": "error",
                    "GOLOG_LOG_FMT": "nocolor",
                },
                start_new_session=True,
            )
        )
        try:
            self._child = await asyncio.shield(spawning)
        except asyncio.CancelledError:
            self._child = await spawning  # or it would run on, unknown to ``stop``
            raise
        ready: asyncio.Future[None] = loop.create_future()
        self._reading = loop.create_task(self._read_outputs(self._child, ready), name="p2pd output")
        await ready
        self._server = await loop.create_unix_server(
            lambda: FrameStream(on_stream), path=str(self.streams_path)
        )
        await self.calls.open(self.control_path)
        response = await self.request(p2pd_pb2.Request(type=p2pd_pb2.Request.IDENTIFY))
        self.peer_id = PeerID(response.identify.id)

    async def _read_outputs(
        self, child: asyncio.subprocess.Process, ready: asyncio.Future[None]
    ) -> None:
        output = child.stdout
        assert output is not None
        while True:
            try:
                line = (await output.readline()).decode(errors="replace").rstrip()
            except ValueError:  # a line longer than the reader's limit (a Go stack trace is not)
                continue
            if not line:
                if output.at_eof():
                    break
                continue
            if line.startswith(confinement.UNCONFINED):
                _tell_unconfined(line.removeprefix(confinement.UNCONFINED))
                continue
            self.last_lines.append(line)
            _logger.debug("%s", line)
            if line.startswith("Peer ID:") and not ready.done():
                ready.set_result(None)
        if not ready.done():
            ready.set_exception(P2PDaemonError("it ended while it was starting"))

    @property
    def lost(self) -> bool:
        """Say whether the daemon has ended, so that no request will be answered any more."""
        return self.calls.lost.is_set()

    async def ended(self) -> str:
        """Wait until the daemon has exited or closed our connection. Returns a description."""
        assert self._child is not None, "it was started"
        exited = asyncio.ensure_future(self._child.wait())
        lost = asyncio.ensure_future(self.calls.lost.wait())
        try:
            await asyncio.wait({exited, lost}, return_when=asyncio.FIRST_COMPLETED)
            if not exited.done():  # it closes the connection a moment before it exits
                await asyncio.wait({exited}, timeout=0.5)
            if exited.done():
                return f"it exited with status {exited.result()}"
            return "it closed our connection"
        finally:
            exited.cancel()
            lost.cancel()

    async def stop(self) -> None:
        """End the daemon and remove its sockets. Never fails, and waits 2 s at most."""
        self.calls.close()
        if self._server is not None:
            self._server.close()
        child = self._child
        if child is not None:
            for number in (signal.SIGINT, signal.SIGKILL):  # confined, it ignores SIGTERM
                if child.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        child.send_signal(number)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(child.wait(), 1.0)
            transport = getattr(child, "_transport", None)
            if transport is not None:
                transport.close()  # or it warns when collected
        if self._reading is not None:
            self._reading.cancel()
        for path in (self.control_path, self.streams_path):
            path.unlink(missing_ok=True)

    # --- single requests, each on a connection that the daemon answers or closes ------------

    @asynccontextmanager
    async def _asked(
        self, request: Any, timeout_s: float
    ) -> AsyncIterator[tuple[Any, asyncio.StreamReader, asyncio.StreamWriter]]:
        """The daemon's response, and the connection on which it came.

        Raises ``TimeoutError``, ``OSError`` and ``P2PDaemonError``.
        """
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_unix_connection(str(self.control_path))
            try:
                writer.write(delimited(request))
                yield await read_response(reader), reader, writer
            except asyncio.IncompleteReadError:
                raise P2PDaemonError("the daemon closed the connection") from None
            finally:
                writer.transport.abort()

    async def request(self, request: Any, *, timeout_s: float = DAEMON_TIMEOUT_S) -> Any:
        """One request to the daemon. Raises ``TimeoutError``, ``OSError``, ``P2PDaemonError``."""
        async with self._asked(request, timeout_s) as (response, _, _):
            return response

    async def identify(self) -> tuple[Multiaddr, ...]:
        """The addresses under which the daemon believes it can be dialled, without /p2p."""
        response = await self.request(p2pd_pb2.Request(type=p2pd_pb2.Request.IDENTIFY))
        return addresses.unpack_all(response.identify.addrs)

    async def connect(self, peer: PeerId, at: Sequence[Multiaddr], *, timeout_s: float) -> None:
        # The multiaddr package's own bytes: hivemind's class encodes Ed25519 ids wrongly.
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.CONNECT,
            connect=p2pd_pb2.ConnectRequest(
                peer=peer_bytes(peer),
                addrs=[addresses.pack(address) for address in at],
                timeout=math.ceil(timeout_s),
            ),
        )
        await self.request(request, timeout_s=timeout_s)

    async def disconnect(self, peer: PeerId) -> None:
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.DISCONNECT,
            disconnect=p2pd_pb2.DisconnectRequest(peer=peer_bytes(peer)),
        )
        await self.request(request)

    async def connected(
        self, *, timeout_s: float = DAEMON_TIMEOUT_S
    ) -> dict[PeerId, tuple[Multiaddr, ...]]:
        """Every peer with a live connection, and the remote address of each connection."""
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS)
        response = await self.request(request, timeout_s=timeout_s)
        return {
            PeerId(PeerID(info.id).to_base58()): addresses.unpack_all(info.addrs)
            for info in response.peers
        }

    async def serve_streams(self, protocol: str) -> None:
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.STREAM_HANDLER,
            streamHandler=p2pd_pb2.StreamHandlerRequest(
                addr=HivemindMultiaddr(f"/unix{self.streams_path}").to_bytes(),
                proto=[protocol],
                balanced=False,
            ),
        )
        await self.request(request)

    async def exchange(
        self, peer: PeerId, protocol: str, message: bytes, *, timeout_s: float = DAEMON_TIMEOUT_S
    ) -> bytes:
        """Send a delimited message over a stream of a foreign protocol; returns the answer.

        Raises ``TimeoutError``, ``OSError`` and ``P2PDaemonError``.
        """
        request = _open_request(peer, protocol, timeout_s)
        async with self._asked(request, timeout_s) as (_, reader, writer):
            writer.write(message)
            return await read_delimited(reader)

    async def open_stream(self, peer: PeerId, protocol: str, *, timeout_s: float) -> FrameStream:
        """Open a stream. Raises ``TimeoutError``, ``OSError`` and ``P2PDaemonError``."""
        loop = asyncio.get_running_loop()
        introduced: asyncio.Future[bytes] = loop.create_future()

        def on_preamble(stream: FrameStream, message: bytes) -> None:
            if not introduced.done():
                introduced.set_result(message)

        def on_closed() -> None:
            if not introduced.done():
                introduced.set_exception(P2PDaemonError("the daemon closed the connection"))

        request = _open_request(peer, protocol, timeout_s)
        stream: FrameStream | None = None
        try:
            async with asyncio.timeout(timeout_s):
                _, stream = await loop.create_unix_connection(
                    lambda: FrameStream(on_preamble), path=str(self.control_path)
                )
                stream.on_closed = on_closed
                stream.write_raw(delimited(request))
                response = p2pd_pb2.Response()
                response.ParseFromString(await introduced)
                accepted(response)
        except BaseException:
            if stream is not None:
                stream.abort()
            raise
        stream.on_closed = None
        introduce(stream, response.streamInfo)
        return stream


def _open_request(peer: PeerId, protocol: str, timeout_s: float) -> Any:
    return p2pd_pb2.Request(
        type=p2pd_pb2.Request.STREAM_OPEN,
        streamOpen=p2pd_pb2.StreamOpenRequest(
            peer=peer_bytes(peer), proto=[protocol], timeout=math.ceil(timeout_s)
        ),
    )


@lru_cache(maxsize=4096)
def peer_bytes(peer: PeerId) -> bytes:
    """The peer id as the daemon's messages carry it. Raises ``ValueError``."""
    encoded: bytes = PeerID.from_base58(peer).to_bytes()
    return encoded


def introduce(stream: FrameStream, info: Any) -> str:
    """Set the stream's peer from the daemon's description; returns the protocol."""
    address = next(iter(addresses.unpack_all([info.addr])), None)
    # An address that we cannot parse may lead through a relay.
    relayed = address is None or addresses.is_relayed(address)
    stream.introduce(PeerId(PeerID(info.peer).to_base58()), relayed=relayed)
    protocol: str = info.proto
    return protocol
