"""The patches of hivemind, and the refusal of versions that they were not written for."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from uuid import uuid4

import pytest
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.control import DaemonConnector
from hivemind.proto import p2pd_pb2
from multiaddr import Multiaddr

from dht.libp2p import hivemind_patches
from dht.libp2p.hivemind_patches import (
    DHTProtocol,
    HivemindVersionError,
    SteadyControlClient,
    check_source,
    check_version,
    varint,
)


def python(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


def test_a_version_that_nobody_has_read_is_refused() -> None:
    check_version("1.1.12")
    for other in ("1.1.11", "1.1.13", "1.2.0"):
        with pytest.raises(HivemindVersionError, match=other):
            check_version(other)


def test_changed_code_is_refused_even_under_a_known_version() -> None:
    with pytest.raises(HivemindVersionError, match=r"source of DHTProtocol\.rpc_find has changed"):
        check_source(DHTProtocol.rpc_find, "0" * 16, found="1.1.12")


def test_the_patches_are_in_place() -> None:
    assert PeerID.__init__ is hivemind_patches._init_peer_id
    assert hivemind_patches.p2pclient.ControlClient is SteadyControlClient


def test_importing_the_host_brings_no_torch_and_changes_nobodys_logging() -> None:
    loaded = python(
        "import logging, sys\n"
        "before = list(logging.getLogger().handlers)\n"
        "import dht.libp2p.hivemind_host\n"
        "assert logging.getLevelName(logging.WARNING) == 'WARNING'\n"
        "assert logging.getLogger().handlers == before\n"
        "assert not logging.getLogger('hivemind').handlers\n"
        "print(*sorted({'torch', 'hivemind.averaging', 'hivemind.dht.dht'} & set(sys.modules)))"
    )
    assert loaded == ""


@pytest.mark.slow  # it imports torch
def test_the_rest_of_hivemind_is_there_for_whoever_asks_for_it() -> None:
    """The benchmark against hivemind's own averager does."""
    pytest.importorskip("torch")
    shown = python(
        "import dht.libp2p.hivemind_host\n"
        "import hivemind\n"
        "from hivemind.dht import DHT\n"
        "from hivemind.utils import nested_flatten\n"
        "print(hivemind.DHT is DHT, hivemind.__version__)"
    )
    assert shown == "True 1.1.12"


@pytest.mark.parametrize(
    ("value", "encoded"), [(0, b"\0"), (127, b"\x7f"), (128, b"\x80\x01"), (300, b"\xac\x02")]
)
def test_lengths_are_written_as_the_daemon_reads_them(value: int, encoded: bytes) -> None:
    assert varint(value) == encoded


async def test_slow_calls_of_few_keys_do_not_take_the_places_of_all_calls() -> None:
    """64 keys with 16 calls for meetings each held all places for ten seconds."""
    control = SteadyControlClient(
        DaemonConnector(Multiaddr("/unix/nowhere")), _initialized_with_create=True
    )
    answered: list[bytes] = []

    async def handle(data: bytes, peer: PeerID) -> bytes:
        if data == b"slow":
            await asyncio.Event().wait()
        answered.append(peer.to_bytes())
        return b""

    control.unary_handlers["/test"] = handle

    async def ask(peer: bytes, data: bytes) -> None:
        request = p2pd_pb2.CallUnaryRequest(peer=peer, proto="/test", data=data)
        control._begin_request(uuid4(), request)
        await asyncio.sleep(0)

    control._calls.in_all = 64
    for number in range(64):
        await ask(b"key%d" % (number % 8), b"slow")
    for _ in range(3):
        await ask(b"anna", b"quick")
        await asyncio.sleep(0)

    assert answered == 3 * [b"anna"]
    assert len(control._handler_tasks) <= 64
    tasks = list(control._handler_tasks.values())
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
