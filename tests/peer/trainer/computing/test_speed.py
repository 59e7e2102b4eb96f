"""Figures of speed for people."""

from __future__ import annotations

import pytest

from peer.run_file.sections import GptModel, PythonStdlibData, RunFile
from peer.trainer.computing.choices import PRECISIONS
from peer.trainer.computing.speed import (
    PEAKS,
    first_merges,
    flops_per_token,
    peak_flops,
    steps_to_merge,
    time_left_s,
)


def test_peaks_are_known_by_name_and_otherwise_nothing_is_said() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3", "bf16") == 989e12
    assert peak_flops("NVIDIA H100 PCIe", "bf16") == 756e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "tf32") == 156e12
    assert peak_flops("NVIDIA GeForce RTX 4090", "bf16") == 165.2e12
    assert peak_flops("Tesla T4", "bf16") is None
    assert peak_flops("NVIDIA L40S", "bf16") != peak_flops("NVIDIA L4", "bf16")
    assert peak_flops("CPU, 8 threads", "fp32") is None
    assert all(set(peaks) <= set(PRECISIONS) for peaks in PEAKS.values())


def test_the_share_of_the_peak_counts_attention() -> None:
    model = GptModel(layers=12, width=768, context=1024)
    run = RunFile(model=model, data=PythonStdlibData(sequence_length=1024))
    flops = flops_per_token(run, 124_000_000)
    assert 425e3 * flops / 989e12 == pytest.approx(0.368, abs=0.002)  # measured on an H100


def test_merges_are_spread_over_a_cycle_and_each_fragment_has_one_per_cycle() -> None:
    merged_at = first_merges(4, 24)
    assert steps_to_merge(merged_at, cycle=24, steps=0) == 6
    assert steps_to_merge(merged_at, cycle=24, steps=5) == 1
    assert steps_to_merge(merged_at, cycle=24, steps=9) == 0, "it is late"
    merged_at[3] = 9
    assert steps_to_merge(merged_at, cycle=24, steps=9) == 3
    assert steps_to_merge([7], cycle=24, steps=9) == 22


def test_the_run_ends_by_tokens_at_the_speed_of_all_or_by_date() -> None:
    def left(tokens: float | None, date: float | None, *times: float) -> float | None:
        return time_left_s(
            tokens_left=tokens, step_tokens=100.0, step_times_s=times, date_left_s=date
        )

    assert left(1000.0, None, 1.0) == 10.0
    assert left(1000.0, None, 1.0, 0.25) == 2.0
    assert left(1000.0, 5.0, 1.0) == 5.0
    assert left(None, None, 1.0) is None
    assert left(1000.0, None, 0.0) is None, "no step yet"
    assert left(-50.0, None, 1.0) == 0.0
