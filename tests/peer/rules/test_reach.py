"""Messages of a peer about the peers of its run that can be dialled."""

from __future__ import annotations

from peer.rules.reach import (
    STUCK_AFTER_S,
    UNTESTED_AFTER_S,
    NobodyReduces,
    Reach,
    Untested,
)


def test_peers_that_can_all_only_dial_out_are_told_what_to_do_once() -> None:
    reach = Reach()

    def look(now: float, *, learners: int = 1, reachable: int = 0) -> object:
        return reach.look(False, connected=True, learners=learners, reachable=reachable, now=now)

    assert look(0.0) is None
    assert look(STUCK_AFTER_S - 0.1) is None, "the verdict about a newcomer may still come"
    assert look(STUCK_AFTER_S) == NobodyReduces(2)
    assert look(STUCK_AFTER_S + 100.0) is None
    assert look(200.0, reachable=1) is None
    assert look(201.0) is None
    assert look(201.0 + STUCK_AFTER_S, learners=2) == NobodyReduces(3), "it became true again"
    assert "shoal keep" in str(NobodyReduces(2)) and "2 peers" in str(NobodyReduces(2))


def test_a_peer_that_can_be_dialled_or_trains_alone_says_nothing() -> None:
    reach = Reach()
    for now in range(0, 600, 10):
        assert reach.look(True, connected=True, learners=3, reachable=0, now=now) is None
    for now in range(600, 1200, 10):
        assert reach.look(False, connected=True, learners=0, reachable=0, now=now) is None


def test_a_founder_says_that_it_waits_for_its_test_if_somebody_could_make_it() -> None:
    reach = Reach()
    for now in (0.0, 10.0):
        assert reach.look(None, connected=False, learners=0, reachable=0, now=now) is None
    assert reach.look(None, connected=True, learners=0, reachable=0, now=20.0) is None
    said = reach.look(None, connected=True, learners=0, reachable=0, now=20.0 + UNTESTED_AFTER_S)
    assert said == Untested()
    assert reach.look(None, connected=True, learners=0, reachable=0, now=60.0) is None
