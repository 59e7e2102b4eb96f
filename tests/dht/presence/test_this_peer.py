"""The record that a peer publishes about itself."""

import itertools
from dataclasses import dataclass
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from dht.addresses import parse
from dht.host import Host
from dht.identity import Identity, PeerId, RunId
from dht.membership.table import PeerTable
from dht.memory.virtual_loop import run
from dht.presence.this_peer import Events, PresenceSettings, Profile, ThisPeer
from dht.records import (
    NAME_LENGTH_MAX,
    SEQUENCE_MAX,
    SITE_LENGTH_MAX,
    PeerRecord,
    Sealed,
    check,
    pack_versions,
    unpack_versions,
)
from tests.dht.membership.signers import DELEGATES, credential, invitation

ANNA = Identity.from_seed(b"a" * 32)
BORIS = Identity.from_seed(b"b" * 32)
RUN = RunId("5f" * 32)


@dataclass
class Machine:
    """All of a host that matters to a record: a name, and a clock that anybody may set."""

    peer_id: PeerId
    clock: float = 0.0

    def wall_time(self) -> float:
        return self.clock


def own(identity: Identity = ANNA) -> ThisPeer:
    return ThisPeer(
        cast(Host, Machine(identity.peer_id)),
        identity,
        Profile(RUN),
        PresenceSettings(),
        np.random.default_rng(0),
        PeerRecord(protocol=(1, 1), role="learner", incarnation=1),
        PeerTable(RUN, identity.peer_id),
        Events(),
    )


def renewed(peer: ThisPeer, *, wall_time: float) -> bytes:
    """A new own record, at this time of the machine's clock."""

    async def renew() -> bytes:
        return peer.renew()

    cast(Machine, peer.host).clock = wall_time
    return run(renew())


def sequence_of(data: bytes) -> int:
    sealed = check(data)
    assert isinstance(sealed, Sealed)
    return sealed.sequence


@given(st.lists(st.floats(-1e12, 1e12), min_size=2, max_size=20))
def test_numbers_grow_whatever_the_clock_does(clock: list[float]) -> None:
    mine = own()
    numbers = [sequence_of(renewed(mine, wall_time=wall_time)) for wall_time in clock]
    for before, after in itertools.pairwise(numbers):
        assert after > before or after == SEQUENCE_MAX


def test_a_restart_goes_on_above_what_was_there_before() -> None:
    first, second = own(), own()
    before = sequence_of(renewed(first, wall_time=1000.0))
    assert sequence_of(renewed(second, wall_time=1001.0)) > before


def test_a_number_is_learnt_from_the_own_signature_only() -> None:
    ahead, behind, stranger = own(), own(), own(BORIS)
    data = renewed(ahead, wall_time=5000.0)
    sealed = check(data)
    assert isinstance(sealed, Sealed)
    renewed(behind, wall_time=10.0)

    assert not stranger.learn(sealed)
    assert behind.learn(sealed)
    assert not behind.learn(sealed), "no news the second time"
    assert sequence_of(renewed(behind, wall_time=11.0)) == sequence_of(data) + 1


def test_the_least_useful_parts_of_a_record_are_left_out_first_where_it_is_too_long() -> None:
    mine = own()
    long_name = "a" * 60 + "." + "b" * 50
    mine.addresses = tuple(parse(f"/dns4/{long_name}/tcp/{port}") for port in range(1, 7))
    mine.facts = replace(mine.facts, versions=pack_versions([n * 20_000 for n in range(128)]))
    sealed = check(renewed(mine, wall_time=1.0))
    assert isinstance(sealed, Sealed) and isinstance(sealed.record, PeerRecord)
    assert 1 <= len(sealed.record.addresses) < 6
    assert len(unpack_versions(sealed.record.versions)) == 128


def test_the_longest_credential_leaves_room_for_addresses_and_versions() -> None:
    mine = own()
    mine.facts = replace(
        mine.facts,
        credential=credential(ANNA.peer_id, invitation(signer=DELEGATES)),
        name="n" * NAME_LENGTH_MAX,
        site="s" * SITE_LENGTH_MAX,
        versions=pack_versions([10**6 + number for number in range(64)]),
    )
    mine.addresses = tuple(parse(f"/ip6/2001:db8::{port}/tcp/{port}") for port in range(1, 7))
    data = renewed(mine, wall_time=1.0)
    sealed = check(data)
    assert isinstance(sealed, Sealed) and isinstance(sealed.record, PeerRecord)
    assert len(sealed.record.addresses) == 6
    assert len(unpack_versions(sealed.record.versions)) == 64
    assert sealed.record.credential == mine.facts.credential


def test_a_fact_that_is_too_long_is_an_error_not_an_endless_loop() -> None:
    mine = own()
    mine.facts = replace(mine.facts, credential=bytes(10_000))
    with pytest.raises(ValueError, match="bytes"):
        renewed(mine, wall_time=1.0)
