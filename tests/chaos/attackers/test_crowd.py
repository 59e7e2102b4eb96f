"""The messages of a crowd of strangers reach the protocols that members serve."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress
from typing import cast

from averaging.live.streams.links import bulk_protocol
from dht.errors import StreamBroken
from dht.host import FRAME_MAX_BYTES, Stream
from dht.identity import RunId
from dht.libp2p.hivemind_host import HivemindHost
from dht.memory.host import MemoryNetwork, identity_of
from dht.memory.virtual_loop import run
from tests.chaos.attackers.crowd import Intruder

RUN = RunId("ab" * 32)


def test_large_uploads_come_on_the_streams_of_uploads() -> None:
    received: list[int] = []

    async def read(stream: Stream) -> None:
        with suppress(StreamBroken):
            while frame := await stream.receive(timeout_s=5.0):
                received.append(len(frame))

    async def attack() -> None:
        network = MemoryNetwork()
        member, stranger = network.host("member"), network.host("stranger")
        await member.serve_streams(bulk_protocol(RUN), read)
        await stranger.connect(member.peer_id, await member.addresses(), timeout_s=5.0)
        host = cast(HivemindHost, stranger)
        intruder = Intruder(identity_of("stranger"), host, member.peer_id, random.Random(1))
        intruder.run, intruder.done = RUN, Counter()
        await intruder.send_large_uploads()
        await asyncio.sleep(1.0)

    run(attack())

    assert received and set(received) == {FRAME_MAX_BYTES}
