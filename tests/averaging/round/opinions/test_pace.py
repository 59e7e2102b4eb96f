"""What a peer asks for because of its line, and how long it stays with it."""

from __future__ import annotations

from dataclasses import replace

from averaging.round.interface.identity import Circumstances
from averaging.round.opinions.neighbourhood import Neighbourhood
from averaging.round.opinions.pace import CYCLES_HELD, Pace
from averaging.rules.due import DuePolicy
from averaging.rules.line_levels import Level, ladder
from tests.averaging.round.machines import ME, POLICY, identity

FIRST = Level(codec="int8", codec_down="int8", cycle_steps=10)
HERE = replace(
    POLICY,
    codec="int8",
    due=DuePolicy(cycle_steps=10, fragments=1),
    smaller_levels=tuple(ladder(FIRST, [("int4", "int4"), ("int2", "int2")], cycle_max=10)[1:]),
)
SIZES = {"int8": 1_000_000, "int4": 500_000, "int2": 250_000}


def test_a_level_rises_at_once_and_falls_after_some_cycles() -> None:
    """Beside one slow line the level of each peer changed 21 times in three minutes."""
    me = identity(ME, HERE)
    peers = Neighbourhood(me, Circumstances(), {}, now=0.0)
    pace = Pace(me, peers, step=0, version=1)
    pace.step_time_s = 1.0
    changes: list[tuple[int, int]] = []
    small, large = 10_000.0, 1_000_000.0
    for cycle in range(6 * CYCLES_HELD):
        for bytes_per_s in (small, large):  # each transfer says another speed
            peers.bytes_per_s = bytes_per_s
            need = pace.need_of_line(SIZES.__getitem__, 10.0 * cycle)
            if need is not None:
                changes.append((cycle, need.level))
        pace.start_cycle(10.0 * cycle)

    assert changes[0] == (0, 2), "what the line needs is asked for at once"
    falls = [cycle for cycle, level in changes if level == 0]
    assert falls == list(range(CYCLES_HELD, 6 * CYCLES_HELD, CYCLES_HELD + 1))
