"""What an experiment's file can say of peers and owners: liars, clocks, releases and orders."""

from __future__ import annotations

from typing import Any

import pytest

from peer.simulate.outcome import SwarmResult
from peer.simulate.settings import BadExperiment, Swarm
from peer.simulate.simulation import run

SMALL: dict[str, Any] = {
    "peers.count": 6,
    "problem.size": 4,
    "outer.fragments": 1,
    "outer.steps_per_cycle": 12,
    "rounds.slice_bytes_min": 256,
    "end.cycles": 5.0,
}


def ran(**settings: Any) -> SwarmResult:
    given = {name.replace("__", "."): value for name, value in settings.items()}
    return run(Swarm().with_settings({**SMALL, **given}), 1)


def test_audits_convict_a_reducer_that_merges_falsely_and_nobody_else() -> None:
    audited = ran(peers__false_reducers=0.17, rounds__audit_rate=1.0, end__cycles=16.0)

    # Those that share a view with a peer that has a proof see the liar no more, and want none.
    assert audited.notes["false reducers convicted"] >= 3
    assert "honest convicted" not in audited.notes
    assert audited.rounds[-1].contributors == 5, "and merges without it"
    assert "false reducers convicted" not in ran(peers__false_reducers=0.17).notes


def test_clocks_that_are_off_change_nothing() -> None:
    right = ran()
    off = ran(peer=[{"peers": [1, 4], "clock_s": 1e5}, {"peers": [2], "clock_s": -300.0}])

    assert off.final.version == right.final.version
    assert off.final.loss == pytest.approx(right.final.loss, rel=0.05)
    assert {record.contributors for record in off.rounds} == {6}


def test_no_round_begins_while_the_owner_pauses_the_run() -> None:
    pause = {"kind": "order", "at_s": 16.0, "peers": [0], "paused": True}
    resume = {"kind": "order", "at_s": 40.0, "peers": [3]}
    times = [record.time_s for record in ran(event=[pause, resume]).rounds]

    assert any(time < 16.0 for time in times)
    assert not any(30.0 < time < 40.0 for time in times), "who hears of it last has tried a round"
    assert max(times) > 45.0


def test_an_amendment_reaches_all_peers_from_one_and_counts_two_versions_later() -> None:
    order = {"kind": "order", "at_s": 20.0, "peers": [2], "amends": ["outer.codec=f32"]}
    larger = {"problem__size": 64, "end__cycles": 8.0}
    amended, usual = ran(event=[order], **larger), ran(**larger)

    assert amended.final.version == usual.final.version
    assert amended.bytes_sent > 2 * usual.bytes_sent
    # Who has not heard of the order yet stays out of one round or two.
    assert [record.contributors for record in amended.rounds[4:]] == 4 * [6]


def test_an_order_that_cannot_be_is_refused_at_once() -> None:
    order = {"kind": "order", "at_s": 20.0, "amends": ["outer.coder=f32"]}
    with pytest.raises(BadExperiment, match=r"outer\.coder is not .*did you mean 'codec'"):
        ran(event=[order])
