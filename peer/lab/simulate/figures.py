"""The tables and pictures of the goodput and bandwidth experiments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from peer.errors import ExtraMissing
from peer.lab.simulate.html_report import Section, as_png
from peer.lab.simulate.paper.bandwidth import Need
from peer.lab.simulate.paper.goodput import Cell, rms_difference

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure


def goodput_section(cells: Sequence[Cell]) -> Section:
    """Our table beside the reported one: measured (reported, difference)."""
    chips = sorted({c.chips for c in cells})
    rows = []
    for name, group in _by_system(cells).items():
        values = {c.chips: c for c in group}
        rows.append([name, *(_compared(values[n]) for n in chips)])
        uptimes = [f"{values[n].uptime:.1f}" for n in chips]
        rows.append(["  some learner steps", *uptimes])
    predicted = [c for c in cells if c.system == "decoupled" and c.reported is not None]
    text = (
        "Goodput in percent: simulated ± standard error over the seeds (reported, difference). "
        f"The {len(predicted)} decoupled cells are predictions; they differ from the reported "
        f"ones by {rms_difference(predicted):.1f} points rms."
    )
    columns = ["", *(f"{n / 1e6:g}M chips" for n in chips)]
    return Section("Goodput under failures", text, columns, rows, _goodput_picture(cells))


def bandwidth_section(needs: Sequence[Need]) -> Section:
    """What each method needs, a column per utilisation."""
    utilisations = sorted({n.utilisation for n in needs})
    rows = []
    for method, codec in dict.fromkeys((n.method, n.codec) for n in needs):
        row = [n for n in needs if (n.method, n.codec) == (method, codec)]
        values = {n.utilisation: n for n in row}
        rows.append([f"{method}, {codec}", *(_need(values[u]) for u in utilisations)])
    text = (
        "Gbit/s per learner and direction for the given share of time spent computing; reported "
        "figures in brackets. Data parallel hides its gradients behind the backward pass only; "
        "decoupled and shoal never wait, so their need does not depend on the share."
    )
    columns = ["method, codec", *(f"{u:.0%}" for u in utilisations)]
    return Section("Bandwidth", text, columns, rows, _bandwidth_picture(needs))


def _compared(cell: Cell) -> str:
    measured = f"{cell.goodput:.1f} ±{cell.standard_error:.1f}"
    if cell.reported is None:
        return measured
    return f"{measured} ({cell.reported}, {cell.goodput - cell.reported:+.1f})"


def _need(need: Need) -> str:
    reported = "" if need.reported_gbit_s is None else f" ({need.reported_gbit_s:g})"
    return f"{need.gbit_s:.3g}{reported}"


def _by_system(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        name = cell.system if cell.system != "decoupled" else f"decoupled, M={cell.learners}"
        groups.setdefault(name, []).append(cell)
    return groups


def _goodput_picture(cells: Sequence[Cell]) -> bytes:
    figure = new_figure()
    axes = figure.add_subplot()
    for name, group in _by_system(cells).items():
        (line,) = axes.plot([c.chips for c in group], [c.goodput for c in group], label=name)
        reported = [(c.chips, c.reported) for c in group if c.reported is not None]
        axes.plot(*zip(*reported, strict=True), "o", color=line.get_color(), mfc="none")
    axes.set(xscale="log", xlabel="chips", ylabel="goodput, percent", ylim=(0, 101))
    plain_ticks(axes.xaxis, sorted({cell.chips for cell in cells}))
    axes.set_title("Goodput: simulated (lines) and reported (circles)")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    return as_png(figure)


def _bandwidth_picture(needs: Sequence[Need]) -> bytes:
    figure = new_figure()
    axes = figure.add_subplot()
    for method, codec in dict.fromkeys((n.method, n.codec) for n in needs):
        if codec not in ("bf16", "int4"):
            continue
        row = [n for n in needs if (n.method, n.codec) == (method, codec)]
        xs, ys = [100 * n.utilisation for n in row], [n.gbit_s for n in row]
        axes.plot(xs, ys, marker="o", label=f"{method}, {codec}")
    axes.set(yscale="log", xlabel="share of time spent computing, percent", ylabel="Gbit/s")
    plain_ticks(axes.yaxis)
    axes.set_title("Link speed each learner needs")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3, which="both")
    return as_png(figure)


def plain_ticks(axis: Axis, values: Sequence[float] | None = None) -> None:
    """Numbers as one would write them on a logarithmic axis; only at these values if given."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    if values is not None:
        axis.set_ticks(list(values))
        axis.set_ticks([], minor=True)
    axis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    axis.set_minor_formatter(NullFormatter())


def short(value: float) -> str:
    """1200000 as 1.2M, 0.84 as it is."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= 10 * size or (abs(value) >= size and letter == "M"):
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def new_figure(*, height: float = 5) -> Figure:
    """A figure outside pyplot, so that no display and no global state is involved."""
    try:
        from matplotlib.figure import Figure as New
    except ImportError as error:
        raise ExtraMissing("a plot", "matplotlib", "plots") from error
    return New(figsize=(8, height))
