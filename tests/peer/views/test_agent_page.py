"""Rows of peers on pages and screens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from averaging.history.merged_map import Mark
from dht.identity import PeerId, RunId
from dht.membership.table import Member
from dht.records import PeerRecord, pack_versions
from peer.events.board import Board
from peer.events.names import Names
from peer.status import PeerRow, PeerStatus
from peer.views.agent_page import content, peer_rows, row_of
from tests.peer.statuses import a_status

ANNA, BORIS, CLARA, GONE = map(PeerId, ("anna", "boris", "clara", "gone"))


def a_member(peer: PeerId, *, versions: tuple[int, ...] = (), trains: bool = True) -> Member:
    record = PeerRecord(
        protocol=(1, 1),
        role="learner",
        incarnation=1,
        name=str(peer),
        trains=trains,
        versions=versions,
    )
    return Member(
        run=RunId("run"),
        peer=peer,
        record=record,
        sequence=1,
        sealed=b"",
        depth=0,
        first_seen=0.0,
        record_seen_at=90.0,
        expires_at=120.0,
    )


TOLD = {BORIS: (40, 2.5), CLARA: (3, 1e9)}


def rows_by_name(*members: Member, merged: dict[PeerId, int]) -> dict[str, PeerRow]:
    marks = {peer: Mark(1, 1, tokens) for peer, tokens in merged.items()}
    last = {BORIS: "merged 2/7"}
    live = [row_of(member, TOLD.get(member.peer), 100.0) for member in members]
    rows = peer_rows(a_status(), live, marks, last, lambda peer: f"?{peer}")
    shares = [row.share or 0.0 for row in rows]
    assert shares == sorted(shares, reverse=True)
    return {row.name: row for row in rows}


def test_the_share_of_a_peer_is_that_of_the_tokens_in_the_model() -> None:
    rows = rows_by_name(
        a_member(BORIS, versions=pack_versions((9, 7))), merged={BORIS: 300, GONE: 100}
    )
    boris, gone = rows["boris"], rows["?gone"]
    assert (boris.share, boris.version, boris.seen_s) == (0.75, 7, 10.0)
    assert (boris.state, gone.state, gone.share) == ("training", "gone", 0.25)
    assert (boris.last, gone.last, gone.behind) == ("merged 2/7", None, None)
    assert rows[a_status().name].you is True


def test_steps_and_loss_of_another_peer_are_those_that_it_told_last() -> None:
    """They were a dash for everybody but this peer."""
    rows = rows_by_name(a_member(ANNA), a_member(BORIS), a_member(CLARA), merged={})
    assert (rows["boris"].steps, rows["boris"].loss) == (40, 2.5)
    assert (rows["anna"].steps, rows["anna"].loss) == (None, None), "it was not asked yet"
    assert (rows["clara"].steps, rows["clara"].loss) == (3, None), "no loss of a model that learns"


def test_the_versions_a_peer_is_behind_are_counted_from_the_newest() -> None:
    rows = rows_by_name(
        a_member(ANNA, versions=pack_versions((12, 11))),
        a_member(BORIS, versions=pack_versions((9, 9))),
        merged={},
    )
    assert (rows["anna"].behind, rows["boris"].behind) == (0, 2)


def test_a_peer_that_has_made_no_step_joins_and_one_that_makes_none_any_more_rests() -> None:
    """A newcomer with all states was shown as resting until it had been dialled."""
    arrives = a_member(BORIS, trains=False, versions=pack_versions((9, 7)))
    worked = msgspec.structs.replace(arrives.record, step_time_s=0.5)
    assert rows_by_name(arrives, merged={})["boris"].state == "joining"
    assert rows_by_name(replace(arrives, record=worked), merged={})["boris"].state == "resting"
    assert rows_by_name(a_member(BORIS, trains=False), merged={})["boris"].state == "joining"


def test_the_percentages_sum_to_a_hundred_also_with_many_who_left() -> None:
    merged = {PeerId(f"gone-{number}"): 10 + number for number in range(50)}
    rows = rows_by_name(a_member(BORIS), merged={BORIS: 1000, **merged})
    assert sum(round(1000 * (row.share or 0.0)) for row in rows.values()) == 1000
    assert rows["18 others"].state == "gone"
    assert {row.share for row in rows_by_name(merged={}).values()} == {None}


def test_the_page_has_the_speed_the_fates_and_the_use_of_the_machine() -> None:
    use = {"processor_share": 0.5, "share_of_peak": 0.37, "device_bytes": 2e9}
    page = a_page(a_status(orders=("paused",), time_left_s=60.0, **use))
    assert (page["state"], page["link"]) == ("training", None)
    assert page["orders"] == ["paused"]
    figures = page["figures"]
    assert figures["tokens_per_s"] == 20.0  # 100 tokens in 10 steps of half a second
    assert figures["fates_text"] == "100 trained: 90 merged, 10 pending, 0 discarded"
    assert figures.items() >= {**use, "temperature_c": None, "time_left_s": 60.0}.items()


def test_the_page_of_a_run_that_is_over_says_so() -> None:
    """Earlier, it asked others to join a run that admits nobody any more."""
    assert a_page(a_status())["ended_at"] is None
    assert a_page(msgspec.structs.replace(a_status(), ended_at=5.0))["ended_at"] == 5.0


def a_page(status: PeerStatus) -> dict[str, Any]:
    rows = peer_rows(status, (), {}, {}, lambda peer: f"?{peer}")
    return content(status, Board(Names({})), rows, run_id="", run_name="", wall_time=0.0)
