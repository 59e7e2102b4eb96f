"""The time for which a peer is live, and from which on it is established."""

from typing import Any

from averaging.rules.peer_view import ESTABLISHED_AFTER_S, SILENCE_MAX_S, PeerView


def seen(
    *, ago: float = 0.0, since: float = 1000.0, failed: float | None = None, **facts: Any
) -> PeerView:
    return PeerView(first_seen=1000.0 - since, heard_at=1000.0 - ago, failed_at=failed, **facts)


def test_silence_and_a_failed_call_make_a_peer_not_live() -> None:
    assert seen(ago=SILENCE_MAX_S).is_live(1000.0)
    assert not seen(ago=SILENCE_MAX_S + 0.1).is_live(1000.0)
    assert not seen(ago=5.0, failed=996.0).is_live(1000.0)
    assert seen(ago=5.0, failed=994.0).is_live(1000.0), "it has been heard since"


def test_established_means_seen_for_a_while() -> None:
    assert not seen(since=ESTABLISHED_AFTER_S - 0.1).is_established(1000.0)
    assert seen(since=ESTABLISHED_AFTER_S).is_established(1000.0)
