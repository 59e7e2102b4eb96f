"""The benchmark of an agent's memory: its settings, its bars, and two small pairs of agents."""

from __future__ import annotations

from contextlib import nullcontext
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


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"values": 999, "fragments": 1}, "at least 1000"),
        ({"ways": ("paper",)}, "known: memory, files"),
        ({"founder": "paper"}, "known: memory, files"),
        ({"codec": "int5"}, "known: f32, f16, int8"),
        ({"turns": 0}, "at least 1"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        MemoryBench(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("founder", "memory", "disk", "what"),
    [
        (None, 24.0, 48.0, None),  # two agents in memory, two in files, and all their checkpoints
        (None, 23.9, 48.0, "of memory"),
        (None, 24.0, 47.9, "of disk"),
        ("files", 12.0, 56.0, None),
        ("files", 11.9, 56.0, "of memory"),
    ],
)
def test_more_values_than_the_machine_holds_are_refused(
    founder: str | None, memory: float, disk: float, what: str | None
) -> None:
    bench = MemoryBench(values=10**9, founder=founder)
    refused = nullcontext() if what is None else pytest.raises(ValueError, match=what)
    with refused:
        bench.check_fits(memory_bytes=memory * 1e9, disk_bytes=disk * 1e9)
    with pytest.raises(ValueError, match=r"values is 1e\+99; 4 agents need .* of memory"):
        MemoryBench(values=int(1e99)).check_fits(memory_bytes=1e12, disk_bytes=1e12)


def test_a_bar_is_missed_from_its_value_on() -> None:
    def row(way: str, resident: float, seconds: float) -> dict[str, object]:
        return {"way": way, "values": 1e9, "resident_bytes": resident, "round_s": seconds}

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
    assert files["anonymous_bytes"] < memory["anonymous_bytes"]
    assert not list(tmp_path.iterdir())
    assert "files" in table(found)
