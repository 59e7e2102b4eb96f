"""Figures of a trial in several regions, beside their prediction. Pure functions.

A round of N regions is an all-reduce: each sends a fragment's values twice, except its own share.
That is what ``examples/paper/bandwidth`` calculates with (``gbit_s``, method shoal). The counters
of the interfaces have everything else as well: headers, acknowledgements, membership, replays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from examples.paper.bandwidth.run import Setting, gbit_s


@dataclass(frozen=True, slots=True)
class Progress:
    """A report of a learner."""

    at_s: float
    steps: int


@dataclass(frozen=True, slots=True)
class Merged:
    """A round that merged work of the learner which reports it."""

    at_s: float
    fragment: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """Observations of the learners and their lines between two moments."""

    began_s: float
    ended_s: float
    progress: Mapping[str, Sequence[Progress]]
    """Reports by region, oldest first."""
    merged: Mapping[str, Sequence[Merged]]
    sent_bytes: int
    """Bytes sent by all regions between the two moments, with all headers."""
    loss: float | None
    """Newest held-out loss at the end."""

    @property
    def seconds(self) -> float:
        return self.ended_s - self.began_s

    def computing(self, step_s: float) -> float:
        """Share of the time in which learners computed, whose steps take ``step_s`` alone."""
        shares = []
        for reports in self.progress.values():
            inside = [each for each in reports if self.began_s <= each.at_s <= self.ended_s]
            if len(inside) < 2:
                shares.append(0.0)
                continue
            first, last = inside[0], inside[-1]
            shares.append((last.steps - first.steps) * step_s / (last.at_s - first.at_s))
        return sum(shares) / len(shares)

    @property
    def rounds(self) -> int:
        """Number of rounds that merged somebody's work."""
        return len({key for merged in self.merged.values() for key in self._rounds_of(merged)})

    @property
    def part(self) -> float:
        """Mean share of those rounds that merged a learner's work."""
        if not self.rounds:
            return 0.0
        each = [len(self._rounds_of(merged)) for merged in self.merged.values()]
        return sum(each) / len(each) / self.rounds

    def _rounds_of(self, merged: Sequence[Merged]) -> set[tuple[int, int]]:
        inside = (each for each in merged if self.began_s <= each.at_s < self.ended_s)
        return {(each.fragment, each.version) for each in inside}


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A region that failed and came back."""

    away_s: float
    rounds_per_minute: float
    """Rounds of the others meanwhile."""
    returned_s: float | None
    """Time from its start until its work was merged again; ``None``: not while it was watched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The figures of one line and one length of the cycle."""

    mbit: float
    cycle: int
    computing: float
    rounds_per_minute: float
    part: float
    round_mb: float
    """Megabytes that a region sent per round, by the counters of its interface."""
    predicted_mb: float
    line_used: float
    """Share of the line's rate that was used in each direction."""
    loss: float | None
    failure: Failure | None = None

    @property
    def off(self) -> float:
        """Measured bytes beyond the predicted ones, as a share of these."""
        return self.round_mb / self.predicted_mb - 1


def predicted_bytes(setting: Setting) -> float:
    """Bytes that each learner sends per round of one fragment."""
    rounds_per_s = setting.fragments / (setting.steps_per_cycle * setting.step_s)
    return gbit_s("shoal", setting) * 1e9 / 8 / rounds_per_s


def row(course: Course, setting: Setting, *, mbit: float, failure: Failure | None = None) -> Row:
    """The figures of a trial of which ``setting`` is the description."""
    per_region = course.sent_bytes / setting.learners
    return Row(
        mbit=mbit,
        cycle=setting.steps_per_cycle,
        computing=course.computing(setting.step_s),
        rounds_per_minute=60 * course.rounds / course.seconds,
        part=course.part,
        round_mb=per_region / max(1, course.rounds) / 1e6,
        predicted_mb=predicted_bytes(setting) / 1e6,
        line_used=8e-6 * per_region / course.seconds / mbit,
        loss=course.loss,
        failure=failure,
    )


def record(row: Row) -> dict[str, Any]:
    return {**asdict(row), "off": row.off}


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| line, Mbit/s | H | computing | merged rounds/min | part of them | MB per round "
        "(predicted) | line used | held-out loss |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in rows:
        loss = "-" if each.loss is None else f"{each.loss:.3f}"
        lines.append(
            f"| {each.mbit:g} | {each.cycle} | {each.computing:.1%} | {each.rounds_per_minute:.1f} "
            f"| {each.part:.0%} | {each.round_mb:.2f} ({each.predicted_mb:.2f}, {each.off:+.0%}) "
            f"| {each.line_used:.0%} | {loss} |"
        )
    lines += [_failure_text(each, each.failure) for each in rows if each.failure is not None]
    return "\n".join(lines)


def _failure_text(row: Row, failure: Failure) -> str:
    returned = (
        "not merged again while it was watched"
        if failure.returned_s is None
        else f"merged again {failure.returned_s:.0f} s after its start"
    )
    return (
        f"{row.mbit:g} Mbit/s, H = {row.cycle}: one region killed for {failure.away_s:.0f} s: the "
        f"others merged {failure.rounds_per_minute:.1f} rounds a minute; it {returned}"
    )
