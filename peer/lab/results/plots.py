"""Matplotlib figures in one style, rendered to PNG without pyplot, a display or global state."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ParamSpec

from peer.errors import ExtraMissing
from peer.quantities import count_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

P = ParamSpec("P")


def new_figure(*, height: float = 5) -> Figure:
    """An empty figure. Raises ``ExtraMissing`` when matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure as New
    except ImportError as error:
        raise ExtraMissing("a plot", "matplotlib", "plots") from error
    return New(figsize=(8, height))


def picture(draw: Callable[P, bytes], *rows: P.args, **how: P.kwargs) -> bytes | None:
    """The picture of an experiment's rows; ``None`` when matplotlib is not installed.

    An experiment may have taken hours, and its table needs no picture.
    """
    try:
        return draw(*rows, **how)
    except ExtraMissing:
        return None


def new_axes() -> Axes:
    """The axes of a new figure that has only these."""
    return new_figure().add_subplot()


def finished_png(axes: Axes, *, fontsize: str = "medium") -> bytes:
    """Add a legend and a grid, then render the figure of these axes."""
    axes.legend(frameon=False, fontsize=fontsize)
    axes.grid(alpha=0.3, which="both")
    return as_png(axes.figure.figure)


def as_png(figure: Figure) -> bytes:
    """Render a figure: the same bytes for the same data."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120, bbox_inches="tight", metadata={"Software": None})
    return buffer.getvalue()


def plain_ticks(axis: Axis, values: Sequence[float] | None = None) -> None:
    """Label a logarithmic axis with plain numbers; only at ``values`` when they are given."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    if values is not None:
        axis.set_ticks(list(values))
        axis.set_ticks([], minor=True)
    axis.set_major_formatter(FuncFormatter(lambda value, _: count_text(value)))
    axis.set_minor_formatter(NullFormatter())
