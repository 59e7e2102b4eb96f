"""Established members that lie, as real processes beside honest ones: a short `tests.chaos`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.chaos.judging.lies import PROVABLE, ROUNDS_MAX, Lie
from tests.processes import Processes

MINUTES = 2.5


@pytest.mark.slow
@pytest.mark.timeout(60 * MINUTES + 600)
def test_members_that_lie_are_banned_and_their_run_goes_on(
    processes: Processes, tmp_path: Path
) -> None:
    """Without a control: as long a run beside it would tell whether the loss suffers."""
    command = ("-m", "tests.chaos", "liars", "--json", "--no-control")
    sizes = ("--minutes", str(MINUTES), "--directory", str(tmp_path / "chaos"))
    process = processes.python(*command, *sizes)
    code = process.wait(timeout=60 * MINUTES + 500)
    output = processes.output_of(process)
    assert code in (0, 1), output
    record = json.loads(output.splitlines()[-1])
    assert record["ok"], output
    rows = {row["lie"]: row for row in record["scenarios"]["liars"]["lies"]}
    assert set(rows) >= {"overstate", "poison", "silence", "equivocate"}
    proved = {lie for lie in PROVABLE if lie in rows and rows[lie]["rounds"] is not None}
    assert proved, "nobody lied in a way that can be proved"
    assert all(rows[lie]["found_by"].startswith("proof: ") for lie in proved)
    # A false merge is proved by an audit, which draws some merges by chance: its lies count.
    counted = {lie: rows[lie]["lies" if lie is Lie.REDUCE else "rounds"] for lie in proved}
    assert all(count <= ROUNDS_MAX for count in counted.values()), counted
    report = (tmp_path / "chaos" / "report.txt").read_text(encoding="utf-8")
    assert "liar-0" in report
