"""The codec and the length of the cycle that follow from the lines of a round's members."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from averaging.numbers.codecs import codec_named
from averaging.rules.line_levels import (
    CYCLE_RATIO,
    FROM_THE_START,
    IN_EVERY_ROUND,
    LEVELS_MAX,
    Every,
    Level,
    Line,
    agreed,
    every,
    ladder,
    needed,
)
from dht.identity import PeerId

PARAMETERS = 124_000_000
FRAGMENTS = 24
MBIT = 125_000.0

FIRST = Level(codec="int4", codec_down="int4", cycle_steps=30)
LEVELS = ladder(FIRST, [("int2", "int4"), ("int2", "int2")], cycle_max=240)


def encoded_bytes(codec: str) -> int:
    return codec_named(codec).encoded_size([PARAMETERS // FRAGMENTS])


def line(mbit: float, *, step_s: float = 0.08) -> Line:
    return Line(
        bytes_per_s=mbit * MBIT, step_s=step_s, fragments=FRAGMENTS, members=8, share_max=0.7
    )


def level_on(mbit: float) -> int:
    return needed(FROM_THE_START, line(mbit), LEVELS, encoded_bytes).level


def test_codecs_become_smaller_before_cycles_become_longer() -> None:
    assert LEVELS[:3] == [
        FIRST,
        Level(codec="int2", codec_down="int4", cycle_steps=30),
        Level(codec="int2", codec_down="int2", cycle_steps=30),
    ]
    assert {(level.codec, level.codec_down) for level in LEVELS[3:]} == {("int2", "int2")}
    cycles = [level.cycle_steps for level in LEVELS[2:]]
    assert cycles[-1] == 240
    assert all(1 < b / a <= CYCLE_RATIO + 0.05 for a, b in itertools.pairwise(cycles))


def test_a_run_that_allows_nothing_else_has_one_level() -> None:
    assert ladder(FIRST, [], cycle_max=FIRST.cycle_steps) == [FIRST]
    assert len(ladder(replace(FIRST, cycle_steps=1), [], cycle_max=10**9)) <= LEVELS_MAX


def test_a_line_is_busy_for_no_more_than_its_share_if_some_level_allows_that() -> None:
    for mbit in (100, 200, 1000, 5000):
        level = LEVELS[level_on(mbit)]
        assert line(mbit).share_of(encoded_bytes, level) <= 0.7, mbit
    assert level_on(5000) == 0
    assert level_on(100) > level_on(200) > level_on(1000) == 0


def test_a_line_that_no_level_suits_gets_the_smallest_and_is_told() -> None:
    need = needed(FROM_THE_START, line(5), LEVELS, encoded_bytes)
    assert need.level == len(LEVELS) - 1
    assert "allows nothing smaller" in need.reason


def test_the_reason_names_what_the_line_would_not_have_carried() -> None:
    need = needed(FROM_THE_START, line(200), LEVELS, encoded_bytes)
    chosen, refused = LEVELS[need.level], LEVELS[need.level - 1]
    assert str(chosen) in need.reason and str(refused) in need.reason


def test_an_unknown_speed_changes_nothing() -> None:
    need = needed(FROM_THE_START, line(100), LEVELS, encoded_bytes)
    assert needed(need, line(0), LEVELS, encoded_bytes) is need
    assert needed(need, line(100, step_s=0.0), LEVELS, encoded_bytes) is need


def test_measurements_that_vary_by_a_tenth_do_not_make_the_level_oscillate() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        mbit = rng.uniform(60, 1000)
        need, seen = FROM_THE_START, []
        for _ in range(200):
            measured = line(mbit * rng.uniform(0.9, 1.1))
            need = needed(need, measured, LEVELS, encoded_bytes)
            seen.append(need.level)
        settled = seen[20:]
        assert max(settled) - min(settled) <= 1, seed
        changes = sum(a != b for a, b in itertools.pairwise(settled))
        assert changes <= 2, (seed, changes)


def test_a_line_that_is_cut_and_recovers_is_used_as_before_at_once() -> None:
    before = needed(FROM_THE_START, line(1000), LEVELS, encoded_bytes)
    cut = needed(before, line(60), LEVELS, encoded_bytes)
    back = needed(cut, line(1000), LEVELS, encoded_bytes)
    assert cut.level > before.level == back.level


def commit_level(*lines: tuple[int, float], levels: int = 10) -> int:
    """The level of a commit whose members need these levels and have lines of these speeds."""
    wanted = {PeerId(str(number)): level for number, (level, _) in enumerate(lines)}
    speeds = {PeerId(str(number)): speed for number, (_, speed) in enumerate(lines)}
    return agreed(wanted, speeds, levels=levels)


def test_the_commit_takes_the_highest_level_of_lines_that_are_not_slow_beside_the_others() -> None:
    assert commit_level((0, 100.0), (1, 90.0), (2, 80.0), (9, 1.0)) == 2


def test_of_five_members_one_alone_does_not_make_all_exchange_less() -> None:
    assert commit_level((0, 100.0), (0, 100.0), (1, 100.0), (0, 100.0), (9, 100.0)) == 1
    assert commit_level((0, 100.0), (0, 100.0), (1, 100.0), (9, 100.0), (9, 100.0)) == 9


def test_a_level_that_the_run_lacks_counts_as_its_last() -> None:
    assert commit_level((60_000, 1.0), (0, 1.0), levels=3) == 2


PAYLOAD = 1_000_000
"""Bytes of a fragment, of which there are four."""
CYCLE_S = 10.0


def by_line(
    bytes_per_s: float,
    before: Every = IN_EVERY_ROUND,
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


def line_busy(busy: float) -> float:
    """A line that carries the payload of a cycle in this share of it."""
    return 4 * PAYLOAD / CYCLE_S / busy


def test_a_line_that_is_busy_for_less_than_its_share_takes_part_in_all_versions() -> None:
    assert by_line(line_busy(0.69)).versions == 1
    assert by_line(line_busy(0.71)).versions == 2
    assert by_line(line_busy(1.39)).versions == 2


def test_a_run_may_give_its_rounds_the_whole_line() -> None:
    assert by_line(line_busy(0.99), share_max=1.0).versions == 1
    assert by_line(line_busy(1.01), share_max=1.0).versions == 2


def test_a_line_of_unknown_speed_takes_part_in_all_versions() -> None:
    assert by_line(0.0, Every(versions=4, reason="")) == IN_EVERY_ROUND


def test_a_round_that_is_longer_than_a_cycle_costs_the_others_a_tenth_at_most() -> None:
    # Up and down of a fragment take 1.2 cycles: the others' round comes 0.2 later, in 1 of 4.
    assert by_line(line_busy(2.4)).versions == 4
    for busy in (0.5, 1.0, 2.0, 2.4, 2.5):
        longer = max(0.0, 2 * busy / 4 - 1)
        assert longer / by_line(line_busy(busy), versions_max=100).versions <= 0.1 + 1e-9


def test_it_is_bounded_by_the_age_at_which_work_is_stale() -> None:
    assert by_line(line_busy(50.0)).versions == 8
    assert "cannot follow" in by_line(line_busy(50.0)).reason
    assert "cannot follow" not in by_line(line_busy(0.9)).reason


@pytest.mark.parametrize("busy", [0.3, 0.6, 0.7, 0.95, 1.3, 1.45, 2.1])
def test_a_line_whose_measured_speed_varies_does_not_make_it_oscillate(busy: float) -> None:
    now, changes = by_line(line_busy(busy)), 0
    for turn in range(40):
        before = now
        now = by_line(line_busy(busy * (1.12 if turn % 2 else 0.92)), before)
        changes += now.versions != before.versions

    assert changes <= 1


def test_a_line_that_recovers_is_used_again_at_once() -> None:
    slow = by_line(line_busy(5.0))

    assert slow.versions == 8
    assert by_line(line_busy(0.1), slow).versions == 1
