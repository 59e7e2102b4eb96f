"""Codecs and cycles that a line carries, for experiments with fixed ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

from averaging.numbers.codecs import codec_named
from averaging.rules.line_levels import Level, Line

__all__ = ["BYTES_S_PER_MBIT", "Level", "shortest_cycles"]

BYTES_S_PER_MBIT = 125e3


def shortest_cycles(
    first: Level,
    codecs: Sequence[tuple[str, str]],
    *,
    parameters: float,
    members: int,
    step_s: float,
    link_mbit: float,
    share_max: float,
) -> list[Level]:
    """The shortest cycle that a line carries with each pair of codecs, up and down.

    ``first`` comes first, whether the line carries it or not; no cycle is shorter than its.
    ``share_max``: share of the line that a cycle takes at most.
    """
    line = Line(
        bytes_per_s=link_mbit * BYTES_S_PER_MBIT,
        step_s=step_s,
        fragments=1,
        members=members,
        share_max=share_max,
    )

    def encoded_bytes(codec: str) -> int:
        return codec_named(codec).encoded_size([int(parameters)])

    levels = [first]
    for up, down in codecs:
        shortest = Level(codec=up, codec_down=down, cycle_steps=first.cycle_steps)
        share = line.share_of(encoded_bytes, shortest)
        steps = math.ceil(first.cycle_steps * max(1.0, share / share_max))
        levels.append(Level(codec=up, codec_down=down, cycle_steps=steps))
    return list(dict.fromkeys(levels))
