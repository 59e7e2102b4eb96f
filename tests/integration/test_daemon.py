"""The daemon as a process: it ends with its owner, however that ends, and leaves no files."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from multiaddr import Multiaddr

from dht.errors import CallRefused, HostClosed, PeerUnreachable, StreamBroken
from dht.host import Stream
from dht.identity import PeerId
from dht.libp2p.hivemind_daemon import RunDirectory
from dht.libp2p.hivemind_host import HivemindHost, HostSettings
from tests.integration.loopback import (
    ANYWHERE,
    LOOPBACK,
    WAIT_S,
    dial_out_only,
    hosts,
    identity,
    run,
    until,
)
from tests.processes import Processes, descendants, described, is_running, still_running

HOST = """
import asyncio, sys
from tests.integration.loopback import LOOPBACK, identity
from dht.libp2p.hivemind_host import HivemindHost

async def main():
    host = await HivemindHost.open(identity(int(sys.argv[1])), LOOPBACK)
    print("up", host.daemon_pid, host._run_directory.path, flush=True)
    await asyncio.Event().wait()

loop_factory = None
if sys.argv[2] == "uvloop":
    import uvloop
    loop_factory = uvloop.new_event_loop
with asyncio.Runner(loop_factory=loop_factory) as runner:
    runner.run(main())
"""


LOOPS = ("uvloop", pytest.param("asyncio", marks=pytest.mark.slow))
"""Agents and bootstrap peers run on uvloop."""


def run_directories() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("shoal-p2p-*"))


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A folder for temporary files of this test alone: any other host clears up in the usual one.

    Its name is short, as a socket's has to be.
    """
    with tempfile.TemporaryDirectory(prefix="apart-", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield folder


def test_a_host_that_is_cancelled_while_its_daemon_is_spawned_leaves_neither(
    monkeypatch: pytest.MonkeyPatch, apart: str
) -> None:
    """The daemon ran on then, and made its sockets while their directory was removed."""
    spawn, children = asyncio.create_subprocess_exec, list[asyncio.subprocess.Process]()
    before = run_directories()

    async def main() -> None:
        spawned = asyncio.Event()

        async def spawn_slowly(*args: Any, **settings: Any) -> asyncio.subprocess.Process:
            children.append(await spawn(*args, **settings))
            spawned.set()
            await asyncio.sleep(0.3)
            return children[-1]

        monkeypatch.setattr(asyncio, "create_subprocess_exec", spawn_slowly)
        opening = asyncio.create_task(HivemindHost.open(identity(1), LOOPBACK))
        await spawned.wait()
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert [child.returncode for child in children] != [None]
        assert run_directories() == before

    run(main())


@pytest.mark.parametrize("loop", LOOPS)
def test_after_kill_9_the_daemon_ends_and_the_next_host_clears_up(
    processes: Processes, apart: str, loop: str
) -> None:
    host = processes.python("-c", HOST, "1", loop, environment={"TMPDIR": apart})
    _, pid, directory = processes.wait_for_line(host, "up ", timeout_s=WAIT_S).split()
    children = processes.kill_hard(host)
    assert [child.pid for child in children] == [int(pid)], (
        "what confines it must become the daemon"
    )
    left = still_running(children, timeout_s=WAIT_S)
    assert not left, described(left)

    assert Path(directory).exists(), "the directory is removed only by the next host"
    assert not (Path(directory) / "key").exists(), "a private key must not be left lying about"
    RunDirectory().remove()
    assert not Path(directory).exists()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills children with a parent")
@pytest.mark.parametrize("loop", LOOPS)
def test_a_daemon_that_hangs_is_killed_with_its_owner(processes: Processes, loop: str) -> None:
    """A stopped daemon cannot notice that its owner has ended; the kernel does."""
    host = processes.python("-c", HOST, "1", loop)
    processes.wait_for_line(host, "up ", timeout_s=WAIT_S)
    (daemon,) = descendants(host.pid)
    daemon.send_signal(signal.SIGSTOP)
    children = processes.kill_hard(host)
    left = still_running(children, timeout_s=WAIT_S)
    assert not left, described(left)


def test_ctrl_c_reaches_the_owner_and_not_the_daemon(processes: Processes) -> None:
    host = processes.python("-c", HOST, "1", "asyncio")
    processes.wait_for_line(host, "up ", timeout_s=WAIT_S)
    (daemon,) = descendants(host.pid)
    assert os.getpgid(daemon.pid) != os.getpgid(host.pid)
    os.killpg(host.pid, signal.SIGINT)
    host.wait(timeout=WAIT_S)
    assert not still_running([daemon], timeout_s=WAIT_S)


@pytest.mark.skipif(sys.platform != "linux", reason="there are no filters elsewhere")
def test_what_asks_all_processes_of_a_job_to_end_leaves_the_daemon_to_its_owner() -> None:
    async def scenario() -> None:
        async with hosts(1) as (host,):
            assert host.daemon_pid is not None
            os.kill(host.daemon_pid, signal.SIGTERM)
            for _ in range(20):  # each is answered by the daemon
                await host.connections()
            assert host.restarts == 0

    run(scenario())


def test_closing_leaves_no_process_and_no_file() -> None:
    async def scenario() -> None:
        before = run_directories()
        async with hosts(2) as opened:
            assert len({host.daemon_pid for host in opened}) == 2
            daemons = [child for child in descendants() if "p2pd" in " ".join(child.cmdline())]
            assert {host.daemon_pid for host in opened} <= {daemon.pid for daemon in daemons}
            made = run_directories() - before
            assert {host._run_directory.path for host in opened} <= made
            assert all(path.stat().st_mode & 0o777 == 0o700 for path in made)
        for host in opened:
            await host.close()  # a second time
            with pytest.raises(HostClosed, match="closed"):
                await host.addresses()
        assert not any(is_running(daemon) for daemon in daemons)
        assert not run_directories() & {host._run_directory.path for host in opened}

    run(scenario())


def test_directories_that_are_in_use_are_left_alone() -> None:
    mine = RunDirectory()
    try:
        other = RunDirectory()
        other.remove()
        assert mine.path.exists()
    finally:
        mine.remove()
    assert not mine.path.exists()


def test_a_port_in_use_is_reported_with_the_output_of_the_daemon() -> None:
    async def scenario() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            address = Multiaddr(f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}")
            settings = HostSettings(listen=(address,), port_mapping=False)
            with pytest.raises(HostClosed, match="address already in use"):
                await HivemindHost.open(identity(1), settings)
        assert not descendants()

    run(scenario())


def test_inbound_streams_of_one_peer_are_limited() -> None:
    async def scenario() -> None:
        held = asyncio.Event()

        async def hold(stream: Stream) -> None:
            await stream.send(b"in", timeout_s=WAIT_S)
            await held.wait()

        async with hosts(3) as (server, first, second):
            server.served.open.in_all, server.served.open.of_each = 4, 3
            await server.serve_streams("/test/hold", hold)

            async def try_once(client: HivemindHost) -> bool:
                stream = await client.open_stream(server.peer_id, "/test/hold", timeout_s=WAIT_S)
                try:
                    return await stream.receive(timeout_s=WAIT_S) == b"in"
                except StreamBroken:
                    return False
                finally:
                    streams.append(stream)

            streams: list[Stream] = []
            assert [await try_once(first) for _ in range(4)] == [True, True, True, False]
            assert await try_once(second)
            assert len(server.served.open) == 4
            assert await try_once(second), "the oldest of the peer with the most made room"
            with pytest.raises(StreamBroken):
                await streams[0].receive(timeout_s=WAIT_S)
            assert [await try_once(client) for client in (second, first)] == [False, False]
            server.prefers = {first.peer_id}.__contains__
            assert await try_once(first), "a peer that is preferred goes before others"
            assert len(server.served.open) == 4
            held.set()

    run(scenario())


def test_calls_of_one_peer_are_limited() -> None:
    async def scenario() -> None:
        held = asyncio.Event()

        async def hold(peer: PeerId, request: bytes) -> bytes:
            await held.wait()
            return request

        async with hosts(2) as (server, client):
            assert server._daemon is not None
            server._daemon.calls._places.of_each = 5
            await server.serve_calls("/test/hold", hold, request_max_bytes=10)

            async def ask() -> bytes:
                return await client.call(server.peer_id, "/test/hold", b"x", timeout_s=WAIT_S)

            asked = [asyncio.ensure_future(ask()) for _ in range(6)]
            done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            assert len(done) == 1
            with pytest.raises(CallRefused, match="too many calls of yours: over 5 at once"):
                done.pop().result()
            held.set()
            answers = await asyncio.gather(*asked, return_exceptions=True)
            assert answers.count(b"x") == 5

    run(scenario())


def test_addresses_are_listened_on_and_announced_separately() -> None:
    async def scenario() -> None:
        announced = Multiaddr("/dns4/shoal.example/tcp/7700")
        settings = HostSettings(listen=(ANYWHERE,), announce=(announced,), port_mapping=False)
        async with hosts(settings) as (host,):
            assert [str(a) for a in await host.addresses()] == [f"{announced}/p2p/{host.peer_id}"]
        async with hosts(dial_out_only()) as (host,):
            assert await host.addresses() == ()

    run(scenario())


def test_a_daemon_that_answers_no_longer_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with hosts(1) as (host,):
            before = host.daemon_pid
            assert before is not None
            os.kill(before, signal.SIGSTOP)
            # Shortened only now: on a busy machine a healthy daemon may take as long.
            monkeypatch.setattr("dht.libp2p.hivemind_host.HANG_AFTER_S", 0.3)
            await until(lambda: host.restarts >= 1, timeout_s=2 * WAIT_S)
            monkeypatch.undo()
            assert host.daemon_pid not in (None, before)

    run(scenario())


@pytest.mark.slow  # tests/dht/libp2p/test_reachability.py
def test_a_peer_that_nobody_can_dial_has_places_at_its_relays_and_its_daemon_runs_on() -> None:
    """It learns that while it runs. Earlier its daemon was started again for it, and whenever a
    relay had lost its place, which broke all streams."""

    async def scenario() -> None:
        public = replace(LOOPBACK, is_bootstrap=True)
        async with hosts(public) as (relay,):
            relays = await relay.addresses()
            unsure = replace(LOOPBACK, relays=relays[:1])
            async with hosts(unsure, 1, first=5) as (host, other):

                async def echo(stream: Stream) -> None:
                    while (frame := await stream.receive(timeout_s=WAIT_S)) is not None:
                        await stream.send(frame, timeout_s=WAIT_S)

                await other.serve_streams("/test/echo", echo)
                await host.connect(other.peer_id, await other.addresses(), timeout_s=WAIT_S)
                stream = await host.open_stream(other.peer_id, "/test/echo", timeout_s=WAIT_S)
                (direct,) = await host.addresses()
                circuit = Multiaddr(f"{relays[0]}/p2p-circuit/p2p/{host.peer_id}")

                async def has_its_place() -> None:
                    async with asyncio.timeout(WAIT_S):
                        while await host.addresses() != (direct, circuit):  # noqa: ASYNC110
                            await asyncio.sleep(0.05)

                await host.set_reachable(False)
                await has_its_place()
                async with hosts(1, first=9) as (caller,):
                    await caller.connect(host.peer_id, [circuit], timeout_s=WAIT_S)
                assert relay.daemon_pid is not None
                os.kill(relay.daemon_pid, signal.SIGKILL)
                async with asyncio.timeout(WAIT_S):
                    while await host.addresses() != (direct,):  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
                await has_its_place()
                await host.set_reachable(True)
                assert await host.addresses() == (direct,)
                await stream.send(b"still here", timeout_s=WAIT_S)
                assert await stream.receive(timeout_s=WAIT_S) == b"still here"
                stream.abort()
                assert host.restarts == 0

    run(scenario())


@pytest.mark.slow
def test_a_direct_connection_takes_the_place_of_a_relayed_one_which_stays_if_there_is_none() -> (
    None
):
    async def scenario() -> None:
        public = replace(LOOPBACK, is_bootstrap=True)
        async with hosts(public) as (relay,):
            with socket.create_server(("127.0.0.1", 0)) as free:
                listen = Multiaddr(f"/ip4/127.0.0.1/tcp/{free.getsockname()[1]}")
            # The daemons would find a direct way by themselves, if it announced where it listens.
            nowhere = Multiaddr("/ip4/127.0.0.1/tcp/9")
            relays = (await relay.addresses())[:1]
            hidden = replace(
                LOOPBACK,
                listen=(listen,),
                announce=(nowhere,),
                relays=relays,
                serve_directory=False,
            )
            async with hosts(hidden, first=5) as (host,):
                direct = Multiaddr(f"{listen}/p2p/{host.peer_id}")
                circuit = Multiaddr(f"{relays[0]}/p2p-circuit/p2p/{host.peer_id}")
                async with asyncio.timeout(WAIT_S):
                    while circuit not in await host.addresses():  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
                # It does not listen, or the hidden host would dial it.
                async with hosts(dial_out_only(), first=9) as (other,):

                    async def echo(stream: Stream) -> None:
                        while (frame := await stream.receive(timeout_s=WAIT_S)) is not None:
                            await stream.send(frame, timeout_s=WAIT_S)

                    await host.serve_streams("/test/echo", echo)
                    await other.connect(host.peer_id, [circuit], timeout_s=WAIT_S)
                    stream = await other.open_stream(host.peer_id, "/test/echo", timeout_s=WAIT_S)
                    assert stream.relayed
                    closed = Multiaddr(f"{nowhere}/p2p/{host.peer_id}")
                    with pytest.raises(PeerUnreachable, match="refused"):
                        await other.improve(host.peer_id, [closed], timeout_s=WAIT_S)
                    await stream.send(b"still here", timeout_s=WAIT_S)
                    assert await stream.receive(timeout_s=WAIT_S) == b"still here"
                    stream.abort()
                    await other.improve(host.peer_id, [direct], timeout_s=WAIT_S)
                    (found,) = [c for c in await other.connections() if c.peer == host.peer_id]
                    assert not found.relayed
                    stream = await other.open_stream(host.peer_id, "/test/echo", timeout_s=WAIT_S)
                    assert not stream.relayed
                    stream.abort()

    run(scenario())
