"""Finding out how much of a batch fits at once, and remembering it for the next time.

What was measured is remembered per device and model, in a file of this user, so that a peer
that returns begins to train at once. It is measured again when less memory is free than it took.
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
    PROBES_MAX_S,
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
"""Passes of a whole micro-batch are compared if they are shorter, otherwise those of a sequence."""

TURNS = 2
"""Number of passes in each precision, of which the best counts."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Choices that fit into this machine, with what was measured of them."""

    choices: Choices
    sequence_s: float
    """Time per sequence: of forward and backward pass, and after training of a step."""
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

    def put_speed(self, key: str, sequence_s: float) -> None:
        """Replace the measured time by that of steps of training, if the machine is known."""
        known = self.get(key)
        if known is not None:
            self.put(key, replace(known, sequence_s=sequence_s))

    def _all(self) -> dict[str, Any]:
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def key_of(run: RunFile, facts: DeviceFacts, wishes: Wishes) -> str:
    """A hash of everything that a measurement depends on."""
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


def fit(engine: Engine, facts: DeviceFacts, wishes: Wishes, *, room: float) -> Fit:
    """Measure, and let the engine train with what is fastest of what fits.

    Raises ``MachineTooSmall`` if not even one sequence does.
    """
    most = engine.choices.micro_batch
    for lean in (False, True):
        engine.choose(replace(engine.choices, lean=lean))
        best = _best_on_gpu(engine, room) if facts.kind == "cuda" else _largest(engine, room)
        if wishes.micro_batch is not None and best is not None and best.size != most:
            # The owner wants no other number, even if that is faster.
            wished = engine.probe(most) if facts.kind == "cuda" else None
            best = wished if wished is not None and wished.peak_bytes <= room else None
        if best is not None:
            break
    else:
        raise MachineTooSmall(engine.run.name, _shortage(wishes, room))
    chosen = replace(engine.choices, micro_batch=best.size)
    engine.choose(chosen)
    if facts.kind == "cpu" and wishes.precision == "auto" and chosen.precision != "fp32":
        best = _against_fp32(engine, best, room)
    return Fit(engine.choices, best.per_sequence_s, best.peak_bytes)


def _best_on_gpu(engine: Engine, room: float) -> Probe | None:
    """Try larger and larger micro-batches, with code that is compiled once for all sizes."""
    choices = engine.choices
    engine.choose(choices, any_size=True)
    probes: list[Probe] = []
    spent = 0.0
    while True:
        size = next_size(
            probes,
            # A compiler makes code of its own for a single sequence.
            start=2 if choices.compile else 1,
            most=choices.micro_batch,
            room_bytes=room,
            elapsed_s=spent,
        )
        if size is None:
            return fastest(probes, room_bytes=room)
        probes.append(engine.probe(size))
        if math.isfinite(probes[-1].seconds):
            spent += 2.0 * probes[-1].seconds


def _largest(engine: Engine, room: float) -> Probe | None:
    """The largest micro-batch whose memory there is.

    Elsewhere than on a GPU one sequence keeps all cores busy: a larger micro-batch is no slower,
    and memory follows from one sequence.
    """
    one = engine.probe(1)
    size = min(engine.choices.micro_batch, int(room / one.peak_bytes))
    if size < 1:
        return None
    if size == 1:
        return one
    if one.seconds * size > PROBES_MAX_S:
        return Probe(size, one.seconds * size, one.peak_bytes * size, one.work_s * size)
    return engine.probe(size)


def _against_fp32(engine: Engine, best: Probe, room: float) -> Probe:
    """Let the engine train in fp32 if that is faster: casting the weights has its price, too."""
    half, plain = engine.choices, replace(engine.choices, precision="fp32")
    size = best.size if best.seconds < SHORT_S else 1
    found: dict[Choices, list[Probe]] = {half: [], plain: []}
    for choices in (half, plain) * TURNS:
        engine.choose(choices)
        found[choices].append(engine.probe(size))
    work = {choices: min(each.work_s for each in probes) for choices, probes in found.items()}
    bytes_in_fp32 = max(each.peak_bytes for each in found[plain]) * best.size / size
    chosen = plain if work[plain] < work[half] and bytes_in_fp32 <= room else half
    engine.choose(chosen)
    seconds = min(each.seconds for each in found[chosen]) * best.size / size
    peak_bytes = bytes_in_fp32 if chosen is plain else best.peak_bytes
    return Probe(best.size, seconds, peak_bytes, work[chosen] * best.size / size)


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
