"""The codec and the length of the cycle that follow from the lines of a round's members."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

from averaging.numbers.codecs import codec_named
from averaging.rules.line_levels import (
    CYCLE_RATIO,
    FROM_THE_START,
    LEVELS_MAX,
    Level,
    Line,
    agreed,
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
