"""What a chaos run leaves for people: a page with a lane per peer, and a few lines of text."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from peer.lab.chaos.judging.evidence import Evidence, FaultDone, PeerEvidence
from peer.lab.chaos.run import Judged, Outcome
from peer.quantities import count_text

WIDTH = 1160
LANE = 30
LEFT = 90
WORDS = {True: "kept", False: "broken", None: "cannot tell"}

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>shoal chaos</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 78rem; margin: auto; padding: 1rem; }}
table {{ border-collapse: collapse; }}
td, th {{ padding: .15rem .7rem; text-align: left; border-bottom: 1px solid #8884; }}
.kept {{ color: #2a8f3c; }} .broken {{ color: #d22; font-weight: bold; }} .cannot {{ color: #888; }}
svg {{ width: 100%; height: auto; }} svg text {{ fill: currentColor; font-size: 11px; }}
</style>
<h1>shoal chaos</h1>
<p>{head}</p>
{body}
</html>
"""

_LEGEND = (
    "A bar is a life of a learner; a tick below it a round that its work was in (grey: one that it "
    "missed or that came to nothing). Red: what was done to it; hover for the words."
)


def write(directory: Path, outcome: Outcome) -> Path:
    """Write ``chaos.html``, which needs nothing else; returns its path."""
    settings = outcome.settings
    head = (
        f"{settings.peers} learners, {settings.minutes:g} minutes a scenario, seed "
        f"{settings.seed}. {_LEGEND}"
    )
    body = "\n".join(_section(each) for each in outcome.judged)
    path = directory / "chaos.html"
    path.write_text(_PAGE.format(head=html.escape(head), body=body), encoding="utf-8")
    return path


def _section(judged: Judged) -> str:
    rows = "".join(
        f"<tr><td>{verdict.promise}</td><td class={WORDS[verdict.kept].split()[0]}>"
        f"{WORDS[verdict.kept]}</td><td>{html.escape(verdict.reason)}</td></tr>"
        for verdict in judged.verdicts
    )
    return (
        f"<h2>{html.escape(judged.scenario)}</h2>\n{timeline(judged.evidence)}\n"
        f"<table>{rows}</table>"
    )


def timeline(evidence: Evidence) -> str:
    """One SVG: a lane per peer, and one for what was done to all of them."""
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
    parts.append(f'<text x="2" y="{top + 11}">everybody</text>')
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
    for told in peer.rounds:
        color = "currentColor" if told.finished and told.contributed else "#8886"
        yield (
            f'<line x1="{x(told.at_s):.1f}" x2="{x(told.at_s):.1f}" y1="{top + 15}" '
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
    """The summary for people."""
    lines = []
    for name, each in record["scenarios"].items():
        broken = [promise for promise, v in each["verdicts"].items() if v["kept"] is False]
        share = "-" if each["goodput"] is None else f"{each['goodput']:.1%}"
        lines.append(
            f"{name:10} {'BROKEN: ' + ', '.join(broken) if broken else 'kept':30} "
            f"goodput {share}, faults: {_counts(each['faults'])}"
        )
    total = record["tokens"]
    fates = ", ".join(
        f"{count_text(total[n])} {n}" for n in ("merged", "pending", "discarded") if n in total
    )
    lines.append(f"tokens: {count_text(total.get('processed', 0))} processed = {fates}")
    lines.append(f"timeline and logs: {page}")
    return "\n".join(lines)


def _counts(faults: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in faults.items()) or "none"
