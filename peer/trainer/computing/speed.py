"""Figures of speed for people: the device's peak, and the time until a merge and the end. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from peer.run_file.sections import GptModel, RunFile
from peer.trainer.computing.choices import Precision

PEAKS: Mapping[str, Mapping[Precision, float]] = {
    "H200": {"bf16": 989e12, "fp16": 989e12, "tf32": 495e12, "fp32": 67e12},
    "H100 PCIe": {"bf16": 756e12, "fp16": 756e12, "tf32": 378e12, "fp32": 51e12},
    "H100": {"bf16": 989e12, "fp16": 989e12, "tf32": 495e12, "fp32": 67e12},
    "B200": {"bf16": 2250e12, "fp16": 2250e12, "tf32": 1125e12, "fp32": 80e12},
    "A100": {"bf16": 312e12, "fp16": 312e12, "tf32": 156e12, "fp32": 19.5e12},
    "L40S": {"bf16": 362e12, "fp16": 362e12, "tf32": 183e12, "fp32": 91.6e12},
    "L4": {"bf16": 121e12, "fp16": 121e12, "tf32": 60e12, "fp32": 30.3e12},
    "A10G": {"bf16": 70e12, "fp16": 70e12, "tf32": 35e12, "fp32": 35e12},
    "V100": {"fp16": 125e12, "fp32": 15.7e12},
    "T4": {"fp16": 65e12, "fp32": 8.1e12},
    "RTX 5090": {"bf16": 209.5e12, "fp16": 209.5e12, "tf32": 104.8e12, "fp32": 104.8e12},
    "RTX 4090": {"bf16": 165.2e12, "fp16": 165.2e12, "tf32": 82.6e12, "fp32": 82.6e12},
    "RTX 3090": {"bf16": 71e12, "fp16": 71e12, "tf32": 35.6e12, "fp32": 35.6e12},
}
"""Dense floating-point operations per second by part of the device's name and precision, from the
vendor's data sheets, accumulating in fp32."""


def peak_flops(device_name: str, precision: Precision) -> float | None:
    """The peak of a device; ``None`` if it is not known. The longest matching name decides."""
    words = f" {device_name.replace('-', ' ')} "
    known = [name for name in PEAKS if f" {name} " in words]
    if not known:
        return None
    return PEAKS[max(known, key=len)].get(precision)


def flops_per_token(run: RunFile, parameters: int) -> float:
    """Floating-point operations of forward and backward pass per token (arXiv 2204.02311, B).

    Attention adds operations that no parameter stands for; those of other models are not known.
    """
    model, length = run.model, run.data.sequence_length
    attention = model.layers * model.width * length if isinstance(model, GptModel) else 0
    return 6.0 * parameters + 12.0 * attention


def steps_to_merge(merged_at: Sequence[int], *, cycle: int, steps: int) -> int:
    """Own steps until the next merge is expected; 0 if one is due.

    ``merged_at``: the step at which each fragment was last merged. Each is merged once per cycle.
    """
    return max(0, min(merged_at) + cycle - steps)


def first_merges(fragments: int, cycle: int) -> list[int]:
    """``merged_at`` of a peer that has just begun: its merges are spread over the first cycle."""
    return [-(index * cycle) // fragments for index in range(fragments)]


def time_left_s(
    *,
    tokens_left: float | None,
    step_tokens: float,
    step_times_s: Sequence[float],
    date_left_s: float | None,
) -> float | None:
    """Time until the run ends, by its tokens or its date; ``None`` if it has no end.

    ``step_times_s``: those of all peers that train, each on ``step_tokens`` tokens a step.
    """
    speed = sum(step_tokens / step_s for step_s in step_times_s if step_s > 0)
    ends = [] if date_left_s is None else [date_left_s]
    if tokens_left is not None and speed > 0:
        ends.append(tokens_left / speed)
    return max(0.0, min(ends)) if ends else None
