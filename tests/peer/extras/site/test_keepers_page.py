"""What a keeper knows of its run: curve, held-out losses and news, bounded and kept."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dht.identity import PeerId
from peer.extras.site.keepers_page import FIRST_EVERY_S, MET_MAX, Record, ShownRun
from peer.extras.site.run_page import NEWS_MAX, POINTS_MAX
from tests.peer.agent.example_keepers import keeper_online

MEASURED = {"event": "measured", "loss": 2.5, "peer": "12D3KooWx"}


def named(*names: str) -> list[tuple[str, PeerId]]:
    return [(name, PeerId(f"id of {name}")) for name in names]


def test_the_median_of_what_learners_tell_is_noted_at_intervals() -> None:
    record = Record()
    record.sample(0.0, 100, [2.0, float("nan"), 9e99, 3.0, 2.5])
    record.sample(FIRST_EVERY_S / 2, 150, [9.0])
    record.sample(FIRST_EVERY_S, 200, [])
    record.sample(FIRST_EVERY_S, 200, [1.5])
    assert [(p.tokens, p.loss) for p in record.losses] == [(100, 2.5), (200, 1.5)]


def test_a_clock_that_was_ahead_once_does_not_end_the_curve() -> None:
    record = Record()
    for at, tokens in ((4e9, 10), (1e9, 20), (1e9 + 5, 30), (1e9 + 60, 40)):
        record.sample(at, tokens, [2.0])
    assert [point.tokens for point in record.losses] == [10, 20, 40]


def test_a_long_run_is_thinned_out_and_keeps_its_beginning_and_its_newest_point() -> None:
    record = Record()
    for number in range(5000):
        record.sample(number * FIRST_EVERY_S, number, [float(number)])
    losses = [point.loss for point in record.losses]
    assert len(losses) <= POINTS_MAX
    assert losses == sorted(losses) and losses[0] < 100 and losses[-1] > 4900
    gaps = [after - before for before, after in pairwise(losses[:-1])]
    assert max(gaps) <= 2 * min(gaps)


def test_the_curve_of_a_run_that_was_taken_back_does_not_go_backwards() -> None:
    """A keeper without the states that a run was taken back to counts no tokens meanwhile."""
    record = Record()
    for number, tokens in enumerate((100, 200, 300, 0, 200)):
        record.sample(number * FIRST_EVERY_S, tokens, [float(number)])
        if tokens:
            record.note({**MEASURED, "tokens": tokens, "at": number * FIRST_EVERY_S})
    assert [point.tokens for point in record.losses] == [100, 200, 200]
    assert [point.tokens for point in record.held_out] == [100, 200, 200]


def test_the_tokens_of_a_day_are_those_that_came_while_the_record_was_kept() -> None:
    record, day = Record(), 86_400.0
    for at, tokens in ((0.0, 1000), (10.0, 1300), (20.0, 0), (30.0, 900), (day, 1000)):
        record.sample(at, tokens, [])
    again = Record.decode(record.encode())
    again.sample(day + 10.0, 1200, [])
    assert [(each.date, each.tokens) for each in again.days] == [
        ("1970-01-01", 300),
        ("1970-01-02", 300),
    ]


def test_events_for_everybody_are_news_and_others_are_not() -> None:
    record = Record()
    record.sample(1.0, 2_000_000, [3.0])
    events: list[dict[str, Any]] = [
        {**MEASURED, "tokens": 1_500_000},
        {**MEASURED, "tokens": 1_600_000, "loss": float("inf")},
        {"event": "published", "tokens": 1_900_000, "path": "/home/ada/exports/x"},
        {"event": "link_lost", "peer": "12D3KooWx", "reason": "192.0.2.7"},
        {"event": "ended_here", "reason": "the run has used its tokens"},
    ]
    for number, event in enumerate(events):
        record.note({**event, "at": 10.0 + number})
    record.meet(20.0, named("Ada"))
    record.meet(21.0, named("Ada", "Boris"))
    record.meet(22.0, named("Ada", "Boris", "Clara"))
    assert [news.text for news in record.news] == [
        "Clara contributes",
        "Boris contributes",
        "the run has ended",
        "a new export, of 1.9 M tokens",
        "held-out loss 2.500 at 1.5 M tokens",
    ]
    assert [point.loss for point in record.held_out] == [2.5]


def test_news_are_bounded() -> None:
    record = Record()
    record.meet(0.0, named("the first"))
    record.meet(1.0, named(*(f"peer {number}" for number in range(2 * NEWS_MAX))))
    assert len(record.news) == NEWS_MAX


def test_a_contributor_that_renames_itself_is_no_news_and_fills_no_record() -> None:
    record = Record()
    record.meet(0.0, named("Ada"))
    for number in range(100):
        record.meet(1.0, [*named("Ada"), (f"mallory {number}", PeerId("m"))])
    assert [news.text for news in record.news] == ["mallory 0 contributes"]
    for number in range(2 * MET_MAX):
        record.meet(3.0, named(f"peer {number}"))
    assert len(msgspec.json.decode(record.encode())["met"]) == MET_MAX


def test_a_record_survives_as_a_file_and_a_damaged_one_begins_anew() -> None:
    record = Record()
    record.sample(1.0, 100, [3.0])
    record.note({**MEASURED, "tokens": 150, "at": 2.0})
    record.meet(3.0, named("Ada"))
    again = Record.decode(record.encode())
    assert again.encode() == record.encode()
    again.meet(4.0, named("Ada", "Boris"))
    assert len(again.news) == 2 and again.news[0].text == "Boris contributes"
    assert Record.decode(b"{").losses == []


async def test_a_run_page_does_not_claim_that_nobody_contributed_before_it_has_heard_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with keeper_online(tmp_path, monkeypatch) as (peer, _):
        assert ShownRun(peer).page().contributors_total is None
