"""The demo as a script runs it: real processes, a kill -9, one JSON object at the end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.processes import Processes


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_ends_well_and_its_last_line_says_so(processes: Processes, tmp_path: Path) -> None:
    out = tmp_path / "demo"
    size = ("--steps", "120", "--peers", "3", "--directory", str(out))
    demo = processes.python("-P", "-m", "peer.cli", "demo", "--json", "--plain", *size)
    code = demo.wait(timeout=500)
    output = processes.output_of(demo)
    assert code == 0, output
    record = json.loads(output.splitlines()[-1])
    assert record["ok"] is True
    assert record["peers"] == 3
    assert record["kills"] == record["rejoins"] == 1
    assert record["loss_end"] < record["loss_start"]
    tokens = record["tokens"]
    accounted = tokens["merged"] + tokens["pending"] + tokens["discarded"]
    assert accounted == pytest.approx(tokens["processed"], rel=0.01)
    assert (out / "demo.png").stat().st_size > 10_000
    assert "<img" in (out / "demo.html").read_text(encoding="utf-8")
