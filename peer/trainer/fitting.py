"""Finding out how much of a batch fits at once, and remembering it for the next time.

What was measured is remembered per device and model, in the user's cache folder, so that a peer
that returns begins to train at once.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from peer.errors import MachineTooSmall
from peer.quantities import bytes_text
from peer.run_file.sections import GptModel, RunFile
from peer.trainer.choices import (
    FREE_FRACTION,
    Choices,
    DeviceFacts,
    Probe,
    Wishes,
    fastest,
    next_size,
)
from peer.trainer.device_facts import free_bytes
from peer.trainer.engine import Engine

REMEMBERED_MAX = 200
"""Number of measurements that are kept; beyond it the oldest are dropped."""

SHORT_S = 0.5
"""A pass that is shorter is measured more than once."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Choices that fit into this machine, with what was measured of them."""

    choices: Choices
    sequence_s: float
    """Time of forward and backward pass per sequence."""
    step_bytes: float
    """Memory of gradients and activations. A CPU's has no gradients."""


class Remembered:
    """A file of measurements."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def get(self, key: str) -> Fit | None:
        try:
            found = self._all()[key]
            return Fit(Choices(**found.pop("choices")), **found)
        except (KeyError, TypeError, AttributeError):
            return None  # not measured yet, or by another version

    def put(self, key: str, fit: Fit) -> None:
        known = self._all()
        known.pop(key, None)
        known[key] = asdict(fit)
        kept = dict(list(known.items())[-REMEMBERED_MAX:])
        self._path.parent.mkdir(parents=True, exist_ok=True)
        written = self._path.with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps(kept), encoding="utf-8")
        written.replace(self._path)

    def _all(self) -> dict[str, Any]:
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def key_of(run: RunFile, facts: DeviceFacts, wishes: Wishes) -> str:
    """What a measurement depends on, as a short text."""
    parts = (
        *(facts.name, facts.memory_bytes, torch.__version__),
        *(msgspec.json.encode(run.model), run.data.sequence_length, run.inner.batch_size),
        wishes,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def least_bytes(run: RunFile, parameters: int) -> float:
    """Memory below which training is impossible: one sequence at once, recomputed activations.

    Parameters, gradients and two moments, and the input of each block.
    """
    model = run.model
    activations = (
        4.0 * run.data.sequence_length * model.width * (model.layers + 2)
        if isinstance(model, GptModel)
        else 0.0
    )
    return 16.0 * parameters + activations


def room_bytes(engine: Engine, *, others_bytes: float) -> float:
    """Memory for gradients and activations, of what is free now.

    ``others_bytes``: memory that is still to be taken, beside the optimizer's two moments.
    """
    parameters = sum(p.numel() for p in engine.model.parameters())
    moments = 8.0 * parameters
    # On CUDA the gradients are part of what is measured.
    gradients = 0.0 if engine.device.type == "cuda" else 4.0 * parameters
    free = (1.0 - FREE_FRACTION) * free_bytes(engine.device)
    return free - moments - gradients - others_bytes


def fit(
    engine: Engine,
    facts: DeviceFacts,
    wishes: Wishes,
    *,
    room: float,
) -> Fit:
    """Measure, and let the engine train with the fastest micro-batch that fits.

    Raises ``MachineTooSmall`` if not even one sequence does.
    """
    for lean in (False, True):
        probes = _probes(engine, replace(engine.choices, lean=lean), wishes, room)
        best = fastest(probes, room_bytes=room)
        if best is not None:
            break
    else:
        raise MachineTooSmall(engine.run.name, _shortage(wishes, room))
    chosen = replace(engine.choices, micro_batch=best.size)
    engine.choose(chosen)
    if facts.kind == "cpu" and wishes.precision == "auto" and chosen.precision != "fp32":
        best = _against_fp32(engine, best, room)
    return Fit(engine.choices, best.per_sequence_s, best.peak_bytes)


def _against_fp32(engine: Engine, best: Probe, room: float) -> Probe:
    """Let the engine train in fp32 if that is faster: casting the weights has its price, too."""
    half, plain = engine.choices, replace(engine.choices, precision="fp32")
    found = {half: [best], plain: []}
    # In turns, and the best of them: other programs disturb single measurements.
    for choices in (plain, half, plain) if best.seconds < SHORT_S else (plain,):
        engine.choose(choices)
        found[choices].append(engine.probe(best.size))
    fastest_of = {each: min(probes, key=lambda p: p.seconds) for each, probes in found.items()}
    wins = (
        fastest_of[plain].seconds < fastest_of[half].seconds
        and fastest_of[plain].peak_bytes <= room
    )
    chosen = plain if wins else half
    engine.choose(chosen)
    return fastest_of[chosen]


def _probes(engine: Engine, choices: Choices, wishes: Wishes, room: float) -> list[Probe]:
    engine.choose(choices, any_size=wishes.micro_batch is None)
    # A compiler makes code of its own for a single sequence.
    start = choices.micro_batch if wishes.micro_batch else 2 if choices.compile else 1
    most = choices.micro_batch
    probes: list[Probe] = []
    spent = 0.0
    while True:
        size = next_size(probes, start=start, most=most, room_bytes=room, elapsed_s=spent)
        if size is None or (probes and wishes.micro_batch is not None):
            return probes
        probes.append(engine.probe(size))
        if math.isfinite(probes[-1].seconds):
            spent += 2.0 * probes[-1].seconds


def _shortage(wishes: Wishes, room: float) -> str:
    free = f"{bytes_text(max(0.0, room))} are free for it"
    if wishes.micro_batch is not None:
        return (
            f"{wishes.micro_batch} sequences at once need more memory than that: {free}; "
            "pass --micro-batch auto"
        )
    return (
        "one sequence at once does not fit, not even with recomputed activations and a loss in "
        f"chunks: {free}; close other programs, use a device with more memory (--device), or "
        "several devices as one peer (GUIDE.md, islands)"
    )
