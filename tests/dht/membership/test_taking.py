"""Records from the network, of one run or of all, that a table takes in and passes on."""

from __future__ import annotations

import numpy as np

from dht.identity import Identity, PeerId, RunId
from dht.membership.hello import PASSED_MAX
from dht.membership.table import MembershipSettings, PeerTable, bucket_key, bucket_of
from dht.records import PeerRecord, seal

ANNA = Identity.from_seed(b"a" * 32)
BORIS = Identity.from_seed(b"b" * 32)
CLARA = Identity.from_seed(b"c" * 32)
RUN = RunId("5f" * 32)


def peer(number: int) -> PeerId:
    return member(number).peer_id


def member(number: int) -> Identity:
    return Identity.from_seed(number.to_bytes(32, "big"))


def record_of(identity: Identity, sequence: int, run: RunId = RUN) -> bytes:
    record = PeerRecord(protocol=(1, 1), role="learner", incarnation=1)
    return seal(record, identity, key=bucket_key(run, ""), sequence=sequence, ttl_s=30)


def table_of(run: RunId | None) -> PeerTable:
    return PeerTable(run, ANNA.peer_id, MembershipSettings())


def call(known: PeerTable, caller: Identity, run: str, now: float, sequence: int = 1) -> bool:
    """A member of a run says hello. Says whether its record was taken."""
    record = record_of(caller, sequence, RunId(run))
    taken = known.take(record, now=now, peer=caller.peer_id)
    known.heard(caller.peer_id, now)
    return taken is not None


def test_a_member_takes_in_its_own_run_only() -> None:
    known = table_of(RUN)
    assert known.take(record_of(BORIS, 1), now=0.0)
    assert not known.take(record_of(BORIS, 1), now=0.0), "nothing new"
    assert not known.take(record_of(CLARA, 1, RunId("other")), now=0.0)
    assert not known.take(b"nonsense", now=0.0)
    assert known.rejected == {"foreign": 1, "malformed": 1}
    assert BORIS.peer_id in known and CLARA.peer_id not in known


def test_a_record_in_a_bucket_that_is_not_its_peers_is_not_taken() -> None:
    """One key in the buckets that a newcomer reads counted for a thousand peers there."""
    known = table_of(RUN)
    record = PeerRecord(protocol=(1, 1), role="learner", incarnation=1)
    own, other = bucket_of(BORIS.peer_id, 10), bucket_of(ANNA.peer_id, 10)
    assert own != other
    for bucket in (other, "zz", "1" * 40):
        assert not known.take(
            seal(record, BORIS, key=bucket_key(RUN, bucket), sequence=1, ttl_s=30), now=0.0
        )
    assert known.rejected == {"misplaced": 3}
    assert known.take(seal(record, BORIS, key=bucket_key(RUN, own), sequence=1, ttl_s=30), now=0.0)


def test_a_table_full_of_peers_of_which_others_tell_has_room_for_one_that_calls() -> None:
    """Records of thousands of keys are cheap: no peer that came later was known to anybody."""
    known = PeerTable(RUN, ANNA.peer_id, MembershipSettings(members_max=4))
    for number in range(8):
        known.take(record_of(member(number), 1), now=0.0)
    assert not known.take(record_of(BORIS, 1), now=1.0), "it is told of as well"
    for caller in (BORIS, CLARA):
        assert known.take(record_of(caller, 2), now=1.0, peer=caller.peer_id)
        known.heard(caller.peer_id, 1.0)
    table = known
    assert len(table) == 4 and {BORIS.peer_id, CLARA.peer_id} <= {each.peer for each in table}
    for number in (5, 6, 7):
        known.take(record_of(member(number), 2), now=2.0, peer=member(number).peer_id)
        known.heard(member(number).peer_id, 2.0)
    assert {BORIS.peer_id, CLARA.peer_id} <= {each.peer for each in table}, "they called before"


def test_fresh_records_are_passed_on_with_their_age_and_stale_ones_are_not() -> None:
    known = table_of(RUN)
    rng = np.random.default_rng(0)
    known.take(record_of(BORIS, 1), now=0.0)
    known.take(record_of(CLARA, 1), now=4.0, age_s=1.0)

    passed = known.pass_on(RUN, to=peer(1), now=10.0, rng=rng)
    assert {(p.sealed, p.age_s) for p in passed} == {
        (record_of(BORIS, 1), 10.0),
        (record_of(CLARA, 1), 7.0),
    }
    assert [p.age_s for p in known.pass_on(RUN, to=CLARA.peer_id, now=10.0, rng=rng)] == [10.0]
    assert [p.age_s for p in known.pass_on(RUN, to=peer(1), now=17.0, rng=rng)] == [14.0]
    assert known.pass_on("other", to=peer(1), now=10.0, rng=rng) == ()
    for number in range(2, 40):
        identity = Identity.from_seed(number.to_bytes(32, "big"))
        known.take(record_of(identity, 1), now=10.0)
    assert len(known.pass_on(None, to=peer(1), now=10.0, rng=rng)) == PASSED_MAX


def test_peers_that_tell_each_other_about_a_dead_one_do_not_keep_it_alive() -> None:
    rng = np.random.default_rng(1)
    tables = [table_of(RUN) for _ in range(6)]
    tables[0].take(record_of(BORIS, 1), now=0.0)
    for now in range(1, 100):
        for teller in tables:
            for listener in tables:
                for passed in teller.pass_on(RUN, to=ANNA.peer_id, now=now, rng=rng):
                    listener.take(passed.sealed, now=now, age_s=passed.age_s)
        alive = [t.is_live(BORIS.peer_id, now) for t in tables]
        assert all(alive) if now < 30 else not any(alive), f"at {now} s: {alive}"


def test_a_peer_that_lags_behind_its_own_record_is_shown_it() -> None:
    known = table_of(RUN)
    newer, older = record_of(BORIS, 9), record_of(BORIS, 3)
    known.take(newer, now=0.0)
    assert known.newer_than(older, BORIS.peer_id) == newer
    assert known.newer_than(newer, BORIS.peer_id) == b""
    assert known.newer_than(older, CLARA.peer_id) == b"", "signed by another than the caller"


def test_a_record_that_a_peer_has_just_passed_on_is_not_told_to_it_again() -> None:
    known, rng = table_of(RUN), np.random.default_rng(0)
    for identity in (BORIS, CLARA):
        known.take(record_of(identity, 1), now=0.0)
    (told,) = known.pass_on(RUN, to=CLARA.peer_id, now=1.0, rng=rng)
    assert told.sealed == record_of(BORIS, 1)
    assert not known.pass_on(RUN, to=CLARA.peer_id, now=1.0, rng=rng, but=[told])
    known.take(record_of(BORIS, 2), now=2.0)
    (newer,) = known.pass_on(RUN, to=CLARA.peer_id, now=2.0, rng=rng, but=[told])
    assert newer.sealed == record_of(BORIS, 2)


def test_one_key_holds_the_place_of_one_run_at_a_bootstrap_peer() -> None:
    known = table_of(None)
    for number in range(128):
        assert call(known, BORIS, f"run{number}", now=0.0, sequence=number)
    assert list(known.live_by_run(0.0)) == ["run127"]

    newest = record_of(BORIS, 127, RunId("run127"))
    older = record_of(BORIS, 5, RunId("older"))
    assert not known.take(older, now=1.0, peer=BORIS.peer_id), "it is in a newer one"
    assert known.rejected == {"replayed": 1}
    assert known.newer_than(older, BORIS.peer_id) == newest, "its clock may have been set back"


def test_strangers_that_name_members_of_many_runs_fill_no_bootstrap_peer() -> None:
    known = PeerTable(None, ANNA.peer_id, MembershipSettings(members_max=12))
    for number in range(40):
        known.take(record_of(member(number), 1, RunId(f"run{number}")), now=0.0)
    assert len(known) == 12 and known.rejected == {"full": 28}
    assert not known.take(record_of(BORIS, 1, RunId("named")), now=1.0), "it is named, too"
    assert call(known, BORIS, "called", now=1.0)
    assert len(known) == 12 and "called" in known.live_by_run(1.0)
    assert known.take(record_of(CLARA, 1), now=31.0), "the lost make room"


def test_keys_of_one_network_do_not_hold_all_places() -> None:
    networks = {BORIS.peer_id: "198.51.100.0/24"}
    known = PeerTable(
        None,
        ANNA.peer_id,
        MembershipSettings(members_max=12),
        network_of=lambda peer: networks.get(peer, "203.0.113.0/24"),
    )
    for number in range(12):
        assert call(known, member(number), f"run{number}", now=0.0)
    assert not call(known, CLARA, "one-more", now=1.0), "the same network"
    assert call(known, BORIS, "honest", now=1.0)
    for number in range(12):
        call(known, member(number), f"other{number}", now=2.0, sequence=2)
    assert "honest" in known.live_by_run(2.0) and len(known) == 12
