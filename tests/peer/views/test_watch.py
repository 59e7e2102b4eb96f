"""Events become sentences and JSON lines."""

from __future__ import annotations

import json

import pytest

from dht.identity import Identity
from peer.observed_run import Fields
from peer.views.watch import (
    JsonReporter,
    PlainReporter,
    Watch,
    offer_told,
    progress_line,
    sentence,
)

ROUND: Fields = {
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
        ({"event": "measured", "loss": 1.25}, "held-out loss 1.2500"),
        ({"event": "phase", "text": "looking for peers"}, "looking for peers"),
        ({"event": "over", "reason": "the run has used its tokens"}, "used its tokens"),
        ({"event": "phase", "name": "fetching", "text": "downloading", "done": 0.5}, "ing: 50%"),
        ({"event": "phase", "name": "leaving", "text": "enough"}, "leaving (enough)"),
        ({"event": "fetch_failed", "reason": "nobody to ask"}, "nobody to ask; trying again"),
        ({"event": "state_adopted", "fragment": 1, "version": 9, "how": "replay"}, "version 9"),
        ({"event": "optimizer_restored", "step": 12}, "at step 12"),
        ({"event": "exported", "path": "/model"}, "wrote /model"),
        ({"event": "reachability", "text": "reachable: boris dialled it"}, "boris dialled it"),
        ({"event": "something_new", "a": 1}, "something_new a=1"),
    ],
)
def test_an_event_is_told_in_words(fields: Fields, says: str) -> None:
    assert says in (sentence(fields) or "")


def test_what_only_programs_want_to_know_is_no_sentence() -> None:
    assert sentence({"event": "adopted", "fragment": 0, "version": 1}) is None


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
        ({**ROUND, "contributed": False}, "every reducer had in time; kept"),
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
def test_why_an_offer_was_merged_or_not_is_told_in_words(fields: Fields, says: str) -> None:
    assert says in (offer_told(fields) or "")


def test_other_events_say_nothing_of_an_offer() -> None:
    assert offer_told({"event": "peer_joined", "name": "boris"}) is None


def test_the_json_reporter_says_one_object_per_event() -> None:
    said: list[str] = []
    with JsonReporter(said.append) as reporter:
        reporter.on_event(ROUND)
        reporter.on_event({"event": "adopted", "fragment": 0, "version": 1})
    assert [json.loads(line)["event"] for line in said] == ["round", "adopted"]


def test_a_loss_that_is_no_number_leaves_a_line_that_any_parser_reads() -> None:
    said: list[str] = []
    with JsonReporter(said.append) as reporter:
        reporter.on_event({"event": "measured", "loss": float("nan")})
        reporter.tell_progress({"event": "progress", "loss": float("inf")})
    assert [json.loads(line)["loss"] for line in said] == [None, None]


def test_the_plain_reporter_says_sentences_only() -> None:
    said: list[str] = []
    with PlainReporter(said.append) as reporter:
        reporter.on_event(ROUND)
        reporter.on_event({"event": "adopted", "fragment": 0, "version": 1})
    assert said == ["fragment 2 version 7: 3 peers, with my work"]


def test_the_plain_reporter_says_where_a_link_works_that_holds_no_public_address() -> None:
    peer = Identity.from_seed(bytes(32)).peer_id
    said: list[str] = []
    for host in ("203.0.113.7", "192.168.1.5"):
        PlainReporter(said.append).tell_link(
            f"shoal://{'ab' * 32}?seed=/ip4/{host}/tcp/7700/p2p/{peer}"
        )
    assert ["only in this local network" in line for line in said] == [False, False, True]


def test_the_plain_reporter_tells_a_phase_once_however_often_it_gets_on() -> None:
    said: list[str] = []
    with PlainReporter(said.append) as reporter:
        for done in (0.0, 0.25, 0.5):
            reporter.on_event(
                {"event": "phase", "name": "fetching", "text": "downloading", "done": done}
            )
        reporter.on_event({"event": "phase", "name": "ready", "text": "in the run", "done": 1.0})
    assert said == ["downloading", "in the run"]


def test_the_plain_reporter_says_once_why_it_leaves() -> None:
    said: list[str] = []
    over = {"event": "over", "reason": "its owner asked it to leave", "finished": False}
    with PlainReporter(said.append) as reporter:
        reporter.on_event(over)
        reporter.on_event({"event": "phase", "name": "leaving", "text": over["reason"]})
        reporter.on_event(over)
    assert said == [over["reason"], f"leaving ({over['reason']}): finishing what is under way"]


def test_a_line_of_progress_survives_a_loss_that_is_not_known_yet() -> None:
    record = {
        "steps": 1,
        "loss": None,
        "peers": 1,
        "global_tokens": 0,
        "rounds": 0,
        "bytes_sent": 0,
        "blocked_fraction": 0.0,
    }
    assert "loss -" in progress_line(record)


def test_the_watch_keeps_a_bounded_number_of_news() -> None:
    watch = Watch()
    for number in range(1000):
        watch.on_event({"event": "something", "number": number})
    assert len(watch._news) <= 50


def test_what_a_terminal_would_obey_is_not_in_a_sentence() -> None:
    fields: Fields = {"event": "round_missed", "fragment": 1, "reason": "\x1b[2J\x9bgone"}
    assert (sentence(fields) or "").isprintable()
    assert "gone" in (sentence(fields) or "")
