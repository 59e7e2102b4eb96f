"""Reports of a chaos run for people: a page with a timeline per peer, and a summary as text."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from peer.quantities import count_text
from peer.results import Section, write_html
from tests.chaos.judging.evidence import Evidence, FaultDone, PeerEvidence
from tests.chaos.run import Judged, Outcome

WIDTH = 1160
LANE = 30
LEFT = 90

_LEGEND = (
    "A bar is one life of a learner. A tick below it is a round that contains its work; a grey "
    "tick is a round that it missed or that failed. Red marks a fault; hover over it for details."
)


def write(directory: Path, outcome: Outcome) -> Path:
    """Write the self-contained page ``chaos.html``; returns its path."""
    settings = outcome.settings
    path = directory / "chaos.html"
    peers = "" if settings.peers is None else f" --peers {settings.peers}"
    length = "" if settings.minutes is None else f" --minutes {settings.minutes:g}"
    write_html(
        path,
        title="chaos",
        command=f"python -m tests.chaos {' '.join(each.scenario for each in outcome.judged)}"
        f"{peers}{length} --seed {settings.seed}",
        sections=[_section(each) for each in outcome.judged],
    )
    return path


def _section(judged: Judged) -> Section:
    rows = [[str(v.promise), v.word, v.reason] for v in judged.verdicts]
    columns = ["promise", "verdict", "reason"]
    svg = timeline(judged.evidence)
    return Section(judged.scenario, _LEGEND, columns, rows, picture_svg=svg, is_text=True)


def timeline(evidence: Evidence) -> str:
    """An SVG with one lane per peer, and one for faults that affect all of them."""
    peers = evidence.peers
    end_s = max([evidence.ended_s, *(life.ended_s for peer in peers for life in peer.lives)])
    height = LANE * (len(peers) + 1) + 30

    def x(at_s: float) -> float:
        return LEFT + (WIDTH - LEFT) * min(max(at_s, 0.0), end_s) / end_s

    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="timeline">']
    for mark, name in ((evidence.ready_s, "ready"), (evidence.quiet_s, "quiet")):
        parts.append(
            f'<line x1="{x(mark):.1f}" x2="{x(mark):.1f}" y1="12" y2="{height - 16}" '
            f'stroke="#8888" stroke-dasharray="3 3"/>'
            f'<text x="{x(mark) + 3:.1f}" y="11">{name}</text>'
        )
    for row, peer in enumerate(peers):
        parts.extend(_lane(evidence, peer, 18 + LANE * row, x))
    top = 18 + LANE * len(peers)
    parts.append(f'<text x="2" y="{top + 11}">all</text>')
    for fault in evidence.faults:
        if fault.victim is None:
            parts.append(_fault(fault, top, x))
    step_s = _tick_s(end_s)
    for number in range(int(end_s / step_s) + 1):
        at = number * step_s
        parts.append(f'<text x="{x(at):.1f}" y="{height - 3}">{at:g} s</text>')
    parts.append("</svg>")
    return "\n".join(parts)


def _lane(
    evidence: Evidence, peer: PeerEvidence, top: int, x: Callable[[float], float]
) -> Iterator[str]:
    yield f'<text x="2" y="{top + 11}">{html.escape(peer.name)}</text>'
    for life in peer.lives:
        ready_s = life.ended_s if life.ready_s is None else life.ready_s
        color = "#b55" if peer.hostile else "#4a90c2"
        for begin, until, fill in (
            (life.began_s, ready_s, "#4a90c255"),
            (ready_s, life.ended_s, color),
        ):
            if until > begin:
                yield (
                    f'<rect x="{x(begin):.1f}" y="{top}" width="{x(until) - x(begin):.1f}" '
                    f'height="14" fill="{fill}"/>'
                )
    for report in peer.rounds:
        color = "currentColor" if report.finished and report.contributed else "#8886"
        yield (
            f'<line x1="{x(report.at_s):.1f}" x2="{x(report.at_s):.1f}" y1="{top + 15}" '
            f'y2="{top + 20}" stroke="{color}"/>'
        )
    for fault in evidence.faults:
        if fault.victim == peer.name:
            yield _fault(fault, top, x)


def _fault(fault: FaultDone, top: int, x: Callable[[float], float]) -> str:
    words = f"{fault.kind} {fault.detail} at {fault.at_s:.1f} s, until {fault.until_s:.1f} s"
    width = max(3.0, x(fault.until_s) - x(fault.at_s))
    return (
        f'<rect x="{x(fault.at_s):.1f}" y="{top - 2}" width="{width:.1f}" height="18" '
        f'fill="#d22" fill-opacity=".55"><title>{html.escape(words)}</title></rect>'
        f'<text x="{x(fault.at_s):.1f}" y="{top - 3}">{fault.kind}</text>'
    )


def _tick_s(end_s: float) -> float:
    for step_s in (10.0, 30.0, 60.0, 300.0, 1800.0):
        if end_s / step_s <= 15:
            return step_s
    return 7200.0


def text(record: Mapping[str, Any], page: Path) -> str:
    """The summary as text; ``page`` is the path to name."""
    lines = []
    for name, each in record["scenarios"].items():
        broken = [promise for promise, v in each["verdicts"].items() if v["kept"] is False]
        share = "-" if each["goodput"] is None else f"{each['goodput']:.1%}"
        faults = ", ".join(f"{count} {kind}" for kind, count in each["faults"].items()) or "none"
        lines.append(
            f"{name:10} {'BROKEN: ' + ', '.join(broken) if broken else 'kept':30} "
            f"goodput {share}, faults: {faults}"
        )
        lines += _lies(each.get("lies", ()))
    total = record["tokens"]
    fates = ", ".join(
        f"{count_text(total[n])} {n}" for n in ("merged", "pending", "discarded") if n in total
    )
    lines.append(f"tokens: {count_text(total.get('processed', 0))} processed = {fates}")
    lines.append(f"timeline and logs: {page}")
    return "\n".join(lines)


def _lies(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table: each way to lie, who found it, after how many rounds, and what it cost."""
    if not rows:
        return []
    cells = [("lie", "liars", "told", "lies until", "rounds until", "versions/min", "found by")]
    for row in rows:
        usual = row["usual_versions_per_minute"]
        beside = "" if usual is None else f" of {usual:.0f}"
        until = ["-" if row[name] is None else str(row[name]) for name in ("lies", "rounds")]
        cells.append(
            (
                *(row["lie"], str(row["liars"]), str(row["told"]), *until),
                f"{row['versions_per_minute']:.0f}{beside}",
                row["found_by"],
            )
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]
