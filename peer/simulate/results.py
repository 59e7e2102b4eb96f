"""Presentation of an experiment's results: tables as CSV, an HTML page, and plots in one style.

``Section`` is a part of a page, ``Mean`` a mean over seeds with its standard error. Pages embed
their pictures. Plots are rendered to PNG without pyplot, a display or global state.
"""

from __future__ import annotations

import base64
import csv
import html
import io
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, get_args, get_type_hints

from peer.errors import ExtraMissing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class Mean:
    """Mean of a few samples with its standard error (0, and not shown, for a single sample)."""

    value: float
    error: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Mean:
        numbers = list(values)
        error = statistics.stdev(numbers) / math.sqrt(len(numbers)) if len(numbers) > 1 else 0.0
        return cls(statistics.fmean(numbers), error)

    def text(self, digits: int, *, per: float = 1.0) -> str:
        error = f" ±{self.error / per:.{digits}f}" if self.error else ""
        return f"{self.value / per:.{digits}f}{error}"

    def percent(self, digits: int = 1) -> str:
        error = f" ±{100 * self.error:.{digits}f}" if self.error else ""
        return f"{100 * self.value:+.{digits}f}%{error}"


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: auto; padding: 1rem; }}
table {{ border-collapse: collapse; display: block; overflow-x: auto; margin: 1rem 0; }}
table {{ font-size: 15px; }}
th, td {{ padding: .3rem .6rem; text-align: right; white-space: pre; }}
th, td {{ border-bottom: 1px solid #8884; }}
th:first-child, td:first-child {{ text-align: left; }}
td[colspan] {{ font-weight: bold; padding-top: 1rem; }}
img {{ max-width: 100%; background: white; border-radius: 6px; }}
pre {{ white-space: pre-wrap; }}
</style>
<h1>{title}</h1>
<pre>{command}</pre>
{body}
</html>
"""


@dataclass(frozen=True, slots=True)
class Section:
    """One part of a page: heading, explanation, table, picture.

    A row of a single cell is a heading inside the table.
    """

    heading: str
    text: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    picture_png: bytes | None = None


def record_of(row: Any) -> dict[str, Any]:
    """The fields of a dataclass instance. A ``Mean`` has two: its value, and ``NAME_error``."""
    hints, record = get_type_hints(type(row)), dict[str, Any]()
    for name, value in asdict(row).items():
        if Mean in (hints[name], *get_args(hints[name])):
            mean = value or {"value": None, "error": None}
            record |= {name: mean["value"], f"{name}_error": mean["error"]}
        else:
            record[name] = value
    return record


def write_csv(path: Path, rows: Sequence[Any]) -> None:
    """Write dataclass instances of one type, or mappings with equal keys: a column per field."""
    records = [row if isinstance(row, dict) else record_of(row) for row in rows]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(records[0]))
        writer.writeheader()
        writer.writerows(records)


def write_html(path: Path, *, title: str, command: str, sections: Sequence[Section]) -> None:
    """Write one self-contained page; ``command`` is how to repeat the experiment."""
    body = "\n".join(_section(section) for section in sections)
    page = _PAGE.format(title=html.escape(title), command=html.escape(command), body=body)
    path.write_text(page, encoding="utf-8")


def _section(section: Section) -> str:
    parts = [f"<h2>{html.escape(section.heading)}</h2>", f"<p>{html.escape(section.text)}</p>"]
    if section.picture_png is not None:
        data = base64.b64encode(section.picture_png).decode()
        alt = html.escape(section.heading)
        parts.append(f'<img alt="{alt}" src="data:image/png;base64,{data}">')
    if section.rows:
        head = "".join(f"<th>{html.escape(c)}</th>" for c in section.columns)
        lines = [_line(row, columns=len(section.columns)) for row in section.rows]
        parts.append(f"<table><tr>{head}</tr>{''.join(lines)}</table>")
    return "\n".join(parts)


def _line(row: Sequence[str], *, columns: int) -> str:
    if len(row) == 1 < columns:
        return f'<tr><td colspan="{columns}">{html.escape(row[0])}</td></tr>'
    return "<tr>" + "".join(f"<td>{html.escape(value)}</td>" for value in row) + "</tr>"


# Plots


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
