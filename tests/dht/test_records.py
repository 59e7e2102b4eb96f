from typing import Any

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from dht.identity import Identity, RunId
from dht.record_keeper import HEAP_SLACK, KeeperLimits, RecordKeeper
from dht.records import (
    FRAGMENTS_MAX,
    PEER_RECORD_MAX_BYTES,
    ContributionCounters,
    PeerRecord,
    Rejected,
    Sealed,
    check,
    pack_versions,
    seal,
    unpack_versions,
)

ANNA = Identity.from_seed(b"a" * 32)
BORIS = Identity.from_seed(b"b" * 32)
RUN = RunId("5f" * 32)
OTHER_RUN = RunId("6f" * 32)
KEY = f"{RUN}/peers/01"
RECORD = PeerRecord(protocol=(1, 1), role="learner", incarnation=7, name="anna")


def sealed(
    record: PeerRecord = RECORD,
    identity: Identity = ANNA,
    *,
    key: str = KEY,
    sequence: int = 1,
    ttl_s: float = 30.0,
) -> bytes:
    return seal(record, identity, key=key, sequence=sequence, ttl_s=ttl_s)


def reason_of(verdict: object) -> str:
    assert isinstance(verdict, Rejected), verdict
    return verdict.reason


# --- by itself ---------------------------------------------------------------------------------


@pytest.mark.parametrize("incarnation", [-1, 2**62 + 1])
def test_no_record_is_built_with_an_incarnation_that_nobody_reads(incarnation: int) -> None:
    assert PeerRecord(protocol=(1, 1), role="keeper", incarnation=2**62)
    with pytest.raises(ValueError, match=f"incarnation is {incarnation}"):
        PeerRecord(protocol=(1, 1), role="keeper", incarnation=incarnation)


def test_a_sealed_record_says_who_where_and_for_how_long() -> None:
    data = sealed()
    assert check(data, run=RUN, key=KEY, peer=ANNA.peer_id) == Sealed(
        peer=ANNA.peer_id,
        run=RUN,
        key=KEY,
        sequence=1,
        ttl_s=30.0,
        record=RECORD,
        digest=blake3(data).digest(16),
    )


def test_a_record_with_64_fragments_and_6_addresses_stays_under_1_kib() -> None:
    record = PeerRecord(
        protocol=(1, 3),
        role="learner",
        incarnation=2**60,
        addresses=tuple(b"\x29" + bytes(16) + b"\x06\xff\xff" + bytes(44) for _ in range(6)),
        reachable=True,
        name="n" * 32,
        site="s" * 16,
        trains=True,
        step_time_s=1.2345,
        link_bytes_s=1e9 / 3,
        versions=pack_versions([1_000_000 + (97 * i) % 4000 for i in range(64)]),
        counters=ContributionCounters(rounds=10**6, tokens=10**15, bytes_sent=10**15),
    )
    data = sealed(record, key=f"{RUN}/peers/{'01' * 10}", sequence=2**53 - 1)

    assert len(data) <= PEER_RECORD_MAX_BYTES
    assert isinstance(check(data), Sealed)


def test_a_record_over_1_kib_is_not_sealed() -> None:
    record = msgspec.structs.replace(RECORD, addresses=tuple(bytes(128) for _ in range(6)))
    assert isinstance(check(sealed(record)), Sealed)
    too_large = msgspec.structs.replace(record, credential=bytes(320))
    with pytest.raises(ValueError, match="no record has over 1024"):
        sealed(too_large)


def test_a_record_is_refused_for_another_run_key_or_peer() -> None:
    data = sealed()

    assert reason_of(check(data, run=OTHER_RUN)) == "foreign"
    assert reason_of(check(data, key=f"{RUN}/peers/00")) == "misplaced"
    assert reason_of(check(data, peer=BORIS.peer_id)) == "forged"


def test_a_record_altered_anywhere_is_refused() -> None:
    data = sealed()
    for position in range(len(data)):
        altered = bytearray(data)
        altered[position] ^= 1
        assert isinstance(check(bytes(altered)), Rejected), f"byte {position}"


def test_a_signature_for_something_else_is_none_for_a_record() -> None:
    body = sealed()[96:]
    data = ANNA.sign(body) + ANNA.public_key + body
    assert reason_of(check(data)) == "forged"


def test_a_body_under_another_peers_key_is_forged() -> None:
    data = sealed()
    assert reason_of(check(data[:64] + BORIS.public_key + data[96:])) == "forged"


def _signed(body: list[Any]) -> bytes:
    encoded = msgspec.msgpack.encode(body)
    return ANNA.sign(b"shoal record\0" + encoded) + ANNA.public_key + encoded


PAYLOAD = msgspec.msgpack.encode(RECORD)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ([2, KEY, 1, 1000, PAYLOAD], "version"),
        ([2, "something", {"quite": "different"}], "version"),
        ([1, KEY, -1, 1000, PAYLOAD], "malformed"),
        ([1, KEY, 2**53, 1000, PAYLOAD], "malformed"),
        ([1, KEY, 1, -1, PAYLOAD], "malformed"),
        ([1, KEY, 1, 600_001, PAYLOAD], "malformed"),
        ([1, KEY, 1, 1000, PAYLOAD, 0], "malformed"),
        ([1, KEY, 1, 1000], "malformed"),
        ([1, f"{RUN}/ghosts/01", 1, 1000, PAYLOAD], "malformed"),
        ([1, f"{RUN}", 1, 1000, PAYLOAD], "malformed"),
        ([1, f"{RUN}/peers/01/02", 1, 1000, PAYLOAD], "malformed"),
        ([1, f"../{RUN}/peers/01", 1, 1000, PAYLOAD], "malformed"),
        ([1, KEY + "\n", 1, 1000, PAYLOAD], "malformed"),
        ([1, KEY, 1, 1000, b""], "malformed"),
        ([1, KEY, 1, 1000, PAYLOAD + b"\0"], "malformed"),
        ([1, f"{RUN}/file", 1, 1000, PAYLOAD], "malformed"),
    ],
)
def test_a_signed_but_unusable_body_is_refused(body: list[Any], reason: str) -> None:
    assert reason_of(check(_signed(body))) == reason


@pytest.mark.parametrize(
    "change",
    [
        {"protocol": (2, 1)},
        {"role": "king"},
        {"name": "evil\x1b[2J"},
        {"name": "n" * 33},
        {"site": "a\nb"},
        {"step_time_s": float("nan")},
        {"step_time_s": 1e308},
        {"link_bytes_s": 1e308},
        {"step_time_s": 0.0},
        {"step_time_s": 5e-324},
        {"link_bytes_s": 5e-324},
        {"versions": b"\x00"},
        {"versions": (0,)},
        {"versions": (3, -1)},
        {"versions": (3, 1, 2)},
        {"versions": (0,) * (FRAGMENTS_MAX + 2)},
        {"versions": pack_versions([2**53])},
        {"link_bytes_s": float("inf")},
        {"link_bytes_s": -1.0},
        {"addresses": (b"",) * 7},
        {"addresses": (bytes(129),)},
        {"counters": [-1, 0, 0]},
        {"incarnation": True},
    ],
)
def test_a_signed_record_with_an_impossible_value_is_refused(change: dict[str, Any]) -> None:
    fields = msgspec.structs.asdict(RECORD) | change
    payload = msgspec.msgpack.encode(list(fields.values()))
    assert reason_of(check(_signed([1, KEY, 1, 1000, payload]))) == "malformed"


def test_a_newer_version_may_append_fields() -> None:
    payload = msgspec.msgpack.encode([*msgspec.msgpack.decode(PAYLOAD), "from the future"])
    verdict = check(_signed([1, KEY, 1, 1000, payload]))
    assert isinstance(verdict, Sealed) and verdict.record == RECORD


def test_a_megabyte_is_refused_by_its_size_alone() -> None:
    assert reason_of(check(bytes(1 << 20))) == "oversized"


# --- in the light of what was seen -------------------------------------------------------------


def test_a_record_is_aged_by_the_own_clock_since_its_sequence_was_first_seen() -> None:
    keeper = RecordKeeper(RUN)
    data = sealed(ttl_s=30)

    for now in (1000.0, 1029.9):
        assert isinstance(keeper.admit(data, now=now, key=KEY), Sealed)
    assert reason_of(keeper.admit(data, now=1030.0, key=KEY)) == "stale"


def test_a_newer_sequence_renews_and_the_older_one_cannot_come_back() -> None:
    keeper = RecordKeeper(RUN)
    old, new = sealed(sequence=5), sealed(sequence=6)
    keeper.admit(old, now=0.0)

    for now in (25.0, 54.9):
        assert isinstance(keeper.admit(new, now=now), Sealed)
    assert reason_of(keeper.admit(old, now=54.9)) == "replayed"
    # Not even once both have expired, for as long as the keeper remembers.
    assert reason_of(keeper.admit(old, now=900.0)) == "replayed"


def test_a_peer_that_uses_a_sequence_twice_is_not_believed_the_second_time() -> None:
    keeper = RecordKeeper(RUN)
    keeper.admit(sealed(sequence=5), now=0.0)
    twice = sealed(msgspec.structs.replace(RECORD, name="also anna"), sequence=5)
    assert reason_of(keeper.admit(twice, now=1.0)) == "replayed"


def test_the_sequence_numbers_of_two_peers_and_of_two_keys_are_apart() -> None:
    keeper = RecordKeeper(RUN)
    keeper.admit(sealed(sequence=9), now=0.0)
    assert isinstance(keeper.admit(sealed(identity=BORIS, sequence=1), now=0.0), Sealed)
    assert isinstance(keeper.admit(sealed(key=f"{RUN}/peers/0", sequence=1), now=0.0), Sealed)


def test_a_keeper_without_a_run_serves_every_run_and_one_with_a_run_its_own() -> None:
    foreign = sealed(key=f"{OTHER_RUN}/peers/01")
    assert isinstance(RecordKeeper().admit(foreign, now=0.0), Sealed)
    assert reason_of(RecordKeeper(RUN).admit(foreign, now=0.0)) == "foreign"


def test_refused_records_are_counted_by_reason_and_change_nothing() -> None:
    keeper = RecordKeeper(RUN)
    before = repr(keeper._shelves)
    keeper.admit(b"nonsense", now=0.0)
    keeper.admit(bytes(1 << 20), now=0.0)
    keeper.admit(sealed(key=f"{OTHER_RUN}/peers/01"), now=0.0)
    keeper.admit(sealed(), now=0.0, key=f"{RUN}/peers/1")

    assert keeper.rejected == {
        "malformed": 1,
        "oversized": 1,
        "foreign": 1,
        "misplaced": 1,
    }
    assert repr(keeper._shelves) == before


def test_a_key_as_a_whole_has_a_cap_and_room_comes_back_with_expiry() -> None:
    size_bytes = len(sealed())
    keeper = RecordKeeper(RUN, KeeperLimits(key_max_bytes=2 * size_bytes))
    keeper.admit(sealed(identity=ANNA, ttl_s=10), now=0.0)
    keeper.admit(sealed(identity=BORIS, ttl_s=30), now=0.0)
    others = [Identity.from_seed(bytes([n]) * 32) for n in range(30)]
    admitted = [isinstance(keeper.admit(sealed(identity=o), now=9.9), Sealed) for o in others]
    assert not all(admitted), "a newcomer of a higher rank than the others finds no room"
    assert keeper._shelves[KEY].size_bytes <= 2 * size_bytes
    # The first one may renew: its old record makes room for the new one.
    assert isinstance(keeper.admit(sealed(identity=ANNA, sequence=2), now=9.9), Sealed)
    assert isinstance(keeper.admit(sealed(identity=others[0], sequence=2), now=50.0), Sealed)
    assert isinstance(keeper.admit(sealed(identity=others[1], sequence=2), now=50.0), Sealed)


def test_a_flood_neither_displaces_the_first_nor_keeps_newcomers_out_of_every_replica() -> None:
    """An attacker with a hundred identities is there before the newcomer, at five replicas."""
    size_bytes = len(sealed())
    limits = KeeperLimits(key_max_bytes=100 * size_bytes)
    keepers = [RecordKeeper(RUN, limits, salt=bytes([n])) for n in range(5)]
    flood = [Identity.from_seed(n.to_bytes(32, "big")) for n in range(200)]
    newcomers = [Identity.from_seed(n.to_bytes(32, "little")) for n in range(1000, 1020)]
    for keeper in keepers:
        keeper.admit(sealed(identity=ANNA, ttl_s=600), now=0.0, store=True)
        for attacker in flood:
            keeper.admit(sealed(identity=attacker, ttl_s=600), now=1.0)
    found = 0
    for newcomer in newcomers:
        record = sealed(identity=newcomer, ttl_s=600)
        answers = [isinstance(keeper.admit(record, now=2.0), Sealed) for keeper in keepers]
        found += any(answers)
    assert found >= len(newcomers) * 2 // 3
    for keeper in keepers:
        shelf = keeper._shelves[KEY]
        assert list(keeper.stored(KEY, now=2.0)) == [ANNA.peer_id]
        assert shelf.size_bytes <= limits.key_max_bytes


def test_a_record_is_stored_for_others_if_it_is_to_be_and_until_it_expires_or_is_outdated() -> None:
    keeper = RecordKeeper(RUN)
    mine = sealed(identity=ANNA, ttl_s=30)
    keeper.admit(mine, now=0.0)
    assert keeper.stored(KEY, now=0.0) == {}, "it was only read"
    keeper.admit(mine, now=1.0, store=True)
    keeper.admit(sealed(identity=BORIS), now=1.0)
    assert keeper.stored(KEY, now=29.9) == {ANNA.peer_id: mine}
    assert keeper.stored_bytes(now=29.9) == len(mine)
    assert keeper.stored(KEY, now=30.0) == {}
    assert keeper.stored_bytes(now=30.0) == 0
    keeper.admit(sealed(identity=ANNA, sequence=2), now=20.0)
    assert keeper.stored(KEY, now=20.0) == {}, "readers know by now that there is a newer one"


def test_the_newest_of_what_was_found_is_believed_whatever_comes_first() -> None:
    older, newer, other = sealed(sequence=1), sealed(sequence=2), sealed(identity=BORIS)
    for found in ([older, newer, b"x", other], [newer, other, older, newer]):
        newest = RecordKeeper(RUN).newest(found, key=KEY, now=0.0)
        assert newest == {ANNA.peer_id: newer, BORIS.peer_id: other}


def test_memory_is_bounded_and_a_flood_does_not_displace_the_living() -> None:
    keeper = RecordKeeper(RUN, KeeperLimits(records_max=3))
    keeper.admit(sealed(ttl_s=600), now=0.0)
    for i in range(20):
        stranger = Identity.from_seed(i.to_bytes(32, "big"))
        keeper.admit(sealed(identity=stranger, ttl_s=0.5), now=2.0 * i)
        assert len(keeper._in_order) <= 3

    shelf = keeper._shelves[KEY]
    assert ANNA.peer_id in shelf.entries
    assert isinstance(keeper.admit(sealed(ttl_s=600), now=100.0), Sealed)
    assert shelf.size_bytes == sum(entry.size_bytes for entry in shelf.entries.values())


def test_a_flood_over_many_keys_and_runs_is_bounded_as_well() -> None:
    size_bytes = len(sealed())
    limits = KeeperLimits(records_max=20, key_max_bytes=4 * size_bytes, bytes_max=16 * size_bytes)
    keeper = RecordKeeper(None, limits, salt=b"salt")
    keeper.admit(sealed(ttl_s=600), now=0.0)
    admitted = 0
    for number in range(200):
        data = sealed(identity=BORIS, key=f"{number:064}/peers/", ttl_s=600)
        admitted += isinstance(keeper.admit(data, now=1.0 + number / 1000), Sealed)
        assert len(keeper._in_order) <= limits.records_max
        assert keeper._size_bytes <= limits.bytes_max
    assert ANNA.peer_id in keeper._shelves[KEY].entries
    assert 16 < admitted < 200, "some of the later ones took the place of others"
    assert len(keeper._sample) <= admitted
    assert keeper._size_bytes == sum(shelf.size_bytes for shelf in keeper._shelves.values())
    assert keeper._settled == sum(
        entry.settled for shelf in keeper._shelves.values() for entry in shelf.entries.values()
    )


def test_a_forgotten_record_leaves_no_trace() -> None:
    keeper = RecordKeeper(RUN, KeeperLimits(memory_s=100.0))
    keeper.admit(sealed(ttl_s=1), now=0.0)
    keeper.admit(sealed(identity=BORIS, key=f"{RUN}/peers/11"), now=200.0)
    assert list(keeper._shelves) == [f"{RUN}/peers/11"]


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([ANNA, BORIS]),
            st.integers(0, 8),
            st.floats(0, 20),
            st.booleans(),
        ),
        max_size=40,
    )
)
def test_no_history_makes_a_keeper_believe_an_older_sequence(
    history: list[tuple[Identity, int, float, bool]],
) -> None:
    keeper = RecordKeeper(RUN)
    newest: dict[str, tuple[int, float]] = {}
    now = 0.0
    for identity, sequence, pause_s, forge in history:
        now += pause_s
        data = sealed(identity=identity, sequence=sequence, ttl_s=10)
        verdict = keeper.admit(data[:-1] if forge else data, now=now)
        if isinstance(verdict, Rejected):
            continue
        assert not forge
        known, first_seen = newest.get(identity.peer_id, (-1, now))
        assert sequence >= known
        if sequence > known:
            newest[identity.peer_id] = (sequence, now)
            first_seen = now
        assert now < first_seen + 10


# --- versions ----------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2**55), min_size=0, max_size=FRAGMENTS_MAX))
def test_versions_come_back_as_they_were_packed(versions: list[int]) -> None:
    assert unpack_versions(pack_versions(versions)) == tuple(versions)


def test_a_keeper_looks_at_no_record_behind_the_first_that_is_not_over() -> None:
    """A look at all of 46 000 records stopped a bootstrap peer for a third of a second."""
    keeper = RecordKeeper(limits=KeeperLimits(memory_s=0.0))
    for ttl_s, seed in ((10, b"1"), (600, b"2"), (10, b"3")):
        data = seal(RECORD, Identity.from_seed(32 * seed), key=KEY, sequence=1, ttl_s=ttl_s)
        assert isinstance(keeper.admit(data, now=0.0), Sealed)
    looked_at = 0

    def is_over(entry: object) -> bool:
        nonlocal looked_at
        looked_at += 1
        return looked_at == 1

    keeper._drop_while(is_over)
    assert looked_at == 2 and len(keeper._in_order) == 2


def test_ranks_of_records_that_are_gone_take_bounded_memory() -> None:
    keeper = RecordKeeper(limits=KeeperLimits(records_max=20, memory_s=0.0))
    for number in range(3000):
        identity = Identity.from_seed(number.to_bytes(32, "big"))
        keeper.admit(seal(RECORD, identity, key=KEY, sequence=1, ttl_s=600), now=float(number))
    assert len(keeper._sample) <= 2 * 20 + HEAP_SLACK + 1
