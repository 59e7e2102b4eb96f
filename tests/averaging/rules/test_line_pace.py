"""The share of rounds in which a peer takes part, by its line."""

from __future__ import annotations

import pytest

from averaging.rules.line_pace import FROM_THE_START, Every, every, exchanges_at_once

PAYLOAD = 1_000_000
"""Bytes of a fragment, of which there are four."""
CYCLE_S = 10.0


def by_line(
    bytes_per_s: float,
    before: Every = FROM_THE_START,
    versions_max: int = 8,
    share_max: float = 0.7,
) -> Every:
    return every(
        before,
        bytes_per_s=bytes_per_s,
        fragment_bytes=PAYLOAD,
        fragments=4,
        cycle_s=CYCLE_S,
        share_max=share_max,
        versions_max=versions_max,
    )


def line(busy: float) -> float:
    """A line that carries the payload of a cycle in this share of it."""
    return 4 * PAYLOAD / CYCLE_S / busy


def test_a_line_that_is_busy_for_less_than_its_share_takes_part_in_all_versions() -> None:
    assert by_line(line(0.69)).versions == 1
    assert by_line(line(0.71)).versions == 2
    assert by_line(line(1.39)).versions == 2


def test_a_run_may_give_its_rounds_the_whole_line() -> None:
    assert by_line(line(0.99), share_max=1.0).versions == 1
    assert by_line(line(1.01), share_max=1.0).versions == 2


def test_a_line_of_unknown_speed_takes_part_in_all_versions() -> None:
    assert by_line(0.0, Every(versions=4, reason="")) == FROM_THE_START


def test_a_round_that_is_longer_than_a_cycle_costs_the_others_a_tenth_at_most() -> None:
    # Up and down of a fragment take 1.2 cycles: the others' round comes 0.2 later, in 1 of 4.
    assert by_line(line(2.4)).versions == 4
    for busy in (0.5, 1.0, 2.0, 2.4, 2.5):
        longer = max(0.0, 2 * busy / 4 - 1)
        assert longer / by_line(line(busy), versions_max=100).versions <= 0.1 + 1e-9


def test_it_is_bounded_by_the_age_at_which_work_is_stale() -> None:
    assert by_line(line(50.0)).versions == 8
    assert "cannot follow" in by_line(line(50.0)).reason
    assert "cannot follow" not in by_line(line(0.9)).reason


@pytest.mark.parametrize("busy", [0.3, 0.6, 0.7, 0.95, 1.3, 1.45, 2.1])
def test_a_line_whose_measured_speed_varies_does_not_make_it_oscillate(busy: float) -> None:
    now, changes = by_line(line(busy)), 0
    for turn in range(40):
        before = now
        now = by_line(line(busy * (1.12 if turn % 2 else 0.92)), before)
        changes += now.versions != before.versions

    assert changes <= 1


def test_a_line_that_recovers_is_used_again_at_once() -> None:
    slow = by_line(line(5.0))

    assert slow.versions == 8
    assert by_line(line(0.1), slow).versions == 1


def test_a_slow_line_carries_few_rounds_at_a_time() -> None:
    for speed, most in ((0.0, 8), (600e3, 4), (700e3, 8)):
        assert exchanges_at_once(speed, most=8, slow_bytes_s=625e3) == most
    assert exchanges_at_once(600e3, most=1, slow_bytes_s=625e3) == 1
