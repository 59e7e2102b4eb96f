"""Result files of an experiment: tables as CSV, and one HTML page with its pictures embedded."""

from __future__ import annotations

import base64
import csv
import html
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints


@dataclass(frozen=True, slots=True)
class Mean:
    """Mean of a few samples with its standard error (0, and not shown, for a single sample)."""

    value: float
    error: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Mean:
        found = list(values)
        error = statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else 0.0
        return cls(statistics.fmean(found), error)

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
.text td, .text th {{ text-align: left; white-space: normal; }}
td[colspan] {{ font-weight: bold; padding-top: 1rem; }}
svg {{ width: 100%; height: auto; }} svg text {{ fill: currentColor; font-size: 11px; }}
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
    picture_svg: str = ""
    is_text: bool = False
    """Align the table to the left and wrap its lines: its cells are sentences, not numbers."""


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
    parts.append(section.picture_svg)
    if section.rows:
        head = "".join(f"<th>{html.escape(c)}</th>" for c in section.columns)
        lines = [_line(row, columns=len(section.columns)) for row in section.rows]
        style = "text" if section.is_text else "numbers"
        parts.append(f"<table class={style}><tr>{head}</tr>{''.join(lines)}</table>")
    return "\n".join(parts)


def _line(row: Sequence[str], *, columns: int) -> str:
    if len(row) == 1 < columns:
        return f'<tr><td colspan="{columns}">{html.escape(row[0])}</td></tr>'
    return "<tr>" + "".join(f"<td>{html.escape(value)}</td>" for value in row) + "</tr>"
