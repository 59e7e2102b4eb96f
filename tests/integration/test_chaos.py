"""`tests.chaos` as a script runs it: faults in real processes, and a verdict per promise."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.judging.lies import PROVABLE, ROUNDS_MAX, Lie
from tests.chaos.judging.scenarios import SCENARIOS
from tests.processes import Processes, still_running

MINUTES = os.environ.get("CHAOS_MINUTES", "3")
"""Minutes of each scenario in the slow tier."""

SEED = os.environ.get("CHAOS_SEED", "0")


def judged(code: int, output: str) -> dict[str, Any]:
    """The last line of the output of a run. Fails with all output if a promise is broken."""
    assert code in (0, 1), output
    record = json.loads(output.splitlines()[-1])
    assert isinstance(record, dict)
    assert (code == 0) == record["ok"]
    assert record["ok"], output
    return record


@pytest.mark.slow  # how commands hear a signal: tests/peer/test_signals.py
@pytest.mark.timeout(300)
def test_a_chaos_run_that_is_asked_to_end_leaves_nothing_behind(
    processes: Processes, tmp_path: Path
) -> None:
    command = ("-m", "tests.chaos", "kill", "--no-control", "--peers", "2")
    process = processes.python(*command, "--directory", str(tmp_path / "chaos"))
    run_file = tmp_path / "chaos" / "kill" / "run.toml"
    while not run_file.exists():  # the bootstrap peers are ready, and learners start
        assert process.poll() is None, processes.output_of(process)
        time.sleep(0.05)
    time.sleep(1.0)
    started = processes.note()
    assert len(started) >= 3
    process.terminate()
    assert process.wait(timeout=120) == 130, processes.output_of(process)
    assert not still_running(started, timeout_s=30)


@pytest.mark.slow
@pytest.mark.timeout(2 * 60 * float(MINUTES) + 600)
@pytest.mark.parametrize("scenario", list(SCENARIOS))
def test_every_scenario_keeps_every_promise(
    processes: Processes, tmp_path: Path, scenario: str
) -> None:
    """A control run of the same length gives the losses and step times to compare with."""
    process = processes.python(
        *("-m", "tests.chaos", scenario, "--json", "--directory", str(tmp_path / "chaos")),
        *("--minutes", MINUTES, "--peers", "5", "--seed", SEED),
    )
    code = process.wait(timeout=2 * 60 * float(MINUTES) + 500)
    record = judged(code, processes.output_of(process))
    tokens = record["tokens"]
    rest = tokens["merged"] + tokens["pending"] + tokens["discarded"]
    assert tokens["processed"] == pytest.approx(rest, abs=len(tokens))
    if scenario == "poison":
        assert record["verdicts"]["once"] is True, record
        assert record["scenarios"]["poison"]["kept_out"] >= 1, record
        assert record["faults"]["upload.nan"] >= 1 and record["faults"]["garbage"] >= 1
    if scenario == "liars":
        assert_that_lies_were_proved(
            {row["lie"]: row for row in record["scenarios"]["liars"]["lies"]}
        )


def assert_that_lies_were_proved(rows: dict[str, dict[str, Any]]) -> None:
    assert set(rows) >= {"overstate", "poison", "silence", "equivocate"}
    proved = {lie for lie in PROVABLE if lie in rows and rows[lie]["rounds"] is not None}
    assert proved, "nobody lied in a way that can be proved"
    assert all(rows[lie]["found_by"].startswith("proof: ") for lie in proved)
    # A false merge is proved by an audit, which draws some merges by chance: its lies count.
    counted = {lie: rows[lie]["lies" if lie is Lie.REDUCE else "rounds"] for lie in proved}
    assert all(count <= ROUNDS_MAX for count in counted.values()), counted
