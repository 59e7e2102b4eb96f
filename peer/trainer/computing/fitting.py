"""A way to begin to train that is safe, and remembering what turned out to be the best.

A few passes before joining say how much memory a sequence takes, and about how fast this machine
will be; the rest is found while training (``peer.trainer.computing.tuning``). It is remembered per
device and model, in a file of this user, and measured again when less memory is free than it took.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from dataclasses import asdict, dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec
import torch

from dht.whole_files import write_whole
from peer.errors import MachineTooSmall
from peer.model.muon import batches, product_dtype
from peer.model.recipes import trained_parameters
from peer.quantities import bytes_text
from peer.run_file.sections import GptModel, RunFile
from peer.trainer.computing.choices import (
    FREE_FRACTION,
    Choices,
    DeviceFacts,
    MicroBatchCost,
    OwnerChoices,
    Precision,
    Probe,
)
from peer.trainer.computing.device_facts import free_bytes
from peer.trainer.computing.engine import Engine
from peer.trainer.computing.probing import probe

logger = logging.getLogger(__name__)

REMEMBERED_MAX = 200
"""Number of measurements that are kept; beyond it the oldest are dropped."""

SAFE_SHARE = 0.5
"""Part of the room that the first micro-batches may take, by calculation from one sequence."""

EAGER = 2.0
"""Memory of activations without compiling, over that of compiled code; 2.0 was measured of 124
million parameters in bf16."""

TRIAL_TOKENS = 64
"""Tokens of the pass before joining, except on a GPU. A processor takes seconds for a sequence, and
time and memory grow with the tokens."""

TRIAL_S = 3.0
"""Time for passes before joining that only tell the speed."""

BLOCK_BYTES = 20e6
"""Memory that the allocator of a GPU takes at once. A smaller difference is not seen."""

WARM_S = 2.0
"""A pass that is this quick is made twice: the first one of a small model measures little else than
loading, which takes more than a second where other programs run."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Choices that fit into this machine, with what was measured of them."""

    choices: Choices
    sequence_s: float
    """Time per sequence: of forward and backward pass, and after training of a step."""
    step_bytes: float
    """Memory of gradients and activations. A CPU's has no gradients."""
    compile_s: float | None = None
    """Time to compile; ``None``: nothing was compiled yet."""
    fixed_bytes: float = 0.0
    """Part of ``step_bytes`` that does not grow with the micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A way to begin to train, and what is left to find out."""

    first: Choices
    """The way to begin with: not compiled, and with a small micro-batch."""
    choices: Choices
    """The way that is wanted. Its micro-batch is the largest, or the one that is known to fit."""
    room_bytes: float
    """Memory for gradients and activations."""
    fixed_bytes: float = 0.0
    """Part of it that ``first`` takes for any number of sequences."""
    known: Fit | None = None
    """The measurement of an earlier start, if there is one: then only code is left to compile."""
    wished: bool = False
    """True if the machine's owner wants this micro-batch and no other."""
    grows: bool = False
    """True if larger micro-batches may be faster, as on a GPU."""
    compares: bool = False
    """True if fp32 may be faster."""

    def for_batch(self, size: int) -> Goal:
        """The same for a device that trains on so many sequences of a batch."""
        first, choices = (
            replace(chosen, micro_batch=min(chosen.micro_batch, size))
            for chosen in (self.first, self.choices)
        )
        return replace(self, first=first, choices=choices)

    @property
    def text(self) -> str:
        """The way in words."""
        return f"{self.first.text} to begin with" if self.known is None else self.choices.text


class Remembered:
    """A file of measurements."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def get(self, key: str) -> Fit | None:
        try:
            return msgspec.convert(self._all()[key], Fit)
        except (KeyError, msgspec.ValidationError):
            return None  # not measured yet, or by another version

    def put(self, key: str, fit: Fit) -> None:
        known = self._all()
        known.pop(key, None)
        known[key] = asdict(fit)
        kept = dict(list(known.items())[-REMEMBERED_MAX:])
        try:
            write_whole(self._path, json.dumps(kept).encode())
        except OSError as error:  # the next start measures again
            logger.warning("measurement_not_kept file=%s error=%s", self._path, error.strerror)

    def put_speed(self, key: str, sequence_s: float) -> None:
        """Replace the measured time by that of steps of training, if the machine is known."""
        known = self.get(key)
        if known is not None:
            self.put(key, replace(known, sequence_s=sequence_s))

    def _all(self) -> dict[str, Any]:
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}


def key_of(run: RunFile, facts: DeviceFacts, wishes: OwnerChoices, *, devices: int = 1) -> str:
    """A hash of everything that a measurement depends on."""
    parts = (
        *(facts, torch.__version__),
        *(msgspec.json.encode(run.model), run.data.sequence_length, run.inner.batch_size),
        *(wishes, devices),
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


def room_bytes(engine: Engine, *, others_bytes: float, devices: int = 1) -> float:
    """Memory for gradients and activations, of what is free now, on each of ``devices``.

    ``others_bytes``: memory that is still to be taken, beside what training takes. Several devices
    that are processors share one memory.
    """
    values = 4.0 * _trained(engine)
    moments = 2.0 * values
    # On CUDA the gradients are part of what is measured.
    gradients = 0.0 if engine.device.type == "cuda" else values
    sums = 0.0 if devices == 1 else values
    free = (1.0 - FREE_FRACTION) * free_bytes(engine.device) - others_bytes
    if engine.device.type == "cpu":
        # Each process has a model of its own; the one that is measured here is there already.
        free = (free + values) / devices - values
    return free - moments - gradients - sums - step_bytes(engine)


def step_bytes(engine: Engine) -> float:
    """Memory that a step of the optimizer takes and gives back: Muon's, for its largest batch.

    By then this process has freed its activations; a compiler at work in it may have some. All
    values are there twice in fp32, once more with a scaler, and four times in the type of products.
    """
    values = max(
        (
            sum(matrix.numel() for matrix in batch)
            for group in engine.optimizer.param_groups
            if group.get("orthogonal")
            for batch in batches(group["params"])
        ),
        default=0,
    )
    if not values:
        return 0.0
    scaled = 4 if engine.scaler is not None else 0
    return values * (8.0 + scaled + 4 * product_dtype(engine.device).itemsize)


def _trained(engine: Engine) -> int:
    return sum(p.numel() for p in trained_parameters(engine.model).values())


def begin(
    engine: Engine, facts: DeviceFacts, wishes: OwnerChoices, *, room: float, known: Fit | None
) -> tuple[Goal, Fit]:
    """Choose the way to begin with. Returns what is left to find out, and the first measurement.

    Raises ``MachineTooSmall`` if not even one sequence fits.
    """
    wanted = engine.choices
    if known is not None and known.step_bytes <= room:
        return _known(engine, known, room)
    one = _one_sequence(engine, room)
    goal = Goal(
        first=engine.choices,
        choices=replace(wanted, lean=engine.choices.lean),
        room_bytes=room,
        fixed_bytes=one.fixed_bytes,
        wished=wishes.micro_batch is not None,
        grows=facts.kind == "cuda",
        compares=facts.kind == "cpu" and wishes.precision == "auto" and wanted.precision != "fp32",
    )
    first = replace(engine.choices, micro_batch=_first_size(engine, goal, one))
    most = max(1, min(wanted.micro_batch, one.fitting(room)))
    sequence_s = _quickest(engine, goal, one)
    engine.choose(first)
    return replace(goal, first=first), Fit(first, sequence_s, one.bytes_of(most))


def size_of_compiled(eager: Probe, *, fixed: float, most: int, room: float) -> int:
    """The micro-batch to compile for, from the best one without compiling.

    Larger ones were measured unless memory was short, and compiled code needs less of it.
    """
    larger = min(most, int(EAGER * eager.size))
    return larger if eager.scaled(larger, fixed=fixed).peak_bytes > room else eager.size


def meanwhile(choices: Choices, takes: float, *, fixed: float, room: float) -> Choices:
    """A way to train while code is compiled that takes so much memory, as the compiler tries it.

    ``fixed``: the part of it that training takes, too, whatever its micro-batch.
    """
    each = EAGER * (takes - fixed) / choices.micro_batch
    size = (room - takes - fixed) / max(1.0, each)
    return replace(choices, compile=False, micro_batch=max(1, min(choices.micro_batch, int(size))))


def _known(engine: Engine, known: Fit, room: float) -> tuple[Goal, Fit]:
    first = known.choices
    if first.compile:
        first = meanwhile(first, known.step_bytes, fixed=known.fixed_bytes, room=room)
    engine.choose(first)
    goal = Goal(
        first=first,
        choices=known.choices,
        room_bytes=room,
        fixed_bytes=known.fixed_bytes,
        known=known,
    )
    return goal, known


def _one_sequence(engine: Engine, room: float) -> MicroBatchCost:
    """Measure one sequence, if need be with recomputed activations."""
    for lean in (False, True):
        engine.choose(replace(engine.choices, compile=False, micro_batch=1, lean=lean))
        one = _in_full(engine) if engine.device.type == "cuda" else _in_short(engine)
        if one.fitting(room):
            return one
    raise MachineTooSmall(engine.run.name, _shortage(room))


def _in_full(engine: Engine) -> MicroBatchCost:
    """One sequence, and what a second one adds, if both fit."""
    probe(engine, 1)  # it loads kernels
    one = probe(engine, 1)
    gradients = 4.0 * _trained(engine)
    added = one.peak_bytes - gradients
    two = probe(engine, 2) if engine.batch_size > 1 and isfinite(added) else None
    if two is None or not isfinite(two.peak_bytes):
        return MicroBatchCost(one.seconds, gradients, added)
    added = min(added, max(two.peak_bytes - one.peak_bytes, BLOCK_BYTES))
    return MicroBatchCost(one.seconds, one.peak_bytes - added, added)


def _in_short(engine: Engine) -> MicroBatchCost:
    """One sequence, by calculation from a few tokens."""
    length = engine.run.data.sequence_length
    tokens = min(length, TRIAL_TOKENS)
    fewer = max(1, tokens // 2)
    less = probe(engine, 1, length=fewer, forward_only=True)
    more = probe(engine, 1, length=tokens)
    if more.seconds < WARM_S:  # most of it may be the first use of the libraries' code
        more = min(more, probe(engine, 1, length=tokens), key=lambda each: each.seconds)
    # Copies of weights in another precision take the same memory for any number of tokens.
    grown = (more.peak_bytes - less.peak_bytes) / max(1, tokens - fewer)
    # What is computed again is a part of ``more`` alone.
    token_bytes = min(max(0.0, grown), more.peak_bytes / tokens)
    return MicroBatchCost(
        sequence_s=more.seconds * length / tokens,
        fixed_bytes=more.peak_bytes - token_bytes * tokens,
        sequence_bytes=token_bytes * length,
    )


def _first_size(engine: Engine, goal: Goal, one: MicroBatchCost) -> int:
    """The first micro-batch: one that certainly fits."""
    fitting = one.fitting(goal.room_bytes)
    most = goal.choices.micro_batch
    if goal.wished and not goal.choices.compile:  # compiled code needs less memory
        if most > fitting:
            raise MachineTooSmall(engine.run.name, _shortage(goal.room_bytes, most))
        return most
    return max(1, min(most, int(SAFE_SHARE * fitting))) if goal.grows else 1


def _quickest(engine: Engine, goal: Goal, one: MicroBatchCost) -> float:
    """Time of a sequence in the fastest way of those that can be tried in a moment.

    People decide by it how much may be sent. By a few tokens a small model seems many times slower
    than it is, because most of the time does not depend on their number.
    """
    best = one.sequence_s
    half_of_room = max(1, int(SAFE_SHARE * one.fitting(goal.room_bytes)))
    most = min(goal.choices.micro_batch, half_of_room)
    plain: list[Precision] = ["fp32"] if goal.compares else []
    precisions = (goal.choices.precision, *plain)
    for precision in precisions:
        engine.choose(replace(engine.choices, precision=precision))
        until = time.perf_counter() + TRIAL_S / len(precisions)
        size = 1
        while size <= most and size * best <= until - time.perf_counter():
            best = min(best, probe(engine, size).per_sequence_s)
            size = min(2 * size, most) if size < most else most + 1
    return best


def _shortage(room: float, wished: int | None = None) -> str:
    free = f"{bytes_text(max(0.0, room))} are free for it"
    if wished is not None:
        return (
            f"{wished} sequences at once need more memory than that: {free}; pass "
            "--micro-batch auto"
        )
    return (
        "one sequence at once does not fit, not even with recomputed activations and a loss in "
        f"chunks: {free}; close other programs, use a device with more memory (--device), or "
        "several devices as one peer (see 'shoal docs speed')"
    )
