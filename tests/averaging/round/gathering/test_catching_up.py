"""Peers that say they are ahead and do not deliver: how long they are waited for."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from averaging import messages as said
from averaging.history.lineage import Lineage
from averaging.history.standing import Standing
from averaging.live.states.fetch_server import FetchServer, Request
from averaging.messages import Head, Link
from averaging.round.gathering.catching_up import (
    FETCH_BASE_S,
    fetch_timeout_s,
    state_timeout_s,
)
from dht.memory.host import MemoryNetwork, identity_of
from tests.averaging.live.quadratic import LAYOUT, POLICY, Peer, swarm
from tests.averaging.live.served_states import Dripping


def test_the_time_for_fetching_grows_with_the_bytes_up_to_a_limit() -> None:
    assert fetch_timeout_s(POLICY, 0) == FETCH_BASE_S
    assert fetch_timeout_s(POLICY, 625_000) == FETCH_BASE_S + 4.0
    assert fetch_timeout_s(POLICY, 1 << 40) == POLICY.catch_up_s


def test_a_measured_slow_line_has_the_time_that_its_bytes_need_and_a_fast_one_no_less() -> None:
    assert fetch_timeout_s(POLICY, 625_000, line_bytes_s=125e3) == FETCH_BASE_S + 20.0
    assert fetch_timeout_s(POLICY, 625_000, line_bytes_s=125e6) == FETCH_BASE_S + 4.0
    assert fetch_timeout_s(POLICY, 625_000, line_bytes_s=1.0) == POLICY.catch_up_s


def test_a_whole_state_has_the_time_that_its_bytes_need_however_long() -> None:
    assert state_timeout_s(POLICY, 10**9, line_bytes_s=1e6) == 4000.0
    assert state_timeout_s(POLICY, 10**8, line_bytes_s=1.0) == 3200.0, "as on the slowest line"
    assert state_timeout_s(POLICY, 10**8) == 3200.0, "nothing is measured yet"
    assert state_timeout_s(POLICY, 625_000, line_bytes_s=125e6) == FETCH_BASE_S + 4.0


class Drips(FetchServer):
    """A server that answers every request, each frame just in time."""

    async def _answer(self, reader: Any, request: Request) -> None:
        await super()._answer(replace(reader, stream=Dripping(reader.stream)), request)


def invented(standing: Standing, topic: bytes, fragment: int) -> Head:
    """A head that descends from this one, with twice the tokens. No peer has it, and boris has
    signed it."""
    lineage = Lineage(bytes([66]) * 32)
    head = standing.head()
    version = head.version + 5
    tokens = 2 * standing.merged.tokens + 1
    link = Link(version, lineage, tokens)
    boris = identity_of("boris")
    signature = boris.sign(said.link_claim(topic, fragment, link))
    return Head(version, lineage, (link, *head.links), ((boris.peer_id, signature),))


async def test_a_slow_liar_delays_a_peer_for_a_while_and_not_for_ten_minutes() -> None:
    """The liar says again and again that it is ahead, and answers drop by drop."""

    async def lie(liar: Peer, to: Peer) -> None:
        while True:
            for index in range(len(LAYOUT.fragments)):
                standing = to.averager.standing(index)
                assert standing is not None
                head = invented(standing, to.averager.topic, index)
                behind = said.Behind(index, head, standing.lineage)
                liar.averager.transport.send(to.id, said.encode(behind))
            await asyncio.sleep(2.0)

    async with swarm(MemoryNetwork()) as made:
        anna, liar = await made.add("anna"), await made.add("mallory", trains=False)
        await made.add("boris")
        liar.averager._server.__class__ = Drips
        await made.live(20.0)
        lying = asyncio.create_task(lie(liar, anna))
        await made.live(FETCH_BASE_S + 5.0)
        held = [version or 0 for version in anna.versions()]
        await made.live(45.0)
        lying.cancel()
        made.check()
        since = [(now or 0) - then for now, then in zip(anna.versions(), held, strict=True)]
        assert min(since) >= 2, "in cycles of eight seconds"
        (reason, *_) = [
            fields["reason"]
            for fields in anna.told("refused")
            if (fields["peer"], fields["kind"]) == (liar.id, "did_not_deliver")
        ]
        assert "not done within 30" in reason
