"""A picture of trials: what a line leaves of the time to compute, and how much of it is used."""

from __future__ import annotations

from collections.abc import Sequence

from peer.lab.regions.figures import Row
from peer.lab.results.plots import as_png, new_figure, plain_ticks


def plot_png(rows: Sequence[Row]) -> bytes:
    """One curve for each length of the cycle. Raises ``ExtraMissing`` without matplotlib."""
    figure = new_figure(height=3.5)
    computing, used = figure.subplots(1, 2)
    lines = sorted({row.mbit for row in rows})
    for axes, title in ((computing, "time computing, %"), (used, "line used, %")):
        axes.set_xscale("log")
        axes.set_xlabel("line, Mbit/s")
        axes.set_title(title)
        axes.set_ylim(0, 105)
        axes.grid(alpha=0.3)
        plain_ticks(axes.xaxis, lines)
    for cycle in sorted({row.cycle for row in rows}):
        of_cycle = sorted((row for row in rows if row.cycle == cycle), key=lambda row: row.mbit)
        shared = [row.mbit for row in of_cycle]
        label = f"H = {cycle}"
        computing.plot(shared, [100 * row.computing for row in of_cycle], "o-", label=label)
        used.plot(shared, [100 * row.line_used for row in of_cycle], "o-", label=label)
    used.legend(frameon=False)
    return as_png(figure)
