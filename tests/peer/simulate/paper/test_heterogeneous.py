"""``shoal simulate heterogeneous``: the table, on the cheap quadratic problem."""

from __future__ import annotations

import pytest

from peer.simulate.paper import heterogeneous

pytestmark = pytest.mark.slow  # figures of the paper: what quorum and grace do is tested in rules

CHEAP = {"problem.name": "quadratic"}


Rows = dict[tuple[str, str], heterogeneous.Row]
SPEEDS, ABSENT = "two speeds, 18% apart", "one peer in every tenth cycle"


@pytest.fixture(scope="module")
def rows() -> Rows:
    found, _ = heterogeneous.table(seeds=(0,), cycles=4, parts=(SPEEDS, ABSENT), changes=CHEAP)
    return {(row.part, row.rule): row for row in found}


def test_only_waiting_for_all_peers_loses_steps(rows: Rows) -> None:
    for rule in heterogeneous.RULES:
        if rule == "K = all":
            assert rows[SPEEDS, rule].goodput < 95
        else:
            assert rows[SPEEDS, rule].goodput > 98


def test_grace_admits_contributions_that_a_bare_quorum_leaves_out(rows: Rows) -> None:
    bare, graced = rows[SPEEDS, "K = 2, no grace"], rows[SPEEDS, "K = 2, grace"]
    assert rows[SPEEDS, "K = all"].missed == 0.0
    assert graced.missed < bare.missed


def test_dropping_late_work_costs_loss(rows: Rows) -> None:
    bare, dropped = rows[SPEEDS, "K = 2, no grace"], rows[SPEEDS, heterogeneous.NO_GRACE]
    assert dropped.missed == pytest.approx(bare.missed, abs=0.05)
    assert dropped.loss.value > rows[SPEEDS, "K = all"].loss.value


def test_the_absent_peer_is_absent(rows: Rows) -> None:
    assert rows[ABSENT, "as a new run: majority, due times scaled"].goodput < 95


def test_reported_figures_belong_to_one_mix_of_speeds(rows: Rows) -> None:
    reported = {key for key, row in rows.items() if row.reported_goodput is not None}
    assert reported == {(SPEEDS, rule) for rule in heterogeneous.REPORTED_GOODPUT}


def test_all_mixes_and_rules_are_planned() -> None:
    planned = heterogeneous.jobs(seeds=(0, 1), cycles=3)
    assert len(planned) == 2 * len(heterogeneous.PARTS) * len(heterogeneous.RULES)
    assert len({job.name for job in planned}) == len(planned) // 2
