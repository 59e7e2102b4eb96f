"""A peer that was not upgraded with the others says so once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dht.protocol import NEWEST, UPGRADE
from dht.records import PeerRecord
from peer.agent.network import Network


def test_a_peer_that_is_behind_most_others_says_so_once_with_the_command() -> None:
    members: list[SimpleNamespace] = []
    me: Any = SimpleNamespace(_told_outdated=False, live_members=lambda: members)

    def look(*newest: int) -> str | None:
        members[:] = [
            SimpleNamespace(record=PeerRecord(protocol=(1, number), role="learner", incarnation=1))
            for number in newest
        ]
        return Network.found_outdated(me)

    assert look(NEWEST, NEWEST + 1) is None
    text = look(NEWEST, NEWEST + 1, NEWEST + 1, NEWEST + 1)
    assert look(NEWEST + 1, NEWEST + 1, NEWEST + 1, NEWEST + 1) is None
    assert text is not None and f"{UPGRADE}" in text
    assert text.startswith(f"3 of 4 other peers run protocol {NEWEST + 1}, this one {NEWEST}")
