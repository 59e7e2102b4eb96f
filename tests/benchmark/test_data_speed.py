from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmark.data_speed import measure


@pytest.mark.bench
def test_training_waits_for_data_less_than_a_hundredth_of_the_time(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="the extra 'hf' is not installed")
    speed = measure(tmp_path, megabytes=64, appetite_per_s=1e6, seconds=10.0, workers=2)
    print(f"\n{speed}")
    assert speed.waited_share < 0.01
