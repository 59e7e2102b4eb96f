"""Places at relays, and the answers of relays."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from multiaddr import Multiaddr

from dht.errors import PeerUnreachable
from dht.identity import Identity, PeerId
from dht.libp2p.places import LOOK_S, RENEW_S, RelayPlaces
from dht.memory.virtual_loop import run

RELAY = Identity.from_seed(b"r" * 32).peer_id
AT = [Multiaddr(f"/{at}/tcp/7700/p2p/{RELAY}") for at in ("ip4/11.77.0.1", "ip6/2a00:78:1::2")]

GRANTED = bytes.fromhex("08021a0608cdbaa4cc06220408f82e102864")
"""Type STATUS, a reservation, a limit, status OK."""
REFUSED = bytes.fromhex("080228c901")
"""Type STATUS, status RESERVATION_REFUSED."""


async def _story() -> None:
    there: set[PeerId] = set()
    dialled: list[Sequence[Multiaddr]] = []
    answers: list[bytes | None] = [REFUSED, GRANTED, GRANTED, GRANTED, None, GRANTED]

    async def connected() -> set[PeerId]:
        return there

    async def connect(peer: PeerId, at: Sequence[Multiaddr]) -> None:
        dialled.append(at)
        there.add(peer)

    async def ask(peer: PeerId) -> bytes:
        answer = answers.pop(0)
        if answer is None:
            raise PeerUnreachable(peer, "it was restarted")
        return answer

    places = RelayPlaces(AT, connected=connected, connect=connect, ask=ask)
    circuits = [Multiaddr(f"{at}/p2p-circuit") for at in AT]
    keeping = asyncio.ensure_future(places.keep())
    await asyncio.sleep(600)
    assert dialled == [], "nobody has said yet that it cannot be dialled"
    places.want(True)
    await asyncio.sleep(1)
    assert places.circuits(there) == [] and dialled == [AT]
    await asyncio.sleep(2 * LOOK_S)
    assert places.circuits(there) == circuits
    there.clear()
    assert places.circuits(there) == [], "a place ends with the connection"
    await asyncio.sleep(LOOK_S)
    assert places.circuits(there) == circuits and dialled == [AT, AT]
    await asyncio.sleep(RENEW_S - 2 * LOOK_S)
    assert len(answers) == 3
    await asyncio.sleep(2 * LOOK_S)
    assert places.circuits(there) == circuits and len(answers) == 2
    await asyncio.sleep(RENEW_S)
    assert places.circuits(there) == [], "it was refused"
    await asyncio.sleep(2 * LOOK_S)
    assert places.circuits(there) == circuits
    places.want(False)
    assert places.circuits(there) == []
    await asyncio.sleep(600)
    assert not answers and dialled == [AT, AT]
    keeping.cancel()
    await asyncio.wait([keeping])


def test_places_are_asked_for_while_they_are_wanted_and_again_when_a_relay_has_lost_one() -> None:
    run(_story())
