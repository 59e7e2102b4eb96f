"""The pure parts of presence: messages, clock, reachability, own record, known runs, budgets."""

import itertools
import random
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dht.addresses import parse
from dht.identity import Identity, PeerId, RunId
from dht.membership import hello as wire
from dht.membership.call_budget import CallBudget
from dht.membership.clock_offset import SAMPLES_MAX, ClockOffsets, ClockSample, sample
from dht.membership.hello import PASSED_MAX
from dht.membership.known_runs import RUNS_MAX, SILENT_S, KnownRuns
from dht.membership.own_record import OwnRecord
from dht.membership.reachability import Reachability
from dht.membership.table import MembershipSettings, bucket_key
from dht.records import (
    PEER_RECORD_MAX_BYTES,
    SEQUENCE_MAX,
    PeerRecord,
    Sealed,
    check,
    seal,
    unpack_versions,
)

ANNA = Identity.from_seed(b"a" * 32)
BORIS = Identity.from_seed(b"b" * 32)
CLARA = Identity.from_seed(b"c" * 32)
RUN = RunId("5f" * 32)
KEY = bucket_key(RUN, "")


def peer(number: int) -> PeerId:
    return Identity.from_seed(number.to_bytes(32, "big")).peer_id


# --- messages ----------------------------------------------------------------------------------

MESSAGES: list[Any] = [
    wire.Hello(
        run=RUN,
        record=bytes(PEER_RECORD_MAX_BYTES),
        passed=tuple(wire.Passed(bytes(PEER_RECORD_MAX_BYTES), 1e9 / 3) for _ in range(PASSED_MAX)),
    ),
    wire.HelloReply(
        run=RUN,
        record=bytes(PEER_RECORD_MAX_BYTES),
        passed=tuple(wire.Passed(bytes(PEER_RECORD_MAX_BYTES), 1e9 / 3) for _ in range(PASSED_MAX)),
        yours=bytes(PEER_RECORD_MAX_BYTES),
        received_at=1.5e9,
        sent_at=1.5e9 + 0.1,
    ),
    wire.DialBack(
        peer=ANNA.peer_id,
        nonce=bytes(16),
        addresses=(bytes(128),) * 6,
        relay=True,
        may_cut=False,
    ),
    wire.DialBackReply(verdict="not reached", reason="r" * 200),
]
KINDS: list[Any] = [wire.Hello, wire.HelloReply, wire.DialBack, wire.DialBackReply]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_the_largest_message_fits_and_comes_back(message: Any) -> None:
    data = wire.write(message)
    limit = wire.DIAL_BACK_MAX_BYTES if isinstance(message, wire.DialBack) else wire.HELLO_MAX_BYTES
    assert wire.read(type(message), data, max_bytes=limit) == message


@pytest.mark.parametrize(
    "write",
    [
        lambda: wire.write(wire.Hello(run="r" * 65)),
        lambda: wire.write(wire.Hello(run="", record=bytes(1025))),
        lambda: wire.write(wire.Hello(run="", passed=(wire.Passed(b"", 0.0),) * (PASSED_MAX + 1))),
        lambda: msgspec.msgpack.encode([1, "", b"", [[b"", float("nan")]]]),
        lambda: msgspec.msgpack.encode([1, "", b"", [[b"", -1.0]]]),
        lambda: msgspec.msgpack.encode([2, "", b"", []]),
        lambda: msgspec.msgpack.encode(["one", "", b"", []]),
        lambda: b"",
        lambda: bytes(wire.HELLO_MAX_BYTES + 1),
    ],
)
def test_a_hello_that_breaks_a_limit_is_a_value_error(write: Callable[[], bytes]) -> None:
    with pytest.raises(ValueError, match="Hello"):
        wire.read(wire.Hello, write())


@pytest.mark.parametrize("at", [float("nan"), float("inf"), 1e300])
def test_a_clock_that_is_no_clock_is_refused(at: float) -> None:
    data = msgspec.msgpack.encode([1, "", b"", [], b"", at, 0.0])
    with pytest.raises(ValueError):
        wire.read(wire.HelloReply, data)


@given(st.binary(max_size=400), st.sampled_from(KINDS))
def test_any_bytes_are_a_message_or_a_value_error(data: bytes, kind: Any) -> None:
    try:
        wire.read(kind, data)
    except ValueError:
        return


def test_mutated_deep_and_huge_messages_are_value_errors_or_messages() -> None:
    rng = random.Random(5)
    refused = 0
    small: list[Any] = [
        wire.Hello(run=RUN, record=b"r", passed=(wire.Passed(b"p", 1.0),)),
        wire.HelloReply(run=RUN, received_at=1.0, sent_at=2.0),
        *MESSAGES[2:],
    ]
    for message in small:
        good = wire.write(message)
        for _ in range(500):
            data = bytearray(good)
            for _ in range(rng.randint(1, 3)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            try:
                wire.read(type(message), bytes(data))
            except ValueError:
                refused += 1
    assert refused > 200
    tracemalloc.start()
    started = time.process_time()
    for bomb in (
        b"\x94\x01" + b"\x91" * 14_000,
        b"\x94\x01\xdb\xff\xff\xff\xff",
        b"\xdd" + b"\xff" * 9,
    ):
        for kind in KINDS:
            with pytest.raises(ValueError):
                wire.read(kind, bomb)
    assert tracemalloc.get_traced_memory()[1] < 4_000_000
    tracemalloc.stop()
    assert time.process_time() - started < 5


# --- clock -------------------------------------------------------------------------------------


@given(st.floats(-1e6, 1e6), st.floats(0, 1), st.floats(0, 1), st.floats(0, 5))
def test_an_offset_is_right_to_within_half_the_round_trip(
    offset_s: float, there_s: float, back_s: float, thinking_s: float
) -> None:
    sent_at = 1_000.0
    received_at = sent_at + there_s + offset_s
    measured = sample(
        sent_at=sent_at,
        received_at=received_at,
        replied_at=received_at + thinking_s,
        returned_at=sent_at + there_s + thinking_s + back_s,
        now=0.0,
    )
    assert abs(measured.offset_s - offset_s) <= (there_s + back_s) / 2 + 1e-6
    assert measured.round_trip_s == pytest.approx(there_s + back_s, abs=1e-6)


def exchange(offset_s: float, now: float, round_trip_s: float = 0.1) -> ClockSample:
    return sample(
        sent_at=0.0,
        received_at=round_trip_s / 2 + offset_s,
        replied_at=round_trip_s / 2 + offset_s,
        returned_at=round_trip_s,
        now=now,
    )


def test_a_minority_with_wrong_clocks_does_not_move_the_estimate() -> None:
    offsets = ClockOffsets()
    assert offsets.estimate(0.0) is None
    for number, offset_s in enumerate([0.1, 0.1, 0.1, 9999.0, -9999.0]):
        offsets.add(peer(number), exchange(offset_s, 0.0))
    estimate = offsets.estimate(0.0)
    assert estimate is not None
    assert estimate.offset_s == pytest.approx(0.1)
    assert estimate.error_s == pytest.approx(0.05)
    assert estimate.peers == 5


def test_slow_old_and_too_many_samples_do_not_count() -> None:
    offsets = ClockOffsets()
    offsets.add(peer(0), exchange(5.0, 0.0, round_trip_s=3.0))
    assert offsets.estimate(0.0) is None
    for number in range(SAMPLES_MAX + 5):
        offsets.add(peer(number), exchange(1.0, 0.0))
    estimate = offsets.estimate(900.0)
    assert estimate is not None and estimate.peers == SAMPLES_MAX
    assert offsets.estimate(900.1) is None


# --- reachability ------------------------------------------------------------------------------

HERE = frozenset({"/ip4/203.0.113.7/tcp/1"})
THERE = frozenset({"/ip4/203.0.113.8/tcp/1"})


def verdict(state: Reachability) -> bool | None:
    return state.reachable


def test_one_connection_proves_it_and_two_helpers_disprove_it() -> None:
    state = Reachability()
    assert state.announce(HERE, now=0.0)
    assert not state.announce(HERE, now=1.0)
    assert state.due_at == 0.0
    state.asked(now=1.0)
    assert state.due_at == 6.0

    assert not state.denied(peer(1), "silence", others=3, now=2.0)
    assert verdict(state) is None
    assert not state.denied(peer(1), "silence", others=3, now=3.0), "the same helper twice"
    assert state.denied(peer(2), "silence", others=3, now=4.0)
    assert verdict(state) is False and state.settled and state.due_at == 124.0

    assert state.confirmed(peer(3), now=124.0)
    assert verdict(state) is True and state.due_at == 724.0
    assert not state.confirmed(peer(3), now=724.0), "no news"


def test_the_only_helper_has_to_say_it_twice() -> None:
    state = Reachability()
    state.announce(HERE, now=0.0)
    assert not state.denied(peer(1), "silence", others=0, now=0.0)
    assert state.denied(peer(1), "silence", others=0, now=5.0)


def test_a_confirmation_wipes_out_doubts() -> None:
    state = Reachability()
    state.announce(HERE, now=0.0)
    state.denied(peer(1), "silence", others=3, now=0.0)
    state.confirmed(peer(2), now=1.0)
    assert not state.denied(peer(3), "silence", others=3, now=601.0)
    assert verdict(state) is True
    assert state.due_at == 606.0, "a doubt is looked into soon"


def test_new_addresses_are_looked_at_at_once_and_the_old_verdict_stands_meanwhile() -> None:
    state = Reachability()
    state.announce(HERE, now=0.0)
    state.confirmed(peer(1), now=0.0)
    assert state.announce(THERE, now=50.0)
    assert state.due_at == 50.0 and verdict(state) is True and not state.settled


def test_without_a_direct_address_nobody_has_to_be_asked() -> None:
    state = Reachability()
    assert state.announce(frozenset(), now=0.0)
    assert verdict(state) is False and state.settled


# --- own record --------------------------------------------------------------------------------


def own(identity: Identity = ANNA) -> OwnRecord:
    return OwnRecord(identity, incarnation=1, protocol_versions=(1, 1), ttl_s=30.0)


def sequence_of(data: bytes) -> int:
    sealed = check(data)
    assert isinstance(sealed, Sealed)
    return sealed.sequence


@given(st.lists(st.floats(-1e12, 1e12), min_size=2, max_size=20))
def test_numbers_grow_whatever_the_clock_does(clock: list[float]) -> None:
    mine = own()
    numbers = [sequence_of(mine.renew(KEY, wall_time=wall_time)) for wall_time in clock]
    for before, after in itertools.pairwise(numbers):
        assert after > before or after == SEQUENCE_MAX


def test_a_restart_goes_on_above_what_was_there_before() -> None:
    first, second = own(), own()
    before = sequence_of(first.renew(KEY, wall_time=1000.0))
    assert sequence_of(second.renew(KEY, wall_time=1001.0)) > before


def test_a_number_is_learnt_from_the_own_signature_only() -> None:
    ahead, behind, stranger = own(), own(), own(BORIS)
    data = ahead.renew(KEY, wall_time=5000.0)
    sealed = check(data)
    assert isinstance(sealed, Sealed)
    behind.renew(KEY, wall_time=10.0)

    assert not stranger.learn(sealed)
    assert behind.learn(sealed)
    assert not behind.learn(sealed), "no news the second time"
    assert sequence_of(behind.renew(KEY, wall_time=11.0)) == sequence_of(data) + 1


def test_what_does_not_fit_is_left_out_the_least_useful_first() -> None:
    mine = own()
    long_name = "a" * 60 + "." + "b" * 50
    mine.addresses = tuple(parse(f"/dns4/{long_name}/tcp/{port}") for port in range(1, 7))
    mine.set_versions([number * 20_000 for number in range(128)])
    sealed = check(mine.renew(KEY, wall_time=1.0))
    assert isinstance(sealed, Sealed) and isinstance(sealed.record, PeerRecord)
    assert 1 <= len(sealed.record.addresses) < 6
    assert len(unpack_versions(sealed.record.versions)) == 128


def test_an_impossible_fact_is_an_error_not_an_endless_loop() -> None:
    mine = own()
    mine.name = "evil\n"
    with pytest.raises(ValueError, match="name"):
        mine.renew(KEY, wall_time=1.0)


# --- known runs --------------------------------------------------------------------------------


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
    assert known.rejected == {"foreign": 1, "malformed": 1}
    assert known.is_member(BORIS.peer_id) and not known.is_member(CLARA.peer_id)


def test_a_bootstrap_peer_knows_many_runs_but_not_any_number() -> None:
    known = runs_of(None)
    for number in range(RUNS_MAX):
        assert known.take(record_of(BORIS, 1, RunId(f"run{number}")), now=0.0)
    assert not known.take(record_of(BORIS, 1, RunId("late")), now=SILENT_S - 1)
    assert known.rejected["full"] == 1

    known.heard(BORIS.peer_id, SILENT_S - 1)
    assert not known.take(record_of(BORIS, 2, RunId("late")), now=SILENT_S + 1)
    assert known.take(record_of(BORIS, 3, RunId("late")), now=2 * SILENT_S)
    assert len(known.tables) == RUNS_MAX


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


def test_who_lags_behind_its_own_record_is_shown_it() -> None:
    known = runs_of(RUN)
    newer, older = record_of(BORIS, 9), record_of(BORIS, 3)
    known.take(newer, now=0.0)
    assert known.newer_than(older, BORIS.peer_id) == newer
    assert known.newer_than(newer, BORIS.peer_id) == b""
    assert known.newer_than(older, CLARA.peer_id) == b"", "signed by another than the caller"


# --- budgets -----------------------------------------------------------------------------------


def test_a_peer_has_so_many_calls_in_any_minute() -> None:
    budget = CallBudget(2)
    assert [budget.spend(peer(1), now) for now in (0.0, 30.0, 59.9, 60.0, 60.1)] == [
        True,
        True,
        False,
        True,
        False,
    ]
    assert budget.spend(peer(2), 60.1), "another peer has its own"


def test_a_budget_forgets_the_longest_silent_first() -> None:
    budget = CallBudget(1, peers_max=2)
    for number in (1, 2, 1, 3):
        budget.spend(peer(number), 0.0)
    assert not budget.spend(peer(1), 1.0)
    assert budget.spend(peer(2), 1.0)
