"""Relaying: shares of the rate, who may use it, and connections through a third peer."""

from __future__ import annotations

import asyncio
import secrets
import socket

import pytest

from dht.errors import NOT_SERVED, CallRefused, PeerUnreachable, StreamBroken
from dht.host import FRAME_MAX_BYTES
from dht.identity import PeerId
from dht.libp2p.framing.sealing import NUMBER_BYTES
from dht.libp2p.lane import meetings, observers, relaying
from dht.libp2p.lane.connection import LaneSettings, Path
from dht.libp2p.lane.relaying import Relay
from dht.libp2p.lane.wire import CIRCUIT_PROTOCOL, PUNCH_PROTOCOL, Circuit, Leg, Via, decode, encode
from tests.dht.libp2p.lane_ends import (
    ANNA,
    BORIS,
    CLARA,
    HERE,
    End,
    OnLoopback,
    closed,
    one_round,
    opened,
    with_loopback,
)
from tests.integration.loopback import WAIT_S, until

DORA = PeerId("dora")
RATE = 1e9
APART = LaneSettings(meeting_s=0.2, wait_s=0.0)


def number() -> bytes:
    return secrets.token_bytes(NUMBER_BYTES)


# --- the relay ----------------------------------------------------------------------------------


async def test_a_relay_that_is_off_or_knows_no_such_members_refuses() -> None:
    relay = Relay()
    with pytest.raises(ValueError, match="does not relay"):
        await relay.admit(ANNA, BORIS, number())
    relay.set_rate(RATE)
    with pytest.raises(ValueError, match="members of one run"):
        await relay.admit(ANNA, BORIS, number())
    relay.judge = only_anna_and_boris
    with pytest.raises(ValueError, match="members"):
        await relay.admit(ANNA, DORA, number())
    with pytest.raises(ValueError, match="different ends"):
        await relay.admit(ANNA, ANNA, number())
    assert relay.counters["refused"] == 4 and relay.circuits == 0
    await relay.close()


async def only_anna_and_boris(peer: PeerId, other: PeerId) -> str | None:
    return None if {peer, other} == {ANNA, BORIS} else "they are no members"


async def everybody(peer: PeerId, other: PeerId) -> str | None:
    return None


async def test_a_third_peer_cannot_join_a_circuit_or_make_room_by_asking_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relaying, "CIRCUITS_MAX", 4)
    monkeypatch.setattr(relaying, "PER_PEER_MAX", 2)
    monkeypatch.setattr(relaying, "JOIN_S", 0.2)
    relay = Relay()
    relay.judge = everybody
    relay.set_rate(RATE)
    ours = number()
    leg = await relay.admit(ANNA, BORIS, ours)
    other = await relay.admit(DORA, ANNA, ours)
    assert leg != other and relay.circuits == 2, "the same number names another circuit"
    with pytest.raises(ValueError, match="asked for already"):
        await relay.admit(ANNA, BORIS, ours)
    await relay.admit(DORA, CLARA, number())
    with pytest.raises(ValueError, match="2 of yours already"):
        await relay.admit(DORA, CLARA, number())
    await relay.admit(ANNA, BORIS, number())
    with pytest.raises(ValueError, match="2 of yours already"):
        await relay.admit(ANNA, DORA, ours)
    await until(lambda: relay.circuits == 0, timeout_s=WAIT_S)
    with socket.socket() as late:
        assert not relay.arrive(leg, late), "nobody came in time"
    await relay.close()


async def test_requests_of_others_take_none_of_a_peer_s_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relaying, "PER_PEER_MAX", 2)
    relay = Relay()
    relay.judge = everybody
    relay.set_rate(RATE)
    for _ in range(2):
        await relay.admit(DORA, ANNA, number())
        await relay.admit(CLARA, ANNA, number())
    await relay.admit(ANNA, BORIS, number())
    await relay.close()


async def test_the_peer_with_the_most_circuits_makes_room_with_the_longest_unused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relaying, "CIRCUITS_MAX", 4)
    relay = Relay()
    relay.judge = everybody
    relay.set_rate(RATE)
    loop = asyncio.get_running_loop()
    used, unused = await joined(relay, DORA, CLARA), await joined(relay, DORA, CLARA)
    await relay.admit(DORA, PeerId("emma"), number())
    await relay.admit(BORIS, PeerId("emma"), number())
    await loop.sock_sendall(used[0], b"news")
    assert await loop.sock_recv(used[1], 9) == b"news"
    await relay.admit(ANNA, BORIS, number())
    assert await loop.sock_recv(unused[1], 1) == b"", "the longest unused one of Dora's"
    with pytest.raises(ValueError, match="4 connections already"):
        await relay.admit(ANNA, CLARA, number())
    await loop.sock_sendall(used[0], b"more")
    assert await loop.sock_recv(used[1], 9) == b"more"
    await relay.close()
    for end in (*used, *unused):
        end.close()


async def test_a_member_that_is_preferred_takes_the_place_of_strangers_and_not_the_other_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Strangers that had a circuit each kept members out."""
    monkeypatch.setattr(relaying, "CIRCUITS_MAX", 2)
    relay = Relay(prefers=lambda peer: peer == ANNA)
    relay.judge = everybody
    relay.set_rate(RATE)
    for stranger in (CLARA, DORA):
        await relay.admit(stranger, BORIS, number())
    for _ in range(2):
        await relay.admit(ANNA, BORIS, number())
    await until(lambda: relay.circuits == 2, timeout_s=WAIT_S)
    with pytest.raises(ValueError, match="2 connections already"):
        await relay.admit(CLARA, BORIS, number())
    await relay.close()


async def joined(relay: Relay, one: PeerId, other: PeerId) -> tuple[socket.socket, socket.socket]:
    """Both ends of a circuit, after the byte that says that it is joined."""
    loop, circuit, ends = asyncio.get_running_loop(), number(), []
    with socket.create_server((HERE, 0)) as server:
        for peer, second in ((one, other), (other, one)):
            end = socket.create_connection(server.getsockname())
            leg, _ = server.accept()
            for each in (end, leg):
                each.setblocking(False)
            assert relay.arrive(await relay.admit(peer, second, circuit), leg)
            ends.append(end)
    for end in ends:
        assert await loop.sock_recv(end, 1) == b"\x01"
    return ends[0], ends[1]


async def swallowed(end: socket.socket, size: int) -> None:
    loop, left = asyncio.get_running_loop(), size
    while left:
        part = await loop.sock_recv(end, min(left, 1 << 16))
        assert part
        left -= len(part)


async def carried_s(ends: tuple[socket.socket, socket.socket], size: int) -> float:
    """Time in which bytes pass from one end to the other."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    await asyncio.gather(loop.sock_sendall(ends[0], bytes(size)), swallowed(ends[1], size))
    return loop.time() - began


async def test_pairs_share_the_rate_and_the_owner_s_meter_counts_every_byte() -> None:
    """One pair has three circuits, the other one; both send as much, and end together."""
    metered = 0

    async def meter(count: int) -> None:
        nonlocal metered
        metered += count

    relay = Relay()
    relay.judge, relay.meter = everybody, meter
    rate = 1.5e6  # a chunk takes 40 ms: a busy machine is late by less
    relay.set_rate(rate)
    three = [await joined(relay, ANNA, BORIS) for _ in range(3)]
    one = await joined(relay, CLARA, DORA)
    loop = asyncio.get_running_loop()
    began = loop.time()
    took_s = await asyncio.gather(
        carried_s(one, 900_000), *(carried_s(each, 300_000) for each in three)
    )
    assert loop.time() - began >= 1.8e6 / rate * 0.7, "the rate holds for all together"
    assert took_s[0] < 1.3 * max(took_s[1:]), "one circuit has half the rate"
    assert metered == relay.counters["bytes"] == 1_800_000
    assert relay.circuits == relay.counters["circuits"] == 4
    one[0].close()
    await until(lambda: relay.circuits == 3, timeout_s=WAIT_S)
    assert not await loop.sock_recv(one[1], 1), "the other end hears that this one has gone"
    relay.set_rate(None)
    await until(lambda: relay.circuits == 0, timeout_s=WAIT_S)
    for end in (one[1], *(end for each in three for end in each)):
        end.close()
    await relay.close()


async def test_a_circuit_without_a_byte_is_closed_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relaying, "IDLE_MAX_S", 0.3)
    relay = Relay()
    relay.judge = everybody
    relay.set_rate(RATE)
    ends = await joined(relay, ANNA, BORIS)
    await carried_s(ends, 1000)
    assert relay.circuits == 1
    await until(lambda: relay.circuits == 0, timeout_s=WAIT_S)
    for end in ends:
        end.close()
    await relay.close()


# --- lanes --------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _loopback_is_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (meetings, observers):
        monkeypatch.setattr(module, "is_outer", with_loopback)
    monkeypatch.setattr(meetings, "is_near", lambda ip: False)


class Home(End):
    """A peer that is connected directly with nobody but Clara."""

    async def where(self, peer: PeerId) -> tuple[str, ...]:
        return (HERE,) if peer == CLARA else ()


class Routers(OnLoopback):
    """Lets connections between homes through, or not."""

    closed = True
    has_relay = True

    async def call(self, peer: PeerId, protocol: str, message: bytes) -> bytes:
        if self.closed and protocol == PUNCH_PROTOCOL:
            raise PeerUnreachable(peer, "its router lets nothing through")
        if not self.has_relay and protocol == CIRCUIT_PROTOCOL:
            raise CallRefused(peer, protocol, NOT_SERVED)
        return await super().call(peer, protocol, message)


class Homes:
    """Anna and Boris behind routers, and Clara outside, who may relay."""

    def __init__(self, settings: LaneSettings = APART) -> None:
        self.anna, self.boris = Home(ANNA, settings), Home(BORIS, settings)
        self.clara = End(CLARA, settings)
        self.clara.lane.start([HERE])
        self.clara.lane.relay.judge = only_anna_and_boris
        self.clara.lane.relay.set_rate(RATE)
        self.routers = []
        for end, other in ((self.anna, self.boris), (self.boris, self.anna)):
            end.others = {other.me: other, CLARA: self.clara}
            routers = Routers(end)
            self.routers.append(routers)
            end.open_lane(settings, routers)

    @property
    def relay(self) -> Relay:
        return self.clara.lane.relay

    async def close(self) -> None:
        await closed(self.anna, self.boris, self.clara)


async def test_streams_go_through_a_relay_where_no_meeting_succeeds() -> None:
    homes = Homes()
    for size in (0, FRAME_MAX_BYTES):
        await one_round(homes.anna, homes.boris, size)
        await until(lambda: homes.anna.idle(BORIS) == 1, timeout_s=WAIT_S)
    assert homes.anna.lane.paths()[BORIS] is Path.RELAYED
    assert homes.boris.lane.paths()[ANNA] is Path.RELAYED
    assert homes.relay.counters["circuits"] == 1
    assert homes.relay.counters["bytes"] > FRAME_MAX_BYTES
    await homes.close()


async def test_the_relay_sees_only_ciphertext_and_cannot_change_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The relay passes the last byte of every chunk on changed, once it is told to."""
    seen, spoil = bytearray(), False
    secret = b"the quick brown fox " * 500

    homes = Homes()

    async def pump(circuit: object, source: socket.socket, target: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while data := bytearray(await loop.sock_recv(source, 1 << 16)):
            seen.extend(data)
            if spoil:
                data[-1] ^= 1
            await loop.sock_sendall(target, data)

    monkeypatch.setattr(homes.relay, "_pump", pump)
    ours = await opened(homes.anna)
    theirs = await homes.boris.served.get()
    await ours.send(secret, timeout_s=WAIT_S)
    assert await theirs.receive(timeout_s=WAIT_S) == secret
    assert len(seen) > len(secret) and secret[:20] not in seen
    spoil = True
    await ours.send(secret, timeout_s=WAIT_S)
    with pytest.raises(StreamBroken, match="not sealed by the other side"):
        await theirs.receive(timeout_s=WAIT_S)
    await homes.close()


async def test_without_consent_the_reason_names_what_would_help() -> None:
    homes = Homes()
    homes.relay.set_rate(None)
    reason = await homes.anna.lane.reach(BORIS)
    assert "its router lets nothing through" in str(reason)
    assert "no connected peer relays bulk data" in str(reason), "not that it refused a call"
    assert "--relay-bulk" in str(reason)
    await homes.close()


async def test_a_bootstrap_peer_without_a_lane_is_one_that_does_not_relay() -> None:
    """The doctor said of it that a protocol is not served."""
    homes = Homes()
    homes.routers[0].has_relay = False
    assert "no connected peer relays bulk data" in str(await homes.anna.lane.reach(BORIS))
    await homes.close()


async def test_meetings_are_tried_each_time_as_long_as_there_is_no_other_path() -> None:
    homes = Homes(LaneSettings(meeting_s=1.0, wait_s=0.0))
    homes.relay.set_rate(None)
    assert "its router lets nothing through" in str(await homes.anna.lane.reach(BORIS))
    homes.routers[0].closed = False
    assert await homes.anna.lane.reach(BORIS) is None
    assert homes.anna.lane.paths() == {BORIS: Path.PUNCHED}
    await homes.close()


async def test_a_better_path_is_taken_again_when_it_opens_and_left_when_it_fails() -> None:
    homes = Homes(LaneSettings(meeting_s=1.0, wait_s=0.0, retry_first_s=0.2))
    assert await homes.anna.lane.reach(BORIS) is None
    assert homes.anna.lane.paths() == {BORIS: Path.RELAYED}
    homes.routers[0].closed = False
    homes.anna.lane._peers[BORIS].idle[0].cut()  # the relay went away
    await until(lambda: not homes.anna.lane.has_connection(BORIS), timeout_s=WAIT_S)
    await asyncio.sleep(0.25)
    assert await homes.anna.lane.reach(BORIS) is None
    assert homes.anna.lane.paths() == {BORIS: Path.PUNCHED}
    homes.routers[0].closed = True
    homes.anna.lane.forget(BORIS)
    assert await homes.anna.lane.reach(BORIS) is None
    assert homes.anna.lane.paths() == {BORIS: Path.RELAYED}
    await homes.close()


async def test_nobody_is_sent_to_a_relay_with_which_it_is_not_connected() -> None:
    homes = Homes()
    with pytest.raises(ValueError, match="no direct connection with this relay"):
        await homes.boris.meetings.come(ANNA, encode(Via(DORA, number())))
    with pytest.raises(ValueError, match="not Via"):
        await homes.boris.meetings.come(ANNA, b"\xc1")
    await homes.close()


async def test_a_stranger_gets_no_leg_and_a_number_from_nowhere_opens_nothing() -> None:
    homes = Homes()
    with pytest.raises(ValueError, match="no members"):
        await homes.clara.lane.grant(DORA, encode(Circuit(BORIS, number())))
    granted = await homes.clara.lane.grant(ANNA, encode(Circuit(BORIS, number())))
    leg = decode(Leg, granted)
    loop = asyncio.get_running_loop()
    with socket.create_connection((HERE, leg.port)) as stranger:
        stranger.setblocking(False)
        await loop.sock_sendall(stranger, bytes((NUMBER_BYTES,)) + number())
        assert not await loop.sock_recv(stranger, 1)
    assert homes.clara.lane.counters["turned_away"] == 1
    await homes.close()
