"""Choices from facts about devices that are not here."""

from __future__ import annotations

import math

import pytest

from peer.run_file.sections import GptModel, PythonStdlibData, RunFile
from peer.trainer.computing.choices import (
    PEAKS,
    PRECISIONS,
    Choices,
    DeviceFacts,
    OwnerChoices,
    Probe,
    Wish,
    choose,
    cuda_precisions,
    fastest,
    flops_per_token,
    next_size,
    peak_flops,
    split,
    wished_devices,
    wishes_from,
)


def cuda(capability: tuple[int, int], *, bf16: bool) -> DeviceFacts:
    return DeviceFacts(
        kind="cuda",
        name="a device",
        fast=cuda_precisions(capability, bf16=bf16),
        compiles=capability >= (7, 0),
    )


@pytest.mark.parametrize(
    ("capability", "bf16", "precision"),
    [
        ((9, 0), True, "bf16"),
        ((8, 0), True, "bf16"),
        ((7, 5), False, "fp16"),
        ((7, 0), False, "fp16"),
        ((6, 1), False, "fp32"),
    ],
)
def test_the_generation_of_a_gpu_decides_its_precision(
    capability: tuple[int, int], bf16: bool, precision: str
) -> None:
    chosen = choose(cuda(capability, bf16=bf16), OwnerChoices(), batch_size=32)
    assert chosen.precision == precision
    assert chosen.compile == (capability >= (7, 0))
    assert chosen.micro_batch == 32


def test_the_owner_has_the_last_word_where_the_device_can() -> None:
    wishes = OwnerChoices(precision="tf32", micro_batch=4, compile="off")
    found = choose(cuda((9, 0), bf16=True), wishes, batch_size=32)
    assert found == Choices(precision="tf32", compile=False, micro_batch=4)
    assert choose(cuda((9, 0), bf16=True), wishes, batch_size=2).micro_batch == 2
    with pytest.raises(ValueError, match=r"a device cannot train in bf16; .*fp16, fp32"):
        choose(cuda((7, 5), bf16=False), OwnerChoices(precision="bf16"), batch_size=1)
    old_processor = DeviceFacts(kind="cpu", name="CPU", fast=("fp32",), emulated=("bf16",))
    assert choose(old_processor, OwnerChoices(), batch_size=1).precision == "fp32"
    assert choose(old_processor, OwnerChoices(precision="bf16"), batch_size=1).precision == "bf16"
    assert choose(old_processor, OwnerChoices(compile="on"), batch_size=1).compile


def test_options_are_read_and_refused_with_the_known_ones() -> None:
    assert wishes_from(precision="auto", micro_batch="auto", compile="auto") == OwnerChoices()
    given = wishes_from(precision="fp16", micro_batch="8", compile="on")
    assert given == OwnerChoices(precision="fp16", micro_batch=8, compile="on")
    for option, text in (("precision", "fp8"), ("micro_batch", "0"), ("compile", "yes")):
        known = {"precision": "auto", "micro_batch": "auto", "compile": "auto", option: text}
        with pytest.raises(ValueError, match=option.replace("_", "-")):
            wishes_from(**known)


@pytest.mark.parametrize(
    ("count", "most", "sizes"),
    [
        (32, 32, (32,)),
        (32, 100, (32,)),
        (32, 8, (8, 8, 8, 8)),
        (30, 8, (6, 6, 6, 6, 6)),  # one shape to compile
        (7, 4, (4, 3)),  # 7 is prime
        (31, 8, (8, 8, 8, 7)),
        (3, 1, (1, 1, 1)),
    ],
)
def test_a_batch_is_divided_into_equal_parts_where_that_costs_little(
    count: int, most: int, sizes: tuple[int, ...]
) -> None:
    assert split(count, most) == sizes


def measured(
    *, room: float, fixed: float, per_sequence: float, speed: float = 1.0, start: int = 1
) -> list[Probe]:
    """All micro-batches that are tried of a batch of 64 on an imaginary device."""
    probes: list[Probe] = []
    while True:
        size = next_size(probes, start=start, most=64, room_bytes=room)
        if size is None:
            return probes
        peak = fixed + per_sequence * size
        fits = peak <= room
        seconds = 0.001 * (4 + size * speed)
        probes.append(Probe(size, seconds if fits else math.inf, peak if fits else math.inf))


def test_micro_batches_are_doubled_until_the_next_one_would_not_fit() -> None:
    probes = measured(room=20.0, fixed=2.0, per_sequence=1.0)
    # 32 is known not to fit from the difference between 8 and 16: it is not tried.
    assert [probe.size for probe in probes] == [1, 2, 4, 8, 16]
    best = fastest(probes, room_bytes=20.0)
    assert best is not None
    assert best.size == 16
    assert [p.size for p in measured(room=1e9, fixed=2.0, per_sequence=1.0)][-1] == 64


def test_a_device_that_is_saturated_gets_no_larger_micro_batch() -> None:
    probes = measured(room=1e9, fixed=0.0, per_sequence=1.0, speed=100.0)
    assert [probe.size for probe in probes] == [1, 2, 4]
    best = fastest(probes, room_bytes=1e9)
    assert best is not None
    assert best.size == 1


def test_one_sequence_is_tried_when_two_do_not_fit() -> None:
    probes = measured(room=5.0, fixed=1.0, per_sequence=3.0, start=2)
    assert [probe.size for probe in probes] == [2, 1]
    best = fastest(probes, room_bytes=5.0)
    assert best is not None
    assert best.size == 1
    assert fastest(measured(room=1.0, fixed=1.0, per_sequence=3.0), room_bytes=1.0) is None


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


@pytest.mark.parametrize(
    ("text", "wish"),
    [
        ("auto", ()),
        ("cuda:1", ("cuda:1",)),
        ("cuda", ("cuda",)),
        ("cpu:0,cpu:1", ("cpu:0", "cpu:1")),
        ("1024", 1024),
        ("cuda, cuda:2", ("cuda:0", "cuda:2")),
    ],
)
def test_devices_are_one_or_several_of_a_kind(text: str, wish: Wish) -> None:
    assert wished_devices(text) == wish


@pytest.mark.parametrize(
    "text",
    [
        *("tpu", "cuda:", "cuda:-1", "cuda:01", "CPU", ""),
        *("0", "1025", "-1", "9" * 5000, "two"),
        *("cuda:0,", "cuda:0,tpu", "cuda:0,auto"),
        *("cpu,cpu:0", "cuda:0,cuda", "cuda:1,cuda:1"),  # two ranks on one GPU
        "cpu:0,cuda:0",
    ],
)
def test_devices_that_are_not_different_ones_of_a_kind_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^--device is .* different devices of one kind"):
        wished_devices(text)
