"""Meetings of two peers of which neither can be dialled, on loopback.

Routers of all kinds are in ``tests/integration/wan/test_meetings.py``.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path as FilePath

import pytest
from msgspec.structs import replace

from dht.errors import HostClosed
from dht.identity import PeerId
from dht.libp2p.framing.sealing import KEY_BYTES, NUMBER_BYTES, Ticket
from dht.libp2p.lane import meetings, observers, punching
from dht.libp2p.lane.connection import LaneSettings, Path
from dht.libp2p.lane.meetings import MEETINGS_PER_MINUTE
from dht.libp2p.lane.punching import Opening
from dht.libp2p.lane.wire import (
    PUNCH_MAX_BYTES,
    PUNCH_PROTOCOL,
    LaneOffer,
    Punch,
    PunchOffer,
    decode,
    encode,
    is_outer,
)
from tests.dht.libp2p.lane_ends import (
    ANNA,
    BORIS,
    CLARA,
    HERE,
    PATIENT,
    End,
    OnLoopback,
    closed,
    one_round,
    with_loopback,
)
from tests.integration.loopback import WAIT_S, until

HERE_IPV6 = "::1"
DORA = PeerId("dora")


def _has_ipv6() -> bool:
    try:
        socket.create_server((HERE_IPV6, 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6, as a container")

TICKET = Ticket(bytes(NUMBER_BYTES), bytes(KEY_BYTES), bytes(KEY_BYTES))
OFFER = PunchOffer(TICKET, (("203.0.113.7", 7700),))


@pytest.fixture(autouse=True)
def _loopback_is_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (meetings, observers):
        monkeypatch.setattr(module, "is_outer", with_loopback)
    monkeypatch.setattr(meetings, "is_near", lambda ip: False)


def hidden(settings: LaneSettings = PATIENT) -> tuple[End, End, OnLoopback]:
    """Two ends without a port that others may dial, and what the first one calls through."""
    anna, boris = End(ANNA, settings), End(BORIS, settings)
    anna.others[BORIS], boris.others[ANNA] = boris, anna
    outsides = []
    for end in (anna, boris):
        end.at = ()
        outside = OnLoopback(end)
        outsides.append(outside)
        end.open_lane(settings, outside)
    return anna, boris, outsides[0]


def files_open() -> int:
    return len(list(FilePath("/proc/self/fd").iterdir()))


async def test_two_ports_that_dial_each_other_make_one_connection() -> None:
    one, other = Opening(), Opening()
    async with (
        asyncio.timeout(WAIT_S),
        one.meeting([(HERE, other.port)]) as found,
        other.meeting([(HERE, one.port)]) as there,
    ):
        here, end = await found.get(), await there.get()
        assert here.getpeername() == end.getsockname()
        here.close()
        end.close()
    one.close()
    other.close()


async def test_a_stream_waits_for_a_meeting_and_the_next_one_has_its_connection() -> None:
    anna, boris, outside = hidden(LaneSettings(wait_s=0.0))
    assert await anna.lane.reach(BORIS) is None
    for size in (0, 100_000):
        await one_round(anna, boris, size)
    assert outside.called == 1 and anna.lane.counters["met"] == 1
    assert anna.lane.has_connection(BORIS)
    anna.lane.forget(BORIS)
    await one_round(anna, boris, 10)
    assert outside.called == 2
    await closed(anna, boris)


async def test_a_peer_that_dialled_out_and_lets_nobody_in_is_met_instead() -> None:
    """As a home that the daemon is connected with. Its uploads went through the daemon."""
    anna, boris, outside = hidden()
    boris.lane.start([HERE])
    anna.at = (HERE,)  # the daemon is connected with it
    with socket.create_server((HERE, 0)) as gone:
        port = gone.getsockname()[1]

    def elsewhere(offer: bytes) -> bytes:
        return encode(replace(decode(LaneOffer, offer), port=port))

    anna.change = elsewhere
    for size in (0, 100_000):
        await one_round(anna, boris, size)
    assert outside.called == 1 and anna.lane.counters["met"] == 1
    assert anna.asked == 2, "it, and a peer outside for the own outer address"
    assert anna.lane.paths()[BORIS] is Path.PUNCHED

    anna.lane.forget(BORIS)
    anna.change = bytes
    await one_round(anna, boris, 10)
    assert anna.lane.paths()[BORIS] is Path.DIRECT
    await closed(anna, boris)


async def test_a_peer_outside_tells_the_outer_port() -> None:
    anna, boris, outside = hidden()
    clara = End(CLARA, PATIENT)
    clara.lane.start([HERE])
    outside.seen = "203.0.113.9"  # would lead nowhere
    anna.others[CLARA] = clara
    assert await anna.lane.reach(BORIS) is None
    assert clara.lane.counters["accepted"] == 1
    await closed(anna, boris, clara)


async def test_peers_that_could_not_be_dialled_are_asked_last_for_the_outer_port() -> None:
    anna, boris, outside = hidden()
    clara = End(CLARA, PATIENT)
    clara.lane.start([HERE])
    outside.seen = "203.0.113.9"  # would lead nowhere
    anna.others[CLARA] = clara
    outside.outside = shut = (PeerId("dora"), PeerId("emil"))
    for peer in shut:
        assert await anna.lane.reach(peer) is not None
    assert await anna.lane.reach(BORIS) is None
    await closed(anna, boris, clara)


@needs_ipv6
async def test_peers_that_both_have_ipv6_meet_over_it_where_ipv4_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    anna, boris, outside = hidden()
    monkeypatch.setattr(punching, "own_ipv6", lambda: HERE_IPV6)
    outside.seen = "203.0.114.9"  # leads nowhere
    boris.meetings.observers.outside.seen = "203.0.114.9"  # type: ignore[attr-defined]
    assert await anna.lane.reach(BORIS) is None
    assert anna.lane.paths()[BORIS] is Path.PUNCHED
    await one_round(anna, boris, 1000)
    await closed(anna, boris)


@needs_ipv6
async def test_of_connections_over_ipv4_and_ipv6_one_is_kept_and_the_other_one_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    families: list[int] = []
    all_up = asyncio.Barrier(4)  # neither side takes one before it has both
    hand_over = punching._hand_over

    async def noted(connected: socket.socket, found: asyncio.Queue[socket.socket]) -> None:
        families.append(connected.family)
        await all_up.wait()
        await hand_over(connected, found)

    monkeypatch.setattr(punching, "_hand_over", noted)
    monkeypatch.setattr(punching, "own_ipv6", lambda: HERE_IPV6)
    before = files_open()
    anna, boris, _ = hidden()
    for _ in range(3):
        families.clear()
        assert await anna.lane.reach(BORIS) is None
        assert sorted(families) == sorted(2 * [socket.AF_INET, socket.AF_INET6])
        await one_round(anna, boris, 1000)
        await until(lambda: not boris.lane._strangers, timeout_s=WAIT_S)
        assert (anna.connections, boris.connections) == (1, 1)
        assert boris.meetings._under_way == 0
        assert files_open() == before + 2, "one connection, and both ends"
        anna.lane.forget(BORIS)
        await until(lambda: boris.connections == 0, timeout_s=WAIT_S)
    await closed(anna, boris)


@needs_ipv6
async def test_a_peer_without_an_outer_address_of_ipv4_is_met_over_ipv6(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    anna, boris, outside = hidden()
    monkeypatch.setattr(punching, "own_ipv6", lambda: HERE_IPV6)
    outside.seen = ""
    assert await anna.lane.reach(BORIS) is None
    await closed(anna, boris)


async def test_peers_that_see_an_address_of_ipv6_do_not_hide_that_of_ipv4(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a peer without IPv6 could not be met any more. Clara has no lane."""
    monkeypatch.setattr(punching, "own_ipv6", lambda: "2a00:78:1:1::2")
    anna, _, outside = hidden()
    dora = End(DORA, PATIENT)
    dora.lane.start([HERE_IPV6])
    anna.others[DORA] = dora
    found = {CLARA: HERE, DORA: HERE_IPV6}

    async def observing() -> Sequence[tuple[PeerId, str]]:
        return list(found.items())

    async def seen_by(peer: PeerId) -> str:
        return HERE_IPV6 if peer == DORA else HERE

    monkeypatch.setattr(outside, "observers", observing)
    monkeypatch.setattr(outside, "seen_by", seen_by)
    named = [await addresses_of(anna)]
    del anna.others[DORA]
    found = {DORA: HERE, CLARA: HERE}  # its daemon is connected over both, its lane is off
    named.append(await addresses_of(anna))
    await closed(anna, dora)
    assert [addresses[0][0] for addresses in named] == [HERE, HERE]


async def addresses_of(end: End) -> tuple[tuple[str, int], ...]:
    """What an end names in a call to a meeting."""
    opening = Opening()
    asks = end.meetings.observers
    try:
        async with asks.outer_addresses(opening) as named:
            return named
    finally:
        opening.close()


@needs_ipv6
async def test_an_opening_dials_over_ipv6_from_no_address_but_the_one_that_it_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel may prefer another one, whose packets the router of the other side keeps out."""
    monkeypatch.setattr(punching, "own_ipv6", lambda: "2a00:78:1:1::2")  # just lost
    lost = Opening()
    monkeypatch.setattr(punching, "own_ipv6", lambda: HERE_IPV6)
    kept = Opening()
    with pytest.raises(OSError, match="assign"):
        (await lost.dial(HERE_IPV6, kept.port)).close()
    dialled = await kept.dial(HERE_IPV6, lost.port)
    assert dialled.getsockname()[:2] == (HERE_IPV6, kept.port)
    dialled.close()
    for opening in (lost, kept):
        opening.close()


def test_the_longest_addresses_fit_into_a_request() -> None:
    longest = Punch(
        (("203.100.114.107", 65535), ("2606:4700:4700:4700:4700:4700:4700:4700", 65535))
    )
    assert len(encode(longest)) <= PUNCH_MAX_BYTES
    assert decode(Punch, encode(longest)) == longest


async def test_a_stranger_at_the_port_of_a_meeting_does_not_spoil_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The stranger connects first, to both ports, and shows a ticket that does not exist."""
    strangers: list[socket.socket] = []

    class Visited(Opening):
        def __init__(self) -> None:
            super().__init__()
            strangers.append(socket.create_connection((HERE, self.port)))
            strangers[-1].sendall(b"\x10" + bytes(16))

    monkeypatch.setattr(meetings, "Opening", Visited)
    anna, boris, _ = hidden(LaneSettings(answer_timeout_s=0.5))
    assert await anna.lane.reach(BORIS) is None
    assert boris.lane.counters["turned_away"] == 1
    await closed(anna, boris)
    for stranger in strangers:
        stranger.close()


async def test_a_meeting_that_fails_says_so_and_is_not_tried_again_at_once() -> None:
    anna, boris, outside = hidden(LaneSettings(meeting_s=0.3))
    outside.seen = ""
    assert "outer address" in str(await anna.lane.reach(BORIS))
    assert anna.lane.is_doubted(BORIS)
    await closed(anna, boris)


async def test_a_daemon_that_is_being_restarted_is_no_fault_of_the_other_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    anna, boris, outside = hidden()

    async def closed_host(peer: PeerId) -> Sequence[str]:
        raise HostClosed("the daemon is being restarted")

    with monkeypatch.context() as restarting:
        restarting.setattr(outside, "where", closed_host)
        assert "restarted" in str(await anna.lane.reach(BORIS))
        assert not anna.lane.is_doubted(BORIS)
    assert await anna.lane.reach(BORIS) is None
    await closed(anna, boris)


async def test_nobody_is_sent_to_dial_a_private_address_or_into_too_many_meetings() -> None:
    anna, boris, _ = hidden(LaneSettings(meetings_max=1, dial_timeout_s=0.5))
    for ip in ("192.168.1.1", "10.0.0.1", "0.0.0.0", "169.254.169.254"):
        with pytest.raises(ValueError, match="no public address"):
            await boris.meetings.meet(ANNA, encode(Punch(((ip, 7700),))))
    with pytest.raises(ValueError, match="not Punch"):
        await boris.meetings.meet(ANNA, b"\xc1")
    offer = decode(PunchOffer, await boris.meetings.meet(ANNA, encode(Punch(((HERE, 1024),)))))
    assert [ip for ip, _ in offer.addresses] == [HERE]
    with pytest.raises(ValueError, match="more than 1 meetings"):
        await boris.meetings.meet(ANNA, encode(Punch(((HERE, 1024),))))
    await closed(anna, boris)


@needs_ipv6
async def test_nobody_is_sent_to_services_of_its_own_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The called peer chooses the first bytes of what the caller would send there."""
    anna, boris, outside = hidden(LaneSettings(meeting_s=1.0))
    monkeypatch.setattr(meetings, "is_near", punching.is_near)
    with socket.create_server((HERE_IPV6, 0), family=socket.AF_INET6) as service:
        service.setblocking(False)

        by_daemon = outside.call

        async def named(peer: PeerId, protocol: str, message: bytes) -> bytes:
            if protocol != PUNCH_PROTOCOL:
                return await by_daemon(peer, protocol, message)
            there = HERE_IPV6, service.getsockname()[1]
            return encode(PunchOffer(Ticket(b"flush_all\r\n.....", bytes(32), bytes(32)), (there,)))

        monkeypatch.setattr(outside, "call", named)
        reason = await anna.lane.reach(BORIS)
        with pytest.raises(BlockingIOError):
            service.accept()[0].close()
    assert "its own network" in str(reason)
    await closed(anna, boris)


async def test_one_member_has_a_third_party_dialled_a_few_times_a_minute() -> None:
    """Each meeting dials the address; 40 members would flood it."""
    port = 1024  # nobody listens there, and no opening gets it
    anna, boris, _ = hidden(LaneSettings(meetings_max=1000, dial_timeout_s=0.5))
    for _ in range(MEETINGS_PER_MINUTE):
        await boris.meetings.meet(ANNA, encode(Punch(((HERE, port),))))
    with pytest.raises(ValueError, match=f"more than {MEETINGS_PER_MINUTE} calls"):
        await boris.meetings.meet(ANNA, encode(Punch((("203.0.114.7", port),))))
    with pytest.raises(ValueError, match=f"more than {MEETINGS_PER_MINUTE} meetings at {HERE}"):
        await boris.meetings.meet(CLARA, encode(Punch(((HERE, port),))))
    await closed(anna, boris)


async def test_dials_over_ipv6_are_limited_by_the_network_of_one_owner() -> None:
    anna, boris, _ = hidden(LaneSettings(meetings_max=1000, dial_timeout_s=0.5))
    for number in range(MEETINGS_PER_MINUTE):
        caller = ANNA if number % 2 else CLARA
        await boris.meetings.meet(caller, encode(Punch(((f"2a00:78:1:{number:x}::2", 7700),))))
    with pytest.raises(ValueError, match=f"more than {MEETINGS_PER_MINUTE} meetings at 2a00:78:1:"):
        await boris.meetings.meet(CLARA, encode(Punch((("2a00:78:1:99::2", 7700),))))
    with pytest.raises(ValueError, match="no public address"):
        await boris.meetings.meet(CLARA, encode(Punch((("fd00::1", 7700),))))
    await closed(anna, boris)


async def test_an_address_that_is_not_dialled_does_not_stop_a_meeting_at_the_other_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A member named addresses of a network too often, in which others have homes."""
    dialled: set[str] = set()

    class Noted(Opening):
        async def dial(self, ip: str, port: int) -> socket.socket:
            dialled.add(ip)
            raise ConnectionRefusedError

    monkeypatch.setattr(meetings, "Opening", Noted)
    anna, boris, _ = hidden(LaneSettings(meetings_max=1000, dial_timeout_s=0.5))
    for number in range(MEETINGS_PER_MINUTE):
        punch = Punch(((f"203.0.114.{number}", 7700), (f"2a00:78:1:{number:x}::2", 7700)))
        await boris.meetings.meet(ANNA, encode(punch))
    await asyncio.sleep(0.01)
    dialled.clear()
    for one, other in (("203.0.114.99", "2a00:78:1:99::2"), ("203.0.114.100", "fd00::1")):
        await boris.meetings.meet(CLARA, encode(Punch(((one, 7700), (other, 7700)))))
    await asyncio.sleep(0.2)
    assert {"203.0.114.99", "203.0.114.100"} <= dialled
    assert not {"2a00:78:1:99::2", "fd00::1"} & dialled
    await closed(anna, boris)


async def test_a_meeting_for_which_there_is_no_room_does_not_count_as_dials() -> None:
    anna, boris, _ = hidden(LaneSettings(meetings_max=1, dial_timeout_s=0.3))
    await boris.meetings.meet(ANNA, encode(Punch((("203.0.114.1", 7700),))))
    for number in range(MEETINGS_PER_MINUTE):
        with pytest.raises(ValueError, match="more than 1 meetings"):
            await boris.meetings.meet(PeerId(f"peer{number}"), encode(Punch(((HERE, 1024),))))
    await asyncio.sleep(0.5)
    await boris.meetings.meet(CLARA, encode(Punch(((HERE, 1024),))))
    await closed(anna, boris)


async def test_peers_that_are_called_to_meetings_name_no_address_too_often() -> None:
    anna, boris, _ = hidden()
    clara, *_ = hidden()
    anna.others[CLARA] = clara
    for called in (BORIS, CLARA) * (MEETINGS_PER_MINUTE // 2):
        assert await anna.lane.reach(called) is None
        anna.lane.forget(called)
    reason = await anna.lane.reach(BORIS)
    assert f"more than {MEETINGS_PER_MINUTE} meetings at {HERE}" in str(reason)
    await closed(anna, boris, clara)


async def test_an_address_that_refuses_is_dialled_less_and_less_often() -> None:
    dials = 0

    class Counted(Opening):
        async def dial(self, ip: str, port: int) -> socket.socket:
            nonlocal dials
            dials += 1
            raise ConnectionRefusedError

    opening = Counted()
    async with opening.meeting([(HERE, 7700)]):
        await asyncio.sleep(1.0)
    opening.close()
    assert 2 <= dials <= 4, "at 0, 0.1, 0.3 and 0.7 s"


@needs_ipv6
def test_addresses_of_this_machine_and_its_ipv6_network_are_near(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert punching.is_near(HERE) and punching.is_near(HERE_IPV6)
    for own, ip, near in (
        ("2a00:78:1:1::2", "2a00:78:1:1:ffff::3", True),
        ("2a00:78:1:1::2", "2a00:78:1:2::2", False),
        ("203.0.114.7", "203.0.114.7", True),
        ("203.0.114.7", "203.0.114.8", False),
        ("fe80::1%eth0", "2a00:78:1:1::2", False),
        ("", "2a00:78:1:1::2", False),
    ):
        monkeypatch.setattr(punching, "own_address_towards", lambda _, own=own: own)
        assert punching.is_near(ip) == near


def test_only_public_addresses_are_outer() -> None:
    for ip in ("203.0.114.7", "2606:4700::1", "2a00:78:1:1::2"):
        assert is_outer(ip)
    for ip in ("", "example.org", "127.0.0.1", "192.168.1.2", "100.64.0.1"):
        assert not is_outer(ip)
    for ip in ("::1", "::", "fe80::1", "fd00::2", "ff02::1", "2001:db8::1", "2606:4700::1%eth0"):
        assert not is_outer(ip)


def test_an_address_of_ipv6_that_stands_for_one_of_ipv4_is_not_outer() -> None:
    """A member could have a third party dialled by each of its names."""
    for ip in ("::ffff:203.0.114.7", "64:ff9b::cb00:7207", "2002:cb00:7207::1", "2001:0:1::2"):
        assert not is_outer(ip)


@pytest.mark.parametrize(
    "changes",
    [
        {"addresses": ()},
        {"addresses": 3 * OFFER.addresses},
        {"addresses": (("203.0.113.7", 0),)},
        {"addresses": (("203.0.113.7", 443),)},
        {"addresses": (("203.0.113.7", 1023),)},
        {"addresses": (("203.0.113.7", 65536),)},
        {"addresses": (("1" * 46, 7700),)},
        {"ticket": replace(TICKET, number=b"")},
        {"ticket": replace(TICKET, dialler_key=b"x")},
    ],
)
def test_an_offer_of_a_meeting_is_checked_when_it_is_read(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="not PunchOffer"):
        decode(PunchOffer, encode(replace(OFFER, **changes)))
    assert decode(PunchOffer, encode(OFFER)) == OFFER
    with pytest.raises(ValueError, match="not LaneOffer"):
        decode(LaneOffer, encode(OFFER))
