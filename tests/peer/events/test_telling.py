"""Sentences of events on the screen, in stories, and about this peer's own offer."""

from __future__ import annotations

import pytest

from peer.events.sentences import Event
from peer.events.telling import on_screen, own_offer

ROUND: Event = {
    "event": "round",
    "fragment": 2,
    "version": 7,
    "members": ["a", "b", "c"],
    "contributed": True,
}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (ROUND, "fragment 2 version 7: 3 peers, with my work"),
        ({**ROUND, "contributed": False}, "without my work"),
        ({"event": "round_missed", "fragment": 1, "reason": "late"}, "round missed, work kept"),
        ({"event": "peer_joined", "peer": "12D3", "name": "calm-otter"}, "calm-otter joined"),
        ({"event": "peer_lost", "peer": "12D3", "name": ""}, "12D3 lost"),
        ({"event": "agent_died", "exit_code": -9, "restart_in_s": 0.5}, "training goes on"),
        ({"event": "page", "url": "http://[::1]:7777/"}, "web page: http://[::1]:7777/"),
        (
            {"event": "run_page", "url": "http://192.168.1.5:8080/"},
            "public page of the run: http://192.168.1.5:8080/ (others who reach this machine can",
        ),
        ({"event": "measured", "loss": 1.25, "tokens": 4_500_000}, "held-out loss 1.250 at 4.5 M"),
        ({"event": "phase", "text": "looking for peers"}, "looking for peers"),
        ({"event": "over", "reason": "the run has used its tokens"}, "used its tokens"),
        (
            {"event": "phase", "name": "fetching", "text": "downloading", "done": 0.5},
            "ing: [#####     ] 50%",
        ),
        ({"event": "phase", "name": "leaving", "text": "enough"}, "leaving (enough)"),
        ({"event": "fetch_failed", "reason": "nobody to ask"}, "nobody to ask; trying again"),
        (
            {"event": "diverged", "fragment": 1, "majority": ["12D3"], "with_me": 1},
            "or the processor of this machine may be faulty",
        ),
        ({"event": "state_adopted", "fragment": 1, "version": 9, "how": "replay"}, "version 9"),
        (
            {
                "event": "state_adopted",
                "fragment": 1,
                "version": 9,
                "how": "state",
                "rebased": True,
                "from_version": 27,
            },
            "fragment 1: took version 9 of the others in place of its own version 27",
        ),
        ({"event": "given_up", "tokens": 155_000}, "lost 155 k tokens of its work"),
        ({"event": "last_offers", "merged": True, "alone": False}, "handed over"),
        ({"event": "last_offers", "merged": True, "alone": True}, "this peer's own state"),
        ({"event": "optimizer_restored", "step": 12}, "at step 12"),
        ({"event": "exported", "path": "/model"}, "wrote /model"),
        ({"event": "reachability", "text": "reachable: boris dialled it"}, "boris dialled it"),
        ({"event": "something_new", "a": 1}, "something new, a 1"),
    ],
)
def test_an_event_has_a_sentence_for_the_screen(fields: Event, says: str) -> None:
    assert says in (on_screen(fields) or "")


def test_a_peer_of_another_run_is_not_on_the_screen() -> None:
    """Each peer of each run that meets at the same bootstrap peer was a line of 200 characters."""
    assert not on_screen({"event": "other_run", "text": "boris takes part in run 1, not in run 2"})


def test_an_event_for_programs_only_is_not_on_the_screen() -> None:
    assert on_screen({"event": "adopted", "fragment": 0, "version": 1}) is None


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {**ROUND, "weight": 0.314, "contributors": 3},
            "merged into fragment 2 version 7, 31% of the work of 3 peers",
        ),
        (
            {**ROUND, "contributed": False, "left_out": "too long"},
            "not merged into fragment 2 version 7: too long; kept for the next round",
        ),
        ({**ROUND, "contributed": False}, "every reducer in time; kept"),
        (
            {"event": "round_missed", "fragment": 1, "reason": "boris left"},
            "fragment 1 not merged: boris left; kept for the next round",
        ),
        (
            {"event": "not_merged", "fragment": 0, "reason": "1 of 2 required peers joined"},
            "fragment 0 not merged: 1 of 2 required peers joined; kept for the next round",
        ),
    ],
)
def test_the_result_of_an_offer_has_a_sentence_with_the_reason(fields: Event, says: str) -> None:
    assert says in (own_offer(fields) or "")


def test_other_events_say_nothing_of_an_offer() -> None:
    assert own_offer({"event": "peer_joined", "name": "boris"}) is None
