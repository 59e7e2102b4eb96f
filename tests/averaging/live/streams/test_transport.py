"""Control links and bulk streams on the in-memory network."""

from __future__ import annotations

import asyncio

import pytest

from averaging.errors import BulkRefused
from averaging.live.streams.bulk import Bulk, TransportSettings
from averaging.live.streams.links import control_protocol
from dht.errors import PeerUnreachable, StreamBroken
from dht.host import Stream
from dht.memory.host import MemoryNetwork
from dht.memory.network import CALM, Weather
from dht.memory.stream import MemoryStream
from dht.memory.virtual_loop import run
from dht.wrapped_host import GuardedHost
from tests.averaging.live.links import RUN, introduce, linked
from tests.dht.membership.signers import only

SETTINGS = TransportSettings(idle_max_s=30.0)


async def test_a_message_opens_the_link_that_it_needs_and_the_answer_uses_it() -> None:
    network = MemoryNetwork()
    hosts = network.host("anna"), network.host("boris")
    await introduce(*hosts)
    async with linked(*hosts) as (anna, boris):
        anna.transport.send(boris.peer, b"hello")
        await asyncio.sleep(1.0)
        boris.transport.send(anna.peer, b"hello yourself")
        await asyncio.sleep(1.0)

        assert boris.heard == [(anna.peer, b"hello")]
        assert anna.heard == [(boris.peer, b"hello yourself")]
        assert anna.transport.linked() == (boris.peer,)
        assert not anna.lost and not boris.lost
    for host in hosts:
        await host.close()


async def test_both_may_open_a_link_at_the_same_moment() -> None:
    network = MemoryNetwork()
    hosts = network.host("anna"), network.host("boris")
    await introduce(*hosts)
    async with linked(*hosts) as (anna, boris):
        for number in range(50):
            anna.transport.send(boris.peer, bytes([number]))
            boris.transport.send(anna.peer, bytes([number]))
        await asyncio.sleep(2.0)
        assert anna.said() == boris.said() == [bytes([number]) for number in range(50)]
    for host in hosts:
        await host.close()


async def test_a_peer_that_opens_its_link_anew_is_answered_on_the_new_one_at_once() -> None:
    # After a change of its address the old connection leads nowhere, and breaks by its silence.
    network = MemoryNetwork()
    hosts = network.host("anna"), network.host("boris")
    await introduce(*hosts)
    async with linked(hosts[0]) as (anna,):

        async def opened() -> Stream:
            protocol = control_protocol(RUN)
            return await hosts[1].open_stream(anna.peer, protocol, timeout_s=5.0, bulk=False)

        earlier = await opened()
        await asyncio.sleep(1.0)
        stream = await opened()
        await asyncio.sleep(1.0)
        assert [peer for peer, _ in anna.lost] == [hosts[1].peer_id]
        anna.transport.send(hosts[1].peer_id, b"you are behind")
        frame = await stream.receive(timeout_s=1.0)
        assert frame is not None and frame[1:] == b"you are behind"
        with pytest.raises(StreamBroken):
            await earlier.receive(timeout_s=1.0)
    for host in hosts:
        await host.close()


async def test_a_peer_that_only_dials_out_is_reached_over_the_link_it_keeps() -> None:
    network = MemoryNetwork()
    hosts = network.host("anna"), network.host("boris")
    anna_host, boris_host = hosts
    network.simulated.dial_out_only(boris_host.peer_id)
    await boris_host.connect(anna_host.peer_id, await anna_host.addresses(), timeout_s=5.0)
    async with linked(*hosts, settings=SETTINGS) as (anna, boris):
        boris.transport.keep([anna.peer])
        await asyncio.sleep(300.0)  # far beyond the idle limit
        anna.transport.send(boris.peer, b"you are due")
        await asyncio.sleep(1.0)
        assert boris.said() == [b"you are due"]
    for host in hosts:
        await host.close()


async def test_an_idle_link_is_closed_without_anybody_being_lost() -> None:
    network = MemoryNetwork()
    hosts = network.host("anna"), network.host("boris")
    await introduce(*hosts)
    async with linked(*hosts, settings=SETTINGS) as (anna, boris):
        anna.transport.send(boris.peer, b"once")
        await asyncio.sleep(25.0)
        assert anna.transport.linked() == (boris.peer,)
        await asyncio.sleep(30.0)
        assert anna.transport.linked() == boris.transport.linked() == ()
        assert not anna.lost and not boris.lost
    for host in hosts:
        await host.close()


async def test_a_message_that_is_said_while_its_link_ends_opens_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was sent on the stream that had said END, which ended the peer."""
    network = MemoryNetwork()
    hosts = network.host("anna"), network.host("boris")
    await introduce(*hosts)
    finish = MemoryStream.finish
    async with linked(*hosts, settings=SETTINGS) as (anna, boris):

        async def finish_and_say(stream: MemoryStream, *, timeout_s: float) -> None:
            asyncio.get_running_loop().call_soon(anna.transport.send, boris.peer, b"one more")
            await finish(stream, timeout_s=timeout_s)

        anna.transport.send(boris.peer, b"once")
        await asyncio.sleep(25.0)
        with monkeypatch.context() as patched:
            patched.setattr(MemoryStream, "finish", finish_and_say)
            await asyncio.sleep(20.0)
        assert boris.said() == [b"once", b"one more"]
        assert not anna.lost and not boris.lost
    for host in hosts:
        await host.close()


async def test_a_message_to_nobody_is_reported_lost() -> None:
    network = MemoryNetwork()
    host = network.host("anna")
    stranger = network.host("boris")
    await introduce(host, stranger)
    await stranger.close()
    async with linked(host) as (anna,):
        anna.transport.send(stranger.peer_id, b"anybody there?")
        await asyncio.sleep(30.0)
        assert [peer for peer, _ in anna.lost] == [stranger.peer_id]
    await host.close()


async def test_a_peer_that_vanishes_is_noticed_within_the_silence_limit() -> None:
    network = MemoryNetwork(Weather(silence_s=1e6))
    hosts = network.host("anna"), network.host("boris")
    await introduce(*hosts)
    async with linked(*hosts, settings=SETTINGS) as (anna, boris):
        anna.transport.send(boris.peer, b"hello")
        await asyncio.sleep(1.0)
        network.simulated.pause(boris.peer)
        await asyncio.sleep(SETTINGS.silence_max_s - 6.0)
        assert not anna.lost
        await asyncio.sleep(SETTINGS.heartbeat_s + 7.0)
        assert [peer for peer, _ in anna.lost] == [boris.peer]
        network.simulated.resume(boris.peer)
        await asyncio.sleep(1.0)
    for host in hosts:
        await host.close()


async def test_a_slow_reader_delays_only_itself_and_its_oldest_messages_are_dropped() -> None:
    settings = TransportSettings(queue_max_messages=100, queue_max_bytes=1 << 20)

    network = MemoryNetwork()
    hosts = network.host("anna"), network.host("boris"), network.host("clara")
    network.simulated.set_link(hosts[1].peer_id, down_bytes_s=2e4)
    await introduce(*hosts)
    async with linked(*hosts, settings=settings) as (anna, boris, clara):
        for number in range(300):
            anna.transport.send(boris.peer, number.to_bytes(2) * 20_000)
            anna.transport.send(clara.peer, number.to_bytes(2))
            await asyncio.sleep(0.01)
        await asyncio.sleep(1.0)
        assert clara.said() == [number.to_bytes(2) for number in range(300)]
        assert anna.transport.counters["messages_dropped"] > 50
        assert {peer for peer, _ in anna.lost} == {boris.peer}
    for host in hosts:
        await host.close()


async def test_a_peer_that_floods_is_read_more_slowly_and_others_are_not() -> None:
    settings = TransportSettings(
        received_per_s=10.0, received_burst=20.0, queue_max_messages=10_000
    )

    network = MemoryNetwork()
    hosts = network.host("anna"), network.host("boris"), network.host("clara")
    await introduce(*hosts)
    async with linked(*hosts, settings=settings) as (anna, boris, clara):
        for _ in range(1000):
            boris.transport.send(anna.peer, b"flood")
        await asyncio.sleep(5.0)
        clara.transport.send(anna.peer, b"calm")
        await asyncio.sleep(1.0)
        from_boris = [1 for peer, _ in anna.heard if peer == boris.peer]
        assert len(from_boris) <= 20 + 10 * 6 + 1
        assert (clara.peer, b"calm") in anna.heard
        assert anna.transport.counters["senders_slowed"] > 0
    for host in hosts:
        await host.close()


async def test_a_frame_that_is_no_message_ends_the_link_and_only_that() -> None:
    network = MemoryNetwork()
    hosts = network.host("anna"), network.host("boris")
    await introduce(*hosts)
    async with linked(hosts[0]) as (anna,):
        protocol = "shoal/test-run/control/1"
        for frame in (b"", b"\x07what", b"\x01" + bytes(200_000)):
            stream = await hosts[1].open_stream(anna.peer, protocol, timeout_s=5.0)
            await stream.send(frame, timeout_s=5.0)
            with pytest.raises(StreamBroken):
                await stream.receive(timeout_s=30.0)
        assert anna.transport.counters["frames_refused"] == 3
        stream = await hosts[1].open_stream(anna.peer, protocol, timeout_s=5.0)
        await stream.send(b"\x01fine", timeout_s=5.0)
        await asyncio.sleep(1.0)
        assert anna.said() == [b"fine"]
        stream.abort()
    for host in hosts:
        await host.close()


async def test_a_message_over_the_limit_is_the_senders_own_mistake() -> None:
    network = MemoryNetwork()
    host = network.host("anna")
    async with linked(host) as (anna,):
        with pytest.raises(ValueError, match="the limit is"):
            anna.transport.send(network.host("boris").peer_id, bytes(1 << 20))
    await host.close()


@pytest.mark.parametrize("seed", range(10))
def test_in_a_storm_messages_arrive_at_most_once_and_missing_ones_were_reported(
    seed: int,
) -> None:
    async def main() -> None:
        storm = Weather(latency_s=(0.05, 0.5), jitter_s=0.1, connection_loss=0.02, duplicate=0.1)
        network = MemoryNetwork(CALM)
        hosts = network.host("anna"), network.host("boris")
        await introduce(*hosts)
        network.simulated.weather = storm
        async with linked(*hosts) as (anna, boris):
            for number in range(100):
                anna.transport.send(boris.peer, bytes([number]))
                await asyncio.sleep(0.5)
            await asyncio.sleep(30.0)
            said = boris.said()
            assert len(said) == len(set(said)), f"seed {seed}: a message arrived twice"
            if len(said) < 100:
                assert anna.lost, f"seed {seed}: a loss was not reported"
        for host in hosts:
            await host.close()

    run(main(), seed=seed)


# Bulk streams


@pytest.mark.parametrize("size", [100, 3000])
async def test_more_or_less_than_the_layout_says_breaks_the_stream(size: int) -> None:
    problems: list[str] = []

    async def expect_2000(bulk: Bulk, header: bytes) -> None:
        try:
            await bulk.receive_into(memoryview(bytearray(2000)))
        except StreamBroken as error:
            problems.append(error.reason)
            raise

    network = MemoryNetwork()
    hosts = network.host("anna"), network.host("boris")
    await introduce(*hosts)
    async with linked(*hosts, bulk=expect_2000) as (anna, boris):
        bulk = await anna.transport.open_bulk(boris.peer, b"header")
        await bulk.send(bytes(size))
        with pytest.raises(StreamBroken):
            await bulk.finish()
            await bulk.granted(timeout_s=10.0)
        bulk.abort()
        await asyncio.sleep(1.0)
        assert len(problems) == 1
    for host in hosts:
        await host.close()


async def test_an_answer_that_is_not_acknowledged_by_the_deadline_is_not_refused() -> None:
    """A reducer on a slow line: its agent ended with the round, and came back without its work."""

    async def answer(bulk: Bulk, header: bytes) -> None:
        try:
            async with asyncio.timeout(2.0):
                await bulk.send(bytes(100_000))
                await bulk.finish()
        except TimeoutError:
            await bulk.refuse("the round's deadline has come")

    network = MemoryNetwork()
    hosts = network.host("anna"), network.host("boris")
    await introduce(*hosts)
    async with linked(*hosts, bulk=answer) as (anna, boris):
        bulk = await anna.transport.open_bulk(boris.peer, b"header")
        await asyncio.sleep(5.0)  # nobody reads, so nothing is acknowledged
        bulk.abort()
        anna.transport.send(boris.peer, b"still there?")
        await asyncio.sleep(1.0)
        assert boris.said() == [b"still there?"]
    for host in hosts:
        await host.close()


async def test_bulk_to_nobody_says_so() -> None:
    network = MemoryNetwork()
    host, stranger = network.host("anna"), network.host("boris")
    await introduce(host, stranger)
    await stranger.close()
    async with linked(host) as (anna,):
        with pytest.raises(PeerUnreachable):
            await anna.transport.open_bulk(stranger.peer_id, b"header")
    await host.close()


async def test_a_relayed_connection_carries_no_bulk(monkeypatch: pytest.MonkeyPatch) -> None:
    from dht.memory.stream import MemoryStream

    network = MemoryNetwork()
    hosts = network.host("anna"), network.host("boris")
    await introduce(*hosts)
    async with linked(*hosts) as (anna, boris):
        monkeypatch.setattr(MemoryStream, "relayed", property(lambda stream: True))
        with pytest.raises(BulkRefused, match="relays carry no bulk"):
            await anna.transport.open_bulk(boris.peer, b"header")
    for host in hosts:
        await host.close()


async def test_only_listed_peers_may_open_links_and_streams_where_there_is_a_list() -> None:
    network = MemoryNetwork()
    hosts = network.host("anna"), network.host("boris"), network.host("clara")
    await introduce(*hosts)
    guarded = GuardedHost(hosts[0], only(hosts[1].peer_id))
    async with linked(guarded) as (anna,), linked(*hosts[1:]) as others:
        for other in others:
            other.transport.send(anna.peer, b"may I?")
        await asyncio.sleep(5.0)
        assert {peer for peer, _ in anna.heard} == {hosts[1].peer_id}
        assert guarded.refused >= 1
        assert any("admits only the peers it lists" in reason for _, reason in others[1].lost)
        with pytest.raises(BulkRefused, match="admits only the peers it lists"):
            bulk = await others[1].transport.open_bulk(anna.peer, b"header")
            await bulk.granted(timeout_s=5.0)
    for host in hosts:
        await host.close()


async def test_a_kept_link_that_is_refused_is_dialled_again_with_the_next_heartbeat() -> None:
    """It was dialled again at once, 30 times a second."""
    network = MemoryNetwork()
    hosts = network.host("anna"), network.host("boris")
    await introduce(*hosts)
    guarded = GuardedHost(hosts[0], only(hosts[0].peer_id))
    async with linked(guarded, hosts[1]) as (anna, boris):
        boris.transport.keep([anna.peer])
        await asyncio.sleep(0.9 * TransportSettings().heartbeat_s)
        assert guarded.refused == 1
        await asyncio.sleep(2 * TransportSettings().heartbeat_s)
        assert 2 <= guarded.refused <= 3
    for host in hosts:
        await host.close()
