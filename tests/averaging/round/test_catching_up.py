"""Peers who say that they are further, and do not deliver: how long they are waited for."""

from __future__ import annotations

import asyncio
from typing import Any

from averaging import messages as said
from averaging.history.lineage import Lineage
from averaging.history.standing import Standing
from averaging.live.fetch_server import FetchServer, Request
from averaging.messages import Head, Link
from averaging.round.catching_up import CATCH_UP_BASE_S, Doubts, patience_s
from dht.host import Stream
from dht.memory.host import MemoryNetwork, run
from tests.averaging.live.quadratic import LAYOUT, POLICY, Peer, swarm
from tests.averaging.live.test_fetch import Dripping
from tests.averaging.round.test_machine import ANNA, BORIS

SHORTEST_S = 4 * POLICY.margin_s


def test_patience_goes_with_the_bytes_up_to_a_limit() -> None:
    assert patience_s(POLICY, 0) == CATCH_UP_BASE_S
    assert patience_s(POLICY, 625_000) == CATCH_UP_BASE_S + 4.0
    assert patience_s(POLICY, 1 << 40) == POLICY.catch_up_s


def test_who_holds_me_up_again_and_again_is_doubted_for_twice_as_long_each_time() -> None:
    doubts = Doubts(POLICY)
    now = 0.0
    for wait_s in (30.0, 60.0, 120.0, 240.0, 480.0, POLICY.catch_up_s, POLICY.catch_up_s):
        assert doubts.believes(ANNA, now)
        doubts.failed(ANNA, held_s=30.0, now=now)
        assert not doubts.believes(ANNA, now + wait_s - 0.1)
        now += wait_s
    assert doubts.believes(BORIS, 0.0)


def test_who_cannot_be_reached_is_tried_again_soon_however_often() -> None:
    doubts = Doubts(POLICY)
    for attempt in range(10):
        now = attempt * SHORTEST_S
        assert doubts.believes(ANNA, now)
        doubts.failed(ANNA, held_s=SHORTEST_S, now=now)


def test_what_several_fragments_say_of_one_source_counts_once() -> None:
    doubts = Doubts(POLICY)
    for _ in range(5):
        doubts.failed(ANNA, held_s=30.0, now=0.0)

    assert doubts.believes(ANNA, 30.0)


def test_who_kept_its_word_is_believed_as_if_nothing_had_been() -> None:
    doubts = Doubts(POLICY)
    for now in (0.0, 30.0):
        doubts.failed(ANNA, held_s=30.0, now=now)
    doubts.kept_its_word(ANNA)
    doubts.failed(ANNA, held_s=30.0, now=100.0)

    assert doubts.believes(ANNA, 130.0)


class Drips(FetchServer):
    """Answers everything, frame by frame, each just in time."""

    async def _answer(self, stream: Stream, request: Request, reading: list[Any]) -> None:
        await super()._answer(Dripping(stream), request, reading)  # type: ignore[arg-type]


def invented(standing: Standing) -> Head:
    """A head that has grown out of this one, with twice the tokens. Nobody has it."""
    lineage = Lineage(bytes([66]) * 32)
    head = standing.head()
    version = head.version + 5
    tokens = 2 * standing.merged.tokens + 1
    return Head(version, lineage, (Link(version, lineage, tokens), *head.links))


def test_a_slow_liar_holds_a_peer_up_for_a_while_and_not_for_ten_minutes() -> None:
    """It says again and again that it is further, and answers drop by drop."""

    async def lie(liar: Peer, to: Peer) -> None:
        while True:
            for index in range(len(LAYOUT.fragments)):
                standing = to.averager.standing(index)
                assert standing is not None
                behind = said.Behind(index, invented(standing), liar.id)
                liar.averager.transport.send(to.id, said.encode(behind))
            await asyncio.sleep(2.0)

    async def main() -> None:
        async with swarm(MemoryNetwork()) as made:
            anna, liar = await made.add("anna"), await made.add("mallory", trains=False)
            await made.add("boris")
            liar.averager._server.__class__ = Drips
            await made.live(20.0)
            lying = asyncio.create_task(lie(liar, anna))
            await made.live(CATCH_UP_BASE_S + 5.0)
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
            assert anna.averager.stats.blamed[liar.id]

    run(main())
