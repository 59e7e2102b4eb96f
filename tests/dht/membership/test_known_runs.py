"""The runs of which a peer knows members."""

from collections.abc import Callable

import numpy as np
import pytest

from dht.identity import Identity, PeerId, RunId
from dht.membership import known_runs
from dht.membership.hello import PASSED_MAX
from dht.membership.known_runs import RUNS_MAX, SILENT_S, KnownRuns
from dht.membership.table import MembershipSettings, bucket_key, bucket_of
from dht.records import (
    PeerRecord,
    seal,
)

ANNA = Identity.from_seed(b"a" * 32)
BORIS = Identity.from_seed(b"b" * 32)
CLARA = Identity.from_seed(b"c" * 32)
RUN = RunId("5f" * 32)


def peer(number: int) -> PeerId:
    return Identity.from_seed(number.to_bytes(32, "big")).peer_id


def record_of(identity: Identity, sequence: int, run: RunId = RUN) -> bytes:
    record = PeerRecord(protocol=(1, 1), role="learner", incarnation=1)
    return seal(record, identity, key=bucket_key(run, ""), sequence=sequence, ttl_s=30)


def runs_of(run: RunId | None) -> KnownRuns:
    return KnownRuns(ANNA.peer_id, run, MembershipSettings())


def test_a_member_takes_in_its_own_run_only() -> None:
    known = runs_of(RUN)
    assert known.take(record_of(BORIS, 1), now=0.0)
    assert not known.take(record_of(BORIS, 1), now=0.0), "nothing new"
    assert not known.take(record_of(CLARA, 1, RunId("other")), now=0.0)
    assert not known.take(b"nonsense", now=0.0)
    assert known.keeper.rejected == {"foreign": 1, "malformed": 1}
    assert known.is_member(BORIS.peer_id) and not known.is_member(CLARA.peer_id)


def member(number: int) -> Identity:
    return Identity.from_seed(number.to_bytes(32, "big"))


def call(known: KnownRuns, caller: Identity, run: str, now: float, sequence: int = 1) -> bool:
    """A member of a run says hello. Says whether its record was taken."""
    record = record_of(caller, sequence, RunId(run))
    taken = known.take(record, now=now, peer=caller.peer_id)
    known.heard(caller.peer_id, now)
    return taken


def full_of_runs(network_of: Callable[[PeerId], str | None] = lambda peer: None) -> KnownRuns:
    """A bootstrap peer that a member of each of ``RUNS_MAX`` runs has called."""
    known = KnownRuns(ANNA.peer_id, None, MembershipSettings(), network_of)
    for number in range(RUNS_MAX):
        assert call(known, member(number), f"run{number}", now=0.0)
    return known


def test_a_bootstrap_peer_knows_many_runs_but_not_any_number() -> None:
    known = full_of_runs()
    assert not call(known, BORIS, "late", now=SILENT_S - 1)
    assert known.keeper.rejected["full"] == 1

    for number in range(1, RUNS_MAX):
        known.heard(member(number).peer_id, SILENT_S - 1)
    assert call(known, BORIS, "late", now=SILENT_S + 1)
    assert len(known.tables) == RUNS_MAX and "run0" not in known.tables
    assert not call(known, CLARA, "later", now=SILENT_S + 1)


def test_one_key_holds_the_place_of_one_run_at_a_bootstrap_peer() -> None:
    known = runs_of(None)
    for number in range(2 * RUNS_MAX):
        assert call(known, BORIS, f"run{number}", now=0.0, sequence=number)
    assert list(known.tables) == [f"run{2 * RUNS_MAX - 1}"]

    newest = record_of(BORIS, 2 * RUNS_MAX - 1, RunId(f"run{2 * RUNS_MAX - 1}"))
    older = record_of(BORIS, 5, RunId("older"))
    assert not known.take(older, now=1.0, peer=BORIS.peer_id), "it is in a newer one"
    assert known.keeper.rejected == {"replayed": 1}
    assert known.newer_than(older, BORIS.peer_id) == newest, "its clock may have been set back"
    assert known.take(older, now=31.0, peer=BORIS.peer_id), "it fell silent in the newer one"


def test_runs_that_were_only_named_give_way_to_one_whose_member_calls() -> None:
    known = runs_of(None)
    for number in range(RUNS_MAX):
        known.take(record_of(member(number), 1, RunId(f"run{number}")), now=0.0)
    assert not known.take(record_of(BORIS, 1, RunId("named")), now=1.0), "it is named, too"
    assert call(known, BORIS, "called", now=1.0)
    assert "called" in known.tables and len(known.tables) == RUNS_MAX


def test_keys_of_one_network_do_not_hold_the_places_of_all_runs() -> None:
    networks = {BORIS.peer_id: "198.51.100.0/24"}
    known = full_of_runs(lambda peer: networks.get(peer, "203.0.113.0/24"))
    assert not call(known, CLARA, "one-more", now=1.0), "the same network"
    assert call(known, BORIS, "honest", now=1.0)
    for number in range(RUNS_MAX):
        call(known, member(number), f"other{number}", now=2.0, sequence=2)
    assert "honest" in known.tables and len(known.tables) == RUNS_MAX


def test_strangers_that_name_members_of_many_runs_fill_no_bootstrap_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(known_runs, "MEMBERS_MAX", 12)
    known = runs_of(None)
    small, large = RunId("small"), RunId("large")
    known.take(record_of(BORIS, 1, small), now=0.0)
    for number in range(40):
        run = large if number % 2 else RunId(f"run{number % 3}")
        known.take(record_of(member(number), 1, run), now=1.0)
    sizes = {run: len(table) for run, table in known.tables.items()}
    assert sum(sizes.values()) == 12
    assert max(sizes.values()) <= 4, "the largest run gives way to the others"
    assert known.take(record_of(CLARA, 1, small), now=2.0), "a small run has room"
    assert sum(map(len, known.tables.values())) == 12


def test_in_a_full_bootstrap_peer_those_that_never_called_give_way_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(known_runs, "MEMBERS_MAX", 3)
    known = runs_of(None)
    known.take(record_of(BORIS, 1), now=0.0)
    known.heard(BORIS.peer_id, 0.0)
    for number in range(2):
        known.take(record_of(Identity.from_seed(bytes([number]) * 32), 1), now=1.0)
    assert known.take(record_of(CLARA, 1, RunId("other")), now=2.0)
    assert known.is_member(BORIS.peer_id) and len(known.tables[RUN]) == 2

    assert known.take(record_of(ANNA, 1, RunId("other")), now=40.0), "the lost make room"
    assert not known.is_member(BORIS.peer_id)


def test_a_record_in_a_bucket_that_is_not_its_peers_is_not_taken() -> None:
    """One key in the buckets that a newcomer reads counted for a thousand peers there."""
    known = runs_of(RUN)
    record = PeerRecord(protocol=(1, 1), role="learner", incarnation=1)
    own, other = bucket_of(BORIS.peer_id, 10), bucket_of(ANNA.peer_id, 10)
    assert own != other
    for bucket in (other, "zz", "1" * 40):
        assert not known.take(
            seal(record, BORIS, key=bucket_key(RUN, bucket), sequence=1, ttl_s=30), now=0.0
        )
    assert known.keeper.rejected == {"misplaced": 3}
    assert known.take(seal(record, BORIS, key=bucket_key(RUN, own), sequence=1, ttl_s=30), now=0.0)


def test_a_table_full_of_peers_of_which_others_tell_has_room_for_one_that_calls() -> None:
    """Records of thousands of keys are cheap: no peer that came later was known to anybody."""
    known = KnownRuns(ANNA.peer_id, RUN, MembershipSettings(members_max=4))
    for number in range(8):
        known.take(record_of(member(number), 1), now=0.0)
    assert not known.take(record_of(BORIS, 1), now=1.0), "it is told of as well"
    for caller in (BORIS, CLARA):
        assert known.take(record_of(caller, 2), now=1.0, peer=caller.peer_id)
        known.heard(caller.peer_id, 1.0)
    table = known.own_table()
    assert len(table) == 4 and {BORIS.peer_id, CLARA.peer_id} <= {each.peer for each in table}
    for number in (5, 6, 7):
        known.take(record_of(member(number), 2), now=2.0, peer=member(number).peer_id)
        known.heard(member(number).peer_id, 2.0)
    assert {BORIS.peer_id, CLARA.peer_id} <= {each.peer for each in table}, "they called before"


def test_a_bootstrap_peer_checks_no_signature_for_a_run_that_it_has_no_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = full_of_runs()
    late = record_of(BORIS, 1, RunId("late"))
    monkeypatch.setattr("dht.records.verify", lambda *arguments: pytest.fail("it was checked"))
    assert not known.take(late, now=1.0)
    assert known.keeper.rejected == {"full": 1}
    assert not known.take(b"nonsense", now=1.0)
    assert known.keeper.rejected == {"full": 1, "malformed": 1}


def test_fresh_records_are_passed_on_with_their_age_and_stale_ones_are_not() -> None:
    known = runs_of(RUN)
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
    tables = [runs_of(RUN) for _ in range(6)]
    tables[0].take(record_of(BORIS, 1), now=0.0)
    for now in range(1, 100):
        for teller in tables:
            for listener in tables:
                for passed in teller.pass_on(RUN, to=ANNA.peer_id, now=now, rng=rng):
                    listener.take(passed.sealed, now=now, age_s=passed.age_s)
        alive = [t.own_table().is_live(BORIS.peer_id, now) for t in tables]
        assert all(alive) if now < 30 else not any(alive), f"at {now} s: {alive}"


def test_a_peer_that_lags_behind_its_own_record_is_shown_it() -> None:
    known = runs_of(RUN)
    newer, older = record_of(BORIS, 9), record_of(BORIS, 3)
    known.take(newer, now=0.0)
    assert known.newer_than(older, BORIS.peer_id) == newer
    assert known.newer_than(newer, BORIS.peer_id) == b""
    assert known.newer_than(older, CLARA.peer_id) == b"", "signed by another than the caller"


def test_a_record_that_a_peer_has_just_passed_on_is_not_told_to_it_again() -> None:
    known, rng = runs_of(RUN), np.random.default_rng(0)
    for identity in (BORIS, CLARA):
        known.take(record_of(identity, 1), now=0.0)
    (told,) = known.pass_on(RUN, to=CLARA.peer_id, now=1.0, rng=rng)
    assert told.sealed == record_of(BORIS, 1)
    assert not known.pass_on(RUN, to=CLARA.peer_id, now=1.0, rng=rng, but=[told])
    known.take(record_of(BORIS, 2), now=2.0)
    (newer,) = known.pass_on(RUN, to=CLARA.peer_id, now=2.0, rng=rng, but=[told])
    assert newer.sealed == record_of(BORIS, 2)
