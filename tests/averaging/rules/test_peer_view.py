"""The time for which a peer is live, and from which on it is established."""

from averaging.rules.peer_view import ESTABLISHED_AFTER_S, SILENCE_MAX_S
from tests.averaging.values import seen


def test_silence_and_a_failed_call_make_a_peer_not_live() -> None:
    assert seen(ago=SILENCE_MAX_S).is_live(1000.0)
    assert not seen(ago=SILENCE_MAX_S + 0.1).is_live(1000.0)
    assert not seen(ago=5.0, failed=996.0).is_live(1000.0)
    assert seen(ago=5.0, failed=994.0).is_live(1000.0), "it has been heard since"


def test_established_means_seen_for_a_while() -> None:
    assert not seen(since=ESTABLISHED_AFTER_S - 0.1).is_established(1000.0)
    assert seen(since=ESTABLISHED_AFTER_S).is_established(1000.0)
