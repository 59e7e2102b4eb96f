"""Tallies of simulated swarms: churn, forks, melds and liars, and all of them agree on the ledger.

Every peer of a storm has a tally, which its swarm knows nothing of. Tallies hear of one another as
live ones do: a peer asks two others every ten seconds. A tally survives its peer as a file does.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import blake3
import pytest

from averaging.history.lineage import bound
from averaging.history.merged_map import MergedMap
from averaging.history.parent_maps import ParentMap
from averaging.messages import Link, link_claim
from averaging.round.opinions.certificates import link_of
from averaging.virtual.keys import Keys
from averaging.virtual.peer import Peer
from dht.identity import Identity, PeerId, RunId, verify
from peer.extras.credit.accounting import wire
from peer.extras.credit.accounting.tally import (
    Part,
    ProvenMap,
    Rank,
    Statement,
    Tally,
    stated,
    totals_of,
)
from tests.averaging.virtual.certified import settles
from tests.averaging.virtual.swarm import Storm, Swarm, cause_storm

RUN = RunId("5f" * 32)
ASK_EVERY_S = 10.0


def identity(seed: int, number: int) -> Identity:
    return Identity.from_seed(blake3.blake3(f"{seed} {number}".encode()).digest())


class Books:
    """The tallies of all peers of a simulated swarm."""

    def __init__(self, seed: int, how: Storm) -> None:
        self.identities: dict[PeerId, Identity] = {}
        self.rng = random.Random(f"books {seed}")
        self.kept: dict[PeerId, bytes] = {}
        self.tallies: dict[Peer, Tally] = {}
        self.swarm: Swarm = cause_storm(partial(self._make), seed, how)
        self.swarm.call_in(ASK_EVERY_S, self._beat)

    def _make(self, seed: int, plans: Any, **rest: Any) -> Swarm:
        for number in range(len(plans)):
            each = identity(seed, number)
            self.identities[each.peer_id] = each
        keys = Keys(lambda number: identity(seed, number), verify)
        return Swarm(seed, plans, keys=keys, **rest)

    def tally(self, node: Peer) -> Tally:
        if node not in self.tallies:
            made = Tally(RUN, fragments=1)
            kept = wire.decode(self.kept.get(node.name, wire.encode(Part())))
            made.unite(kept, believes=lambda proven: True)
            self.tallies[node] = made
        return self.tallies[node]

    def look(self, node: Peer) -> None:
        """Take what ``peer.extras.credit.service`` takes from a peer's own states."""
        standing = node.machine.standing
        if standing is None or not standing.merged.tokens:
            return
        head = standing.head()
        shown = node.machine.certificates.show(head, node.now())
        content = ParentMap(standing.merged, standing.history)
        own = ProvenMap(0, link_of(head), content, shown.signatures)
        self.unite(node, Part(maps=(own,)))

    def unite(self, node: Peer, part: Part) -> bool:
        def believes(proven: ProvenMap) -> bool:
            certificates = node.machine.certificates
            return certificates.believes(proven.link, proven.signatures, node.now())

        return self.tally(node).unite(part, believes=believes)

    def ask(self, node: Peer, other: Peer) -> None:
        asked = wire.summary(self.tally(node))
        answer = wire.encode_some(wire.missing(self.tally(other), asked))
        self.unite(node, wire.decode(answer))

    def gossip(self) -> None:
        """Everybody looks, says its name, and asks two others that it can reach."""
        swarm = self.swarm
        up = [n for n in swarm.alive if not swarm.network.is_paused(n.name)]
        for node in up:
            self.look(node)
            self.tally(node).state(self.identities[node.name], f"peer {node.name[-4:]}", swarm.now)
        for node in up:
            others = [o for o in up if o is not node and swarm.network.connected(o.name, node.name)]
            for other in self.rng.sample(others, min(2, len(others))):
                self.ask(node, other)
            self.kept[node.name] = wire.encode(self.tally(node).part)

    def _beat(self) -> None:
        self.gossip()
        self.swarm.call_in(ASK_EVERY_S, self._beat)

    def agree(self, within: int) -> int:
        """The number of turns of gossip after which all are equal, while nothing else happens.

        All that stand somewhere: a helper without a state may count too few to believe others.
        """
        standing = [node for node in self.swarm.alive if node.machine.standing is not None]
        for turns in range(within + 1):
            values = [shared(self.tally(node)) for node in standing]
            if all(value == values[0] for value in values):
                return turns
            self.gossip()
        raise AssertionError(f"tallies differ after {within} turns: {values}")

    @property
    def one(self) -> Tally:
        return self.tally(self.swarm.alive[0])


def shared(tally: Tally) -> tuple[list[Statement], list[Rank]]:
    """What all peers know: of a map, signatures of other peers may be kept."""
    return list(tally.part.statements), [proven.rank for proven in tally.part.maps]


def ledger(swarm: Swarm) -> Mapping[PeerId, int]:
    """The tokens of each peer by the run's own states."""
    return totals_of(n.state.merged for n in swarm.trainers() if n.state is not None)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 8))]
)
def test_after_a_storm_all_tallies_are_equal_within_a_minute_and_are_the_ledger(seed: int) -> None:
    """Crashes, partitions, rebases and mixes; keepers, and peers that start late."""
    books = Books(seed, Storm())
    books.swarm.run(Storm().rough_s)
    assert settles(books.swarm, within_s=120.0), f"seed {seed}"
    books.gossip()
    assert books.agree(within=5) <= 5, f"seed {seed}: a minute is six turns"
    assert books.one.totals == ledger(books.swarm), f"seed {seed}"
    assert len(books.one.statements) > 1, f"seed {seed}"


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))])
def test_tallies_of_several_groups_agree_and_end_as_the_ledger(seed: int) -> None:
    """Melds: each group stands on a lineage of its own until all meet in one at the end."""
    how = Storm(peers=(9, 12), group_size=4, accidents=(1, 4), tokens_end=60_000)
    books = Books(seed, how)
    seen = set()
    while books.swarm.now < 600.0:
        books.swarm.run(books.swarm.now + 10.0)
        seen.add(len(books.swarm.lineages()))
        if books.swarm.now > how.rough_s and settles(books.swarm, within_s=1.0):
            break
    assert len(books.swarm.lineages()) == 1, f"seed {seed}: {books.swarm.versions()}"
    assert max(seen) > 1, "groups had lineages of their own"
    assert sum(ledger(books.swarm).values()) >= 60_000
    books.gossip()
    assert books.agree(within=5) <= 5
    assert books.one.totals == ledger(books.swarm), f"seed {seed}"


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))])
def test_a_peer_that_inflates_its_claims_gains_nothing(seed: int) -> None:
    books = Books(seed, Storm(peers=(4, 7)))
    swarm = books.swarm
    swarm.run(Storm().rough_s)
    assert settles(swarm, within_s=120.0)
    liar = swarm.trainers()[-1]
    tried = Counter[bool]()
    for lie in lies(books, liar):
        for node in swarm.alive:
            if node is not liar:
                tried[books.unite(node, lie)] += 1
    assert tried[False] and not tried[True], f"seed {seed}: {tried}"
    books.gossip()
    books.agree(within=5)
    assert books.one.totals == ledger(swarm), f"seed {seed}"


def lies(books: Books, liar: Peer) -> Iterator[Part]:
    """Maps with more tokens of the liar, bound by invented lineages, signed by whom it can."""
    standing = liar.machine.standing
    assert standing is not None
    true = standing.head()
    more = standing.merged.with_work(liar.name, liar.incarnation, 10**6, 10**9)
    swarm = books.swarm
    link = link_of(true)
    certified = liar.machine.certificates.show(true, liar.now()).signatures
    yield Part(maps=(ProvenMap(0, link, ParentMap(more, standing.history), certified),))
    for version in (true.version, true.version + 1):
        lineage = bound(standing.history, more.digest())
        forged = Link(version, lineage, more.tokens)
        claim = link_claim(swarm.topic, 0, forged)
        own = (liar.name, swarm.sign(liar.name, claim))
        sybils = [identity(99, number) for number in range(8)]
        yield Part(maps=(ProvenMap(0, forged, ParentMap(more, standing.history), (own,)),))
        signed = (own, *((sybil.peer_id, sybil.sign(claim)) for sybil in sybils))
        yield Part(maps=(ProvenMap(0, forged, ParentMap(more, standing.history), signed),))
        stolen = tuple((peer, bytes(32)) for peer in swarm.names)
        yield Part(maps=(ProvenMap(0, forged, ParentMap(more, standing.history), stolen),))
    alone = MergedMap().with_work(liar.name, 1, 10, 10**12)
    yield Part(
        maps=(
            ProvenMap(
                0,
                Link(1, bound(bytes(32), alone.digest()), alone.tokens),
                ParentMap(alone, bytes(32)),
            ),
        )
    )
    yield Part(statements=(stated(identity(99, 1), RUN, 1, "a stranger"),))


def test_a_tally_survives_the_restart_of_every_peer_at_once() -> None:
    books = Books(3, Storm())
    books.swarm.run(Storm().rough_s)
    assert settles(books.swarm, within_s=120.0)
    books.gossip()
    books.agree(within=5)
    before = shared(books.one)
    for name in list(books.swarm.nodes):
        books.swarm.crash(name)
    for name in list(books.swarm.nodes):
        books.swarm.restart(name)
    assert shared(books.tally(books.swarm.alive[0])) == before
