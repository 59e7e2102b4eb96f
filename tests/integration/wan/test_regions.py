"""``tests.benchmark.regions``: a trial with real peers in network namespaces."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

RUN = Path(__file__).parents[3] / "examples" / "regions" / "run.toml"


def test_traffic_is_as_predicted_and_a_region_comes_back(tmp_path: Path) -> None:
    options = ("--mbit", "100", "--cycle", "24", "--time", "60s", "--fail", "10s")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.benchmark.regions", str(RUN), *options),
            *("--directory", str(tmp_path), "--json"),
        ],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert abs(row["off"]) < 0.15
    assert row["part"] > 0.8
    assert row["failure"]["returned_s"] is not None
