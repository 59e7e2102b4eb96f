"""A peer that was not upgraded with the others says so once."""

from __future__ import annotations

from types import SimpleNamespace

from dht.protocol import NEWEST, UPGRADE
from dht.records import PeerRecord
from peer.agent.online_peer import OnlinePeer


def test_a_peer_that_is_behind_most_others_says_so_once_with_the_command() -> None:
    told: list[tuple[str, str]] = []
    members: list[SimpleNamespace] = []
    me = SimpleNamespace(
        _told_outdated=False,
        live_members=lambda: members,
        local=SimpleNamespace(event=lambda name, text: told.append((name, text))),
    )

    def look(*newest: int) -> None:
        members[:] = [
            SimpleNamespace(record=PeerRecord(protocol=(1, number), role="learner", incarnation=1))
            for number in newest
        ]
        OnlinePeer._tell_if_outdated(me)  # type: ignore[arg-type]

    look(NEWEST, NEWEST + 1)
    assert not told
    look(NEWEST, NEWEST + 1, NEWEST + 1, NEWEST + 1)
    look(NEWEST + 1, NEWEST + 1, NEWEST + 1, NEWEST + 1)
    ((name, text),) = told
    assert name == "outdated" and f"{UPGRADE}" in text
    assert text.startswith(f"3 of 4 other peers run protocol {NEWEST + 1}, this one {NEWEST}")
