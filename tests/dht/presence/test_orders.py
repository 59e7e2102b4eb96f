"""Orders of a run's owner reach peers that are away, apart, or told something else."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from dht.membership.credentials import Signer, encode
from dht.membership.orders import NONE, End, Orders
from dht.memory.network import CALM, Weather
from dht.presence.this_peer import PresenceSettings
from tests.dht.membership.signers import (
    DELEGATE,
    DELEGATES,
    OWNERS,
    RUN,
    admission,
    banning,
)
from tests.dht.memory.weather import STORM
from tests.dht.presence.presence_swarm import Peer, Swarm, simulate, until
from tests.seeds import seeds

WITHIN_S = 60.0
"""Time within which an order is known to every peer that is on line."""


def ordering(number: int, orders: Orders = NONE, signer: Signer = OWNERS) -> bytes:
    return encode(signer.directive(number, frozenset(), orders))


async def member(swarm: Swarm, name: str, *, kept: Path | None = None) -> Peer:
    return await swarm.start(
        name,
        seeds=await swarm.seed_addresses(*list(swarm.peers)[:2]),
        run=RUN,
        admission=admission("open"),
        settings=replace(PresenceSettings(), directives_path=kept),
    )


def follows(peer: Peer, number: int) -> bool:
    directive = peer.presence.door.admission.owners_directive
    return directive is not None and directive.number == number


@pytest.mark.parametrize("weather", [CALM, STORM], ids=["calm", "storm"])
@pytest.mark.parametrize("seed", seeds(2, soak=30))
def test_an_order_is_known_to_all_within_a_minute_also_to_those_that_were_away(
    seed: int, weather: Weather, tmp_path: Path
) -> None:
    async def story(swarm: Swarm) -> None:
        for number in range(6):
            await member(swarm, f"p{number}", kept=tmp_path / f"p{number}")
        await until(lambda: swarm.all_see(swarm.members()), within_s=300, what="all see each other")
        await swarm.stop("p5")
        swarm.peers["p2"].presence.door.take([ordering(3, Orders(paused=True))])
        here = swarm.members()
        await until(lambda: all(follows(each, 3) for each in here), within_s=WITHIN_S, what="all")
        assert all(each.presence.door.admission.orders.paused for each in here)
        assert "paused" in here[0].told("directive")[-1].text
        await swarm.stop("p2")
        back = await member(swarm, "p5", kept=tmp_path / "p5")
        await until(lambda: follows(back, 3), within_s=WITHIN_S, what="the one that was away")

    simulate(story, weather=weather, seed=seed)


async def test_the_event_of_a_directive_says_whom_it_bans_and_how_long_a_delegates_counts(
    swarm: Swarm,
) -> None:
    anna = await member(swarm, "anna")
    of_delegate = ordering(1, signer=DELEGATES)
    anna.presence.door.take([of_delegate, banning(DELEGATE.public_key)])
    told = [event.fields for event in anna.told("directive")]
    assert DELEGATES.delegation is not None
    assert [each["banned"] for each in told] == ["", DELEGATE.peer_id]
    assert [each["expires_at"] for each in told] == [DELEGATES.delegation.expires_at, None]


async def test_an_order_that_was_given_in_a_partition_holds_everywhere_after_it(
    swarm: Swarm,
) -> None:
    peers = [await member(swarm, f"p{number}") for number in range(6)]
    await until(lambda: swarm.all_see(peers), within_s=300, what="all see each other")
    left, right = peers[:3], peers[3:]
    swarm.network.partition([[each.id for each in left], [each.id for each in right]])
    await asyncio.sleep(20.0)
    left[0].presence.door.take([ordering(2, Orders(end=End(version=5)))])
    right[0].presence.door.take([ordering(4, Orders(paused=True))])
    await until(lambda: all(follows(each, 2) for each in left), within_s=60, what="one side")
    swarm.network.heal()
    await until(lambda: all(follows(each, 4) for each in peers), within_s=300, what="all")
