"""The benchmark of an agent's memory: its bars, and two small pairs of agents."""

from __future__ import annotations

from pathlib import Path

import pytest

from averaging.numbers.layout import Layout
from tests.benchmark.memory import MemoryBench, _bars, run_memory_bench, table


def test_the_model_has_about_as_many_values_as_were_asked_for_and_every_fragment_some() -> None:
    bench = MemoryBench(values=1_000_000, fragments=5)
    sizes = [part.size for part in Layout.build(bench.tensors, bench.fragments).fragments]
    assert len(sizes) == 5 and min(sizes) == max(sizes)
    assert 1_000_000 <= sum(sizes) < 1_020_000
    assert bench.run.outer.fragments == 5


def test_a_bar_is_missed_from_its_value_on() -> None:
    def row(way: str, resident: float, seconds: float) -> dict[str, object]:
        values = {"values": 1e9, "momentum": 0.5}
        return {"way": way, **values, "resident_bytes": resident, "round_s": seconds}

    def met(memory: float, files: float, seconds: float) -> list[bool]:
        bars = _bars([row("memory", memory, 1), row("files", files, seconds)])
        return [each["met"] for each in bars]

    assert met(14.4e9, 1.9e9, 1.2) == [True, True, True]
    assert met(14.45e9, 2e9, 1.21) == [False, False, False]
    assert len(list(_bars([row("memory", 9e9, 1.0)]))) == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_both_ways_make_rounds_and_leave_the_folder_as_it_was(tmp_path: Path) -> None:
    bench = MemoryBench(values=4_000_000, fragments=2, turns=1, step_s=0.2)
    found = run_memory_bench(bench, folder=tmp_path)
    memory, files = found["rows"]
    assert memory["rounds"] >= 2 and files["rounds"] >= 2
    assert 8 * 4e6 < memory["fetched_bytes"] < 8.3 * 4e6
    assert files["anonymous_bytes"] < memory["anonymous_bytes"]
    assert not list(tmp_path.iterdir())
    assert "files" in table(found)
