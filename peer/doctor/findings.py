"""What the doctor's checks find, and what comes of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

State = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found."""

    check: str
    state: State
    text: str
    remedy: str | None = None
    """What to do about it, where there is something to do."""

    took_s: float | None = None
    """How long the answer took, where that says something."""

    def __str__(self) -> str:
        mark = {"ok": "ok", "warning": "warn", "failed": "FAIL", "skipped": "-"}[self.state]
        line = f"{mark:<5} {self.check:<14} {self.text}"
        return line if self.remedy is None else f"{line}\n{'':<20} -> {self.remedy}"


def exit_code(findings: Iterable[Finding]) -> int:
    """0: nothing failed; 3: the network is in the way; 2: this machine is."""
    failed = {finding.check for finding in findings if finding.state == "failed"}
    seeds = [finding.state for finding in findings if finding.check == "seed"]
    if "seed" in failed and "ok" in seeds:
        failed.discard("seed")  # one that answers is enough to take part
    if not failed:
        return 0
    return 3 if failed <= {"seed", "DHT", "run", "reachability"} else 2


def as_json(findings: Sequence[Finding]) -> dict[str, object]:
    """For scripts: stable names, one entry per finding."""
    return {
        "ok": exit_code(findings) == 0,
        "findings": [asdict(finding) for finding in findings],
    }
