"""The only module that imports hivemind: the names that every other ``hivemind_*.py`` uses.

hivemind's packages import torch and its whole training stack (280 MB and seconds per process, and a
changed sharing strategy of torch). Only its messages, its routing table and the protocol of its
directory are needed. So three package ``__init__`` files are deferred until a name that only they
define is requested, which never happens (40 MB, no torch). What is used of the protocol was read in
one version, and another one is refused. One function is replaced: it wrote the text of a peer id
each time (``dht.identity.base58_encode``).

This is the only module that does work when it is imported.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import sys
import types
from typing import Any

from dht.identity import base58_encode

WRITTEN_FOR = "1.1.12"
"""The version of hivemind that was read."""


class HivemindVersionError(ImportError):
    """The installed hivemind is another one than was read."""

    def __init__(self, found: str, what: str) -> None:
        super().__init__(found, what)
        self.found = found
        self.what = what

    def __str__(self) -> str:
        return (
            f"hivemind {self.found}: {self.what}; dht/libp2p was written for {WRITTEN_FOR}: "
            "install with constraints.txt"
        )


def check_version(found: str) -> None:
    """Refuse a version that was not read."""
    if found != WRITTEN_FOR:
        raise HivemindVersionError(found, "this version has not been examined")


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

from google.protobuf.message import DecodeError  # noqa: E402  # hivemind's own dependency
from hivemind.dht.protocol import DHTProtocol  # noqa: E402
from hivemind.dht.routing import DHTID, RoutingTable  # noqa: E402
from hivemind.p2p import P2PContext, PeerID  # noqa: E402
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError  # noqa: E402
from hivemind.proto import dht_pb2, p2pd_pb2  # noqa: E402
from hivemind.utils.multiaddr import Multiaddr as HivemindMultiaddr  # noqa: E402

__all__ = [
    "DHTID",
    "DHTProtocol",
    "DecodeError",
    "HivemindMultiaddr",
    "HivemindVersionError",
    "P2PContext",
    "P2PDaemonError",
    "P2PHandlerError",
    "PeerID",
    "RoutingTable",
    "ValueWithExpiration",
    "dht_pb2",
    "p2pd_pb2",
]


def _init_peer_id(self: Any, peer_id_bytes: bytes) -> None:
    """``PeerID.__init__`` with text that is written once for each peer."""
    self._bytes = peer_id_bytes
    self._b58_str = base58_encode(peer_id_bytes)


PeerID.__init__ = _init_peer_id
