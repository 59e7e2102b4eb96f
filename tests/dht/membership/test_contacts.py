"""The peers that a peer greets, connects with and looks for: decided without a network."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pytest

from dht.addresses import pack, parse
from dht.identity import PeerId
from dht.membership import contacts as rules
from dht.membership.contacts import (
    LOOK_FOR_CHANCE_MIN,
    contacts_to_make,
    is_lonely,
    peers_to_greet,
)
from dht.membership.table import PeerTable
from dht.memory.host import identity_of
from tests.dht.membership.table_of_records import ME, TableOfRecords

NAMES = ("anna", "boris", "clara", "dora", "emil", "fedor")
IDS = {name: identity_of(name).peer_id for name in NAMES}
ADDRESS = pack(parse("/ip4/10.0.0.7/tcp/7700"))


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in (("HELLOS_PER_BEAT", 2), ("PEERS_MIN", 2), ("PEERS_MAX", 3)):
        monkeypatch.setattr(rules, name, number)


def swarm_of(*names: str, reachable: bool | None = True) -> TableOfRecords:
    swarm = TableOfRecords()
    for name in names:
        swarm.record(identity_of(name), 0.0, sequence=1, reachable=reachable, addresses=(ADDRESS,))
    return swarm


def greeted(
    swarm: TableOfRecords | None,
    connected: Collection[PeerId] = (),
    strangers: tuple[PeerId, ...] = (),
    *,
    now: float = 1.0,
    seed: int = 0,
) -> list[PeerId]:
    rng = np.random.default_rng(seed)
    table = PeerTable(None, ME.peer_id) if swarm is None else swarm.table
    return peers_to_greet(table, connected, strangers, now=now, rng=rng)


def test_half_of_the_hellos_are_for_members_that_were_never_heard() -> None:
    """All of them were: keys at which nobody answers kept honest peers from greeting each other."""
    swarm = swarm_of(*NAMES)
    assert len(greeted(swarm)) == 2
    swarm.table.heard(IDS["anna"], 1.0)
    for seed in range(20):
        unheard, heard = greeted(swarm, seed=seed)
        assert unheard != heard == IDS["anna"]
    for name in NAMES[:4]:
        swarm.table.heard(IDS[name], 1.0)
    for seed in range(20):
        unheard, heard = greeted(swarm, seed=seed)
        assert unheard in {IDS["emil"], IDS["fedor"]} and heard in {IDS[n] for n in NAMES[:4]}
    for name in NAMES:
        swarm.table.heard(IDS[name], 1.0)
    often = {peer for seed in range(50) for peer in greeted(swarm, seed=seed)}
    assert often == {*IDS.values()}, "chance gives everybody a turn"


def test_with_enough_contacts_nobody_else_is_connected_to_for_a_hello() -> None:
    swarm = swarm_of(*NAMES)
    three = [IDS[name] for name in NAMES[:3]]
    for seed in range(20):
        assert {*greeted(swarm, three, seed=seed)} <= {*three}
    assert any({*greeted(swarm, three[:2], seed=seed)} - {*three} for seed in range(20))


def test_one_stranger_is_greeted_and_a_bootstrap_peer_knows_only_strangers() -> None:
    strangers = (IDS["anna"], IDS["boris"])
    assert greeted(None) == []
    assert {greeted(None, strangers, strangers, seed=seed)[0] for seed in range(20)} == {*strangers}
    assert len(greeted(None, strangers, strangers)) == 1
    assert len(greeted(swarm_of("clara", "dora", "emil"), strangers, strangers)) == 3


def test_a_peer_that_cannot_be_dialled_is_greeted_only_over_an_existing_connection() -> None:
    swarm = swarm_of("anna", reachable=False)
    assert greeted(swarm) == []
    assert greeted(swarm, [IDS["anna"]]) == [IDS["anna"]]
    assert contacts(swarm) == []


def test_one_who_fell_silent_is_looked_for_ever_less_often() -> None:
    swarm = swarm_of("anna")
    silent_after = 30.0  # the record's time
    assert all(greeted(swarm, now=silent_after, seed=seed) for seed in range(100))
    often = sum(bool(greeted(swarm, now=240.0, seed=seed)) for seed in range(400))
    assert 150 < often < 250
    seldom = sum(bool(greeted(swarm, now=20_000.0, seed=seed)) for seed in range(2000))
    assert 100 < seldom < 2000 * LOOK_FOR_CHANCE_MIN * 1.5


def contacts(
    swarm: TableOfRecords, connected: Collection[PeerId] = (), *, now: float = 1.0
) -> list[PeerId]:
    rng = np.random.default_rng(0)
    return contacts_to_make(swarm.table, connected, now=now, rng=rng)


def test_contacts_are_made_up_to_the_fewest_wished_established_peers_first() -> None:
    swarm = swarm_of("anna", "boris")
    for name in ("clara", "dora", "emil"):
        swarm.record(identity_of(name), 29.0, sequence=1, addresses=(ADDRESS,))
    for name in ("anna", "boris"):
        swarm.record(identity_of(name), 29.0, sequence=2, addresses=(ADDRESS,))
    old = {IDS["anna"], IDS["boris"]}
    assert {*contacts(swarm, now=31.0)} == old
    assert contacts(swarm, [IDS["anna"]], now=31.0) == [IDS["boris"]]
    assert contacts(swarm, [*old], now=31.0) == []


def test_a_peer_is_lonely_until_it_has_the_fewest_contacts_or_all_there_are() -> None:
    def lonely(swarm: TableOfRecords | None, connected: Collection[PeerId]) -> bool:
        table = PeerTable(None, ME.peer_id) if swarm is None else swarm.table
        return is_lonely(table, connected, now=1.0)

    swarm = swarm_of("anna", "boris", "clara")
    assert lonely(swarm, [IDS["anna"]])
    assert not lonely(swarm, [IDS["anna"], IDS["boris"]])
    assert not lonely(swarm_of("anna"), [IDS["anna"]]), "it is the only one"
    assert lonely(swarm_of(), [IDS["anna"]]), "a connection with a stranger is no contact"
    assert lonely(None, []) and not lonely(None, [IDS["anna"]])
