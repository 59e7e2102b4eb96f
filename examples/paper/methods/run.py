"""Ideas for a better loss, one cell each: `python -m examples.paper.methods.run --help`.

``CELLS`` is the list: what is expected, and what differs from the control in a few lines. README.md
says what was found and decided. A cell and its control are trained with the same seeds, by
``members``: the merges, codecs, weights and outer steps of live peers, without their messages. A
new idea is a new cell. Its prediction is committed before it is trained, and it stays in the list
if it is no good.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import typer
from typer import Option

from examples.paper.methods.members import (
    CHECKPOINTS,
    Contribution,
    Late,
    Nesterov,
    Outcome,
    Trial,
    Weights,
    mean_of_its_cycles,
    train,
)
from examples.paper.paired import shown
from examples.paper.program import (
    FirstSeed,
    OutKept,
    PairedSeeds,
    run_program,
    seeds_from,
    show_rows,
)
from peer.cli.application import Json, progress, usage_errors
from peer.simulate import Float32s
from peer.simulate.problems.text_gpt import TextGpt
from peer.simulate.results import Mean, Section, as_png, new_figure, picture
from peer.simulate.settings import ProblemChoice


@dataclass(frozen=True, slots=True)
class Cell:
    """One row of the table."""

    idea: str
    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Of ``Trial``, against its defaults."""
    control: str = ""
    """Name of the cell of the same idea that it is compared with; empty: it is a control."""
    prediction: str = ""
    """Expected difference of the loss; written before the cell was trained."""
    figure: Callable[[Outcome], float] = lambda outcome: outcome.loss
    of: str = ""
    """Name of the cell whose trainings have the figure; empty: its own."""
    size: Mapping[str, Any] = field(default_factory=dict)
    """Of the problem, against the options of the program."""
    seeds_max: int = 3

    @property
    def full_name(self) -> str:
        return f"{self.idea}/{self.name}"

    @property
    def trained(self) -> str:
        return f"{self.idea}/{self.of or self.name}"


# Small steps: what each member adds

MEMBERS = (2, 4, 8)
RATES = (6e-3, 1.2e-2, 2.4e-2)
RATE = {"alone": 1.2e-2, "data parallel": 1.2e-2, "every 30": 1.2e-2, "every 8": 2.4e-2}
"""The best peak learning rates of those, with eight members."""
KINDS: Mapping[str, Mapping[str, Any]] = {
    "data parallel": {"central": True},
    "every 30": {"cycle": 30},
    "every 8": {"cycle": 8},
}
"""Data parallel, and swarms that merge every so many steps."""
ALONE: Mapping[str, Any] = {"members": 1, "central": True, "rate": RATE["alone"]}


def rates() -> list[Cell]:
    kinds = {"alone": ALONE, **KINDS}
    return [
        Cell("rates", f"{kind}, {rate:g}", {**changes, "rate": rate}, seeds_max=1)
        for kind, changes in kinds.items()
        for rate in RATES
    ]


Expected = Mapping[str, Mapping[int, float]]
EXPECTED: Expected = {
    "every 30": {2: 4, 4: 14, 8: 25, 16: 35},
    "every 8": {2: 2, 4: 8, 8: 15, 16: 22},
}
"""Percent from data parallel, by number of members."""


def law(
    idea: str,
    members: Sequence[int] = (8,),
    *,
    expected: Expected = EXPECTED,
    slower: float = 1.0,
    steps: int = 360,
    size: Mapping[str, Any] | None = None,
) -> list[Cell]:
    """Losses by number of members, against data parallel, and those of one member alone, for as
    long as it needs. ``slower``: factor on all learning rates."""
    longer = {"alone": 1, "alone, 2 times": 2, "alone, 4 times": 4}
    trials: dict[str, Mapping[str, Any]] = {
        name: {**ALONE, "steps": times * steps} for name, times in longer.items()
    }
    predictions: dict[str, tuple[str, str]] = {}
    for count in members:
        for kind, changes in KINDS.items():
            name = f"{kind}, M = {count}"
            trials[name] = {**changes, "members": count, "rate": RATE[kind], "steps": steps}
            if kind != "data parallel":
                predictions[name] = (
                    f"data parallel, M = {count}",
                    f"{expected[kind][count]:+g}%",
                )
    cells: list[Cell] = []
    for name, trial in trials.items():
        changes = {**trial, "rate": slower * trial["rate"]}
        control, prediction = predictions.get(name, ("", ""))
        cells.append(Cell(idea, name, changes, control, prediction, size=size or {}))
    return cells


TOKENS_1024: Mapping[str, Any] = {"batch": 32}
EXPECTED_OF_1024: Expected = {"every 30": {8: 25}, "every 8": {8: 8}}


def sizes() -> list[Cell]:
    """1024 tokens a step, models of 70 000 to 3.2 million parameters."""
    deeper = {"layers": 4, "length": 256, "batch": 4, "precision": "bf16"}
    small, larger, large = TOKENS_1024, {**deeper, "width": 128}, {**deeper, "width": 256}
    cells: list[Cell] = []
    for name, size, slower, every_30, every_8 in (
        ("70 000", small, 1.0, 14, 8),
        ("0.8 M", larger, 1.0, 18, 12),
        ("0.8 M, half the rates", larger, 0.5, 18, 11),
        ("3.2 M", large, 0.5, 22, 14),
    ):
        expected = {"every 30": {8: every_30}, "every 8": {8: every_8}}
        idea = f"size, {name}"
        cells += law(idea, expected=expected, slower=slower, steps=240, size=size)
    expected = {"every 30": {8: 30}, "every 8": {8: 22}}
    cells += law("longer, 3.2 M", expected=expected, slower=0.5, steps=720, size=large)
    of_large = (*other_rates(large), *shared_momentum(large), *orthogonal(large))
    return [
        *cells,
        *of_large,
        *failing(larger),
        *parts(),
        *no_outer_momentum(large),
        *higher_rates(),
        *few_without_momentum(),
        *large_steps(),
        *cycles_of_a_new_run(),
        *momentum_of_a_new_run(),
        *momentum_of_a_new_model(),
        *adamw(),
        *middle(larger),
        *failing_every_2(large),
        *bytes_for_a_loss(),
        *few_short_cycles(),
        *thirty_two(),
        *headline(),
    ]


def other_rates(size: Mapping[str, Any]) -> list[Cell]:
    """Both sides at other rates than half of those of 70 000 parameters, and longer outer steps."""
    idea, parallel, every_8 = "size, 3.2 M", "data parallel, M = 8", "every 8, M = 8"
    changes = {
        parallel: {"steps": 240, **KINDS["data parallel"]},
        every_8: {"steps": 240, **KINDS["every 8"]},
    }
    return [
        *(
            Cell(
                idea, f"{kind}, {rate:g}", {**changes[kind], "rate": rate}, kind, change, size=size
            )
            for kind, rate, change in (
                (parallel, 3e-3, "+6%"),
                (parallel, 1.2e-2, "+2%"),
                (every_8, 6e-3, "+6%"),
                (every_8, 2.4e-2, "-2%"),
            )
        ),
        Cell(
            idea,
            f"{every_8}, mu 0.7",
            {**changes[every_8], "rate": 1.2e-2, "outer": more_momentum},
            every_8,
            "-3%",
            size=size,
        ),
    ]


def shared_momentum(large: Mapping[str, Any]) -> list[Cell]:
    """Momenta remember twenty steps: shared, they hold the noise of one large batch, not of eight
    small ones. Also merges of as many bytes without it, and more of them."""
    cells = []
    for idea, size, steps, rate, expected in (
        ("shared momentum, 70 000", TOKENS_1024, 360, RATE["every 8"], (-4, -2, -2, -3)),
        ("shared momentum, 3.2 M", large, 240, 6e-3, (-10, -4, -5, -7)),
    ):
        control = "every 8"
        changes = {"steps": steps, "rate": rate}
        cells.append(Cell(idea, control, {**changes, "cycle": 8}, size=size))
        for name, cycle, shares, percent in (
            ("every 8, shared", 8, True, expected[0]),
            ("every 16, shared", 16, True, expected[1]),
            ("every 16, shared, half the rate", 16, True, expected[2]),
            ("every 4", 4, False, expected[3]),
        ):
            halved = rate / 2 if "half" in name else rate
            settings = {**changes, "rate": halved, "cycle": cycle, "shares_momentum": shares}
            cells.append(Cell(idea, name, settings, control, f"{percent:+g}%", size=size))
    return cells


def orthogonal(large: Mapping[str, Any]) -> list[Cell]:
    """The mean of orthogonal updates is not orthogonal: directions in which a small batch has more
    noise than gradient are short in it, where data parallel takes full steps."""
    cells = []
    for idea, size, steps, rate, expected in (
        ("orthogonal merges, 70 000", TOKENS_1024, 360, RATE["every 8"], (-3, -5, -5)),
        ("orthogonal merges, 3.2 M", large, 240, 6e-3, (-5, -8, -8)),
    ):
        control, every_8 = "every 8", {"steps": steps, "rate": rate, "cycle": 8}
        cells.append(Cell(idea, control, every_8, size=size))
        for name, changes, percent in (
            ("half", {"orthogonal": 0.5}, expected[0]),
            ("whole", {"orthogonal": 1.0}, expected[1]),
            ("whole, half the rate", {"orthogonal": 1.0, "rate": rate / 2}, expected[2]),
        ):
            settings = {**every_8, **changes}
            cells.append(Cell(idea, name, settings, control, f"{percent:+g}%", size=size))
    return cells


def parts() -> list[Cell]:
    """What the distance from data parallel is made of: nearer to it by one thing at a time."""
    idea, control = "parts of the distance", "every 8"
    base: dict[str, Any] = {"cycle": 8, "rate": RATE["every 8"]}
    at_once = {"overlap": 0, "outer": no_momentum, "rate": RATE["data parallel"]}
    cells = [Cell(idea, control, base, size=TOKENS_1024)]
    for name, changes, percent in (
        ("adopted at once", {"overlap": 0}, -2),
        ("f32", {"codec": "f32"}, 0),
        ("one fragment", {"fragments": 1}, 0),
        ("mu 0", {"outer": no_momentum}, 2),
        ("at once, mu 0, shared momentum, half the rate", {**at_once, "shares_momentum": True}, -2),
        ("every step, at once, mu 0, half the rate", {**at_once, "cycle": 1}, -4),
        (
            "the same, shared momentum",
            {**at_once, "cycle": 1, "fragments": 1, "shares_momentum": True},
            -7,
        ),
        ("data parallel", {"central": True, "rate": RATE["data parallel"]}, -8),
    ):
        prediction = f"{percent:+g}%"
        cells.append(Cell(idea, name, {**base, **changes}, control, prediction, size=TOKENS_1024))
    return cells


def no_outer_momentum(large: Mapping[str, Any]) -> list[Cell]:
    """Merges every 8 steps are so many that the outer momentum is not needed to get far."""
    idea, control, rate = "mu 0, 70 000", "every 8, mu 0.5", RATE["every 8"]
    every_8: dict[str, Any] = {"cycle": 8, "rate": rate}
    cells = [Cell(idea, control, every_8, size=TOKENS_1024)]
    without = {**every_8, "outer": no_momentum}
    for name, changes, percent in (
        ("every 8, mu 0.25", {"outer": less_momentum}, -2),
        ("every 8, mu 0, twice the rate", {"rate": 2 * rate}, -3),
        ("every 8, mu 0, half the rate", {"rate": rate / 2}, 0),
        ("every 8, mu 0, orthogonal", {"orthogonal": 1.0}, -4),
        ("every 4, mu 0", {"cycle": 4}, -3.5),
        ("every 16, mu 0", {"cycle": 16}, -1),
        ("every 30, mu 0", {"cycle": 30}, 4),
        ("every 30, mu 0.5", {"cycle": 30, "outer": usual}, 3),
    ):
        settings = {**without, **changes}
        cells.append(Cell(idea, name, settings, control, f"{percent:+g}%", size=TOKENS_1024))
    idea, rate = "mu 0, 3.2 M", 6e-3
    every_8 = {"steps": 240, "cycle": 8, "rate": rate}
    cells.append(Cell(idea, control, every_8, size=large))
    for name, changes, percent in (
        ("every 8, mu 0", {}, -4),
        ("every 8, mu 0, twice the rate", {"rate": 2 * rate}, -2),
        ("every 8, mu 0, orthogonal", {"orthogonal": 1.0}, -8),
        ("every 4, mu 0", {"cycle": 4}, -8),
        ("every 8, mu 0, four times the rate", {"rate": 4 * rate}, 0),
        ("every 4, mu 0, twice the rate", {"cycle": 4, "rate": 2 * rate}, -11),
        ("every 2, mu 0, twice the rate", {"cycle": 2, "overlap": 1, "rate": 2 * rate}, -14),
    ):
        settings = {**every_8, "outer": no_momentum, **changes}
        cells.append(Cell(idea, name, settings, control, f"{percent:+g}%", size=large))
    return cells


def higher_rates() -> list[Cell]:
    """How far short cycles without outer momentum go, by their number, members and tokens."""
    cells = []
    rate = 4.8e-2
    without: dict[str, Any] = {"cycle": 8, "rate": rate, "outer": no_momentum}
    idea, control = "higher rates, 1024 tokens", "every 8, mu 0"
    cells.append(Cell(idea, control, without, size=TOKENS_1024))
    for name, changes, percent in (
        ("twice the rate", {"rate": 2 * rate}, 1),
        ("orthogonal", {"orthogonal": 1.0}, -1),
        ("every 4", {"cycle": 4}, -0.5),
        ("30% fail", {"misses": 0.3}, 1.5),
        ("mu 0.5, half the rate, 30% fail", {"misses": 0.3, "outer": usual, "rate": rate / 2}, 6),
        ("M = 16", {"members": 16}, -3),
        ("M = 4, half the rate", {"members": 4, "rate": rate / 2}, 6),
        ("M = 2, a quarter of the rate", {"members": 2, "rate": rate / 4}, 11),
    ):
        settings = {**without, **changes}
        cells.append(Cell(idea, name, settings, control, f"{percent:+g}%", size=TOKENS_1024))
    idea, control = "higher rates, 256 tokens", "every 8, mu 0.5"
    cells.append(Cell(idea, control, {"cycle": 8, "rate": rate / 2}))
    for name, changes, percent in (
        ("every 8, mu 0", {"rate": rate / 2}, -2),
        ("every 8, mu 0, twice the rate", {}, -3),
        ("every 4, mu 0, twice the rate", {"cycle": 4}, -4),
        ("every 2, mu 0, twice the rate", {"cycle": 2, "overlap": 1}, -8),
        ("every 4, mu 0, four times the rate", {"cycle": 4, "rate": 2 * rate}, -4),
    ):
        cells.append(Cell(idea, name, {**without, **changes}, control, f"{percent:+g}%"))
    return cells


def few_without_momentum() -> list[Cell]:
    """Whether two and four members are better without outer momentum, too."""
    cells = []
    for number, count, tokens, size, expected in (
        ("two", 2, 1024, TOKENS_1024, (-1, -1)),
        ("four", 4, 1024, TOKENS_1024, (-2, -3)),
        ("two", 2, 256, {}, (-1, 0)),
        ("four", 4, 256, {}, (-1, -1)),
    ):
        idea, control = f"{number} every 8, {tokens} tokens", "mu 0.5"
        every_8: dict[str, Any] = {"cycle": 8, "members": count, "rate": RATE["every 30"]}
        outer = damped if count == 2 else usual
        cells.append(Cell(idea, control, {**every_8, "outer": outer}, size=size))
        for name, factor, percent in (
            ("mu 0", 1, expected[0]),
            ("mu 0, twice the rate", 2, expected[1]),
        ):
            changes = {**every_8, "outer": no_momentum, "rate": factor * RATE["every 30"]}
            cells.append(Cell(idea, name, changes, control, f"{percent:+g}%", size=size))
        if count > 2:
            changes = {**every_8, "outer": outer, "rate": 2 * RATE["every 30"]}
            cells.append(Cell(idea, "mu 0.5, twice the rate", changes, control, "-2%", size=size))
    return cells


def large_steps() -> list[Cell]:
    """Whether steps of 4096 tokens, as in a new run, gain by short cycles, too."""
    idea, control, rate = "short cycles, 4096 tokens", "every 24, mu 0.5", RATE["every 30"]
    size = {"batch": 128}
    base: dict[str, Any] = {"steps": 240, "cycle": 24, "rate": rate}
    cells = [Cell(idea, control, base, size=size)]
    for name, changes, percent in (
        ("data parallel", {"central": True}, -3),
        ("every 24, mu 0.5, twice the rate", {"rate": 2 * rate}, 0),
        ("every 8, mu 0, twice the rate", {"cycle": 8, "outer": no_momentum, "rate": 2 * rate}, -2),
        ("every 8, mu 0.5", {"cycle": 8}, -1),
    ):
        cells.append(Cell(idea, name, {**base, **changes}, control, f"{percent:+g}%", size=size))
    return cells


def cycles_of_a_new_run() -> list[Cell]:
    """The cycle of a new run, whose steps have 4096 tokens, with its fragments and overlap."""
    cells = []
    for number, count, outer, expected in (
        ("two", 2, damped, (-0.5, -2, -3)),
        ("eight", 8, usual, (3, -1, -4)),
    ):
        idea, control = f"a new run, {number}", "every 24, mu 0.5"
        base: dict[str, Any] = {"members": count, "steps": 240, "fragments": 8}
        base |= {"rate": RATE["every 30"], "cycle": 24, "overlap": 6}
        cells.append(Cell(idea, control, {**base, "outer": outer}, size={"batch": 128}))
        for cycle, percent in zip((24, 12, 8), expected, strict=True):
            changes = {**base, "cycle": cycle, "overlap": cycle // 4, "outer": no_momentum}
            name, prediction = f"every {cycle}, mu 0", f"{percent:+g}%"
            cells.append(Cell(idea, name, changes, control, prediction, size={"batch": 128}))
    return cells


def momentum_of_a_new_run() -> list[Cell]:
    """The same at the rate that a new run has, 1.5 divided by the width, and at twice that: whether
    new runs are better without outer momentum, with however many members."""
    cells = []
    size, rate = {"batch": 128}, RATE["every 8"]
    for number, count, outer, expected in (
        ("two", 2, damped, (0, 0, 2, -1, -2)),
        ("three", 3, usual, (0, -1, 1, -2, -3)),
        ("eight", 8, usual, (0, -1, -2, -2, -4)),
    ):
        idea, control = f"rate of a new run, {number}", "every 24, mu 0.5"
        base: dict[str, Any] = {"members": count, "steps": 240, "fragments": 8}
        every_24 = {**base, "cycle": 24, "overlap": 6, "rate": rate}
        without = {**every_24, "outer": no_momentum}
        cells.append(Cell(idea, control, {**every_24, "outer": outer}, size=size))
        changed: Mapping[str, Mapping[str, Any]] = {
            "every 24, mu 0.5, twice the rate": {"outer": outer, "rate": 2 * rate},
            "every 24, mu 0": {},
            "every 24, mu 0, twice the rate": {"rate": 2 * rate},
            "every 12, mu 0": {"cycle": 12, "overlap": 3},
            "every 8, mu 0": {"cycle": 8, "overlap": 2},
        }
        for (name, changes), percent in zip(changed.items(), expected, strict=True):
            cells.append(
                Cell(idea, name, {**without, **changes}, control, f"{percent:+g}%", size=size)
            )
    return cells


def momentum_of_a_new_model() -> list[Cell]:
    """The same with the model of a new run, of 0.8 million parameters."""
    cells = []
    for number, count, outer, expected in (
        ("two", 2, damped, (0, 2, -1, -8)),
        ("eight", 8, usual, (-1, -2, -4, -8)),
    ):
        idea, control = f"model of a new run, {number}", "every 24, mu 0.5"
        base: dict[str, Any] = {"members": count, "steps": 240, "fragments": 8}
        every_24 = {**base, "cycle": 24, "overlap": 6, "rate": 1.2e-2}
        without = {**every_24, "outer": no_momentum}
        cells.append(Cell(idea, control, {**every_24, "outer": outer}, size=NEW_RUN))
        changed: Mapping[str, Mapping[str, Any]] = {
            "every 24, mu 0": without,
            "every 24, mu 0, twice the rate": {**without, "rate": 2.4e-2},
            "every 8, mu 0": {**without, "cycle": 8, "overlap": 2},
            "data parallel": {**base, "central": True, "rate": 1.2e-2},
        }
        for (name, changes), percent in zip(changed.items(), expected, strict=True):
            cells.append(Cell(idea, name, changes, control, f"{percent:+g}%", size=NEW_RUN))
    return cells


def adamw() -> list[Cell]:
    """The momentum of a new run where members train with AdamW, at the best rate of one alone and
    at twice that."""
    cells = []
    size: Mapping[str, Any] = {"batch": 128, "optimizer": "adamw"}
    idea, control = "AdamW, one alone", "0.012"
    alone = {"members": 1, "central": True, "steps": 240}
    cells.append(Cell(idea, control, {**alone, "rate": 1.2e-2}, size=size))
    for rate, percent in ((3e-3, 8), (6e-3, 2), (2.4e-2, 5)):
        trial = {**alone, "rate": rate}
        cells.append(Cell(idea, f"{rate:g}", trial, control, f"{percent:+g}%", size=size))
    for number, count, expected in (
        ("two", 2, (1, 2, -1, -11, -12)),
        ("eight", 8, (3, 0, -2, -14, -17)),
    ):
        idea, control = f"AdamW, {number}", "every 24, mu 0.5"
        base: dict[str, Any] = {"members": count, "steps": 240, "fragments": 8, "rate": 1.2e-2}
        every_24 = {**base, "cycle": 24, "overlap": 6}
        without = {**every_24, "outer": no_momentum}
        cells.append(Cell(idea, control, every_24, size=size))
        for name, changes, percent in (
            ("every 24, mu 0", without, expected[0]),
            ("every 24, mu 0, twice the rate", {**without, "rate": 2.4e-2}, expected[1]),
            ("every 12, mu 0", {**without, "cycle": 12, "overlap": 3}, expected[2]),
            ("every 8, mu 0", {**without, "cycle": 8, "overlap": 2}, expected[3]),
            ("every 4, mu 0", {**without, "cycle": 4, "overlap": 1}, expected[4]),
        ):
            cells.append(Cell(idea, name, changes, control, f"{percent:+g}%", size=size))
        parallel = {**base, "central": True}
        cells.append(Cell(idea, "data parallel", parallel, control, "-12%", size=size))
    return cells


def middle(size: Mapping[str, Any]) -> list[Cell]:
    """0.8 million parameters in short cycles without outer momentum."""
    idea, control, rate = "mu 0, 0.8 M", "data parallel", RATE["every 8"]
    parallel: dict[str, Any] = {"steps": 240, "central": True, "rate": rate / 4}
    every_8: dict[str, Any] = {"steps": 240, "cycle": 8, "rate": rate, "outer": no_momentum}
    every_2 = {**every_8, "cycle": 2, "overlap": 1}
    cells = [Cell(idea, control, parallel, size=size)]
    for name, changes, percent in (
        ("data parallel, twice the rate", {**parallel, "rate": rate / 2}, 2),
        ("one alone", {**parallel, "members": 1}, 40),
        ("every 8", every_8, 14),
        ("every 8, half the rate", {**every_8, "rate": rate / 2}, 16),
        ("every 4", {**every_8, "cycle": 4}, 9),
        ("every 2", every_2, 5),
        ("every 8, 30% fail", {**every_8, "misses": 0.3}, 16),
        ("every 2, 30% fail", {**every_2, "misses": 0.3}, 6.5),
    ):
        cells.append(Cell(idea, name, changes, control, f"{percent:+g}%", size=size))
    return cells


def failing_every_2(large: Mapping[str, Any]) -> list[Cell]:
    """The largest model of these cells, in its best cycles."""
    idea, control = "every 2, 3.2 M", "int4"
    every_2 = {"steps": 240, "cycle": 2, "overlap": 1, "rate": 1.2e-2, "outer": no_momentum}
    return [
        Cell(idea, control, every_2, size=large),
        Cell(idea, "30% fail", {**every_2, "misses": 0.3}, control, "+2%", size=large),
        Cell(idea, "int2", {**every_2, "codec": "int2"}, control, "+2%", size=large),
    ]


def bytes_for_a_loss() -> list[Cell]:
    """Smaller codes in shorter cycles cost as many bytes as larger ones in longer cycles."""
    idea, control = "bytes, 1024 tokens", "every 8, int4"
    without: dict[str, Any] = {"outer": no_momentum, "overlap": 2}
    every_8 = {**without, "cycle": 8, "rate": 4.8e-2}
    cells = [Cell(idea, control, every_8, size=TOKENS_1024)]
    for cycle, codec, rate, percent in (
        (2, "int4", 4.8e-2, -3),
        (2, "int2", 4.8e-2, -2),
        (4, "int4", 4.8e-2, -1.9),
        (4, "int2", 4.8e-2, -1),
        (8, "int2", 4.8e-2, 1),
        (16, "int4", 2.4e-2, 3),
        (16, "int2", 2.4e-2, 4),
        (30, "int4", 2.4e-2, 6),
        (30, "int2", 2.4e-2, 7),
    ):
        changes = {**without, "cycle": cycle, "codec": codec, "rate": rate}
        if cycle == 2:
            changes["overlap"] = 1
        name, prediction = f"every {cycle}, {codec}", f"{percent:+g}%"
        cells.append(Cell(idea, name, changes, control, prediction, size=TOKENS_1024))
    return cells


def few_short_cycles() -> list[Cell]:
    """Runs of 10 and 20 short cycles."""
    cells = []
    control = "data parallel"
    for tokens, cycles, expected in (
        (256, 10, (8, 11, 4)),
        (256, 20, (7, 10, 3)),
        (1024, 10, (5, 7, 2)),
        (1024, 20, (4, 6, 1)),
        (4096, 20, (3, 5, 1)),
    ):
        idea = f"{cycles} cycles of 8, {tokens} tokens"
        short = {"steps": 8 * cycles}
        parallel = {**short, "central": True, "rate": RATE["data parallel"]}
        every_8 = {**short, "cycle": 8, "rate": RATE["every 8"]}
        without = {**every_8, "outer": no_momentum, "rate": 2 * RATE["every 8"]}
        size = {"batch": tokens // 32}
        cells.append(Cell(idea, control, parallel, size=size))
        for name, changes, percent in (
            ("data parallel, twice the rate", {**parallel, "rate": 2.4e-2}, 0),
            ("every 8, mu 0", without, expected[0]),
            ("every 8, mu 0.5", every_8, expected[1]),
            ("every 4, mu 0", {**without, "cycle": 4}, expected[2]),
            ("one alone", {**parallel, "members": 1, "rate": 2.4e-2}, 12),
        ):
            cells.append(Cell(idea, name, changes, control, f"{percent:+g}%", size=size))
    return cells


def thirty_two() -> list[Cell]:
    idea, control = "thirty-two, 1024 tokens", "data parallel"
    parallel: dict[str, Any] = {"members": 32, "central": True, "rate": RATE["data parallel"]}
    every_8 = {"members": 32, "cycle": 8, "rate": 2 * RATE["every 8"], "outer": no_momentum}
    cells = [Cell(idea, control, parallel, size=TOKENS_1024)]
    for name, changes, percent in (
        ("data parallel, twice the rate", {**parallel, "rate": 2.4e-2}, 0),
        ("every 8", every_8, 9),
        ("every 4", {**every_8, "cycle": 4}, 6),
        ("every 8, 30% fail", {**every_8, "misses": 0.3}, 11),
    ):
        cells.append(Cell(idea, name, changes, control, f"{percent:+g}%", size=TOKENS_1024))
    return cells


def headline() -> list[Cell]:
    """One, eight and sixteen in cycles of 8 without outer momentum, against data parallel."""
    cells = []
    for tokens, steps, expected in (
        (1024, 360, (22, 6, 6, 8, -2, 0, 24)),
        (4096, 240, (8, 3, 3, 5, -5, -4, 10)),
    ):
        size, control = {"batch": tokens // 32}, "data parallel, 8"
        idea, rate = f"headline, {tokens} tokens", 4.8e-2 if tokens == 1024 else 2.4e-2
        every_8 = {"steps": steps, "cycle": 8, "rate": rate, "outer": no_momentum}
        parallel = {"steps": steps, "central": True, "rate": RATE["data parallel"]}
        cells.append(Cell(idea, control, parallel, size=size))
        cells.append(Cell(idea, "data parallel, 16", {**parallel, "members": 16}, size=size))
        twice, four_times = ({**parallel, "rate": times * parallel["rate"]} for times in (2, 4))
        for name, changes, against, percent in (
            ("data parallel, 8, twice the rate", twice, control, expected[4]),
            ("data parallel, 8, four times the rate", four_times, control, expected[5]),
            ("one alone", {**parallel, "members": 1}, control, expected[0]),
            ("one alone, twice the rate", {**twice, "members": 1}, control, expected[6]),
            ("eight, 30% fail", {**every_8, "misses": 0.3}, control, expected[1]),
            ("sixteen", {**every_8, "members": 16}, "data parallel, 16", expected[2]),
            (
                "sixteen, 30% fail",
                {**every_8, "members": 16, "misses": 0.3},
                "data parallel, 16",
                expected[3],
            ),
        ):
            cells.append(Cell(idea, name, changes, against, f"{percent:+g}%", size=size))
    return cells


def failing(size: Mapping[str, Any]) -> list[Cell]:
    idea, control = "size, 0.8 M, half the rates", "every 8, M = 8"
    changes = {"steps": 240, "rate": RATE["every 8"] / 2, "misses": 0.3, **KINDS["every 8"]}
    return [Cell(idea, f"{control}, 30% fail", changes, control, "+2%", size=size)]


# The learning rate of a new run

NEW_RUN: Mapping[str, Any] = {"layers": 4, "width": 128, "length": 128, "batch": 32}
"""Model and steps of ``shoal run new`` without a size: 0.8 million parameters, 4096 tokens."""


def new_run() -> list[Cell]:
    """The best rate times the width was 1.5 with widths of 64 and of 384, and is so in the runs of
    named sizes. With a width of 128 that is 0.012."""
    idea, control = "a new run", "one alone, 0.002"
    cells = []
    for rate, expected in ((2e-3, ""), (6e-3, "-12%"), (1.2e-2, "-16%"), (2.4e-2, "-13%")):
        name = f"one alone, {rate:g}"
        changes = {**ALONE, "steps": 240, "rate": rate}
        against = control if expected else ""
        cells.append(Cell(idea, name, changes, against, expected, size=NEW_RUN))
    pair = {"members": 2, "cycle": 24, "steps": 240, "outer": damped}
    control = "two, 0.002"
    cells.append(Cell(idea, control, {**pair, "rate": 2e-3}, size=NEW_RUN))
    for rate, expected in ((6e-3, "-10%"), (1.2e-2, "-13%")):
        changes = {**pair, "rate": rate}
        cells.append(Cell(idea, f"two, {rate:g}", changes, control, expected, size=NEW_RUN))
    return cells


# Short runs and founders

SHORT: Mapping[str, Any] = {"steps": 240, "cycle": 24, "rate": RATE["every 30"]}
RESTART = Nesterov(1.0, 1e-30)
"""With a momentum of 0 the memory would stay as it is."""


def warm_mu(part: float, version: int) -> Nesterov:
    return Nesterov(1.0, max(1e-30, 0.5 * min(1.0, version / 5)))


def warm_eta(part: float, version: int) -> Nesterov:
    return Nesterov(min(1.0, 0.5 + version / 10), 0.5)


def restarted(part: float, version: int) -> Nesterov:
    return RESTART if version % 4 == 0 else Nesterov(1.0, 0.5)


def more_momentum(part: float, version: int) -> Nesterov:
    return Nesterov(1.0, 0.7)


def falling_momentum(part: float, version: int) -> Nesterov:
    """0.7 first, 0.3 in the end, where steps are short and momentum overshoots."""
    return Nesterov(1.0, 0.7 - 0.4 * part)


def damped(part: float, version: int) -> Nesterov:
    return Nesterov(0.7, 0.5)


OUTERS: Mapping[str, tuple[Callable[[float, int], Nesterov], str]] = {
    "mu warms up": (warm_mu, "-0.5%"),
    "eta warms up": (warm_eta, "+1%"),
    "momentum restarts every 4 versions": (restarted, "+1%"),
    "mu 0.7": (more_momentum, "-1%"),
    "mu falls from 0.7 to 0.3": (falling_momentum, "-1.5%"),
    "eta 0.7, mu 0.5": (damped, "+2%"),
}


def short() -> list[Cell]:
    idea, twice = "10 cycles", "20 cycles"
    alone = {**SHORT, **ALONE}
    parallel = {**SHORT, "central": True, "rate": RATE["data parallel"]}
    return [
        Cell(twice, "data parallel", {**parallel, "steps": 480}, seeds_max=1),
        Cell(twice, "eight", {**SHORT, "steps": 480}, "data parallel", "+12%", seeds_max=1),
        Cell(idea, "eight", SHORT),
        Cell(idea, "data parallel", parallel, "eight", "-22%"),
        Cell(idea, "one alone", alone, "eight", "+12%"),
        *(
            Cell(idea, name, {**SHORT, "outer": outer}, "eight", prediction)
            for name, (outer, prediction) in OUTERS.items()
        ),
    ]


def founder() -> list[Cell]:
    idea = "a founder alone, 10 cycles"
    stepped = {**SHORT, "members": 1, "rate": RATE["alone"], "codec": "f32"}
    return [
        Cell(idea, "folds its work", {**SHORT, **ALONE}),
        Cell(idea, "outer steps, eta 1, mu 0.5", stepped, "folds its work", "+3%"),
        Cell(
            idea,
            "outer steps, eta 0.7, mu 0.5",
            {**stepped, "outer": damped},
            "folds its work",
            "-1%",
        ),
    ]


def usual(part: float, version: int) -> Nesterov:
    return Nesterov(1.0, 0.5)


def no_momentum(part: float, version: int) -> Nesterov:
    return Nesterov(1.0, 0.0)


def shorter(part: float, version: int) -> Nesterov:
    return Nesterov(0.85, 0.5)


def less_momentum(part: float, version: int) -> Nesterov:
    return Nesterov(1.0, 0.25)


USUAL = "eta 1, mu 0.5"
DAMPED: Mapping[str, Any] = {"outer": damped}


def few() -> list[Cell]:
    """A lone founder loses by outer momentum, which lengthens its steps: do few members as well?"""
    cells = []
    for count, number, expected in ((2, "two", "-1.5%"), (3, "three", "-1%"), (4, "four", "0%")):
        idea = f"{number} members, 10 cycles"
        settings = {**SHORT, "members": count}
        cells += [
            Cell(idea, USUAL, settings),
            Cell(idea, "eta 0.7, mu 0.5", {**settings, **DAMPED}, USUAL, expected),
        ]
    idea, pair = "two members, 10 cycles", {**SHORT, "members": 2}
    half = {**pair, "rate": RATE["every 30"] / 2}
    return [
        *cells,
        Cell(idea, "eta 0.85, mu 0.5", {**pair, "outer": shorter}, USUAL, "-1.3%"),
        Cell(idea, "eta 1, mu 0", {**pair, "outer": no_momentum}, USUAL, "-1%"),
        Cell(idea, "eta 1, mu 0.25", {**pair, "outer": less_momentum}, USUAL, "-1%"),
        Cell(idea, "half the learning rate", half, USUAL, "0%"),
        Cell(idea, "half the learning rate, eta 0.7", {**half, **DAMPED}, USUAL, "+2%"),
        Cell(
            idea,
            "twice the learning rate, eta 0.7",
            {**pair, **DAMPED, "rate": 2 * RATE["every 30"]},
            USUAL,
            "-0.5%",
        ),
    ]


def few_for_longer() -> list[Cell]:
    """Whether shorter outer steps of few members are a matter of short runs or small steps."""
    cells = []
    for number, count, changes, size, expected in (
        ("one member, 40 cycles", 1, {"steps": 960}, {}, "+0.5%"),
        ("two members, 40 cycles", 2, {"steps": 960}, {}, "-1%"),
        ("four members, 40 cycles", 4, {"steps": 960}, {}, "+1%"),
        ("two members, 1024 tokens", 2, {}, TOKENS_1024, "-0.5%"),
        ("two members, 4096 tokens", 2, {}, {"batch": 128}, "0%"),
        ("four members, 1024 tokens", 4, {}, TOKENS_1024, "+1%"),
    ):
        settings = {**SHORT, "members": count, **changes}
        control, against = (USUAL, settings)
        if count == 1:
            control, against = "folds its work", {**settings, **ALONE}
            settings = {**settings, "codec": "f32"}
        cells += [
            Cell(number, control, against, size=size),
            Cell(number, "eta 0.7, mu 0.5", {**settings, **DAMPED}, control, expected, size=size),
        ]
    return cells


def few_every_8() -> list[Cell]:
    """Whether short cycles, which help eight members with steps of few tokens, help fewer."""
    cells = []
    for number, count, expected in (
        ("two", 2, ("0%", "-2%", "+1%", "-1.7%")),
        ("four", 4, ("-2%", "-3%", "-1%", "+0.5%")),
    ):
        idea = f"{number} members, cycles of 8"
        settings = {"members": count, "rate": RATE["every 30"]}
        every_8 = {**settings, "cycle": 8}
        for name, changes, prediction in (
            ("every 8 steps", every_8, expected[0]),
            ("every 8, eta 0.7", {**every_8, **DAMPED}, expected[1]),
            (
                "every 8, twice the rate, eta 0.7",
                {**every_8, **DAMPED, "rate": 2.4e-2},
                expected[2],
            ),
        ):
            cells.append(Cell(idea, name, changes, "every 30 steps", prediction))
        cells.append(Cell(idea, "every 30 steps", settings))
        damped_too = {**settings, **DAMPED}
        cells.append(Cell(idea, "every 30, eta 0.7", damped_too, "every 30 steps", expected[3]))
    idea, control = "eight members, cycles of 8", "every 30 steps"
    return [
        *cells,
        Cell(idea, control, {**KINDS["every 30"], "rate": RATE["every 30"]}),
        Cell(idea, "every 8 steps", {**KINDS["every 8"], "rate": RATE["every 8"]}, control, "-8%"),
    ]


# Machines of different speed


def by_tokens(claims: Sequence[Contribution], new: Sequence[int]) -> Sequence[float]:
    """By what each has processed, whoever has most."""
    tokens = [claim.tokens for claim in claims]
    return [each / sum(tokens) for each in tokens]


def at_most(largest: float) -> Weights:
    """By tokens, but for those that would have more than this share."""

    def weigh(claims: Sequence[Contribution], new: Sequence[int]) -> Sequence[float]:
        weights = by_tokens(claims, new)
        rest = sum(weight for weight in weights if weight <= largest)
        left = 1.0 - largest * sum(weight > largest for weight in weights)
        return [largest if weight > largest else weight * left / rest for weight in weights]

    return weigh


def as_long_as_the_fastest(weights: Weights) -> Weights:
    """The merge is as long as if all had made the steps of the fastest one."""

    def weigh(claims: Sequence[Contribution], new: Sequence[int]) -> Sequence[float]:
        found = weights(claims, new)
        mean = sum(weight * claim.steps for weight, claim in zip(found, claims, strict=True))
        longer = max(claim.steps for claim in claims) / mean
        return [weight * longer for weight in found]

    return weigh


def slow() -> list[Cell]:
    """Ten members that take ten times as long for a step do the work of one of the others."""
    idea, control = "ten slow members", "two fast members"
    mixed = {**SHORT, "members": 12, "slow": 10}
    quarter = at_most(1 / 4)
    found = [
        Cell(idea, control, {**SHORT, "members": 2}),
        Cell(idea, "three fast members", {**SHORT, "members": 3}, control, "-3.5%"),
        *(
            Cell(
                idea,
                f"two fast and ten slow, {name}",
                {**mixed, "weights": weights},
                control,
                change,
            )
            for name, weights, change in (
                ("at most a quarter", quarter, "+2%"),
                ("by tokens", by_tokens, "-1%"),
                ("as long as the fastest", as_long_as_the_fastest(by_tokens), "-2%"),
                ("a quarter, as long as the fastest", as_long_as_the_fastest(quarter), "-1.5%"),
            )
        ),
    ]
    idea, control = "ten slow members and one", "one fast member"
    mixed = {**mixed, "members": 11}
    return [
        *found,
        Cell(idea, control, {**SHORT, **ALONE}),
        Cell(idea, "two fast members", {**SHORT, "members": 2, **DAMPED}, control, "-3.5%"),
        *(
            Cell(
                idea,
                f"one fast and ten slow, {name}",
                {**mixed, "weights": weights},
                control,
                change,
            )
            for name, weights, change in (
                ("at most a quarter", quarter, "+2%"),
                ("at most a third", at_most(1 / 3), "0%"),
                ("by tokens", by_tokens, "-1.5%"),
            )
        ),
    ]


# Members that turn to where all went


def turning() -> list[Cell]:
    idea, control = "four members, turning", "to nothing"
    four = {**SHORT, "members": 4}
    return [
        Cell(idea, control, four),
        *(
            Cell(
                idea, f"to the last merge, {toward:g}", {**four, "toward": toward}, control, change
            )
            for toward, change in ((0.3, "-1%"), (1.0, "-2%"))
        ),
    ]


# Late and lost work

LATE: Mapping[str, Any] = {**SHORT, "misses": 0.3}


def whole(late: Late) -> Float32s:
    return late.moved


def by_angle(late: Late) -> Float32s:
    """The part along what was merged meanwhile as the mean of its cycles, if it is no step back;
    the rest whole: nobody else has it."""
    direction = late.meanwhile.astype(np.float64)
    length = float(direction @ direction)
    if late.age == 0 or length == 0.0:
        return late.moved
    along = float(late.moved @ direction) / length
    kept = max(0.0, along) / (1 + late.age)
    return late.moved + np.float32(kept - along) * late.meanwhile


def by_angle_shorter(late: Late) -> Float32s:
    """The mean of its cycles, without a step back along what was merged meanwhile."""
    direction = late.meanwhile.astype(np.float64)
    length = float(direction @ direction)
    shorter = mean_of_its_cycles(late)
    back = min(0.0, float(shorter @ direction) / length) if late.age and length else 0.0
    return shorter - np.float32(back) * late.meanwhile


def by_root(late: Late) -> Float32s:
    """As long as independent cycles add up to."""
    return late.moved / np.float32(np.sqrt(1 + late.age))


def late() -> list[Cell]:
    idea, control = "30% fail", "mean of its cycles"
    none = {**LATE, "misses": 0.0}
    rules = {
        "whole": (whole, "+2%"),
        "by angle, the rest whole": (by_angle, "+0.5%"),
        "by angle, mean of its cycles": (by_angle_shorter, "-0.3%"),
        "divided by the root of its cycles": (by_root, "-0.3%"),
    }
    return [
        Cell(idea, control, LATE),
        Cell(idea, "none fails", none, control, "-4%"),
        *(
            Cell(idea, name, {**LATE, "late": rule}, control, prediction)
            for name, (rule, prediction) in rules.items()
        ),
    ]


# The model that comes out

CONSTANT = ProblemChoice(warmup_share=0.05, decay="constant")
LONG_COSINE: Mapping[str, Any] = {"members": 2, "steps": 1440, "cycle": 24}
PAIR_FOR_LONG: Mapping[str, Any] = {**LONG_COSINE, "schedule": CONSTANT}


SAVED: Mapping[str, Sequence[float]] = {
    "averages, two, eta 0.7, 60 cycles, constant": (-0.9, -3.8, -4.5, -4.8, -2.8, -4.0, -3, -4.6),
    "averages, two, eta 0.7, 60 cycles, cosine": (-0.1, -0.4, -0.5, -0.4, -0.3, -0.4, -0.3, -0.5),
    "averages, eight, 60 cycles, constant": (-0.8, -3.2, -3.9, -4.0, -2.4, -3.5, -2.5, -4.0),
    "averages, eight, 60 cycles, cosine": (-0.1, -0.45, -0.6, -0.4, -0.3, -0.5, -0.3, -0.6),
    "averages, constant rate": (0, 0, 1.5, 6, 0.5, 1, 3, 4),
    "averages, cosine rate": (0, 0.5, 1.5, 5, 0.5, 1, 2, 3),
}
"""Expected of the mean of three checkpoints, in the order of ``CHECKPOINTS``."""


def averages() -> list[Cell]:
    cells = []
    names = ("last 2", "last 4", "last 8", "exponential 0.5", "exponential 0.75", "growing")
    saved = {
        idea: dict(zip(CHECKPOINTS, expected, strict=True)) for idea, expected in SAVED.items()
    }
    eight = {"members": 8}
    for idea, changes, expected in (
        ("averages, constant rate", {"schedule": CONSTANT}, (-1, -1, 2, -1, 0, 0)),
        ("averages, cosine rate", {}, (0.5, 2, 6, 0.5, 3, 0)),
        ("averages, two, 60 cycles, constant", PAIR_FOR_LONG, (-1, -1.5, -1, -1, -1.5, -8)),
        ("averages, two, 60 cycles, cosine", LONG_COSINE, (0.1, 0.2, 0.5, 0.1, 0.2, -0.8)),
        (
            "averages, two, eta 0.7, 60 cycles, constant",
            {**PAIR_FOR_LONG, **DAMPED},
            (-3, -5, -6, -4, -5, -5),
        ),
        (
            "averages, two, eta 0.7, 60 cycles, cosine",
            {**LONG_COSINE, **DAMPED},
            (0, 0, 0.3, 0, 0, -0.4),
        ),
        (
            "averages, eight, 60 cycles, constant",
            {**PAIR_FOR_LONG, **eight},
            (-1, -2, -2, -1.8, -2.2, -2.2),
        ),
        (
            "averages, eight, 60 cycles, cosine",
            {**LONG_COSINE, **eight},
            (0, 0.1, 0.5, 0.1, 0.2, 0.2),
        ),
    ):
        settings: dict[str, Any] = {**SHORT, "averaged": True, "cycle": 15, **changes}
        if "schedule" in changes:
            settings["rate"] = RATE["every 30"] / 2
        newest = "newest version"
        cells.append(Cell(idea, newest, settings, figure=lambda outcome: outcome.merged_loss))
        cells += [
            Cell(idea, name, {}, newest, f"{percent:+g}%", average_named(name), of=newest)
            for name, percent in (*zip(names, expected, strict=True), *saved.get(idea, {}).items())
        ]
    return cells


def average_named(name: str) -> Callable[[Outcome], float]:
    return lambda outcome: outcome.averages[name]


# Newcomers

REPLACED_AT = 120
REPLACED: Mapping[str, Any] = {
    **SHORT,
    "measured_cycles": 1,
    "half_replaced_at": REPLACED_AT,
}


def after(outcome: Outcome) -> float:
    """Mean loss of the merged model in the three cycles after newcomers have come."""
    losses = [loss for step, loss in outcome.points if REPLACED_AT < step <= REPLACED_AT + 3 * 24]
    return float(np.mean(losses))


def newcomers() -> list[Cell]:
    idea, control = "half of eight replaced", "a quarter of a merge together"
    cells = [Cell(idea, control, REPLACED, figure=after)]
    for name, changes, soon, in_the_end in (
        ("nobody replaced", {"half_replaced_at": None}, "-3%", "-1%"),
        ("like all others", {"newcomers": "plain"}, "+0.5%", "+0%"),
        ("no share in their first cycle", {"newcomers": "silent"}, "-0.5%", "+0.5%"),
    ):
        settings = {**REPLACED, **changes}
        cells.append(Cell(idea, name, settings, control, soon, after))
        cells.append(Cell(idea, f"{name}, at the end", {}, f"{control}, at the end", of=name))
        cells[-1] = replace(cells[-1], prediction=in_the_end)
    return [*cells, Cell(idea, f"{control}, at the end", of=control)]


CELLS: Sequence[Cell] = (
    *few(),
    *few_for_longer(),
    *few_every_8(),
    *slow(),
    *turning(),
    *late(),
    *newcomers(),
    *averages(),
    *founder(),
    *short(),
    *law("law, 256 tokens", MEMBERS),
    *law("law, more members", (16,)),
    *rates(),
    *law("law, 1024 tokens", expected=EXPECTED_OF_1024, size=TOKENS_1024),
    *sizes(),
    *new_run(),
)


# Training and the table


@dataclass(frozen=True, slots=True)
class Row:
    cell: Cell
    figures: Mean
    change: Mean | None
    """Relative difference from the control, paired by seed."""
    seeds: int
    seconds: float
    noise_tokens: float | None


def problem_for(cell: Cell, size: TextGpt) -> TextGpt:
    return replace(size, **cell.size)


def parameters_of(size: TextGpt) -> int:
    return sum(spec.size for spec in size.specs)


def trial_for(cell: Cell, seed: int) -> Trial:
    return Trial(seed=seed, **cell.changes)


def needed(chosen: Sequence[Cell]) -> list[Cell]:
    """The cells whose trainings the chosen ones and their controls need."""
    by_name = {cell.full_name: cell for cell in CELLS}
    found: dict[str, Cell] = {}
    for cell in chosen:
        controls = [by_name[f"{cell.idea}/{cell.control}"]] if cell.control else []
        for one in (cell, *controls):
            found[one.trained] = by_name[one.trained]
    return list(found.values())


SIDE_BY_SIDE = 500_000
"""Parameters of the largest model whose cells gain by being trained together."""

Outcomes = dict[tuple[str, int], Outcome]
"""By full name of a cell, and seed."""


def trained(
    cells: Sequence[Cell],
    *,
    seeds: Sequence[int],
    size: TextGpt,
    kept: Path | None,
    compiled: bool,
    progress: Callable[[float], None] = lambda share: None,
) -> Outcomes:
    """Train what is not in the folder ``kept``: the cells of one idea and seed together, or one by
    one, which is no slower, where models are larger."""
    found: Outcomes = {}
    groups: dict[tuple[str, int, int, TextGpt, str], list[Cell]] = {}
    for seed in seeds:
        for cell in cells:
            if seed not in seeds[: cell.seeds_max]:
                continue
            if kept is not None and (file := _file(kept, cell, seed)).exists():
                found[cell.full_name, seed] = msgspec.json.decode(file.read_bytes(), type=Outcome)
            else:
                problem = problem_for(cell, size)
                by_itself = cell.name if parameters_of(problem) > SIDE_BY_SIDE else ""
                steps = trial_for(cell, seed).steps
                shape = cell.idea, seed, steps, problem, by_itself
                groups.setdefault(shape, []).append(cell)
    for done, ((_, seed, _, problem, _), together) in enumerate(groups.items()):
        trials = [trial_for(cell, seed) for cell in together]
        outcomes = train(
            trials,
            problem,
            compiled=compiled,
            progress=lambda share, done=done: progress((done + share) / len(groups)),  # type: ignore[misc]
        )
        for cell, outcome in zip(together, outcomes, strict=True):
            found[cell.full_name, seed] = outcome
            if kept is not None:
                kept.mkdir(parents=True, exist_ok=True)
                _file(kept, cell, seed).write_bytes(msgspec.json.encode(outcome))
    return found


def _file(folder: Path, cell: Cell, seed: int) -> Path:
    """Named by the cell, not by what it trains: after a change of a cell begin anew."""
    return folder / f"{re.sub('[^a-z0-9.]+', '-', cell.full_name.lower())}.{seed}.json"


def table(chosen: Sequence[Cell], outcomes: Outcomes, *, seeds: Sequence[int]) -> list[Row]:
    by_name = {cell.full_name: cell for cell in CELLS}
    rows = []
    for cell in chosen:
        mine = {seed: outcomes[cell.trained, seed] for seed in seeds[: cell.seeds_max]}
        change = None
        if cell.control:
            control = by_name[f"{cell.idea}/{cell.control}"]
            change = Mean.of(
                cell.figure(outcome) / control.figure(outcomes[control.trained, seed]) - 1
                for seed, outcome in mine.items()
            )
        noises = [one.noise_tokens for one in mine.values() if one.noise_tokens is not None]
        rows.append(
            Row(
                cell,
                Mean.of(cell.figure(outcome) for outcome in mine.values()),
                change,
                seeds=len(mine),
                seconds=sum(outcome.seconds for outcome in mine.values()) if not cell.of else 0.0,
                noise_tokens=Mean.of(noises).value if noises else None,
            )
        )
    return rows


def record(row: Row) -> dict[str, Any]:
    """A row for scripts."""
    return {
        "idea": row.cell.idea,
        "name": row.cell.name,
        "control": row.cell.control,
        "prediction": row.cell.prediction,
        "loss": row.figures.value,
        "loss_error": row.figures.error,
        "change": None if row.change is None else row.change.value,
        "change_error": None if row.change is None else row.change.error,
        "seeds": row.seeds,
        "noise_tokens": row.noise_tokens,
        "seconds": row.seconds,
    }


def section(rows: Sequence[Row], *, size: TextGpt) -> Section:
    text = (
        f"A decoder of {parameters_of(size)} parameters in steps of {size.step_tokens} tokens per "
        "member unless the idea says otherwise. Loss: held-out, in nats per byte, of the mean of "
        "all members' parameters at the end, or what the name says, with the standard error over "
        "seeds. Difference: from the control, paired by seed. Seconds of processor time of all "
        "seeds."
    )
    table = shown(
        "Methods",
        text,
        rows,
        lambda row: row.cell.idea,
        {
            "": lambda row: row.cell.name,
            "loss": lambda row: row.figures.text(4),
            "predicted": lambda row: row.cell.prediction,
            "difference": lambda row: "" if row.change is None else row.change.percent(1),
            "seeds": lambda row: str(row.seeds),
            "noise": lambda row: "" if row.noise_tokens is None else f"{row.noise_tokens:.0f}",
            "s": lambda row: f"{row.seconds:.0f}",
        },
    )
    return replace(table, picture_png=picture(_picture, rows))


def _picture(rows: Sequence[Row]) -> bytes:
    """Differences from the controls with their error bars, idea by idea."""
    drawn: list[tuple[str, Mean | None]] = []
    for row in rows:
        if row.change is None:
            continue
        if row.cell.idea not in [name for name, _ in drawn]:
            drawn.append((row.cell.idea, None))
        drawn.append((row.cell.name, row.change))
    figure = new_figure(height=1 + 0.24 * len(drawn))
    axes = figure.add_subplot()
    axes.axvline(0.0, color="gray", linewidth=1)
    axes.set_yticks(range(len(drawn)), [name for name, _ in drawn])
    for place, (label, (_, change)) in enumerate(zip(axes.get_yticklabels(), drawn, strict=True)):
        if change is None:
            label.set_fontweight("bold")
        else:
            axes.errorbar(
                100 * change.value, place, xerr=200 * change.error, fmt="o", color="tab:blue"
            )
    axes.set_ylim(len(drawn) - 0.5, -0.5)
    axes.set_xlabel("difference from the control, percent (two standard errors)")
    axes.grid(alpha=0.3, axis="x")
    return as_png(figure)


def main(
    seeds: PairedSeeds = 2,
    seed: FirstSeed = 0,
    only: Annotated[
        str,
        Option(
            help="Only cells of ideas whose names begin with this; several with '|' between them.",
            metavar="IDEA",
        ),
    ] = "",
    width: Annotated[int, Option(help="Width of the model.", min=8)] = 64,
    layers: Annotated[int, Option(help="Blocks of the model.", min=1)] = 1,
    length: Annotated[int, Option(help="Tokens of a sequence.", min=2)] = 32,
    batch: Annotated[int, Option(help="Sequences in a step of a member.", min=1)] = 8,
    compiled: Annotated[
        bool,
        Option("--compile", help="Compile the model first: a minute, then twice as fast."),
    ] = False,
    out: OutKept = None,
    as_json: Json = False,
) -> None:
    """Ideas for a better loss, each beside its control with the same seeds.

    Assumes a small decoder on bytes of the Python standard library, Muon, 360 steps of each of
    eight members, four fragments, int4, H = 30, eta 1, mu 0.5 unless the cell says otherwise.
    Merges are those of live peers, without messages.

    Example: python -m examples.paper.methods.run --only averages
    """
    size = TextGpt(layers=layers, width=width, length=length, batch=batch, optimizer="muon")
    chosen = [cell for cell in CELLS if cell.idea.startswith(tuple(only.split("|")))]
    if not chosen:
        names = dict.fromkeys(cell.idea for cell in CELLS)
        raise typer.BadParameter(f"no idea begins with {only!r}; there are: {'; '.join(names)}")
    those = seeds_from(seed, seeds)
    with usage_errors(), progress("training", quiet=as_json) as advance:
        outcomes = trained(
            needed(chosen),
            seeds=those,
            size=size,
            kept=None if out is None else out / "trainings",
            compiled=compiled,
            progress=advance,
        )
    rows = table(chosen, outcomes, seeds=those)
    show_rows(section(rows, size=size), [record(row) for row in rows], out=out, as_json=as_json)


if __name__ == "__main__":
    run_program(main)
