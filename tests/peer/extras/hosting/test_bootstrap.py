"""A bootstrap peer in this process, on a real daemon."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from multiaddr import Multiaddr

from dht import addresses
from dht.errors import CallRefused, KeyFileError
from dht.identity import Identity, PeerId, RunId
from dht.libp2p.hivemind_host import HivemindHost
from dht.libp2p.lane.wire import CIRCUIT_PROTOCOL, Circuit, Leg, decode, encode
from dht.presence.presence import Presence
from dht.presence.this_peer import Profile
from peer.errors import Unusable
from peer.extras.hosting.bootstrap import (
    Bootstrap,
    BootstrapSettings,
    announced,
    open_bootstrap,
    serve,
)
from tests.integration.loopback import LOOPBACK
from tests.peer.views.served_figures import served_by_bootstrap_peers
from tests.processes import free_port

RUN = RunId("ab" * 32)


def local(folder: Path) -> BootstrapSettings:
    port = free_port()
    listen = (Multiaddr(f"/ip4/127.0.0.1/tcp/{port}"),)
    return BootstrapSettings(data_directory=folder, port=port, listen=listen)


def figures(bootstrap: Bootstrap) -> dict[str, float]:
    return {
        sample.name: sample.value for metric in bootstrap.metrics() for sample in metric.samples
    }


def test_the_address_of_a_bootstrap_peer_survives_a_restart(tmp_path: Path) -> None:
    settings = local(tmp_path)

    async def once() -> Multiaddr:
        async with open_bootstrap(settings) as bootstrap:
            return bootstrap.address

    first = asyncio.run(once())
    assert first == asyncio.run(once())
    assert str(first).startswith(f"/ip4/127.0.0.1/tcp/{settings.port}/p2p/12D3KooW")
    assert settings.key_file.stat().st_mode & 0o777 == 0o600


def test_a_bootstrap_peer_announces_the_given_addresses(tmp_path: Path) -> None:
    settings = replace(local(tmp_path), announce=(announced("seed.example.org", port=7700),))

    async def main() -> None:
        async with open_bootstrap(settings) as bootstrap:
            outer = Multiaddr("/dns4/seed.example.org/tcp/7700")
            assert bootstrap.addresses == (addresses.with_peer(outer, bootstrap.peer_id),)

    asyncio.run(main())


@pytest.mark.slow  # dht/presence/test_presence.py: it introduces the members of each run
def test_a_bootstrap_peer_introduces_the_peers_of_a_run_and_counts_them(tmp_path: Path) -> None:
    async def main() -> None:
        settings = replace(local(tmp_path), relay_bytes_s=2e6, lane_port=free_port())
        async with open_bootstrap(settings) as bootstrap:
            assert all(check.ok for check in bootstrap.checks())
            presences = []
            hosts = []
            for number in (1, 2):
                identity = Identity.from_seed(bytes([number]) * 32)
                host = await HivemindHost.open(identity, LOOPBACK)
                hosts.append(host)
                presence = Presence(host, identity, Profile(RUN), seeds=(bootstrap.address,))
                presences.append(presence)
                await presence.start()
            try:
                loop = asyncio.get_running_loop()
                async with asyncio.timeout(90):
                    while not all(  # noqa: ASYNC110 (nothing announces it)
                        len(presence.table.live(loop.time())) == 1 for presence in presences
                    ):
                        await asyncio.sleep(0.05)
                found = figures(bootstrap)
                assert found["shoal_runs"] == 1
                assert found["shoal_peers"] == 2
                assert found["shoal_hellos_received_total"] >= 2
                assert found["shoal_daemon_resident_memory_bytes"] > 1e6
                assert len(found) < 40
                names = {
                    f"{metric.name}_total" if metric.type == "counter" else metric.name
                    for metric in bootstrap.metrics()
                }
                assert names == served_by_bootstrap_peers()
                assert found["shoal_relay_circuits"] == 0

                async def ask_for_leg(other: PeerId) -> Leg:
                    circuit = encode(Circuit(other, bytes(16)))
                    return decode(
                        Leg,
                        await hosts[0].call(
                            bootstrap.peer_id, CIRCUIT_PROTOCOL, circuit, timeout_s=30
                        ),
                    )

                assert (await ask_for_leg(hosts[1].peer_id)).port == settings.lane_port
                assert figures(bootstrap)["shoal_relay_circuits"] == 1
                with pytest.raises(CallRefused, match="members of one run alone"):
                    await ask_for_leg(Identity.from_seed(bytes(32)).peer_id)
            finally:
                for presence in presences:
                    await presence.close()
                for host in hosts:
                    await host.close()

    asyncio.run(main())


def test_a_bootstrap_peer_with_a_dead_daemon_and_silent_seeds_is_not_ready(tmp_path: Path) -> None:
    other = Identity.from_seed(bytes(32)).peer_id
    seed = Multiaddr(f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{other}")

    async def main() -> None:
        async with open_bootstrap(replace(local(tmp_path), seeds=(seed,))) as bootstrap:
            wrong = {check.name: check.reason for check in bootstrap.checks() if not check.ok}
            assert list(wrong) == ["seeds"]
            assert str(seed) in wrong["seeds"]

            daemon, bootstrap.host._daemon = bootstrap.host._daemon, None
            wrong = {check.name: check.reason for check in bootstrap.checks() if not check.ok}
            bootstrap.host._daemon = daemon
            assert sorted(wrong) == ["daemon", "seeds"]

    asyncio.run(main())


def test_a_taken_port_is_noticed_before_anything_is_started(tmp_path: Path) -> None:
    async def main() -> None:
        settings = local(tmp_path)
        with socket.socket() as other:
            other.bind(("127.0.0.1", settings.port))
            other.listen(1)
            with pytest.raises(Unusable, match=f"port {settings.port} is taken") as caught:
                async with open_bootstrap(settings):
                    pass
        assert "--port" in str(caught.value)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.EACCES, "ports below 1024 belong to root"),
        (errno.EADDRNOTAVAIL, "--announce"),
        (errno.EADDRINUSE, "sport = :80"),
        (errno.EAFNOSUPPORT, "--listen"),
    ],
)
def test_each_reason_why_listening_fails_has_a_remedy(
    code: int, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(socket.socket):
        def bind(self, address: object) -> None:
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(socket, "socket", Refusing)
    settings = BootstrapSettings(
        data_directory=tmp_path, listen=(Multiaddr("/ip4/127.0.0.1/tcp/80"),)
    )

    async def main() -> None:
        async with open_bootstrap(settings):
            pass

    # The loop itself needs sockets, which it has made by then.
    with pytest.raises(Unusable) as caught:
        asyncio.run(main())
    assert remedy in str(caught.value)


def test_bulk_data_is_relayed_only_with_consent_on_the_next_port(tmp_path: Path) -> None:
    off = BootstrapSettings(data_directory=tmp_path, port=7700)
    assert off.lane is None
    on = replace(off, relay_bytes_s=2e6)
    assert on.lane is not None and on.lane.port == 7701
    other = replace(on, lane_port=8000)
    assert other.lane is not None and other.lane.port == 8000
    with pytest.raises(Unusable, match="--lane"):
        replace(on, lane_port=70000)


def test_a_damaged_key_is_reported_and_kept(tmp_path: Path) -> None:
    settings = local(tmp_path)
    settings.key_file.write_bytes(b"damaged")
    settings.key_file.chmod(0o600)

    async def main() -> None:
        with pytest.raises(KeyFileError, match="damaged"):
            async with open_bootstrap(settings):
                pass

    asyncio.run(main())
    assert settings.key_file.read_bytes() == b"damaged"


def test_systemd_is_notified_of_start_and_stop(tmp_path: Path) -> None:
    async def main() -> list[bytes]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
            systemd.bind(str(tmp_path / "notify"))
            systemd.setblocking(False)
            settings = replace(local(tmp_path), notify_socket=str(tmp_path / "notify"))
            stop = asyncio.Event()
            await serve(settings, stop=stop, on_ready=lambda bootstrap: stop.set())
            heard = []
            while True:
                try:
                    heard.append(systemd.recv(100))
                except BlockingIOError:
                    return heard

    assert asyncio.run(main()) == [b"READY=1", b"WATCHDOG=1", b"STOPPING=1"]


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("seed.example.org", "/dns4/seed.example.org/tcp/7700"),
        ("seed.example.org:443", "/dns4/seed.example.org/tcp/443"),
        ("203.0.113.7", "/ip4/203.0.113.7/tcp/7700"),
        ("203.0.113.7:80", "/ip4/203.0.113.7/tcp/80"),
        ("2001:db8::7", "/ip6/2001:db8::7/tcp/7700"),
        ("[2001:db8::7]:80", "/ip6/2001:db8::7/tcp/80"),
        ("/dns6/seed.example.org/tcp/1", "/dns6/seed.example.org/tcp/1"),
    ],
)
def test_an_address_to_announce_may_be_a_host_name_or_ip_address(text: str, address: str) -> None:
    assert str(announced(text, port=7700)) == address


@pytest.mark.parametrize("text", ["0.0.0.0", "::", "seed.example.org:0", "/ip4/0.0.0.0/tcp/7700"])
def test_an_address_that_nobody_can_dial_is_not_announced(text: str) -> None:
    """Earlier, 0.0.0.0 was printed as the address to hand out."""
    with pytest.raises(Unusable, match=r"nobody can dial .*; name the host"):
        announced(text, port=7700)


@pytest.mark.parametrize("text", ["", "a b", "http://x", "seed.example.org:99999", "1.2.3.4/7"])
def test_an_invalid_address_to_announce_is_refused(text: str) -> None:
    with pytest.raises((Unusable, ValueError)):
        announced(text, port=7700)
