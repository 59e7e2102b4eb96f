import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from blake3 import blake3
from multiaddr import Multiaddr
from pytest import MonkeyPatch

from dht.addresses import pack, parse, without_peer
from dht.errors import CallRefused, DhtError, PeerUnreachable, RunFileUnavailable
from dht.host import Connection, Stream
from dht.identity import Identity, PeerId, RunId
from dht.limits import Rate
from dht.membership import contacts as contact_rules
from dht.membership import hello as wire
from dht.membership.table import Member, bucket_key
from dht.memory.directory import MemoryDirectory
from dht.memory.host import MemoryHost, identity_of
from dht.memory.network import CALM
from dht.presence.greeting import Greeting
from dht.presence.presence import Presence
from dht.presence.seeking import decode_cache
from dht.presence.this_peer import (
    CALL_TIMEOUT_S,
    GOODBYE_TIMEOUT_S,
    PresenceEvent,
    PresenceSettings,
    Profile,
)
from dht.records import PeerRecord, Sealed, check, seal
from tests.dht.memory.weather import STORM
from tests.dht.presence.presence_swarm import OTHER_RUN, RUN, Peer, Swarm, simulate, until
from tests.seeds import seeds

MINUTE = 60.0


async def start_swarm(
    swarm: Swarm, count: int, *, within_s: float = 60.0, **options: object
) -> None:
    await swarm.start_bootstrap("seed")
    seeds = await swarm.seed_addresses("seed")
    for number in range(count):
        await swarm.start(f"peer{number}", seeds=seeds, **options)  # type: ignore[arg-type]
    await until(lambda: swarm.all_see(swarm.members()), within_s=within_s, what="all see all")


async def start_halves(swarm: Swarm, count: int) -> None:
    """Two swarms of one run that know nothing of each other, each with a bootstrap peer."""
    for half in ("east", "west"):
        await swarm.start_bootstrap(half)
        seeds = await swarm.seed_addresses(half)
        for number in range(count):
            await swarm.start(f"{half}{number}", seeds=seeds)
    await asyncio.sleep(MINUTE)
    assert swarm.all_see([peer for peer in swarm.members() if peer.name.startswith("east")])


async def link(swarm: Swarm, name: str, other_name: str) -> None:
    one, other = swarm.peers[name], swarm.peers[other_name]
    await one.host.connect(other.id, await other.host.addresses(), timeout_s=5)


def forget_events(swarm: Swarm) -> None:
    for peer in swarm.peers.values():
        peer.events.clear()


# --- who is here -------------------------------------------------------------------------------


async def test_thirty_peers_see_one_another_within_ten_seconds(swarm: Swarm) -> None:
    await start_swarm(swarm, 30, within_s=10)


@pytest.mark.parametrize("seed", seeds(1, soak=40))
def test_in_a_storm_everybody_is_found_and_nobody_alive_is_lost(seed: int) -> None:
    async def story(swarm: Swarm) -> None:
        await start_swarm(swarm, 8)
        forget_events(swarm)
        await asyncio.sleep(5 * MINUTE)
        lost = [event.text for peer in swarm.members() for event in peer.told("peer_lost")]
        assert lost == []

    simulate(story, weather=STORM, seed=seed)


def test_the_same_seed_tells_the_same_story() -> None:
    async def story(swarm: Swarm) -> list[tuple[str, str]]:
        await start_swarm(swarm, 6)
        await swarm.crash("peer1")
        await asyncio.sleep(2 * MINUTE)
        return [(peer.name, event.text) for peer in swarm.members() for event in peer.events]

    told = simulate(story, weather=STORM, seed=5)
    assert told == simulate(story, weather=STORM, seed=5)
    assert told != simulate(story, weather=STORM, seed=6)


async def test_goodbye_is_known_to_all_at_once_or_with_the_next_heartbeat(swarm: Swarm) -> None:
    await start_swarm(swarm, 10)
    leaver = swarm.peers["peer3"]
    await swarm.stop("peer3", leave=True)
    await until(lambda: swarm.all_see(swarm.members()), within_s=12, what="it is gone")
    assert any(peer.told("peer_left") for peer in swarm.members())
    assert not any(peer.told("peer_lost") for peer in swarm.members())
    # Nobody who passes on its older records revives it.
    await asyncio.sleep(2 * MINUTE)
    assert not any(leaver.id in peer.sees() for peer in swarm.members())


async def test_a_peer_that_crashed_is_missed_by_all_within_a_minute_and_never_revived(
    swarm: Swarm,
) -> None:
    await start_swarm(swarm, 10)
    await asyncio.sleep(MINUTE)
    gone = swarm.peers["peer3"].id
    await swarm.crash("peer3")
    await until(
        lambda: not any(gone in peer.sees() for peer in swarm.members()),
        within_s=MINUTE,
        what="it is lost",
    )
    for _ in range(30):
        await asyncio.sleep(5)
        assert not any(gone in peer.sees() for peer in swarm.members())


async def test_a_peer_that_comes_back_after_a_crash_is_seen_again(swarm: Swarm) -> None:
    await start_swarm(swarm, 5)
    await swarm.crash("peer3")
    await asyncio.sleep(5)
    await swarm.start("peer3", seeds=await swarm.seed_addresses("seed"))
    await until(lambda: swarm.all_see(swarm.members()), within_s=20, what="it is back")


async def test_the_facts_that_a_peer_states_about_itself_reach_the_others(swarm: Swarm) -> None:
    await start_swarm(swarm, 3)
    anna, boris = swarm.peers["peer0"], swarm.peers["peer1"]
    anna.state(trains=True, step_time_s=0.5, versions=(4, 0, 1, 2), name="Anna")

    def known() -> bool:
        member = boris.presence.table.get(anna.id)
        return member is not None and member.record.trains and member.record.name == "Anna"

    await until(known, within_s=12, what="the facts are known")


async def test_a_fact_that_no_record_can_hold_is_refused_at_once(swarm: Swarm) -> None:
    await swarm.start("anna")
    with pytest.raises(ValueError, match="start at 0"):
        swarm.peers["anna"].state(versions=(-1, 0))


def without_hellos(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the directory alone to tell who is here."""

    async def silence(self: Greeting, peer: PeerId) -> None:
        pass

    monkeypatch.setattr(Greeting, "say_hello", silence)


def test_a_swarm_that_knows_itself_asks_one_holder_of_a_bucket_and_not_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_hellos(monkeypatch)

    async def story(swarm: Swarm) -> tuple[int, int]:
        await start_swarm(swarm, 16)
        began = swarm.network.simulated.bytes_sent
        await asyncio.sleep(20)
        first = swarm.network.simulated.bytes_sent - began
        await asyncio.sleep(MINUTE)
        began = swarm.network.simulated.bytes_sent
        await asyncio.sleep(20)
        assert swarm.all_see(swarm.members())
        return first, swarm.network.simulated.bytes_sent - began

    first, later = simulate(story)
    assert later < first / 2


async def test_holders_without_a_peers_record_do_not_make_it_lost(
    monkeypatch: pytest.MonkeyPatch,
    swarm: Swarm,
) -> None:
    without_hellos(monkeypatch)

    await start_swarm(swarm, 12)
    unlucky = swarm.peers["peer3"]
    await asyncio.sleep(MINUTE)
    loop = asyncio.get_running_loop()
    key = bucket_key(RUN, "")
    nodes = [peer.host.directory for peer in swarm.peers.values() if peer is not unlucky]
    holders = [node for node in nodes if node._read(key)]
    assert len(holders) > 2
    store = MemoryDirectory._store

    def forgetful(node: MemoryDirectory, record: bytes) -> bool:
        sealed = check(record)
        assert isinstance(sealed, Sealed)
        if sealed.peer == unlucky.id and node in holders[1:]:
            return False
        return store(node, record)

    monkeypatch.setattr(MemoryDirectory, "_store", forgetful)
    until_s = loop.time() + 3 * MINUTE
    while loop.time() < until_s:
        await asyncio.sleep(1)
        assert swarm.all_see(swarm.members())


@pytest.mark.slow
async def test_140_peers_in_four_buckets_cost_each_a_bounded_number_of_look_ups(
    swarm: Swarm,
) -> None:
    await swarm.start_bootstrap("seed")
    seeds = await swarm.seed_addresses("seed")
    for number in range(140):
        await swarm.start(f"peer{number}", seeds=seeds)
    await until(lambda: swarm.all_see(swarm.members()), within_s=60, what="all", step_s=2)
    before = {p.name: replace(p.presence.stats) for p in swarm.members()}
    await asyncio.sleep(15)
    assert swarm.all_see(swarm.members())
    for peer in swarm.members():
        assert peer.presence.table.depth(asyncio.get_running_loop().time()) == 2
        stats, old = peer.presence.stats, before[peer.name]
        beats = stats.heartbeats - old.heartbeats
        assert stats.look_ups - old.look_ups <= 14 * (beats + 1)  # 4 buckets, 2 + 8 beside
        assert stats.hellos_sent - old.hellos_sent <= 6 * beats


# --- seeds -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", seeds(1, soak=40))
def test_a_seed_that_comes_back_is_met_within_30_seconds_without_a_restart(seed: int) -> None:
    async def story(swarm: Swarm) -> None:
        await swarm.start_bootstrap("seed")
        seeds = await swarm.seed_addresses("seed")
        await swarm.stop("seed")
        anna = await swarm.start("anna", seeds=seeds)
        boris = await swarm.start("boris", seeds=seeds)
        await asyncio.sleep(random.Random(seed).uniform(1, 20 * MINUTE))
        assert anna.sees() == set()

        await swarm.start_bootstrap("seed")
        await until(
            lambda: anna.sees() == {boris.id} and boris.sees() == {anna.id},
            within_s=30,
            what=f"seed {seed}: they meet",
        )

    simulate(story, weather=STORM if seed % 2 else CALM, seed=seed)


async def test_if_nobody_answers_it_is_told_once_with_each_address_and_its_reason(
    swarm: Swarm,
) -> None:
    await swarm.start_bootstrap("seed")
    (closed,) = await swarm.seed_addresses("seed")
    await swarm.stop("seed")
    nowhere = parse(f"/ip4/203.0.113.9/tcp/7700/p2p/{identity_of('nobody').peer_id}")
    anna = await swarm.start("anna", seeds=[closed, nowhere])
    await asyncio.sleep(20 * MINUTE)

    (event,) = anna.told("nobody_answered")
    assert str(closed) in event.text and "refuses connections" in event.text
    assert str(nowhere) in event.text and "belongs to no peer" in event.text
    assert "\n" not in event.text
    attempts = [seed.failures for seed, _ in anna.presence.seeds]
    assert all(60 <= count <= 160 for count in attempts), "it keeps trying, not too often"


async def test_losing_all_seeds_leaves_a_connected_swarm_connected(swarm: Swarm) -> None:
    await swarm.start_bootstrap("seed")
    await swarm.start_bootstrap("seed2", seeds=await swarm.seed_addresses("seed"))
    seeds = await swarm.seed_addresses("seed", "seed2")
    for number in range(8):
        await swarm.start(f"peer{number}", seeds=seeds)
    await until(lambda: swarm.all_see(swarm.members()), within_s=60, what="all see all")
    await swarm.crash("seed")
    await swarm.crash("seed2")
    forget_events(swarm)
    for _ in range(20):  # several times what a record and a hello hold
        await asyncio.sleep(10)
        assert swarm.all_see(swarm.members())
    assert not any(peer.told("nobody_answered") for peer in swarm.members())

    # And who knows one of them still gets in.
    door = await swarm.seed_addresses("peer4")
    await swarm.start("late", seeds=door)
    await until(lambda: swarm.all_see(swarm.members()), within_s=30, what="late is in")


@pytest.mark.parametrize("seed", seeds(1, soak=30))
def test_halves_that_bootstrapped_apart_join_up_once_any_link_exists(seed: int) -> None:
    async def story(swarm: Swarm) -> None:
        await start_halves(swarm, 6)
        rng = random.Random(seed)
        ends = [f"east{rng.randrange(6)}", f"west{rng.randrange(6)}"]
        if seed % 3 == 0:
            ends = ["east", "west"]  # the bootstrap peers learn of each other
        await link(swarm, *ends)
        await until(lambda: swarm.all_see(swarm.members()), within_s=40, what=f"seed {seed}: one")

    simulate(story, seed=seed)


@pytest.mark.parametrize("seed", seeds(1, soak=20))
def test_a_partition_that_heals_after_the_seeds_have_gone_leaves_one_swarm(seed: int) -> None:
    async def story(swarm: Swarm) -> None:
        await start_swarm(swarm, 8)
        await swarm.crash("seed")
        members = swarm.members()
        left, right = members[:4], members[4:]
        swarm.network.partition([[peer.id for peer in left], [peer.id for peer in right]])
        # Ever longer, since who has been gone for long is looked for ever more rarely.
        apart_s = random.Random(seed).uniform(2, 3 + min(17, 2 * seed)) * MINUTE
        await asyncio.sleep(apart_s)
        assert swarm.all_see(left) and swarm.all_see(right)

        swarm.network.heal()
        await until(
            lambda: swarm.all_see(members), within_s=3 * MINUTE, what=f"seed {seed}: one again"
        )

    simulate(story, seed=seed)


async def test_a_peer_finds_its_swarm_through_the_peers_kept_on_disk(
    tmp_path: Path, swarm: Swarm
) -> None:
    path = tmp_path / "peers.json"

    await start_swarm(swarm, 5)
    seeds = await swarm.seed_addresses("seed")
    anna = await swarm.start("anna", seeds=seeds, cache_path=path)
    await until(lambda: len(anna.sees()) == 5, within_s=30, what="anna is in")
    await asyncio.sleep(30)
    await swarm.stop("anna", leave=True)
    await swarm.crash("seed")
    assert len(decode_cache(path.read_bytes()).addresses) >= 3

    again = await swarm.start("anna", seeds=seeds, cache_path=path)
    await until(lambda: len(again.sees()) == 5, within_s=15, what="anna is in again")
    await until(lambda: swarm.all_see(swarm.members()), within_s=15, what="the others see her")


async def test_a_peer_that_is_killed_in_its_first_minute_has_kept_those_it_met(
    tmp_path: Path, swarm: Swarm
) -> None:
    # With all seeds down as well it found nobody until one of them was back.
    path = tmp_path / "peers.json"

    await start_swarm(swarm, 5)
    seeds = await swarm.seed_addresses("seed")
    anna = await swarm.start("anna", seeds=seeds, cache_path=path)
    await until(lambda: len(anna.sees()) == 5, within_s=30, what="anna is in")
    await asyncio.sleep(15)
    assert len(decode_cache(path.read_bytes()).addresses) >= 3
    # A few are enough to find the others: the file is not written for everybody who comes.
    written_at = path.stat().st_mtime_ns
    await asyncio.sleep(15)
    assert path.stat().st_mtime_ns == written_at


async def test_a_damaged_cache_is_told_and_does_not_matter(tmp_path: Path, swarm: Swarm) -> None:
    path = tmp_path / "peers.json"
    path.write_bytes(b"{not json")

    await start_swarm(swarm, 2)
    seeds = await swarm.seed_addresses("seed")
    anna = await swarm.start("anna", seeds=seeds, cache_path=path)
    await until(lambda: len(anna.sees()) == 2, within_s=20, what="anna is in")
    assert len(anna.told("cache_unreadable")) == 1


async def test_a_cache_that_cannot_be_written_is_told_and_does_not_matter(
    tmp_path: Path, swarm: Swarm
) -> None:
    (tmp_path / "file").write_bytes(b"")

    await start_swarm(swarm, 2)
    seeds = await swarm.seed_addresses("seed")
    anna = await swarm.start("anna", seeds=seeds, cache_path=tmp_path / "file" / "peers.json")
    await asyncio.sleep(3 * MINUTE)
    assert len(anna.sees()) == 2
    assert anna.told("cache_unwritable") or anna.told("cache_unreadable")


# --- clocks ------------------------------------------------------------------------------------


async def test_wrong_clocks_are_told_and_change_nothing(swarm: Swarm) -> None:
    await start_swarm(swarm, 5)
    seeds = await swarm.seed_addresses("seed")
    slow = await swarm.start("slow", seeds=seeds, wall_offset_s=-86_400.0)
    fast = await swarm.start("fast", seeds=seeds, wall_offset_s=86_400.0)
    await until(lambda: swarm.all_see(swarm.members()), within_s=20, what="all see all")
    await asyncio.sleep(2 * MINUTE)
    assert swarm.all_see(swarm.members())

    assert slow.presence.clock is not None and fast.presence.clock is not None
    assert slow.presence.clock.offset_s == pytest.approx(86_400, abs=1)
    assert fast.presence.clock.offset_s == pytest.approx(-86_400, abs=1)
    assert [e.fields["offset_s"] for e in slow.told("clock_off")] == [pytest.approx(86_400, abs=1)]
    assert "behind" in slow.told("clock_off")[0].text
    right = swarm.peers["peer0"].presence.clock
    assert right is not None and abs(right.offset_s) < 1
    assert not swarm.peers["peer0"].told("clock_off")


async def test_a_peer_that_changes_its_protocol_all_the_time_is_told_of_once(
    swarm: Swarm,
) -> None:
    await start_swarm(swarm, 2)
    anna, _ = swarm.members()
    key = bucket_key(RUN, "")
    for number in range(20):
        protocol = (1000 + number, 1000 + number)
        record = PeerRecord(protocol=protocol, role="learner", incarnation=1)
        sealed = seal(record, identity_of("x"), key=key, sequence=number + 1, ttl_s=30)
        assert not anna.presence._intake.take(sealed)
    assert len(anna.told("hello_refused")) == 1
    assert [each.theirs for each in anna.presence.misfits.values()] == ["1019"]


async def test_a_bootstrap_peer_that_is_busy_is_said_hello_to_again_in_a_moment(
    swarm: Swarm,
) -> None:
    """One that many keys called was left alone for ten minutes, as if it had refused."""
    seed = await swarm.start_bootstrap("seed")
    addresses = await swarm.seed_addresses("seed")
    greeting = seed.presence._greeting
    usual, greeting.budget = greeting.budget, Rate(1.0, 0.0)
    anna = await swarm.start("anna", seeds=addresses)
    await asyncio.sleep(30.0)
    answered = anna.presence._greeting.bootstrap_peers
    assert not answered and not anna.told("hello_refused")
    greeting.budget = usual
    await until(lambda: seed.id in answered, within_s=60.0, what="it is asked again")


async def test_a_visitor_without_a_hello_is_no_refusal(swarm: Swarm) -> None:
    """`shoal doctor` of a member was shown to the others as a peer that refused them."""
    anna = await swarm.start("anna")
    visitor = swarm.network.host("doctor")
    address = await swarm.seed_addresses("anna")
    await visitor.connect(anna.id, address, timeout_s=5.0)
    await until(lambda: visitor.peer_id in anna.presence.connected, within_s=60, what="it is seen")
    await asyncio.sleep(2 * MINUTE)
    assert anna.told("hello_refused") == []


async def test_strangers_do_not_set_the_clock_by_which_a_run_ends(swarm: Swarm) -> None:
    await start_swarm(swarm, 3)
    seeds = await swarm.seed_addresses("peer0", "peer1", "peer2")
    for number in range(6):
        name = f"stranger{number}"
        await swarm.start(
            name, run=None, role="bootstrap", seeds=seeds, wall_offset_s=365 * 86_400.0
        )
    await asyncio.sleep(5 * MINUTE)
    for peer in swarm.members()[:3]:
        assert len(peer.presence.connected) >= 8
        assert peer.presence.clock is not None and abs(peer.presence.clock.offset_s) < 1
        assert not peer.told("clock_off")


async def test_newcomers_do_not_set_the_clock_where_others_have_worked(swarm: Swarm) -> None:
    """Anybody may be a member of an open run, under as many keys as it likes."""
    await start_swarm(swarm, 3)
    old = swarm.members()[:3]
    for peer in old:
        peer.presence.go_by_clocks_of({each.host.peer_id for each in old}.__contains__)
    seeds = await swarm.seed_addresses("peer0", "peer1", "peer2")
    for number in range(6):
        await swarm.start(f"new{number}", seeds=seeds, wall_offset_s=365 * 86_400.0)
    await asyncio.sleep(5 * MINUTE)
    for peer in old:
        assert peer.presence.clock is not None and abs(peer.presence.clock.offset_s) < 1
        assert peer.presence.clock.peers == 2
    old[0].presence.go_by_clocks_of(lambda peer: False)
    clock = old[0].presence.clock
    assert clock is not None and clock.peers == 8, "where none of them has worked, all count"


async def test_a_clock_set_back_over_a_restart_keeps_nobody_out(swarm: Swarm) -> None:
    await start_swarm(swarm, 5)
    await swarm.stop("peer2")
    seeds = await swarm.seed_addresses("seed")
    await swarm.start("peer2", seeds=seeds, wall_offset_s=-7200.0)
    await until(lambda: swarm.all_see(swarm.members()), within_s=20, what="it is back")
    await asyncio.sleep(2 * MINUTE)
    assert swarm.all_see(swarm.members())


# --- without the directory -----------------------------------------------------------------------


@pytest.fixture
def silent_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look-ups find nothing: what is known is known from hellos alone."""

    async def look_up(
        self: MemoryDirectory, key: str, *, timeout_s: float, quick: bool = False
    ) -> dict[PeerId, bytes]:
        return {}

    monkeypatch.setattr(MemoryDirectory, "look_up", look_up)


@pytest.mark.usefixtures("silent_directory")
async def test_hellos_alone_keep_a_small_swarm_together(swarm: Swarm) -> None:
    await start_swarm(swarm, 8)
    forget_events(swarm)
    await asyncio.sleep(3 * MINUTE)
    assert swarm.all_see(swarm.members())
    assert not any(peer.told("peer_lost") for peer in swarm.members())


@pytest.mark.usefixtures("silent_directory")
async def test_two_peers_seldom_say_hello_to_each_other_in_the_same_heartbeat(swarm: Swarm) -> None:
    """One hello brings both records. All the same every peer asks for the others' clocks."""
    await start_swarm(swarm, 5)
    forget_events(swarm)
    before = [peer.presence.stats for peer in swarm.members()]
    counted = [(stats.hellos_sent, stats.heartbeats) for stats in before]
    await asyncio.sleep(5 * MINUTE)
    sent = beats = 0
    for peer, (hellos, heartbeats) in zip(swarm.members(), counted, strict=True):
        sent += peer.presence.stats.hellos_sent - hellos
        beats += peer.presence.stats.heartbeats - heartbeats
        assert peer.presence.clock is not None and peer.presence.clock.peers == 4
        assert not peer.told("peer_lost")
    # Four others, and the bootstrap peer now and then.
    assert 2.0 < sent / beats < 3.2, sent / beats


@pytest.mark.usefixtures("silent_directory")
async def test_a_peer_that_another_has_lost_sight_of_is_seen_as_soon_as_it_greets(
    swarm: Swarm,
) -> None:
    await start_swarm(swarm, 3)
    anna, boris, *_ = swarm.members()
    anna.presence.table.remove(boris.id)
    assert boris.id not in anna.sees()
    await boris.presence.greet([anna.id])
    assert boris.id in anna.sees()


@pytest.mark.usefixtures("silent_directory")
async def test_a_peer_that_has_just_said_hello_learns_at_once_that_another_stopped_training(
    swarm: Swarm,
) -> None:
    await start_swarm(swarm, 2)
    anna, boris = swarm.members()
    anna.state(trains=True)
    await asyncio.sleep(5 * MINUTE)
    for tenth in range(10):
        anna.state(trains=bool(tenth % 2))
        await asyncio.sleep(2.0 + tenth)
        member = boris.presence.table.get(anna.id)
        assert member is not None and member.record.trains == bool(tenth % 2), tenth


async def test_the_owner_hears_at_once_of_a_member_that_begins_to_train(swarm: Swarm) -> None:
    """It looked at the members every second: a newcomer called before it was seen to train."""
    heard: list[Member] = []
    await start_swarm(swarm, 1)
    seeds = await swarm.seed_addresses("seed")
    boris = await swarm.start("boris", seeds=seeds, on_record=heard.append)
    (anna,) = (peer for peer in swarm.members() if peer is not boris)
    await until(lambda: bool(boris.sees()), within_s=MINUTE, what="they have met")
    heard.clear()

    anna.state(trains=True)
    await asyncio.sleep(0.5)

    assert heard
    for member in heard:  # the first one, and with the heartbeat perhaps another
        assert (member.peer, member.record.trains) == (anna.id, True)


@pytest.mark.usefixtures("silent_directory")
@pytest.mark.parametrize("ends", [("east0", "west3"), ("east", "west"), ("east2", "west")])
async def test_halves_join_up_by_hellos_alone(ends: tuple[str, str], swarm: Swarm) -> None:
    await start_halves(swarm, 4)
    await link(swarm, *ends)
    await until(lambda: swarm.all_see(swarm.members()), within_s=2 * MINUTE, what="one swarm")


@pytest.mark.usefixtures("silent_directory")
async def test_the_others_tell_a_peer_whose_clock_was_set_back(swarm: Swarm) -> None:
    await start_swarm(swarm, 5)
    await swarm.stop("peer2")
    await asyncio.sleep(MINUTE)
    seeds = await swarm.seed_addresses("seed")
    back = await swarm.start("peer2", seeds=seeds, wall_offset_s=-7200.0)
    back.state(trains=True)

    def known() -> bool:
        members = [p.presence.table.get(back.id) for p in swarm.members() if p is not back]
        return all(member is not None and member.record.trains for member in members)

    await until(known, within_s=30, what="its new record is believed")


# --- reachability ------------------------------------------------------------------------------


def reachability(peer: Peer) -> list[object]:
    return [event.fields["reachable"] for event in peer.told("reachability")]


async def test_others_find_out_who_can_be_dialled_and_who_cannot(swarm: Swarm) -> None:
    await start_swarm(swarm, 4)
    seeds = await swarm.seed_addresses("seed")
    decided: list[bool] = []

    async def on_reachable(reachable: bool) -> None:
        decided.append(reachable)

    shy = await swarm.start("shy", seeds=seeds, dial_out_only=True, on_reachable=on_reachable)
    await until(lambda: shy.presence.reachable is False, within_s=90, what="shy knows")
    await asyncio.sleep(15)
    assert swarm.all_see(swarm.members()), "it is a member all the same"
    for peer in swarm.members():
        assert peer.presence.reachable == (peer is not shy)
        for member in peer.presence.table:
            assert member.reachable == (member.peer != shy.id)
    assert reachability(shy) == [False] == decided
    assert "dial-out only" in shy.told("reachability")[0].text

    await asyncio.sleep(5 * MINUTE)
    assert swarm.all_see(swarm.members())
    contacts = shy.presence.connected & shy.sees()
    assert len(contacts) >= contact_rules.PEERS_MIN


@pytest.mark.parametrize("hidden", [True, False])
async def test_two_peers_that_meet_find_out_without_breaking_what_goes_over_their_connection(
    hidden: bool, swarm: Swarm
) -> None:
    """Earlier, each of two peers cut its connection in order to dial the other one afresh. That
    broke the streams of a round, and both led the next one."""
    anna = await swarm.start("anna")
    await asyncio.sleep(3)

    async def echo(stream: Stream) -> None:
        while (frame := await stream.receive(timeout_s=60)) is not None:
            await stream.send(frame, timeout_s=60)

    await anna.host.serve_streams("/echo", echo)
    seeds = await swarm.seed_addresses("anna")
    boris = await swarm.start("boris", seeds=seeds, dial_out_only=hidden)
    await boris.host.connect(anna.id, seeds, timeout_s=5)
    stream = await boris.host.open_stream(anna.id, "/echo", timeout_s=5)
    for number in range(60):
        await stream.send(b"%d" % number, timeout_s=5)
        assert await stream.receive(timeout_s=5) == b"%d" % number
        await asyncio.sleep(1)
    assert anna.presence.reachable is True
    assert boris.presence.reachable is not hidden
    stream.abort()


async def test_two_peers_alone_in_the_world_find_out_about_each_other(swarm: Swarm) -> None:
    anna = await swarm.start("anna")
    shy = await swarm.start("shy", seeds=await swarm.seed_addresses("anna"), dial_out_only=True)
    await until(
        lambda: anna.presence.reachable is True and shy.presence.reachable is False,
        within_s=2 * MINUTE,
        what="both know",
    )
    await asyncio.sleep(5 * MINUTE)
    assert swarm.all_see([anna, shy])
    assert reachability(anna) == [True] and reachability(shy) == [False]


async def test_a_new_address_is_announced_and_tested_at_once(swarm: Swarm) -> None:
    await start_swarm(swarm, 4)
    mover = swarm.peers["peer1"]
    await until(lambda: mover.presence.reachable is True, within_s=MINUTE, what="known")
    swarm.network.move(mover.id)
    await asyncio.sleep(MINUTE)
    address = (await mover.host.addresses())[0]
    other = swarm.peers["peer2"].presence.table.get(mover.id)
    assert other is not None
    assert [f"{a}/p2p/{mover.id}" for a in other.addresses] == [str(address)]
    assert mover.presence.reachable is True

    swarm.network.simulated.dial_out_only(mover.id)
    swarm.network.move(mover.id)
    await until(lambda: mover.presence.reachable is False, within_s=2 * MINUTE, what="noticed")
    assert reachability(mover) == [True, False]


async def test_a_peer_that_can_only_dial_out_keeps_a_few_connections_to_be_reached_over(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contact_rules, "HELLOS_PER_BEAT", 1)
    await start_swarm(swarm, 8)
    seeds = await swarm.seed_addresses("seed")
    shy = await swarm.start("shy", seeds=seeds, dial_out_only=True)

    def contacts() -> int:
        return len(shy.presence.connected & shy.sees())

    await until(lambda: contacts() >= 3, within_s=5, what="contacts")
    for peer in sorted(shy.presence.connected & shy.sees()):
        await shy.host.disconnect(peer)
    await until(lambda: contacts() == 0, within_s=10, what="noticed")
    await until(lambda: contacts() >= 3, within_s=12, what="contacts again")


async def test_members_that_name_a_strangers_address_have_it_dialled_a_few_times_a_minute(
    swarm: Swarm, monkeypatch: MonkeyPatch
) -> None:
    """Records cost nothing: a member dialled six ports of one machine for each of many keys."""
    await start_swarm(swarm, 2)
    anna, _ = swarm.members()
    dialled: list[str] = []
    connect = MemoryHost.connect

    async def watch(
        self: MemoryHost, peer: PeerId, addresses: Sequence[Multiaddr], *, timeout_s: float
    ) -> None:
        if self is anna.host:
            dialled.extend(str(address).partition("/p2p/")[0] for address in addresses)
        await connect(self, peer, addresses, timeout_s=timeout_s)

    monkeypatch.setattr(MemoryHost, "connect", watch)
    kinds = "/ip4/11.1.2.3/tcp/700{}", "/ip6/2a01:db8::{}/tcp/7", "/dns4/{}.example.org/tcp/7"
    named = [tuple(pack(parse(each.format(n))) for n in range(1, 7)) for each in kinds]
    for minute in range(2):
        for number in range(20):
            key = Identity.from_seed(bytes([number]) * 32)
            record = PeerRecord(
                protocol=(1, 1),
                role="learner",
                incarnation=1,
                addresses=named[number % 3],
            )
            sealed = seal(record, key, key=bucket_key(RUN, ""), sequence=minute, ttl_s=120)
            assert anna.presence._intake.take(sealed)
        await asyncio.sleep(MINUTE)
    for kind in ("ip4/11.1", "ip6", "dns4"):
        assert 16 <= sum(kind in address for address in dialled) <= 3 * 16 * 2


async def test_members_that_name_others_addresses_do_not_keep_honest_ones_from_being_dialled(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All host names share one limit. A peer that it had not dialled was noted as not answering."""
    await start_swarm(swarm, 2)
    anna, _ = swarm.members()
    dialled: set[PeerId] = set()
    connect = MemoryHost.connect

    async def watch(
        self: MemoryHost, peer: PeerId, addresses: Sequence[Multiaddr], *, timeout_s: float
    ) -> None:
        if self is anna.host:
            dialled.add(peer)
        await connect(self, peer, addresses, timeout_s=timeout_s)

    monkeypatch.setattr(MemoryHost, "connect", watch)
    honest: set[PeerId] = set()
    for minute in range(4):
        for number in range(20):
            key = Identity.from_seed(bytes([number]) * 32)
            names = range(6 if number < 12 else 1)
            if number >= 12:
                honest.add(key.peer_id)
            record = PeerRecord(
                protocol=(1, 1),
                role="learner",
                incarnation=1,
                addresses=tuple(pack(parse(f"/dns4/{n}.{number}.net/tcp/7")) for n in names),
            )
            sealed = seal(record, key, key=bucket_key(RUN, ""), sequence=minute, ttl_s=120)
            assert anna.presence._intake.take(sealed)
        await asyncio.sleep(MINUTE)
    assert honest <= dialled


@pytest.mark.parametrize("hidden", [True, False])
async def test_a_connection_that_its_owner_opens_again_proves_no_dial_back(
    hidden: bool, swarm: Swarm
) -> None:
    """Earlier, the helper took a connection of the other side for its own: a peer that nobody can
    dial was called reachable."""
    await swarm.start_bootstrap("seed")
    seeds = await swarm.seed_addresses("seed")
    boris = await swarm.start("boris", seeds=seeds)
    home = await swarm.start("home", seeds=seeds, dial_out_only=hidden)
    at = await boris.host.addresses()

    async def keep_linked() -> None:
        while True:
            with suppress(PeerUnreachable):
                await home.host.connect(boris.id, at, timeout_s=5)
            await asyncio.sleep(0.05)

    linked = asyncio.ensure_future(keep_linked())
    for _ in range(60):
        await asyncio.sleep(1.0)
        assert home.presence.reachable is not hidden, home.presence.reachability_reason
    assert home.presence.reachable is not None
    linked.cancel()


async def test_bulk_streams_to_a_helper_do_not_delay_the_proof_of_a_dial_back(swarm: Swarm) -> None:
    boris = await swarm.start("boris")
    home = await swarm.start("home", seeds=await swarm.seed_addresses("boris"))

    async def take(stream: Stream) -> None:
        await asyncio.sleep(0)

    await boris.host.serve_streams("/bulk", take)

    async def send() -> None:
        while True:
            with suppress(DhtError):
                stream = await home.host.open_stream(boris.id, "/bulk", timeout_s=5, bulk=True)
                stream.abort()
            await asyncio.sleep(0.05)

    sending = asyncio.ensure_future(send())
    for _ in range(60):
        await asyncio.sleep(1.0)
    assert home.presence.reachable, home.presence.reachability_reason
    sending.cancel()


async def test_a_helper_dials_for_nobody_but_the_caller_and_not_into_its_own_network(
    swarm: Swarm,
) -> None:
    await start_swarm(swarm, 2)
    anna, boris = swarm.peers["peer0"], swarm.peers["peer1"]
    request = wire.DialBack(
        peer=identity_of("victim").peer_id,
        nonce=bytes(16),
        addresses=(),
        relay=True,
    )
    with pytest.raises(CallRefused, match="to itself only"):
        await anna.host.call(boris.id, wire.DIAL_BACK_PROTOCOL, wire.write(request), timeout_s=5)
    loopback = msgspec.structs.replace(
        request, addresses=(b"\x04\x7f\0\0\x01\x06\0\x16",), relay=False
    )
    data = await anna.host.call(
        boris.id, wire.DIAL_BACK_PROTOCOL, wire.write(loopback), timeout_s=5
    )
    assert wire.read(wire.DialBackReply, data).verdict == "not reached"


async def test_a_home_computer_with_private_addresses_alone_hears_that_it_is_not_reached(
    swarm: Swarm,
) -> None:
    """Earlier, such a computer heard "cannot help" for ever, and so never looked for a relay."""
    await start_swarm(swarm, 3)
    anna, boris = swarm.peers["peer0"], swarm.peers["peer1"]
    request = wire.DialBack(
        peer=anna.id,
        nonce=bytes(16),
        # A network that the helpers, at 10.x.x.x, are not in: here loopback stands for it.
        addresses=(b"\x04\x7f\0\0\x01\x06\x1e\x14",),
        relay=True,
    )
    data = await anna.host.call(boris.id, wire.DIAL_BACK_PROTOCOL, wire.write(request), timeout_s=5)
    assert wire.read(wire.DialBackReply, data).verdict == "not reached"


HOMES = ("/ip4/192.168.1.5/tcp/7700", "/ip4/192.168.1.6/tcp/7700")
PUBLIC = tuple(f"/ip4/11.77.0.{number}/tcp/7700" for number in range(1, 6))


async def start_at_home(swarm: Swarm, **options: object) -> list[Peer]:
    """Two members in one local network, and a bootstrap peer outside of it."""
    await swarm.start("seed", run=None, role="bootstrap", at=PUBLIC[0])
    seeds = await swarm.seed_addresses("seed")
    anna, boris = [
        await swarm.start(name, seeds=seeds, at=at, **options)  # type: ignore[arg-type]
        for name, at in zip(("anna", "boris"), HOMES, strict=True)
    ]
    return [anna, boris]


async def test_a_relayed_connection_is_no_reason_not_to_try_an_address_in_the_own_network(
    monkeypatch: MonkeyPatch, swarm: Swarm
) -> None:
    """Earlier, two machines behind one router that had met by a relay never met in their own
    network."""
    anna, boris = await start_at_home(swarm)
    await until(lambda: swarm.all_see([anna, boris]), within_s=30, what="they met")
    connections = boris.host.connections
    tried: list[list[str]] = []

    async def relayed() -> tuple[Connection, ...]:
        return tuple(replace(each, relayed=True) for each in await connections())

    async def improve(peer: PeerId, addresses: Sequence[Multiaddr], *, timeout_s: float) -> None:
        tried.append([f"{without_peer(address)}" for address in addresses])
        raise PeerUnreachable(peer, "no answer")

    monkeypatch.setattr(boris.host, "connections", relayed)
    monkeypatch.setattr(boris.host, "improve", improve)
    await boris.presence.connect(anna.id, timeout_s=5)
    assert tried == [[HOMES[0]]]
    await asyncio.sleep(MINUTE)
    await boris.presence.connect(anna.id, timeout_s=5)
    assert tried == [[HOMES[0]]], "in vain: not again so soon"
    moved = "/ip4/192.168.1.9/tcp/7700"
    swarm.network.place(anna.id, parse(moved))
    await until(lambda: len(tried) > 1, within_s=MINUTE, what="the new address")
    assert tried == [[HOMES[0]], [moved]]
    await until(lambda: len(tried) > 2, within_s=12 * MINUTE, what="once more, after a while")


def addresses(monkeypatch: MonkeyPatch, peer: Peer, *texts: str) -> None:
    """Let a peer have these addresses."""

    async def given() -> tuple[Multiaddr, ...]:
        return tuple(map(parse, texts))

    monkeypatch.setattr(peer.host, "addresses", given)


async def test_only_addresses_that_lead_there_are_announced_and_dialled(
    monkeypatch: MonkeyPatch, swarm: Swarm
) -> None:
    """Every peer announced 127.0.0.1 and its private address to all, who dialled their own machine
    and took it for the other one: up, and refusing connections."""
    anna, boris = await start_at_home(swarm)
    away = await swarm.start("away", seeds=await swarm.seed_addresses("seed"), at=PUBLIC[1])
    public = "/ip4/11.77.0.9/tcp/7700"
    addresses(monkeypatch, anna, HOMES[0], "/ip4/127.0.0.1/tcp/7700", public)

    def dials(peer: Peer) -> set[str]:
        return {f"{without_peer(each)}" for each in peer.presence.addresses_to_dial(anna.id)}

    await until(lambda: dials(away) == {public}, within_s=MINUTE, what="outside")
    await until(lambda: dials(boris) == {public, HOMES[0]}, within_s=MINUTE, what="at home")


async def test_a_peer_that_has_addresses_of_its_machine_alone_announces_those(
    monkeypatch: MonkeyPatch, swarm: Swarm
) -> None:
    await start_swarm(swarm, 2)
    anna = swarm.peers["peer0"]
    addresses(monkeypatch, anna, "/ip4/127.0.0.1/tcp/7700")
    await until(
        lambda: [str(each) for each in anna.presence.addresses] == ["/ip4/127.0.0.1/tcp/7700"],
        within_s=MINUTE,
        what="announced",
    )


async def test_in_a_run_of_one_network_neighbours_prove_enough_though_the_bootstrap_is_outside(
    swarm: Swarm,
) -> None:
    homes = await start_at_home(swarm)
    await until(
        lambda: all(peer.presence.reachable is True for peer in homes),
        within_s=30,
        what="both are proved",
    )
    assert all("local network" in peer.presence.reachability_reason for peer in homes)


async def test_a_neighbour_proves_nothing_once_a_member_lives_outside_and_that_counts_at_once(
    swarm: Swarm,
) -> None:
    decided: list[bool] = []

    async def on_reachable(reachable: bool) -> None:
        decided.append(reachable)

    homes = await start_at_home(swarm, on_reachable=on_reachable)
    await until(lambda: decided == [True, True], within_s=30, what="both are proved")
    seeds = await swarm.seed_addresses("seed")
    far = await swarm.start("far", seeds=seeds, at=PUBLIC[1])
    await until(
        lambda: not any(peer.presence.reachable for peer in homes),
        within_s=15,
        what="the homes know",
    )
    await until(lambda: decided[2:4] == [False, False], within_s=2, what="the owners know")
    await until(
        lambda: (
            [far.presence.table.get(peer.id).reachable for peer in homes]  # type: ignore[union-attr]
            == [False, False]
        ),
        within_s=30,
        what="the others know",
    )
    await asyncio.sleep(5 * MINUTE)
    assert not any(peer.presence.reachable for peer in homes)
    assert far.presence.reachable is True, "the homes connected to it"


async def test_a_public_peer_that_meets_dial_out_peers_alone_is_never_called_dial_out(
    swarm: Swarm,
) -> None:
    """A restarted bootstrap peer meets only peers behind routers."""
    await swarm.start("seed", run=None, role="bootstrap", at=PUBLIC[0])
    seeds = await swarm.seed_addresses("seed")
    for number in (1, 2, 3):
        await swarm.start(f"home{number}", seeds=seeds, at=PUBLIC[number], dial_out_only=True)
    keeper = await swarm.start("keeper", seeds=seeds, at=PUBLIC[4])
    await asyncio.sleep(5 * MINUTE)
    assert keeper.presence.reachable is True
    swarm.network.crash(swarm.peers["seed"].id)
    await swarm.peers.pop("seed").presence.close()
    await swarm.stop("keeper")
    seed = await swarm.start("seed", run=None, role="bootstrap", at=PUBLIC[0])
    await until(lambda: seed.presence.reachable is True, within_s=2 * MINUTE, what="proved")
    await asyncio.sleep(5 * MINUTE)
    assert reachability(seed) == [True]


async def ask_for_dial(
    asking: Peer, helper: Peer, at: str, *, peer: PeerId | None = None, relay: bool
) -> str:
    request = wire.DialBack(
        peer=asking.id if peer is None else peer,
        nonce=bytes(16),
        addresses=(pack(parse(at)),),
        relay=relay,
    )
    data = await asking.host.call(
        helper.id, wire.DIAL_BACK_PROTOCOL, wire.write(request), timeout_s=30
    )
    return wire.read(wire.DialBackReply, data).verdict


async def test_a_dial_back_goes_to_the_address_alone_that_the_asking_peer_has(swarm: Swarm) -> None:
    await start_swarm(swarm, 3)
    anna, boris = swarm.peers["peer0"], swarm.peers["peer1"]
    victim = str((await swarm.peers["peer2"].host.addresses())[0]).partition("/p2p/")[0]
    done = [peer.presence._dial_backs.done for peer in swarm.peers.values()]
    assert await ask_for_dial(anna, boris, victim, relay=True) == "not reached"
    assert await ask_for_dial(anna, boris, "/ip4/11.77.0.9/tcp/22", relay=True) == "not reached"
    assert [peer.presence._dial_backs.done for peer in swarm.peers.values()] == done


async def test_a_stranger_has_nobody_dialled_and_learns_nothing(swarm: Swarm) -> None:
    await start_swarm(swarm, 2)
    boris = swarm.peers["peer1"]
    stranger = await swarm.start("stranger", run=OTHER_RUN)
    await stranger.host.connect(boris.id, await boris.host.addresses(), timeout_s=5)
    done = boris.presence._dial_backs.done
    someone = identity_of("someone").peer_id
    for at in ("/ip4/10.0.0.0/tcp/7700", "/ip4/10.0.0.0/tcp/7701", "/ip4/11.77.0.9/tcp/22"):
        verdict = await ask_for_dial(stranger, boris, at, peer=someone, relay=False)
        assert verdict == "cannot help"
    assert boris.presence._dial_backs.done == done


async def test_a_newcomer_is_tested_as_soon_as_it_is_connected(
    monkeypatch: MonkeyPatch, swarm: Swarm
) -> None:
    """Earlier, the newcomer asked before it had looked who could help, and again only five seconds
    later, while its download of the run's state waited."""
    connections = MemoryHost.connections

    async def asked_of_a_daemon(host: MemoryHost) -> tuple[Connection, ...]:
        await asyncio.sleep(0.01)
        return await connections(host)

    monkeypatch.setattr(MemoryHost, "connections", asked_of_a_daemon)

    await swarm.start("anna")
    boris = await swarm.start("boris", seeds=await swarm.seed_addresses("anna"))
    await until(lambda: boris.presence.reachable is True, within_s=2, what="the test")


async def test_how_long_a_failed_dial_took_is_nobodys_business(swarm: Swarm) -> None:
    await start_swarm(swarm, 2)
    anna, boris = swarm.peers["peer0"], swarm.peers["peer1"]
    loop, took = asyncio.get_running_loop(), []
    someone = identity_of("someone").peer_id
    swarm.network.simulated.dial_out_only(swarm.peers["seed"].id)  # it drops what comes in
    silent = str((await swarm.peers["seed"].host.addresses())[0]).partition("/p2p/")[0]
    open_port = str((await anna.host.addresses())[0]).partition("/p2p/")[0]
    for at in (open_port, "/ip4/10.0.9.9/tcp/7700", silent):
        began = loop.time()
        verdict = await ask_for_dial(anna, boris, at, peer=someone, relay=False)
        took.append(loop.time() - began)
        assert verdict == "not reached"
    assert max(took) - min(took) < 0.2, took


# --- run file ----------------------------------------------------------------------------------


async def test_a_newcomer_with_a_link_gets_the_run_file_from_the_peers(swarm: Swarm) -> None:
    run = RunId(blake3(b"name = 'ours'").hexdigest())
    await start_swarm(swarm, 3, run_file=b"name = 'ours'", run=run)
    seeds = await swarm.seed_addresses("seed")
    late = await swarm.start("late", seeds=seeds, run=run)
    content = await late.presence.fetch_run_file(
        lambda found: found == b"name = 'ours'", timeout_s=30
    )
    assert content == b"name = 'ours'"


def test_a_few_of_many_peers_without_a_run_file_are_named() -> None:
    answers = tuple((f"peer{number:02}", "no run file") for number in range(40))
    line = str(RunFileUnavailable(RUN, answers, 20.0))
    assert "peer02: no run file; and 37 more" in line and "peer03" not in line
    assert str(RunFileUnavailable(RUN, answers[:3], 20.0)).endswith("peer02: no run file")


async def test_a_run_file_that_does_not_match_is_not_believed(swarm: Swarm) -> None:
    await start_swarm(swarm, 2, run_file=b"name = 'forged'")
    late = await swarm.start("late", seeds=await swarm.seed_addresses("seed"))
    with pytest.raises(RunFileUnavailable) as caught:
        await late.presence.fetch_run_file(lambda found: False, timeout_s=20)
    reasons = dict(caught.value.answers)
    assert "something else" in reasons[swarm.peers["peer0"].id]
    assert "no run file" in reasons[swarm.peers["seed"].id]


async def test_a_visitor_has_the_run_file_within_a_second(swarm: Swarm) -> None:
    await start_swarm(swarm, 3, run_file=b"name = 'ours'")
    loop = asyncio.get_running_loop()
    began = loop.time()
    late = await swarm.start("late", seeds=await swarm.seed_addresses("seed"), observes=True)
    await late.presence.fetch_run_file(lambda found: True, timeout_s=30)
    assert loop.time() - began < 1.0


async def test_a_peer_that_hangs_does_not_hold_up_the_run_file(swarm: Swarm) -> None:
    await start_swarm(swarm, 4, run_file=b"name = 'ours'")
    late = await swarm.start("late", seeds=await swarm.seed_addresses("seed"))
    await until(lambda: len(late.sees()) == 4, within_s=20, what="it sees all")
    for name in sorted(swarm.peers, key=lambda name: swarm.peers[name].id)[:2]:
        if name != "late":
            swarm.network.simulated.pause(swarm.peers[name].id)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await late.presence.fetch_run_file(lambda found: True, timeout_s=30)
    assert loop.time() - began < CALL_TIMEOUT_S


# --- observers ---------------------------------------------------------------------------------


async def test_an_observer_sees_all_and_is_seen_by_nobody(swarm: Swarm) -> None:
    await start_swarm(swarm, 14)  # more than one hello passes on
    members = swarm.members()
    await asyncio.sleep(15)  # the bootstrap peer tells who joined with its next heartbeat
    forget_events(swarm)
    seeds = await swarm.seed_addresses("seed")
    visitor = await swarm.start("visitor", seeds=seeds, observes=True)
    everybody = {peer.id for peer in members}
    await until(lambda: visitor.sees() == everybody, within_s=5, what="it sees all")
    await asyncio.sleep(2 * MINUTE)
    assert visitor.sees() == everybody
    assert visitor.presence.stats.hellos_sent > 10, "a test of an observer that says nothing"
    assert visitor.presence.stats.hellos_received > 0

    await swarm.stop("visitor", leave=True)
    await asyncio.sleep(MINUTE)
    for peer in [swarm.peers["seed"], *members]:
        assert visitor.id not in peer.presence.table
        assert not [event for event in peer.events if event.name.startswith("peer_")]
    found = await members[0].host.directory.look_up(bucket_key(RUN, ""), timeout_s=5)
    assert everybody == set(found)


async def test_an_observer_needs_a_run_to_look_at(swarm: Swarm) -> None:
    with pytest.raises(ValueError, match="observes"):
        await swarm.start("nobody", run=None, observes=True)


# --- strangers ---------------------------------------------------------------------------------


async def test_a_peer_of_another_run_is_refused_with_both_ids(swarm: Swarm) -> None:
    anna = await swarm.start("anna")
    seeds = await swarm.seed_addresses("anna")
    boris = await swarm.start("boris", run=OTHER_RUN, seeds=seeds)
    await asyncio.sleep(2 * MINUTE)
    assert anna.sees() == boris.sees() == set()
    (event,) = boris.told("other_run")
    assert RUN in event.text and OTHER_RUN in event.text


async def test_a_bootstrap_peer_introduces_the_members_of_each_run_to_each_other_only(
    swarm: Swarm,
) -> None:
    seed = await swarm.start_bootstrap("seed")
    seeds = await swarm.seed_addresses("seed")
    ours = [await swarm.start(f"ours{n}", seeds=seeds) for n in range(3)]
    theirs = [await swarm.start(f"theirs{n}", seeds=seeds, run=OTHER_RUN) for n in range(3)]
    await until(
        lambda: swarm.all_see(ours) and swarm.all_see(theirs), within_s=30, what="both runs"
    )
    now = asyncio.get_running_loop().time()
    assert set(seed.presence.table.live_by_run(now)) == {RUN, OTHER_RUN}


async def test_a_bootstrap_peer_does_not_lose_a_member_that_is_alone(swarm: Swarm) -> None:
    """Greeted every 30 to 40 s, it forgot the founder of a run for a quarter of the time."""
    seed = await swarm.start_bootstrap("seed")
    await swarm.start("alone", seeds=await swarm.seed_addresses("seed"))
    await asyncio.sleep(20 * MINUTE)
    assert len(seed.told("peer_joined")) == 1
    assert not seed.told("peer_lost")


async def test_nobody_says_goodbye_for_another(swarm: Swarm) -> None:
    await start_swarm(swarm, 3)
    anna, boris, clara = swarm.members()
    record = PeerRecord(protocol=(1, 1), role="learner", incarnation=1, leaving=True)
    forged = seal(
        record, identity_of("peer0"), key=bucket_key(RUN, ""), sequence=1, ttl_s=30
    )  # an old goodbye of Anna's own, replayed by Boris
    for sealed in (forged, forged[:-1], b"", bytes(900)):
        hello = wire.write(wire.Hello(run=RUN, record=sealed))
        await boris.host.call(clara.id, wire.HELLO_PROTOCOL, hello, timeout_s=5)
    assert anna.id in clara.sees() and boris.id in clara.sees()
    assert clara.presence.table.rejected["forged"] + clara.presence.table.rejected["malformed"] >= 3


async def test_a_flood_of_hellos_is_refused_and_the_swarm_goes_on(swarm: Swarm) -> None:
    await start_swarm(swarm, 3)
    anna, boris, _ = swarm.members()
    flood = wire.write(wire.Hello(run=RUN))
    refused = 0
    for _ in range(300):
        try:
            await anna.host.call(boris.id, wire.HELLO_PROTOCOL, flood, timeout_s=5)
        except CallRefused:
            refused += 1
    assert refused >= 150
    assert boris.presence.stats.refused >= refused
    await asyncio.sleep(2 * MINUTE)
    assert swarm.all_see(swarm.members())


async def test_a_hello_of_a_new_key_has_nobody_look_at_the_addresses_of_all_members(
    swarm: Swarm, monkeypatch: MonkeyPatch
) -> None:
    """It took 70 ms of the peer's processor time among 1000 members, and 0.7 s among 8000."""
    anna = await swarm.start("anna")
    await swarm.start("boris", seeds=await swarm.seed_addresses("anna"))
    address = pack(parse("/ip4/10.0.0.9/tcp/4001"))

    def record_of(name: str) -> bytes:
        record = PeerRecord(
            protocol=(1, 1), role="learner", incarnation=1, addresses=(address,), reachable=True
        )
        return seal(record, identity_of(name), key=bucket_key(RUN, ""), sequence=1, ttl_s=600)

    for number in range(100):
        now = asyncio.get_running_loop().time()
        anna.presence.table.take(record_of(f"member {number}"), now=now)
    await asyncio.sleep(MINUTE)
    addresses: property = vars(Member)["addresses"]
    looks = 0

    def counted(member: Member) -> tuple[Multiaddr, ...]:
        nonlocal looks
        looks += 1
        found: tuple[Multiaddr, ...] = addresses.__get__(member)
        return found

    strangers = [swarm.network.host(identity_of(f"new {number}")) for number in range(20)]
    for stranger in strangers:
        await stranger.connect(anna.id, await anna.host.addresses(), timeout_s=5.0)
    monkeypatch.setattr(Member, "addresses", property(counted))
    for number, stranger in enumerate(strangers):
        hello = wire.write(wire.Hello(run=RUN, record=record_of(f"new {number}")))
        await stranger.call(anna.id, wire.HELLO_PROTOCOL, hello, timeout_s=5.0)
        told = {event.fields["peer"] for event in anna.told("peer_joined")}
        assert stranger.peer_id in told, "at once"
    assert looks < 1000, "but for the looks at all of them from time to time"
    for stranger in strangers:
        await stranger.close()


@pytest.mark.parametrize(
    "protocol",
    [
        wire.HELLO_PROTOCOL,
        wire.DIAL_BACK_PROTOCOL,
        wire.CONFIRM_PROTOCOL,
        wire.RUN_FILE_PROTOCOL,
    ],
)
async def test_nonsense_from_a_stranger_is_refused_and_breaks_nothing(
    protocol: str, swarm: Swarm
) -> None:
    settings = PresenceSettings(calls_per_minute=100_000)
    await start_swarm(swarm, 2, settings=settings)
    anna, boris = swarm.members()
    good = {
        wire.HELLO_PROTOCOL: wire.write(wire.Hello(run=RUN)),
        wire.DIAL_BACK_PROTOCOL: wire.write(
            wire.DialBack(peer=anna.id, nonce=bytes(16), addresses=(b"x",), relay=False)
        ),
    }.get(protocol, b"\x93\x01\x02\x03")
    rng = random.Random(4)
    refused = 0
    for number in range(200):
        data = bytearray(rng.randbytes(rng.randint(0, 200)) if number % 2 else good)
        if number % 2 == 0 and data:
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            await anna.host.call(boris.id, protocol, bytes(data), timeout_s=10)
        except CallRefused:
            refused += 1
    assert refused > 50
    await asyncio.sleep(MINUTE)
    assert swarm.all_see(swarm.members())


async def test_two_peers_with_one_key_file_are_told_so(swarm: Swarm) -> None:
    await start_swarm(swarm, 2)
    anna, boris = swarm.members()
    record = PeerRecord(protocol=(1, 1), role="learner", incarnation=2)
    for ahead in range(1, 7):  # the other process is always a little further
        data = seal(
            record,
            identity_of("peer0"),
            key=bucket_key(RUN, ""),
            sequence=2_000_000_000_000 + 1000 * ahead,
            ttl_s=30,
        )
        passed = wire.write(wire.Hello(run=RUN, passed=(wire.Passed(data, 0.0),)))
        await boris.host.call(anna.id, wire.HELLO_PROTOCOL, passed, timeout_s=5)
    assert len(anna.told("identity_in_use")) == 1


# --- life --------------------------------------------------------------------------------------


async def test_a_bug_is_not_swallowed(swarm: Swarm) -> None:
    class Bug(Exception):
        pass

    def break_it(event: PresenceEvent) -> None:
        if event.name == "reachability":
            raise Bug

    anna = await swarm.start("anna", on_event=break_it)
    await swarm.start("boris", seeds=await swarm.seed_addresses("anna"))
    with pytest.raises(ExceptionGroup) as caught:
        await anna.presence.watch()
    assert caught.value.subgroup(Bug) is not None
    await swarm.peers.pop("anna").host.close()


async def test_closing_twice_and_leaving_alone_is_quick(swarm: Swarm) -> None:
    anna = await swarm.start("anna")
    await asyncio.sleep(1)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await anna.presence.leave()
    await anna.presence.leave()
    await anna.presence.close()
    await anna.presence.close()
    assert loop.time() - began <= GOODBYE_TIMEOUT_S


async def test_the_identity_has_to_be_the_hosts(swarm: Swarm) -> None:
    host = swarm.network.host("anna")
    with pytest.raises(ValueError, match="identity is"):
        Presence(host, Identity.from_seed(bytes(32)), Profile(RUN))
    await host.close()


async def test_the_seeds_of_a_run_hold_its_records_whatever_is_nearer_to_their_keys(
    swarm: Swarm,
) -> None:
    await start_swarm(swarm, 20)
    seeds = set(swarm.peers) - {member.name for member in swarm.members()}
    await asyncio.sleep(30.0)
    members = {member.id for member in swarm.members()}
    ids = {swarm.peers[name].id for name in seeds}
    assert all(member.host.directory._seeds == ids for member in swarm.members())
    for name in seeds:
        keeper = swarm.peers[name].host.keeper
        stored = (keeper.stored(key, now=swarm.network.heap.now) for key in keeper.known_keys)
        assert {peer for records in stored for peer in records} == members


# --- laptops ------------------------------------------------------------------------------------


@pytest.mark.parametrize("slept_s", [2 * MINUTE, 20 * MINUTE])
async def test_a_laptop_that_slept_is_back_within_half_a_minute(
    swarm: Swarm, slept_s: float
) -> None:
    await start_swarm(swarm, 4)
    sleeper = swarm.members()[2]
    swarm.network.simulated.pause(sleeper.id)
    await asyncio.sleep(slept_s)
    assert all(sleeper.id not in peer.sees() for peer in swarm.members() if peer is not sleeper)
    swarm.network.simulated.resume(sleeper.id)
    await until(lambda: swarm.all_see(swarm.members()), within_s=30, what="it is back")


@pytest.mark.parametrize("jumps_by_s", [-8 * 60 * MINUTE, 8 * 60 * MINUTE])
async def test_a_clock_that_jumps_by_hours_costs_nobody_a_peer(
    swarm: Swarm, jumps_by_s: float
) -> None:
    await start_swarm(swarm, 4)
    swarm.members()[2].host.wall_offset_s += jumps_by_s
    for _ in range(30):
        await asyncio.sleep(10.0)
        assert swarm.all_see(swarm.members())
