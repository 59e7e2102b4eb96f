import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dht.addresses import pack, parse
from dht.identity import Identity
from dht.membership.table import (
    DEPTH_MAX,
    Change,
    MembershipSettings,
    PeerTable,
    bucket_key,
    bucket_of,
    depth_for,
)
from dht.records import PeerRecord, seal
from tests.dht.membership.table_of_records import ANNA, BORIS, ME, RUN, TableOfRecords


@pytest.mark.parametrize(
    ("peers", "depth"), [(1, 0), (64, 0), (65, 1), (128, 1), (129, 2), (200, 2), (10_000, 8)]
)
def test_buckets_deepen_with_every_doubling(peers: int, depth: int) -> None:
    assert depth_for(peers) == depth


def test_the_depth_has_an_end() -> None:
    assert depth_for(1e30) == DEPTH_MAX


@given(st.binary(min_size=32, max_size=32), st.integers(1, DEPTH_MAX))
def test_a_deeper_bucket_lies_within_the_shallower_one(seed: bytes, depth: int) -> None:
    peer = Identity.from_seed(seed).peer_id
    assert bucket_of(peer, depth).startswith(bucket_of(peer, depth - 1))
    assert len(bucket_of(peer, depth)) == depth


def test_a_peer_is_live_from_its_record_until_that_expires() -> None:
    swarm = TableOfRecords()
    assert swarm.live(0.0) == []
    assert swarm.record(ANNA, 0.0, sequence=1)

    assert swarm.live(29.9) == [ANNA.peer_id]
    assert swarm.live(30.0) == []


def test_hearing_a_peer_keeps_it_live_without_a_record() -> None:
    swarm = TableOfRecords()
    swarm.record(ANNA, 0.0, sequence=1)
    swarm.table.heard(ANNA.peer_id, 25.0)

    assert swarm.live(54.9) == [ANNA.peer_id]
    assert swarm.live(55.0) == []


def test_a_failed_call_ends_it_until_the_next_sign_of_life() -> None:
    swarm = TableOfRecords()
    swarm.record(ANNA, 0.0, sequence=1)
    swarm.table.failed(ANNA.peer_id, 5.0)
    assert swarm.live(5.0) == []
    assert [member.peer for member in swarm.table.present(5.0)] == [ANNA.peer_id]

    swarm.record(ANNA, 10.0, sequence=2)
    assert swarm.live(10.0) == [ANNA.peer_id]


def test_a_failed_call_says_nothing_about_a_peer_that_can_only_dial_out() -> None:
    swarm = TableOfRecords()
    swarm.record(ANNA, 0.0, sequence=1, reachable=False)
    swarm.table.failed(ANNA.peer_id, 5.0)
    assert swarm.live(5.0) == [ANNA.peer_id]


def test_a_peer_that_fell_silent_may_train_on_unless_it_said_goodbye_or_had_no_work() -> None:
    swarm = TableOfRecords()
    swarm.record(ANNA, 0.0, sequence=1, trains=True)
    swarm.record(BORIS, 0.0, sequence=1)
    assert swarm.table.absent(10.0) == {}
    assert swarm.table.absent(40.0) == {ANNA.peer_id: 0.0, BORIS.peer_id: None}
    swarm.record(ANNA, 41.0, sequence=2, trains=True, leaving=True)
    assert swarm.table.absent(41.0) == {ANNA.peer_id: None, BORIS.peer_id: None}


def test_only_a_reachable_peer_that_lasted_is_established() -> None:
    swarm = TableOfRecords()
    for sequence, now in enumerate([0.0, 10.0, 20.0, 30.0]):
        swarm.record(ANNA, now, sequence=sequence)
        swarm.record(BORIS, now, sequence=sequence, reachable=None)

    assert swarm.established(29.9) == []
    assert swarm.established(30.0) == [ANNA.peer_id]


def test_a_failed_call_is_mended_by_an_answer_not_by_a_record() -> None:
    swarm = TableOfRecords()
    for sequence, now in enumerate([0.0, 10.0, 20.0, 30.0]):
        swarm.record(ANNA, now, sequence=sequence)
    swarm.table.failed(ANNA.peer_id, 35.0)
    swarm.record(ANNA, 40.0, sequence=9)

    # Its record is new, so it lives for somebody; for us it is not established.
    assert swarm.live(40.0) == [ANNA.peer_id]
    assert swarm.established(40.0) == []
    swarm.table.heard(ANNA.peer_id, 41.0)
    assert swarm.live(41.0) == [ANNA.peer_id]


def test_a_peer_that_was_restarted_has_to_prove_itself_again() -> None:
    swarm = TableOfRecords()
    swarm.record(ANNA, 0.0, sequence=1)
    swarm.record(ANNA, 10.0, sequence=2, incarnation=2)
    swarm.table.heard(ANNA.peer_id, 35.0)

    assert swarm.established(39.9) == []
    assert swarm.established(40.0) == [ANNA.peer_id]


@pytest.mark.parametrize("by", ["record", "message"])
def test_a_peer_that_was_out_of_reach_is_established_as_soon_as_it_is_back(by: str) -> None:
    """After a partition both sides choose their leaders among the same peers at once."""
    swarm = TableOfRecords()
    swarm.record(ANNA, 0.0, sequence=1)
    assert swarm.live(100.0) == []
    if by == "record":
        swarm.record(ANNA, 100.0, sequence=2)
    else:
        swarm.table.heard(ANNA.peer_id, 100.0)

    assert swarm.established(100.0) == [ANNA.peer_id]


def test_goodbye_ends_it_at_once_and_an_older_record_elsewhere_does_not_revive_it() -> None:
    swarm = TableOfRecords()
    swarm.record(ANNA, 0.0, sequence=1)
    swarm.record(ANNA, 5.0, sequence=3, leaving=True)
    assert swarm.live(5.0) == []

    swarm.table.heard(ANNA.peer_id, 6.0)  # it may still talk while it drains
    assert not swarm.record(ANNA, 6.0, sequence=2, depth=1)
    assert swarm.live(6.0) == []

    assert swarm.record(ANNA, 7.0, sequence=4)
    assert swarm.live(7.0) == [ANNA.peer_id]


def test_changes_tell_who_came_and_how_who_went() -> None:
    swarm = TableOfRecords()
    swarm.record(ANNA, 0.0, sequence=1)
    swarm.record(BORIS, 0.0, sequence=1)
    joined = swarm.table.changes(0.0)
    assert {(change.peer, change.kind) for change in joined} == {
        (ANNA.peer_id, "joined"),
        (BORIS.peer_id, "joined"),
    }
    swarm.record(ANNA, 1.0, sequence=2, leaving=True)
    assert swarm.table.changes(1.0) == [Change(ANNA.peer_id, "left", "n", RUN)]
    assert swarm.table.changes(2.0) == []
    assert swarm.table.changes(30.0) == [Change(BORIS.peer_id, "lost", "n", RUN)]


def test_the_own_record_is_no_member() -> None:
    swarm = TableOfRecords()
    assert not swarm.record(ME, 0.0, sequence=1)
    assert len(swarm.table) == 0


def test_nonsense_among_the_addresses_is_left_out() -> None:
    swarm = TableOfRecords()
    good = parse("/ip4/203.0.113.7/tcp/7700")
    swarm.record(ANNA, 0.0, sequence=1, addresses=(b"junk", pack(good)))
    member = swarm.table.get(ANNA.peer_id)
    assert member is not None and member.addresses == (good,)


def test_the_table_is_bounded_and_the_gone_make_room() -> None:
    swarm = TableOfRecords(members_max=2)
    clara = Identity.from_seed(b"c" * 32)
    swarm.record(ANNA, 0.0, sequence=1)
    swarm.record(BORIS, 20.0, sequence=1)
    assert not swarm.record(clara, 21.0, sequence=1)
    assert len(swarm.table) == 2
    assert swarm.record(clara, 31.0, sequence=2)
    assert swarm.live(31.0) == sorted([BORIS.peer_id, clara.peer_id])


def test_nobody_is_established_because_another_says_that_it_saw_it_long_ago() -> None:
    """Its steps would be believed as well, as many as it could have made since."""
    swarm = TableOfRecords()
    record = PeerRecord(protocol=(1, 1), role="learner", incarnation=1, reachable=True)
    data = seal(record, ANNA, key=bucket_key(RUN, ""), sequence=1, ttl_s=600)
    assert swarm.table.take(data, now=1000.0, age_s=590.0)
    swarm.table.heard(ANNA.peer_id, 1001.0)
    assert swarm.established(1002.0) == [] and swarm.established(1030.0) == [ANNA.peer_id]
    (member,) = swarm.table
    assert member.expires_at == 1010.0, "and it does not live longer for that"


def test_a_crowd_that_finds_the_table_full_has_it_searched_once_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    swarm = TableOfRecords(members_max=2)
    swarm.record(ANNA, 0.0, sequence=1)
    swarm.record(BORIS, 0.0, sequence=1)
    searched = []
    monkeypatch.setattr(PeerTable, "forget_lost", lambda table, now: searched.append(now))
    for number in range(256):
        crowd = Identity.from_seed(number.to_bytes(32, "big"))
        assert not swarm.record(crowd, 10.0 + number / 100, sequence=1)
    assert len(searched) == 3


def test_a_peer_long_gone_is_forgotten() -> None:
    swarm = TableOfRecords(memory_s=900.0)
    swarm.record(ANNA, 0.0, sequence=1)
    swarm.table.forget(900.0)
    assert len(swarm.table) == 1
    swarm.table.forget(900.1)
    assert len(swarm.table) == 0


def test_those_who_fell_silent_are_worth_a_look_and_those_who_left_are_not() -> None:
    swarm = TableOfRecords()
    clara = Identity.from_seed(b"c" * 32)
    swarm.record(ANNA, 0.0, sequence=1)
    swarm.record(BORIS, 0.0, sequence=1, leaving=True)
    swarm.record(clara, 0.0, sequence=1, reachable=False)
    assert swarm.table.gone(29.9) == ()
    assert [member.peer for member in swarm.table.gone(30.0)] == [ANNA.peer_id]


def crowd(count: int) -> list[Identity]:
    return [Identity.from_seed(number.to_bytes(32, "big")) for number in range(1, count + 1)]


def read_everything(
    swarm: TableOfRecords, identities: list[Identity], depth: int, now: float
) -> int:
    """One heartbeat: read what the table asks for; the others wrote at ``depth``."""
    buckets = swarm.table.buckets_to_read(now)
    for bucket in buckets:
        swarm.table.was_read(bucket, now)
        for identity in identities:
            if len(bucket) == depth and bucket_of(identity.peer_id, depth) == bucket:
                swarm.record(identity, now, sequence=int(now * 1000) + 1, depth=depth)
    return len(buckets)


def test_a_small_swarm_costs_the_root_and_the_two_buckets_below() -> None:
    swarm = TableOfRecords()
    read_everything(swarm, crowd(20), 0, 0.0)
    assert len(swarm.live(0.0)) == 20
    assert set(swarm.table.buckets_to_read(1.0)) == {"", "0", "1"}


def test_finding_the_live_ones_of_200_peers_costs_one_look_up_per_bucket() -> None:
    swarm = TableOfRecords()
    others = crowd(199)
    for beat in range(4):
        read_everything(swarm, others, 2, 10.0 * beat)
    now = 30.0

    assert len(swarm.live(now)) == 199
    assert swarm.table.depth(now) == 2
    buckets = swarm.table.buckets_to_read(now)
    assert len(buckets) == len(set(buckets)) == 4 + 2 + 8
    assert swarm.table.own_bucket(now) == bucket_of(ME.peer_id, 2)


def test_others_one_depth_off_are_found_all_the_same() -> None:
    others = crowd(130)
    for depth in (1, 2):
        swarm = TableOfRecords()
        for beat in range(4):
            read_everything(swarm, others, depth, 10.0 * beat)
        assert len(swarm.live(30.0)) == 130, f"depth {depth}"


def test_a_newcomer_finds_the_depth_of_a_large_swarm() -> None:
    count = 1200
    others = crowd(count)
    depth = depth_for(count)
    swarm = TableOfRecords()
    first = swarm.table.buckets_to_read(0.0)
    assert {bucket_of(ME.peer_id, probe) for probe in range(DEPTH_MAX + 1)} <= set(first)

    for beat in range(4):
        cost = read_everything(swarm, others, depth, 10.0 * beat)
        assert cost <= swarm.table.settings.look_ups_max
    assert abs(swarm.table.depth(30.0) - depth) <= 1
    estimate = swarm.table.size_estimate(30.0)
    assert 0.7 * count < estimate < 1.4 * count


class Sized(PeerTable):
    """A table that believes in a swarm of a given size."""

    def __init__(self, peers: int, look_ups_max: int) -> None:
        super().__init__(RUN, ME.peer_id, MembershipSettings(look_ups_max=look_ups_max))
        self.peers = peers

    def size_estimate(self, now: float) -> float:
        return self.peers


@given(
    st.integers(0, DEPTH_MAX),
    st.integers(8, 64),
    st.lists(st.integers(0, 40), max_size=20),
)
def test_look_ups_are_bounded_at_every_depth(depth: int, limit: int, reads: list[int]) -> None:
    table = Sized(64 * 2**depth, limit)
    for read_at, number in enumerate(reads):
        table.was_read(bucket_of(ME.peer_id, number % DEPTH_MAX), read_at)
    buckets = table.buckets_to_read(50.0)
    assert len(buckets) <= limit
    assert len(set(buckets)) == len(buckets)


@pytest.mark.parametrize(("others", "waits_s"), [(1, 75.0), (41, 75.0), (42, 15.0), (63, 15.0)])
def test_a_bucket_without_anybody_is_read_at_every_other_heartbeat_or_every_eighth(
    others: int, waits_s: float
) -> None:
    """Every other, where a swarm half as large again writes there: 64 peers fill a bucket."""
    swarm = TableOfRecords()
    for peer in crowd(others):
        swarm.record(peer, 0.0, sequence=1)
    assert set(swarm.table.buckets_due(0.0)) == {"", "0", "1"}
    for bucket in ("", "0", "1"):
        swarm.table.was_read(bucket, 0.0)
    for peer in crowd(others):
        swarm.record(peer, waits_s - 10.0, sequence=2)
    assert swarm.table.buckets_due(waits_s - 0.1) == ("",)
    assert set(swarm.table.buckets_due(waits_s)) == {"", "0", "1"}


def test_a_bucket_is_read_at_every_other_heartbeat_if_all_its_peers_were_heard() -> None:
    swarm = TableOfRecords()
    anna, boris = crowd(2)
    for peer in (anna, boris):
        swarm.record(peer, 0.0, sequence=1)
        swarm.table.heard(peer.peer_id, 5.0)
    for bucket in ("", "0", "1"):
        swarm.table.was_read(bucket, 5.0)
    assert swarm.table.buckets_due(19.9) == ()
    assert swarm.table.buckets_due(20.1) == ("",)
    swarm.table.was_read("", 20.1)
    swarm.table.heard(anna.peer_id, 20.1)
    assert swarm.table.buckets_due(30.0) == ("",), "boris may be live, and was not heard"
    swarm.table.heard(boris.peer_id, 30.0)
    assert swarm.table.buckets_due(30.0) == ()


def test_a_reading_that_misses_a_peer_is_known_before_the_peer_is_lost() -> None:
    swarm = TableOfRecords()
    swarm.record(ANNA, 0.0, sequence=1)
    assert not swarm.table.misses_a_peer("", 17.4)
    assert swarm.table.misses_a_peer("", 17.6), "the next heartbeat may be too late"
    assert not swarm.table.misses_a_peer(bucket_of(ANNA.peer_id, 1), 17.6), "not its bucket"
    assert not swarm.table.misses_a_peer("", 30.0), "it is lost already"

    swarm.table.heard(ANNA.peer_id, 17.6)
    assert not swarm.table.misses_a_peer("", 17.6)
    swarm.record(BORIS, 18.0, sequence=1)
    swarm.record(BORIS, 19.0, sequence=2, leaving=True)
    assert not swarm.table.misses_a_peer("", 35.0), "who left is missed by nobody"


def test_every_bucket_of_a_level_has_its_turn() -> None:
    swarm = TableOfRecords(look_ups_max=8)
    others = crowd(600)
    depth = depth_for(600)
    seen: set[str] = set()
    for beat in range(1 + math.ceil(2**depth / 5)):
        now = float(beat)
        seen |= set(swarm.table.buckets_to_read(now))
        read_everything(swarm, others, depth, now)
    assert {bucket for bucket in seen if len(bucket) == depth} == {
        f"{number:0{depth}b}" for number in range(2**depth)
    }
