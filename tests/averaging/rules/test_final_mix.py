"""A swarm of several groups that ends by tokens ends with one model."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from averaging import messages as said
from averaging.history.chain import Chain, ChainLink
from averaging.history.standing import LINKS_SHOWN, Standing
from averaging.messages import Head, Link
from averaging.rules.final_mix import gives_way, goes_on, grew_from, shows_final
from dht.memory.host import MemoryNetwork
from dht.memory.virtual_loop import run
from tests.averaging.live.quadratic import POLICY, lineages, swarm
from tests.averaging.message_examples import COMMIT
from tests.averaging.simulated.several_groups import SEVERAL_GROUPS
from tests.averaging.simulated.swarm import Swarm as StormySwarm
from tests.averaging.simulated.swarm import storm


def chain(*tokens: int, side: int = 0) -> Chain:
    """Return a chain with these counts of merged tokens."""
    return Chain(
        ChainLink(version, bytes([version, side]) * 16, merged)
        for version, merged in enumerate(tokens)
    )


def head(of: Chain) -> Head:
    links = tuple(Link(*link) for link in of.thinned(LINKS_SHOWN))
    return Head(of.tip.version, of.tip.lineage, links)


def test_a_version_is_final_when_it_grew_from_one_with_the_runs_tokens() -> None:
    assert not grew_from(chain(0, 50, 99, 120), 100)
    assert grew_from(chain(0, 50, 100, 120), 100)
    assert not shows_final(head(chain(0, 50, 99, 120)), 100)
    assert shows_final(head(chain(0, 50, 100, 120)), 100)


def test_a_peer_gives_way_to_a_final_state_and_to_a_heavier_final_one() -> None:
    early, final = head(chain(0, 90, 110)), head(chain(0, 100, 120, side=1))
    heavier, twin = head(chain(0, 100, 121, side=2)), head(chain(0, 100, 120, side=3))

    assert gives_way(early, final, 100) and not gives_way(final, early, 100)
    assert gives_way(final, heavier, 100) and not gives_way(heavier, final, 100)
    assert gives_way(final, twin, 100) != gives_way(twin, final, 100), "one of them does"
    assert not gives_way(early, head(chain(0, 90, 130, side=1)), 100), "neither is final"


@pytest.mark.parametrize(
    ("kind", "tokens", "parents", "objected"),
    [
        ("meld", 100, 2, True),
        ("merge", 100, 2, True),
        ("meld", 99, 2, False),
        ("mix", 100, 2, False),
        ("merge", 100, 1, False),
    ],
)
def test_from_the_runs_tokens_on_lineages_only_mix(
    kind: str, tokens: int, parents: int, objected: bool
) -> None:
    links = tuple(Link(7, bytes([side]) * 32, tokens) for side in range(parents))
    commit = msgspec.structs.replace(COMMIT, kind=kind, parents=links)
    assert goes_on(commit, 100) == objected


def test_groups_that_reach_the_runs_tokens_end_on_one_lineage_and_merge_no_more() -> None:
    async def main() -> None:
        policy = replace(POLICY, group_size=3, slice_bytes_min=1024, tokens_end=9_000)
        async with swarm(MemoryNetwork()) as made:
            peers = [await made.add(f"peer-{number}", policy=policy) for number in range(7)]
            await made.live(30.0)
            assert any(len(each) > 1 for each in lineages(made)), "groups have their own"
            await made.live(200.0)
            everything = frozenset(range(len(made.layout.fragments)))
            assert all(peer.averager.final_fragments == everything for peer in peers)
            assert [len(each) for each in lineages(made)] == [1] * len(everything)
            made.check()  # equal lineage, equal bits
            before = [peer.versions() for peer in peers]
            await made.live(60.0)
            assert [peer.versions() for peer in peers] == before, "nothing follows"

    run(main())


@pytest.mark.parametrize("seed", range(12))
def test_after_a_storm_several_groups_end_on_one_lineage(seed: int) -> None:
    """Invariants of storms are checked after each event; this test adds that the run ends."""
    how = SEVERAL_GROUPS[seed % 2]
    weather = storm(seed, replace(how, tokens_end=3_000))
    shows_where_it_ended(weather)
    weather.run(how.rough_s)
    while weather.heap.now < how.rough_s + 120.0:
        weather.run(weather.heap.now + 2.0)
        there = [node for node in weather.alive if node.state is not None]
        if (
            all(node.machine.is_final(weather.heap.now) for node in there)
            and len(weather.lineages()) == 1
        ):
            return
    raise AssertionError(f"seed {seed}: {weather.lineages()} two minutes after the storm")


def shows_where_it_ended(weather: StormySwarm) -> None:
    """Every second a finished peer tells another one, as live peers do while they linger."""
    for node in weather.alive:
        other = weather.rng.choice(weather.alive)
        if node.machine.is_final(weather.heap.now) and node.state is not None and other is not node:
            ends_at = said.Compare(0, Standing.of(node.state).head())
            weather.wires.send(node.part, other.name, ends_at)
    weather.heap.call_in(1.0, shows_where_it_ended, weather)
