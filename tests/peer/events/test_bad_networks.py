"""Messages that were wrong on bad networks, from the events that caused them, each with what is so.

Routers, delays of 40 to 140 ms, lines of 1 to 100 Mbit/s, splits, and goodbyes of all at once.
"""

from __future__ import annotations

import pytest

from dht.addresses import parse
from dht.identity import PeerId
from dht.membership.reachability import in_words
from dht.membership.seeds import NobodyAnswered, Seed
from peer.events.sentences import Fields
from peer.events.table import on_screen
from peer.rules.leaving import who_leaves_too
from peer.rules.others import nobody_reduces
from tests.peer.statuses import a_status

SILENT = Seed(
    PeerId("12D3"), parse("/ip4/203.0.113.9/tcp/4001"), "seed", 0.0, failures=3, reason="no answer"
)


@pytest.mark.parametrize(
    ("event", "says"),
    [
        (
            {"event": "work_lost", "fragment": 2, "tokens": 3136, "reason": "overwritten"},
            "lost 3.14 k tokens of work in fragment 2: its parameters were set to a version of the "
            "others (overwritten) (shoal docs work-lost)",
        ),
        (
            {"event": "state_adopted", "fragment": 1, "version": 9, "how": "state"}
            | {"rebased": True, "from_version": 27},
            "fragment 1: took version 9 of the others in place of its own version 27, from which "
            "they do not go on",
        ),
        (
            {"event": "fetch_failed", "reason": "fragment 1 could not be fetched: nobody to ask"},
            "fragment 1 could not be fetched: nobody to ask; trying again",
        ),
        (
            {"event": "reachability", "reachable": False},
            "other peers cannot connect to this one, as it is behind a router or firewall; it "
            "connects to them and takes full part",
        ),
    ],
)
def test_what_the_screen_says(event: Fields, says: str) -> None:
    assert on_screen(event) == says


@pytest.mark.parametrize(
    "event",
    [
        # Four peers joined at once, and asked the same few: nothing is wrong.
        {
            "event": "fetch_waits",
            "fragment": 1,
            "reason": "too many fetches at once; ask somebody else, or later",
        },
        # The other side of a round of which this peer knows the end.
        {"event": "refused", "peer": "12D3", "kind": "opening_refused", "reason": "it is over"},
        # A connection broke; the next message opens another.
        {"event": "link_lost", "peer": "12D3", "reason": "it ended without END"},
        {"event": "level", "fragment": 1, "before": "int4", "level": "int2"},
    ],
)
def test_what_the_screen_does_not_say(event: Fields) -> None:
    assert on_screen(event) is None


def test_a_cable_that_is_out_is_not_the_bootstrap_peers_fault() -> None:
    assert str(NobodyAnswered((SILENT,), lost=4)) == (
        "all 4 connected peers fell silent, and no address answers: this machine's own line seems "
        "to be down; still trying, and training goes on meanwhile"
    )
    assert "check that one of them is running" in str(NobodyAnswered((SILENT,)))


def test_a_private_address_of_another_network_says_nothing_of_its_machine() -> None:
    assert in_words(None, "dial to self attempted") == (
        "the only address known of it is private, and this machine has the same in its own network"
    )
    assert in_words(False, "connection refused") == (
        "it is behind a router or firewall that lets no connection in"
    )


def test_who_can_only_dial_out_hears_what_would_help() -> None:
    text = nobody_reduces(2)
    assert "has a direct connection with no other" in text
    assert "run `shoal keep` on a machine that others can dial" in text


def test_who_leaves_with_others_is_told_for_whom_it_stays() -> None:
    other = a_status(name="boris", phase="leaving", versions=(3, 4), fates={"pending": 11.0})
    assert who_leaves_too((3, 4), [other]) == ["boris: has work that is not merged"]
