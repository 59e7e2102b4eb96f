"""The experiment on a wide-area network: what it counts, and that a run survives its faults."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dht.identity import PeerId
from tests.integration.wan.accounting import Events, sent_for
from tests.integration.wan.experiment import (
    Outcome,
    Phase,
    Row,
    conduct,
    finished_rounds,
    row,
    table,
)
from tests.processes import Processes
from tests.swarms.topology import Nat
from tests.swarms.wide_area import FAULTS, sites

ANNA, BORIS, CLARA = PeerId("anna"), PeerId("boris"), PeerId("clara")


def told(round_id: str, at: float, *contributors: PeerId, received: int) -> dict[str, object]:
    return {
        "event": "round",
        "round": round_id,
        "at": at,
        "seconds": 1.0,
        "outcome": "finished",
        "fragment": 0,
        "contributors": list(contributors),
        "received_bytes": received,
        "received_line_bytes": received * 8 // 10,
    }


def test_a_learner_whose_work_a_round_lacks_has_missed_it_unless_its_process_was_gone() -> None:
    logs = [
        [told("a", 10.1, ANNA, BORIS, received=100), told("b", 20.0, ANNA, CLARA, received=50)],
        [
            told("a", 10.0, ANNA, BORIS, received=300),
            {**told("c", 21.0, received=9), "outcome": "void"},
        ],
    ]
    rounds = finished_rounds(logs)
    assert [each.at for each in rounds] == [10.0, 20.0]
    learners = {"anna": ANNA, "boris": BORIS, "clara": CLARA}
    events: dict[str, Events] = dict.fromkeys(learners, ())
    events["clara"] = [
        {"event": "behind", "fragment": 0, "at": 5.0},
        {"event": "too_late", "fragment": 0, "at": 9.0},
        {"event": "turned_away", "fragment": 1, "at": 9.5},
    ]
    everything = Phase("quiet", 0.0, 30.0, 1000, 1504)
    assert row(everything, rounds, learners, [], events) == Row(
        "quiet", 30.0, 2, 6, 2, 450, 360, 504, {"too_late": 1, "no join": 1}
    )
    two = {name: learners[name] for name in ("anna", "clara")}
    mended = replace(everything, mended_at=12.0)
    assert row(mended, rounds, two, [], events).together_s == 8.0
    killed = [("boris", 15.0, 25.0)]
    assert row(everything, rounds, learners, killed, events) == Row(
        "quiet", 30.0, 2, 5, 1, 450, 360, 504, {"too_late": 1}
    )
    early = Phase("early", 0.0, 19.5, 1000, 1450)
    assert row(early, rounds, learners, [], events) == Row(
        "early", 19.5, 1, 3, 1, 425, 340, 450, {"too_late": 1}
    )


def test_bytes_are_told_by_purpose_for_the_time_of_a_phase() -> None:
    log = [
        {"event": "round", "at": 10.0, "sent_for": {"bulk": 100}},
        {"event": "idle", "at": 15.0},
        {"event": "round", "at": 20.0, "sent_for": {"bulk": 300, "audit": 40}},
    ]
    assert sent_for([log, log], 15.0, 30.0) == {"bulk": 200, "audit": 40}


def test_the_table_has_shares_and_the_tokens_that_were_lost_by_reason() -> None:
    rows = (
        Row("quiet", 60.0, 10, 40, 2, 1_250_000, 1_000_000, 1_080_000, together_s=4.0),
        Row("split", 9.0, 0, 0, 0, 0, 0, 5),
        Row("address", 60.0, 10, 40, 2, 1, 1, 2, together_s=9.0),
    )
    outcome = Outcome(
        rows,
        {
            "anna": {"processed": 12.0, "merged": 6.0, "pending": 1.0, "left": 5.0},
            "boris": {"processed": 9.0, "merged": 2.0, "pending": 0.0, "left": 3.0, "stale": 4.0},
        },
        predicted_bytes=50_000.0,
    )
    lines = table(outcome).splitlines()
    assert "5.0%" in lines[1] and "8.0%" in lines[1]
    assert lines[1].endswith("0.054 (0.050) MB    4.0 s  MISSED: 1%")
    assert "inf" in lines[2] and lines[2].endswith("MISSED: 15 s")
    assert lines[3].endswith("held")
    assert lines[-1] == "tokens lost: 12 (left 8, stale 4)"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_of_public_peers_and_homes_heals_after_its_quick_faults(
    processes: Processes, tmp_path: Path
) -> None:
    """Every ``after`` phase waits until all learners have had work merged again."""
    happenings = [("quiet", 15.0), ("cable", 20.0), ("address", 15.0), ("bootstrap", 10.0)]
    outcome = conduct(
        sites(1, [Nat.PORT_RESTRICTED, Nat.SYMMETRIC]),
        happenings,
        processes,
        tmp_path,
        cycle=60,
        layers=1,
        width=64,
    )
    phases = {each.phase: each for each in outcome.rows}
    assert len(outcome.rows) == 2 * len(happenings) - 1
    assert phases["quiet"].rounds > 0
    assert phases["cable"].rounds > 0, "the others go on without the home whose line is dead"
    assert phases["cable"].missed > 0
    for fates in outcome.fates.values():
        rest = sum(tokens for fate, tokens in fates.items() if fate != "processed")
        assert fates["processed"] == pytest.approx(rest, abs=1e-6)
        assert fates["merged"] > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_laptop_that_slept_is_merged_again_within_half_a_minute(
    processes: Processes, tmp_path: Path
) -> None:
    """So that its own agent and daemon were stopped, and all its connections are dead."""
    homes = [Nat.PORT_RESTRICTED, Nat.PORT_RESTRICTED]
    outcome = conduct(
        sites(1, homes), [("sleep", 90.0)], processes, tmp_path, cycle=60, layers=1, width=64
    )
    slept, after = outcome.rows
    assert slept.rounds > 0, "the others go on without it"
    assert after.together_s < FAULTS["sleep"].together_s
