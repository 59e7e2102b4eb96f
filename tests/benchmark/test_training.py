from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from peer.errors import RunFileError, Unusable
from peer.run_file.presets import preset
from peer.run_file.reading import parse
from peer.run_file.sections import CustomModel, GptModel, PythonStdlibData, RunFile
from tests.benchmark import training
from tests.benchmark.training import LOOPS, LoopFailed, TrainingBench, measured_run, table
from tests.benchmark.training_loops import WARM_UPS, Setup, Stopwatch, measure
from tests.command_line import exit_code_of
from tests.peer.run_file.whole import whole

TINY = """
name = "tiny"
[model]
layers = 1
width = 16
heads = 2
context = 16
[data]
sequence_length = 16
[inner]
batch_size = 2
[outer]
fragments = 2
steps_per_cycle = 8
overlap_steps = 2
"""


def fake(
    speeds: dict[str, list[float]], monkeypatch: pytest.MonkeyPatch, *, device: str = "abacus"
) -> list[str]:
    """Let turns of loops reach these speeds. Returns the list that the loops' names go to."""
    begun: list[str] = []

    def turn(loop: str, setup: Setup) -> dict[str, Any]:
        begun.append(loop)
        speed = 1.0 if len(begun) == 1 else speeds[loop].pop(0)
        share = speed / 1000
        record = {
            "loop": loop,
            "tokens_per_s": speed,
            "share_of_peak": share,
            "step_s": 1.0,
            "way": "fp32",
        }
        more: dict[str, Any] = {
            "device": device,
            "parameters": 8,
            "peak_memory_bytes": 5,
            "rounds": 3,
        }
        more["tokens_per_cpu_s"] = 1000.0
        more["blocked_share"] = 0.01
        return {**record, **more}

    class Partner:
        def __enter__(self) -> str:
            return "/ip4/127.0.0.1/tcp/1"

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(training, "_measured", turn)
    monkeypatch.setattr(training, "_partner", lambda setup, pace_s: Partner())
    return begun


def test_ratios_compare_turns_that_followed_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The machine is half as fast in the second turn, for all loops.
    speeds = {"alone": [100.0, 50.0, 90.0], "by_hand": [110.0, 55.0, 99.0]}
    begun = fake({**speeds, "shoal": [99.5, 49.5, 60.0]}, monkeypatch)
    path = tmp_path / "run.toml"
    path.write_text(whole(TINY), encoding="utf-8")
    command = [str(path), "--turns", "3", "--device", "cpu", "--json"]
    assert exit_code_of(training.main, [*command, "--check"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [row["loop"] for row in found["rows"]] == list(LOOPS)
    rows = {row["loop"]: row for row in found["rows"]}
    assert rows["alone"]["tokens_per_s"] == 90.0
    assert (rows["shoal"]["tokens_per_s_min"], rows["shoal"]["tokens_per_s_max"]) == (49.5, 99.5)
    assert rows["by_hand"]["share_of_peak"] == pytest.approx(0.099)
    assert rows["shoal"]["rounds"] == 9
    bars = {bar["against"]: bar for bar in found["bars"]}
    assert bars["alone"]["share"] == pytest.approx(0.99)
    assert bars["alone"]["met"]
    assert bars["by_hand"]["share"] == pytest.approx(0.9)
    assert bars["by_hand"]["share_by_cpu_time"] == pytest.approx(1.0)
    assert not bars["by_hand"]["met"]
    assert "shoal has 90.0% of the speed of by_hand" in table(found)
    assert "safe points took 1.00% of the time" in table(found)
    # After a first turn that warms caches up, each loop is once the first, the second, the last.
    rounds = [begun[at : at + 3] for at in (1, 4, 7)]
    assert all(set(each) == set(LOOPS) for each in rounds)
    assert all({each[place] for each in rounds} == set(LOOPS) for place in range(3))


def test_only_the_loops_that_are_asked_for_take_turns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--turns", "2", "--device", "cpu", "--check"]
    begun = fake({"alone": [50.0, 50.0], "by_hand": [100.0]}, monkeypatch)
    assert exit_code_of(training.main, [*command, "--loops", "by_hand,alone"]) == 0
    assert begun == ["by_hand", "alone", "alone", "by_hand"]
    text = capsys.readouterr().out
    assert "alone" in text and "shoal" not in text
    for loops, told in (("alone,both", "loop is 'both'; there are"), ("", "no loop is given")):
        assert exit_code_of(training.main, [*command, "--loops", loops]) == 2
        assert told in capsys.readouterr().err


def test_missed_bars_are_a_failure_only_if_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--turns", "1", "--device", "cpu"]
    for options, shoal, code in (([], 10.0, 0), (["--check"], 10.0, 1), (["--check"], 99.9, 0)):
        fake({"alone": [100.0], "by_hand": [100.0], "shoal": [shoal]}, monkeypatch)
        assert exit_code_of(training.main, [*command, *options]) == code
        assert ("missed" in capsys.readouterr().out) == (shoal == 10.0)


@pytest.mark.parametrize(("size", "met"), [("124m", False), ("1b", True), ("350m", None)])
def test_a_named_size_is_compared_with_what_its_device_should_reach(
    size: str,
    met: bool | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Half of the peak, and less than 420 k tokens/s."""
    command = ["--size", size, "--turns", "1", "--device", "cpu", "--check"]
    speeds = {"alone": [500.0], "by_hand": [500.0], "shoal": [500.0]}
    fake(speeds, monkeypatch, device="NVIDIA H100 80GB HBM3")
    assert exit_code_of(training.main, command) == (met is False)
    text = capsys.readouterr().out
    assert ("share_of_peak 0.5; at least 0.45: kept" in text) == (size == "1b")
    assert ("tokens_per_s 500; at least 420000: missed" in text) == (size == "124m")


def test_a_run_and_a_size_are_one_too_many(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["x.toml", "--size", "1b"], ["--size", "2b"]):
        assert exit_code_of(training.main, ["--device", "cpu", *command]) == 2
    assert "pass a run or --size, not both" in capsys.readouterr().err


def test_the_measured_run_needs_no_download_and_does_not_end() -> None:
    run = measured_run(preset("350m", "fineweb-edu"))
    assert run.data == PythonStdlibData(sequence_length=1024)
    assert run.model == preset("350m").model
    assert run.end.tokens == "unlimited"
    with pytest.raises(Unusable):
        measured_run(RunFile(model=CustomModel()))
    with pytest.raises(RunFileError, match="at least 256"):
        measured_run(RunFile(model=GptModel(vocabulary=64)))


def test_a_stopwatch_counts_steps_after_the_warm_up_once_it_may_begin() -> None:
    watch = Stopwatch(torch.device("cpu"), seconds=1e-9)
    for _ in range(WARM_UPS + 3):
        assert not watch.step(ready=lambda: False)
    assert not watch.running
    assert not watch.step()
    assert watch.running
    assert [watch.step() for _ in range(5)] == [False] * 4 + [True]
    assert watch.steps == 5
    assert watch.elapsed_s > 0


@pytest.mark.slow  # the program compares them
@pytest.mark.parametrize("loop", ["alone", "by_hand"])
def test_a_loop_without_shoal_reports_its_speed(loop: str, tmp_path: Path) -> None:
    run = measured_run(parse(TINY))
    setup = Setup(
        run=run.canonical().decode(),
        device="cpu",
        threads=1,
        seconds=0.05,
        folder=str(tmp_path),
        own=str(tmp_path),
    )
    found = measure(loop, setup)
    assert found["tokens_per_s"] * found["step_s"] == pytest.approx(2 * 16)
    assert found["tokens_per_cpu_s"] > 0.5 * found["tokens_per_s"]  # one thread
    assert found["peak_memory_bytes"] > 10e6
    assert found["share_of_peak"] is None
    assert found["way"].endswith("at once")


def test_the_loop_by_hand_finds_what_fits_once_for_all_turns(tmp_path: Path) -> None:
    run = measured_run(parse(TINY))
    setup = Setup(
        run=run.canonical().decode(),
        device="cpu",
        threads=1,
        seconds=0.05,
        folder=str(tmp_path),
        own=str(tmp_path),
    )
    known = tmp_path / "by_hand.json"
    measure("by_hand", setup)
    assert json.loads(known.read_text(encoding="utf-8"))[1] == 2
    known.write_text('["bf16", 1]', encoding="utf-8")
    assert measure("by_hand", setup)["way"] == "bf16, 1 sequences at once"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_all_loops_take_turns_and_the_one_with_shoal_merges(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    bench = TrainingBench(run=parse(TINY), device="cpu", threads=1, seconds=10.0, turns=1)
    found = training.run_training_bench(bench)
    rows = {row["loop"]: row for row in found["rows"]}
    assert all(row["tokens_per_s"] > 0 for row in rows.values())
    assert rows["shoal"]["rounds"] > 0
    assert 0 < rows["shoal"]["blocked_share"] < 0.5
    assert set(rows) == set(LOOPS)


@pytest.mark.slow
def test_a_loop_that_fails_says_why() -> None:
    bench = TrainingBench(run=parse(TINY), device="nothing", threads=1, turns=1)
    with pytest.raises(LoopFailed, match=r"(?s)loop alone did not finish.*'nothing' cannot"):
        training.run_training_bench(bench)
