"""Findings of the doctor's checks, as text, as JSON, and as an exit code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from dht.bounded_mapping import ALL

State = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check."""

    check: str
    state: State
    text: str
    remedy: str | None = None
    """Advice on what to do; ``None`` if there is nothing to do."""

    took_s: float | None = None
    """Response time; ``None`` for checks without one."""

    def __str__(self) -> str:
        mark = {"ok": "ok", "warning": "warn", "failed": "FAIL", "skipped": "-"}[self.state]
        line = f"{mark:<5} {self.check:<14} {self.text}"
        return line if self.remedy is None else f"{line}\n{'':<20} -> {self.remedy}"


def exit_code(findings: Iterable[Finding]) -> int:
    """0: nothing failed; 2: a check of this machine failed; 3: only checks of the network did."""
    failed = {finding.check for finding in findings if finding.state == "failed"}
    seeds = [finding.state for finding in findings if finding.check == "seed"]
    if "seed" in failed and "ok" in seeds:
        failed.discard("seed")  # one that answers is enough to take part
    if not failed:
        return 0
    return 3 if failed <= {"seed", "DHT", "run", "reachability"} else 2


def as_record(findings: Sequence[Finding]) -> dict[str, object]:
    """The findings for ``--json``, and the tables of what others could cause meanwhile. Names are
    stable."""
    return {
        "ok": exit_code(findings) == 0,
        "findings": [asdict(finding) for finding in findings],
        "tables": {name: asdict(used) for name, used in ALL.use().items()},
    }
