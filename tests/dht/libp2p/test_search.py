"""Searches in the directory when peers lie about others, and the routing table under a flood."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from dht.identity import Identity, PeerId
from dht.libp2p.directory_search import ASKED_MAX, BEAM
from dht.libp2p.directory_wire import place_of
from dht.libp2p.hivemind_directory import (
    BUCKET_SIZE,
    REPLICAS,
    BoundedRoutingTable,
    HivemindDirectory,
    id_of,
)
from dht.libp2p.hivemind_imports import DHTID, PeerID
from dht.membership.replicas import ALIKE_MAX
from dht.record_keeper import RecordKeeper
from tests.integration.loopback import identity

KEY_ID = id_of("run/peers/0")


def peers(numbers: range) -> dict[Any, Any]:
    """The peers of these numbers by place, nearest to the key first."""
    made = (PeerID.from_base58(identity(number).peer_id) for number in numbers)
    by_place = {DHTID.from_bytes(place_of(peer.to_bytes())): peer for peer in made}
    return dict(sorted(by_place.items(), key=lambda item: KEY_ID.xor_distance(item[0])))


HONEST = peers(range(20))
GROUND = dict(list(peers(range(100, 1100)).items())[:100])
"""Peers of one attacker, nearer to the key than nearly all others: it tried many keys."""


class Network:
    """hivemind's protocol with these peers in its table, each of which names some peers."""

    def __init__(self, table: dict[Any, Any], answers: dict[Any, dict[Any, Any] | None]) -> None:
        self.node_id = id_of("me")
        self.asked: list[Any] = []
        self._answers = answers
        self.routing_table = SimpleNamespace(
            get_nearest_neighbors=lambda key, count, exclude: sorted(
                table.items(), key=lambda item: key.xor_distance(item[0])
            )[:count]
        )

    async def call_find(self, peer: Any, keys: list[Any]) -> Any:
        self.asked.append(peer)
        await asyncio.sleep(0)
        named = self._answers.get(peer)
        return None if named is None else {keys[0]: (None, named)}


def search(
    network: Network, *, seed: Any = None, networks: dict[Any, str] | None = None
) -> list[Any]:
    """The peers that a search finds, in the order in which records are stored at them.

    ``networks``: where the peers are connected; without it each in a network of its own.
    """
    directory = HivemindDirectory(Identity.generate().peer_id, RecordKeeper())
    ids = {peer: PeerId(peer.to_base58()) for peer in (*HONEST.values(), *GROUND.values())}
    directory._connected = {peer: (networks or {}).get(each, peer) for each, peer in ids.items()}
    if seed is not None:
        directory.set_seeds([ids[seed]])
    seeds = directory._seeds_of(KEY_ID)
    found = asyncio.run(directory._search(network, KEY_ID, {}, seeds))
    return list(found.values())


def test_peers_named_at_places_that_are_not_theirs_are_never_asked() -> None:
    liar = next(iter(HONEST.values()))
    invented = {DHTID(int(KEY_ID) ^ n): peer for n, peer in enumerate(GROUND.values())}
    answers: dict[Any, dict[Any, Any] | None] = {p: dict(HONEST) for p in HONEST.values()}
    answers[liar] = invented
    network = Network(HONEST, answers)
    assert not set(GROUND.values()) & set(search(network))
    assert not set(GROUND.values()) & set(network.asked)


def test_a_hostile_peer_and_those_it_names_are_not_all_that_a_search_finds() -> None:
    """The attacker has keys of the nearest places, and each of its peers names the others."""
    evil_place, evil = next(iter(GROUND.items()))
    answers: dict[Any, Any] = {peer: dict(HONEST) for peer in HONEST.values()}
    answers |= {peer: dict(GROUND) for peer in GROUND.values()}
    found = search(Network(HONEST | {evil_place: evil}, answers))
    assert len(found) == BEAM
    assert len(set(found[:REPLICAS]) & set(GROUND.values())) == ALIKE_MAX
    nearest = list(HONEST.values())[: REPLICAS - ALIKE_MAX]
    assert [peer for peer in found if peer in HONEST.values()][: len(nearest)] == nearest


def test_names_that_lead_nowhere_do_not_use_up_the_requests_of_a_search() -> None:
    evil_place, evil = next(iter(GROUND.items()))
    far = dict(list(HONEST.items())[BEAM:])
    answers: dict[Any, Any] = {peer: dict(HONEST) for peer in HONEST.values()}
    answers[evil] = dict(GROUND)  # none of which answers
    network = Network(far | {evil_place: evil}, answers)
    found = search(network)
    assert found[0] is evil and found[1:] == list(HONEST.values())[: BEAM - 1]
    assert len(network.asked) <= ASKED_MAX
    assert sum(peer in GROUND.values() for peer in network.asked) <= ASKED_MAX // BEAM


def test_peers_of_one_network_are_not_all_that_a_search_finds_although_each_is_known() -> None:
    """The attacker's peers are the nearest in the table, and name none but each other."""
    evil = dict(list(GROUND.items())[:20])
    answers: dict[Any, Any] = {peer: dict(HONEST) for peer in HONEST.values()}
    answers |= dict.fromkeys(evil.values(), evil)
    table = HONEST | evil
    assert set(search(Network(table, answers))) <= set(evil.values())
    found = search(Network(table, answers), networks=dict.fromkeys(evil.values(), "one"))
    assert len(found) == BEAM
    assert len(set(found) & set(evil.values())) == ALIKE_MAX
    assert found[ALIKE_MAX:] == list(HONEST.values())[: BEAM - ALIKE_MAX]


def test_a_search_in_one_network_finds_the_nearest_and_asks_nobody_twice() -> None:
    answers: dict[Any, Any] = {peer: dict(HONEST) for peer in HONEST.values()}
    network = Network(HONEST, answers)
    found = search(network, networks=dict.fromkeys(HONEST.values(), "one"))
    assert found == list(HONEST.values())[:BEAM] == network.asked


def test_a_seed_is_asked_wherever_it_is_in_place_of_the_farthest_of_the_others() -> None:
    far = list(HONEST.values())[-1]
    answers: dict[Any, Any] = {peer: dict(HONEST) for peer in HONEST.values()}
    network = Network(HONEST, answers)
    nearest = list(HONEST.values())
    assert search(network, seed=far) == nearest[: BEAM - 1]
    assert set(network.asked) == {far, *nearest[: BEAM - 1]}
    near = Network(HONEST, answers)
    assert search(near, seed=nearest[2]) == nearest[:BEAM]
    assert set(near.asked) == set(nearest[:BEAM])
    assert search(Network(HONEST, answers | {far: None}), seed=far) == nearest[:BEAM]


def test_one_peer_in_the_table_is_enough_to_find_the_nearest() -> None:
    place, peer = list(HONEST.items())[-1]
    answers: dict[Any, Any] = {peer: dict(HONEST) for peer in HONEST.values()}
    assert search(Network({place: peer}, answers)) == list(HONEST.values())[:BEAM]


def test_a_flood_of_nodes_leaves_a_bounded_routing_table() -> None:
    table = BoundedRoutingTable(id_of("me"), BUCKET_SIZE, 5)
    nodes = [DHTID.generate(source=f"node {n}") for n in range(5000)]
    for n, node in enumerate(nodes):
        table.add_or_update_node(node, f"peer {n}")
    held = sum(len(b.nodes_to_peer_id) + len(b.replacement_nodes) for b in table.buckets)
    assert held == len(table.uid_to_peer_id) == len(table.peer_id_to_uid)
    assert all(len(bucket.replacement_nodes) <= BUCKET_SIZE for bucket in table.buckets)
    assert held <= 2 * BUCKET_SIZE * len(table.buckets)
    # Those that were there first keep their places, and one that leaves is replaced.
    assert nodes[0] in table
    for bucket in table.buckets:
        for node in list(bucket.nodes_to_peer_id):
            del table[node]
    assert len(table.uid_to_peer_id) == sum(
        len(b.nodes_to_peer_id) + len(b.replacement_nodes) for b in table.buckets
    )
