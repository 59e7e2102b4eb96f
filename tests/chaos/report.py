"""Reports of a chaos run for people: what was done to a swarm and what became of it, as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from peer.quantities import count_text
from tests.chaos.run import Judged, Outcome


def write(directory: Path, outcome: Outcome) -> Path:
    """Write the report of every scenario to ``report.txt``; returns its path."""
    path = directory / "report.txt"
    lines = [line for judged in outcome.judged for line in _scenario(judged)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _scenario(judged: Judged) -> Iterator[str]:
    """Verdicts, then faults and lives of learners, which also end by themselves, by time."""
    yield f"{judged.scenario}, seed {judged.seed}"
    for verdict in judged.verdicts:
        yield f"  {verdict.promise:10} {verdict.word:12} {verdict.reason}"
    told: list[tuple[float, str]] = []
    for fault in judged.evidence.faults:
        whom = f"{fault.victim or 'all'} {fault.detail}".rstrip()
        told.append((fault.at_s, f"{fault.kind} of {whom}, until {fault.until_s:.1f} s"))
    for peer in judged.evidence.peers:
        for life in peer.lives:
            if life.ready_s is not None:
                told.append((life.ready_s, f"{peer.name} is in the run"))
            told.append((life.ended_s, f"{peer.name} has ended, exit code {life.exit_code}"))
    yield from (f"  {at_s:8.1f} s  {text}" for at_s, text in sorted(told))


def text(record: Mapping[str, Any]) -> str:
    """The summary as text."""
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
    lines.append(f"faults, verdicts and logs: {record['directory']}")
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
