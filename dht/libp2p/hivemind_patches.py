"""The only module that imports hivemind, and the patches that are applied to it.

Every other ``hivemind_*.py`` imports hivemind's names from here, because two things have to happen
once, around the first import:

- hivemind's packages import torch and its whole training stack (280 MB and seconds per process,
  and a changed sharing strategy of torch). Only its daemon bindings and its DHT node are needed, so
  three package ``__init__`` files are deferred until a name that only they define is requested,
  which never happens (40 MB, no torch).
- A few functions are replaced. The digests of their sources are checked first: with another version
  the import of this module fails, because a patch for changed code is worse than none.

This is the only module that does work when it is imported.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import importlib.util
import inspect
import logging
import sys
import types
from collections.abc import Callable
from contextlib import closing
from functools import lru_cache, partial
from typing import Any
from uuid import UUID, uuid4

from dht.errors import BUSY
from dht.libp2p import directory_wire
from dht.libp2p.directory_wire import MalformedMessage
from dht.limits import FairQueue, Place, Places, Rate

WRITTEN_FOR = ("1.1.12",)
"""Versions of hivemind that these patches were written for."""

ERROR_TEXT_MAX_BYTES = 512

_logger = logging.getLogger("dht.hivemind")


class HivemindVersionError(ImportError):
    """The installed hivemind is not one that the patches were written for."""

    def __init__(self, found: str, what: str) -> None:
        super().__init__(found, what)
        self.found = found
        self.what = what

    def __str__(self) -> str:
        return (
            f"hivemind {self.found}: {self.what}; dht/libp2p/hivemind_patches.py was written for "
            f"{', '.join(WRITTEN_FOR)}: install with constraints.txt"
        )


def check_version(found: str) -> None:
    """Refuse a version for which the patches were not written."""
    if found not in WRITTEN_FOR:
        raise HivemindVersionError(found, "this version has not been examined")


def check_source(function: Callable[..., Any], digest: str, *, found: str) -> None:
    """Refuse to replace or override code that differs from the examined source."""
    actual = hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]
    if actual != digest:
        raise HivemindVersionError(found, f"the source of {function.__qualname__} has changed")


def _defer_package(name: str) -> types.ModuleType | None:
    """Register a hivemind package without running its ``__init__``; ``None`` if it has run."""
    if name in sys.modules:
        return None
    spec = importlib.util.find_spec(name)  # finds the parent, which is registered already
    if spec is None or spec.loader is None or spec.submodule_search_locations is None:
        raise HivemindVersionError(VERSION, f"there is no package {name}")
    loader = spec.loader
    module = importlib.util.module_from_spec(spec)

    def run_init(attribute: str) -> Any:
        if (submodule := sys.modules.get(f"{name}.{attribute}")) is not None:
            return submodule  # its own import is still under way
        if attribute.startswith("__") or "__getattr__" not in vars(module):
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
        del vars(module)["__getattr__"]
        loader.exec_module(module)
        return getattr(module, attribute)

    vars(module)["__getattr__"] = run_init
    sys.modules[name] = module
    return module


VERSION = importlib.metadata.version("hivemind")
check_version(VERSION)
_defer_package("hivemind")
_utils = _defer_package("hivemind.utils")
_defer_package("hivemind.dht")

# The imports below need the deferred packages.
import base58  # noqa: E402  # hivemind's own dependency, as the next one
from google.protobuf.message import DecodeError  # noqa: E402
from hivemind.utils.logging import get_logger, use_hivemind_log_handler  # noqa: E402
from hivemind.utils.serializer import MSGPackSerializer, SerializerBase  # noqa: E402
from hivemind.utils.timed_storage import ValueWithExpiration, get_dht_time  # noqa: E402

if _utils is not None:  # names that hivemind's own modules import from the package itself
    for _name, _value in {
        "get_logger": get_logger,
        "MSGPackSerializer": MSGPackSerializer,
        "SerializerBase": SerializerBase,
        "get_dht_time": get_dht_time,
    }.items():
        setattr(_utils, _name, _value)

# hivemind renames a log level for the whole process and bypasses its handlers. Here its log records
# go to the same handlers as ours, and only errors do.
logging.addLevelName(logging.WARNING, "WARNING")
use_hivemind_log_handler("nowhere")
logging.getLogger("hivemind").setLevel(logging.ERROR)

from hivemind.dht.protocol import DHTProtocol  # noqa: E402
from hivemind.dht.routing import DHTID, KBucket, RoutingTable  # noqa: E402
from hivemind.p2p import P2P, P2PContext, PeerID  # noqa: E402
from hivemind.p2p.p2p_daemon_bindings import p2pclient  # noqa: E402
from hivemind.p2p.p2p_daemon_bindings.control import ControlClient  # noqa: E402
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError, read_pbmsg_safe  # noqa: E402
from hivemind.proto import dht_pb2, p2pd_pb2  # noqa: E402
from hivemind.utils.multiaddr import Multiaddr as HivemindMultiaddr  # noqa: E402

__all__ = [
    "DHTID",
    "P2P",
    "BoundedRoutingTable",
    "DHTProtocol",
    "HivemindMultiaddr",
    "HivemindVersionError",
    "P2PDaemonError",
    "P2PHandlerError",
    "PeerID",
    "RefusedByHandler",
    "StrictP2P",
    "ValueWithExpiration",
    "dht_pb2",
    "p2pclient",
    "p2pd_pb2",
]


class RefusedByHandler(Exception):  # an answer, not an error of ours
    """Raised by a unary handler to send its text back to the caller."""


class MalformedCall(RefusedByHandler):
    """A request that no program of ours sends: it counts as many calls of its peer."""


_Call = tuple[UUID, Any, Place[bytes]]
"""A call that waits: its number, its request and its place."""


class SteadyControlClient(ControlClient):  # type: ignore[misc]  # hivemind is untyped
    """hivemind's persistent connection to the daemon, which fails loudly instead of hanging.

    Differences:

    - when the connection ends, every pending call fails at once, and so does each later one;
    - a reply that arrives for a call just cancelled is dropped (the original raised inside its
      read loop, which silently ended every other call of the process);
    - a reply over the limit, and a request for an unknown protocol, are answered with an error
      (the original built a message with a field that does not exist, or did not answer);
    - the tasks of one remote peer are limited, and so are its calls and replies by time;
    - calls that wait are begun by peer in turns, those of peers that ask little first, so that a
      flood delays mostly itself;
    - a message is written in one piece, not byte by byte.
    """

    CALLS_PER_PEER_MAX = 64
    CALLS_MAX = 1024
    CALLS_PER_S = 100.0
    CALLS_BURST = 2000.0
    REPLY_BYTES_PER_CALL = 4096
    """A reply counts as a further call for so many bytes each."""

    CALLS_PER_MALFORMED = 20.0
    """A peer that goes on sending malformed requests is refused before they are parsed. Its
    connection stays: to refuse a call costs less than the handshake of the next connection."""

    BEGUN_AT_ONCE = 8
    """Calls of frugal peers begun in one turn of the event loop, which the others wait for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # At most a second of debt: who goes on calling beyond his rate is not heard meanwhile.
        self._rate = Rate[bytes](self.CALLS_PER_S, self.CALLS_BURST, debt=self.CALLS_PER_S)
        self._frugal, self._others = FairQueue[bytes, _Call](), FairQueue[bytes, _Call]()
        """Calls that wait: of peers with half of what they may spend at once, and of others."""

        self.lost = asyncio.Event()
        """Set when the connection to the daemon has ended."""
        self._calls = Places[Place[bytes]](self.CALLS_MAX, self.CALLS_PER_PEER_MAX)
        """Those that wait or are under way; only those under way make room."""

    async def _ensure_persistent_conn(self) -> None:
        await super()._ensure_persistent_conn()
        # Both loops end together: a reader without a writer could not be answered.
        self._write_task.add_done_callback(lambda task: self._connection_lost())
        self._read_task.add_done_callback(lambda task: self._connection_lost())

    def _connection_lost(self) -> None:
        if self.lost.is_set():
            return
        self.lost.set()
        for future in self._pending_calls.values():
            if not future.done():
                future.set_exception(P2PDaemonError("the connection to the daemon is lost"))
        for task in list(self._handler_tasks.values()):
            task.cancel()
        self.close()

    async def _read_from_persistent_conn(self, reader: asyncio.StreamReader) -> None:
        while True:
            message = p2pd_pb2.PersistentConnectionResponse()
            try:
                await read_pbmsg_safe(reader, message)
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            call_id = UUID(bytes=message.callId)
            if message.HasField("requestHandling"):
                self._begin_request(call_id, message.requestHandling)
            elif message.HasField("cancel"):
                if (task := self._handler_tasks.get(call_id)) is not None:
                    task.cancel()
            else:
                self._settle(call_id, message)

    def _settle(self, call_id: UUID, message: Any) -> None:
        future = self._pending_calls.get(call_id)
        if future is None or future.done():
            return  # the caller has just given up
        if message.HasField("daemonError"):
            future.set_exception(P2PDaemonError(message.daemonError.message))
        elif not message.HasField("callUnaryResponse"):
            future.set_result(None)
        elif message.callUnaryResponse.HasField("error"):
            text = message.callUnaryResponse.error[:ERROR_TEXT_MAX_BYTES].decode(errors="replace")
            future.set_exception(P2PHandlerError(text))
        else:
            future.set_result(message.callUnaryResponse.response)

    def _begin_request(self, call_id: UUID, request: Any) -> None:
        peer: bytes = request.peer
        loop = asyncio.get_running_loop()
        now = loop.time()
        if not self._rate.spend(peer, now):
            self._reply(call_id, error=f"{BUSY} of yours: over {self.CALLS_PER_S:g} in a second")
            return
        if self._calls.held(peer) >= self._calls.of_each:
            self._reply(call_id, error=f"{BUSY} of yours: over {self._calls.of_each} at once")
            return
        place = Place(peer)
        if not self._calls.take(place):
            self._reply(call_id, error=f"{BUSY} at once")
            return
        if not self._frugal and not self._others:
            loop.call_soon(self._begin_some)
        is_frugal = self._rate.left(peer, now) >= self.CALLS_BURST / 2
        (self._frugal if is_frugal else self._others).push(peer, (call_id, request, place))

    def _begin_some(self) -> None:
        """Begin the next calls: some of frugal peers, and one of the others.

        So a peer that asks little waits for one call of the others, however many identities they
        have and whatever their calls cost.
        """
        calls = [self._frugal.pop() for _ in range(self.BEGUN_AT_ONCE) if self._frugal]
        if self._others:
            calls.append(self._others.pop())
        for _, (call_id, request, place), _ in calls:
            if self.lost.is_set():
                self._calls.leave(place)
                continue
            task = asyncio.ensure_future(self._handle_persistent_request(call_id, request))
            self._handler_tasks[call_id] = task
            place.end = partial(self._give_up, call_id)
            task.add_done_callback(partial(self._end_request, call_id, place))
        if self._frugal or self._others:
            asyncio.get_running_loop().call_soon(self._begin_some)

    def _give_up(self, call_id: UUID) -> None:
        """End a call of the peer with the most under way, for one of another peer."""
        self._handler_tasks[call_id].cancel()
        self._reply(call_id, error=f"{BUSY} at once")

    def _end_request(self, call_id: UUID, place: Place[bytes], task: asyncio.Task[None]) -> None:
        del self._handler_tasks[call_id]
        self._calls.leave(place)

    async def _handle_persistent_request(self, call_id: UUID, request: Any) -> None:
        handler = self.unary_handlers.get(request.proto)
        if handler is None:
            self._reply(call_id, error=f"{request.proto!r} is not served")
            return
        try:
            reply: bytes = await handler(request.data, PeerID(request.peer))
        except RefusedByHandler as refusal:
            if isinstance(refusal, MalformedCall):
                now = asyncio.get_running_loop().time()
                self._rate.spend(request.peer, now, self.CALLS_PER_MALFORMED)
            self._reply(call_id, error=str(refusal))
        except Exception as error:  # a malformed message: the caller must get an answer
            _logger.debug("call_failed protocol=%s", request.proto, exc_info=True)
            self._reply(call_id, error=type(error).__name__)
        else:
            tokens = len(reply) / self.REPLY_BYTES_PER_CALL
            self._rate.spend(request.peer, asyncio.get_running_loop().time(), tokens)
            self._reply(call_id, response=reply)

    def _reply(self, call_id: UUID, *, response: bytes = b"", error: str | None = None) -> None:
        if error is not None:
            content = p2pd_pb2.CallUnaryResponse(error=error.encode()[:ERROR_TEXT_MAX_BYTES])
        else:
            content = p2pd_pb2.CallUnaryResponse(response=response)
        message = p2pd_pb2.PersistentConnectionRequest(callId=call_id.bytes, unaryResponse=content)
        if message.ByteSize() > self.persistent_conn_max_msg_size:
            return self._reply(call_id, error="the reply is larger than a message may be")
        self._pending_messages.put_nowait(message)
        return None

    async def _write_to_persistent_conn(self, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            while True:
                message = await self._pending_messages.get()
                writer.write(delimited(message))
                try:
                    await writer.drain()
                except ConnectionError:
                    return

    async def _request(self, **content: Any) -> Any:
        """Send one request on the persistent connection and wait for its result."""
        if self.lost.is_set():
            raise P2PDaemonError("the connection to the daemon is lost")
        call_id = uuid4()
        message = p2pd_pb2.PersistentConnectionRequest(callId=call_id.bytes, **content)
        if message.ByteSize() > self.persistent_conn_max_msg_size:
            raise P2PDaemonError(f"over {self.persistent_conn_max_msg_size} bytes in one message")
        future = self._pending_calls[call_id] = asyncio.get_running_loop().create_future()
        self._pending_messages.put_nowait(message)
        try:
            return await future
        except asyncio.CancelledError:
            await self._cancel_unary_call(call_id)
            raise
        finally:
            del self._pending_calls[call_id]

    async def call_unary_handler(self, peer_id: Any, proto: str, data: bytes) -> bytes:
        call = p2pd_pb2.CallUnaryRequest(peer=peer_id.to_bytes(), proto=proto, data=data)
        reply: bytes = await self._request(callUnary=call)
        return reply

    async def add_unary_handler(self, proto: str, handler: Any, balanced: bool = False) -> None:
        if proto in self.unary_handlers:
            raise P2PDaemonError(f"handler for protocol {proto} is registered already")
        self.unary_handlers[proto] = handler
        await self._request(
            addUnaryHandler=p2pd_pb2.AddUnaryHandlerRequest(proto=proto, balanced=balanced)
        )

    async def remove_unary_handler(self, proto: str) -> None:
        if self.unary_handlers.pop(proto, None) is None:
            raise P2PDaemonError(f"handler for protocol {proto} is not registered")
        if self.lost.is_set():
            return  # the daemon that knew it is gone
        await self._request(removeUnaryHandler=p2pd_pb2.RemoveUnaryHandlerRequest(proto=proto))


class StrictP2P(P2P):  # type: ignore[misc]  # hivemind is untyped
    """hivemind's P2P for the directory's calls, which checks a message before hivemind decodes it.

    The original parses messages of any size and passes them to handlers that trust their lengths,
    times and nesting.
    """

    def __init__(self) -> None:
        super().__init__()
        self.on_malformed: Callable[[str], None] = lambda reason: None
        """Called for each request that was refused and each reply that was dropped."""

    async def _add_protobuf_unary_handler(
        self, handle_name: str, handler: Any, input_protobuf_type: Any, balanced: bool = False
    ) -> None:
        rule = directory_wire.rule_for(input_protobuf_type.DESCRIPTOR.name)

        async def answer(data: bytes, remote_id: Any) -> bytes:
            try:
                request = _parsed(input_protobuf_type, data, directory_wire.MESSAGE_MAX_BYTES)
                rule.check(request, remote_id.to_bytes())
            except MalformedMessage as error:
                self._malformed(remote_id, str(error))
                raise MalformedCall(f"malformed: {error}") from error
            context = P2PContext(
                handle_name=handle_name, local_id=self.peer_id, remote_id=remote_id
            )
            reply: bytes = (await handler(request, context)).SerializeToString()
            return reply

        await self._client.add_unary_handler(handle_name, answer, balanced=balanced)

    async def _call_unary_protobuf_handler(
        self, peer_id: Any, handle_name: str, request: Any, output_protobuf_type: Any
    ) -> Any:
        rule = directory_wire.rule_for(request.DESCRIPTOR.name)
        data = await self._client.call_unary_handler(
            peer_id, handle_name, request.SerializeToString()
        )
        try:
            reply = _parsed(output_protobuf_type, data, rule.reply_max_bytes)
            rule.check_reply(reply, peer_id.to_bytes())
        except MalformedMessage as error:
            self._malformed(peer_id, str(error))
            raise
        return reply

    def _malformed(self, peer: Any, reason: str) -> None:
        _logger.debug("malformed peer=%s reason=%s", peer, reason)
        self.on_malformed(reason)


def _parsed(kind: Any, data: bytes, size_max: int) -> Any:
    directory_wire.check_size(kind.DESCRIPTOR.name, data, size_max)
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise MalformedMessage(f"not a {kind.DESCRIPTOR.name}") from error


class BoundedRoutingTable(RoutingTable):  # type: ignore[misc]  # hivemind is untyped
    """hivemind's routing table, whose buckets keep a limited number of replacement nodes.

    The original remembers every node that ever asked something while its bucket was full.
    """

    def add_or_update_node(self, node_id: Any, peer_id: Any) -> Any:
        to_ping = super().add_or_update_node(node_id, peer_id)
        bucket = self.buckets[self.get_bucket_index(node_id)]
        while len(bucket.replacement_nodes) > bucket.size:
            del self[next(iter(bucket.replacement_nodes))]
        # Nodes that were removed while they were pinged.
        bucket.nodes_requested_for_ping.intersection_update(bucket.nodes_to_peer_id)
        return to_ping


def delimited(message: Any) -> bytes:
    """A protobuf message behind its length, as the daemon reads it."""
    body: bytes = message.SerializeToString()
    return varint(len(body)) + body


def varint(value: int) -> bytes:
    """An unsigned number in groups of seven bits, lowest first."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


@lru_cache(maxsize=16_384)
def _base58(peer_id_bytes: bytes) -> str:
    text: str = base58.b58encode(peer_id_bytes).decode()
    return text


def _init_peer_id(self: Any, peer_id_bytes: bytes) -> None:
    """``PeerID.__init__`` with cached base58 text, which was most of a look-up's cost."""
    self._bytes = peer_id_bytes
    self._b58_str = _base58(peer_id_bytes)


# Functions that are replaced, overridden or relied upon, with the digests of their examined source.
for _function, _digest in (
    (RoutingTable.add_or_update_node, "6ab5a1f8767af675"),
    (RoutingTable.__delitem__, "c097f46b65b1404e"),
    (KBucket.add_or_update_node, "8358fcd3c31585a9"),
    (KBucket.__delitem__, "352f64fc0b7f728a"),
    (KBucket.request_ping_node, "be0b0a0c2a133b7e"),
    (DHTProtocol.rpc_ping, "34c1159e968bcbfb"),
    (DHTProtocol.rpc_store, "1be6960bd046f8f7"),
    (DHTProtocol.rpc_find, "b7e0365bc4ba6855"),
    (DHTProtocol.call_ping, "7282d8ddc614b2c4"),
    (DHTProtocol.call_store, "61fc01b360f06a4b"),
    (DHTProtocol.call_find, "433adef0e520e526"),
    (MSGPackSerializer.dumps, "b5889c447075fd08"),
    (P2P.__init__, "a83eaaf45423fbde"),
    (P2P._add_protobuf_unary_handler, "29c242f5b962d984"),
    (P2P._call_unary_protobuf_handler, "a844e495400c5598"),
    (PeerID.__init__, "ee2d8caf5ba119a2"),
    (ControlClient.__init__, "9f240246ec9b4e5e"),
    (ControlClient.close, "4747f54d5258ad92"),
    (ControlClient._ensure_persistent_conn, "7a11d5d833d76143"),
    (ControlClient._read_from_persistent_conn, "7388e48bacf61325"),
    (ControlClient._write_to_persistent_conn, "12ef3434da03333f"),
    (ControlClient._handle_persistent_request, "9c958fd0b80cf3d6"),
    (ControlClient._cancel_unary_call, "026aabe511047ce3"),
    (ControlClient.add_unary_handler, "f6e499ca44aff3c7"),
    (ControlClient.remove_unary_handler, "689cb4eecd04d720"),
    (ControlClient.call_unary_handler, "f2704627a5ed76b5"),
):
    check_source(_function, _digest, found=VERSION)

p2pclient.ControlClient = SteadyControlClient
PeerID.__init__ = _init_peer_id
