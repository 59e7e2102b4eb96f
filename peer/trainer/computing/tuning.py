"""Finding the fastest way to train that fits, while training.

A ``Tuner`` begins with a way that is safe, measures micro-batches of the batches that are trained
on, and then compiles for the best one in the background. So a peer trains from its first moment in
a run, and nothing is computed for the sake of measuring. Gradients are the same to rounding in
whatever way they are computed, and a micro-batch that runs out of memory is repeated
(``peer.trainer.computing.engine``).
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from math import inf
from typing import Self, TypeAlias

import torch
from torch import nn

from peer.processes import is_out_of_memory
from peer.quantities import bar_text, duration_text, plural
from peer.trainer.computing.choices import Choices, Probe, fastest, next_size
from peer.trainer.computing.compiling import usual_compile_s
from peer.trainer.computing.engine import Engine, Tuning, autocast, recompute_activations
from peer.trainer.computing.fitting import EAGER, Fit, Goal, meanwhile, size_of_compiled
from peer.trainer.computing.probing import Meter, random_tokens

COMPARED_S = 0.5
"""Time of a pass by which precisions are compared: of so many sequences that casting the weights
counts about as little as in training."""

ALMOST = 0.99
"""Share of a compilation that takes longer than expected."""

PASSES = 2
"""Number of micro-batches that are measured of each kind: the first one fills caches."""

Plan: TypeAlias = Generator[bool, Probe | None, None]
"""Goes on after each micro-batch: it yields whether to measure the next one, and is sent what was
measured."""

Measuring: TypeAlias = Generator[bool, Probe | None, Probe]


class Tuner(Tuning):
    """Finds the best way to train while an engine trains."""

    def __init__(
        self, engine: Engine, goal: Goal, *, keep: Callable[[Fit], None] = lambda fit: None
    ) -> None:
        """``keep`` is called with what was found."""
        self._engine = engine
        self._goal = goal
        self._keep = keep
        self._fit = goal.known
        """The last measurement."""
        self._compile_s = None if goal.known is None else goal.known.compile_s
        """Time of the last compilation."""
        self._told = None if goal.known is None else goal.choices
        """The way that people were told of last, beside the one to begin with."""
        self._code: Compilation | None = None
        self._plan = self._planned()
        self._measures = self._done = False
        self._is_between_steps = True

    def __enter__(self) -> Self:
        self._go_on(None)
        return self

    def __exit__(self, *_: object) -> None:
        self._plan.close()

    @property
    def text(self) -> str | None:
        if self._done:
            return None
        if self._code is None:
            return f"measuring {plural(self._engine.choices.micro_batch, 'sequence')} at once"
        taken = self._code.elapsed_s
        # By the time that it took before, the first time by that of another machine.
        share = taken / (self._compile_s or usual_compile_s(self._engine.model))
        return f"compiling {bar_text(min(ALMOST, share))} for {duration_text(taken)}"

    @contextmanager
    def around(self, size: int, *, last: bool) -> Iterator[None]:
        if self._done:
            yield
            return
        meter = Meter(self._engine, size)
        with meter if self._measures else nullcontext():
            yield
        self._is_between_steps = last
        self._go_on(meter.probe)

    def leaving(self) -> None:
        if self._code is not None and not self._code.done:
            self._engine.events.append({"event": "compiler_awaited", "text": self.text})

    def wait(self) -> bool:
        return self._code is not None and self._code.wait()

    def reduced(self) -> None:
        """Memory ran out: remember it, and train without compiled code until there is some."""
        wanted = self._engine.choices
        if not (self._done or wanted.compile):
            return  # the plan sees it
        if wanted.compile:
            size = max(1, int(wanted.micro_batch / EAGER))
            self._engine.choose(replace(wanted, compile=False, micro_batch=size))
        self._told = self._engine.choices  # as ``micro_batch_reduced``
        self._plan, self._done = self._replanned(wanted), False
        self._go_on(None)

    def _go_on(self, found: Probe | None) -> None:
        try:
            self._measures = self._plan.send(found)
        except StopIteration:
            self._done = True

    # --- the plan -------------------------------------------------------------------------------

    def _planned(self) -> Plan:
        engine, goal = self._engine, self._goal
        if goal.known is not None:
            if goal.choices != engine.choices:
                yield from self._compiled(goal.choices)
                self._tell()
            return
        if goal.wished and goal.choices.compile:  # without compiling it may not fit
            yield from self._compiled(replace(goal.choices, lean=engine.choices.lean))
        best = yield from self._best()
        if goal.choices.compile and not goal.wished:
            best = yield from self._best_compiled(best)
        if goal.compares and not engine.choices.compile:
            best = yield from self._against_fp32(best)
        self._found(self._fit_of(best))

    def _replanned(self, choices: Choices) -> Plan:
        if choices.compile:
            yield from self._compiled(choices)
        if (earlier := self._fit) is None:
            best = yield from self._measured(self._engine.choices.micro_batch)
            self._found(self._fit_of(best))
        else:
            share = choices.micro_batch / earlier.choices.micro_batch
            grown = (earlier.step_bytes - earlier.fixed_bytes) * min(1.0, share)
            took = earlier.fixed_bytes + grown
            self._found(replace(earlier, choices=self._engine.choices, step_bytes=took))

    def _fit_of(self, best: Probe) -> Fit:
        return Fit(
            choices=self._engine.choices,
            sequence_s=best.per_sequence_s,
            step_bytes=best.peak_bytes,
            fixed_bytes=min(self._fixed_bytes, best.peak_bytes),
        )

    @property
    def _fixed_bytes(self) -> float:
        """Memory for any number of sequences. It is not known of recomputing begun meanwhile."""
        goal = self._goal
        return goal.fixed_bytes if self._engine.choices.lean == goal.first.lean else 0.0

    def _found(self, fit: Fit) -> None:
        self._tell()
        self._fit = replace(fit, compile_s=self._compile_s)
        # A compiler that failed is tried again at the next start: it may lack a package or space.
        if fit.choices.compile or not self._goal.choices.compile:
            self._keep(self._fit)

    def _tell(self) -> None:
        """Say how it trains from now on, as the next start will, unless that was said."""
        choices = self._engine.choices
        if choices != self._told:
            self._told = choices
            self._engine.events.append({"event": "way_found", "text": choices.text})

    def _compiled(self, choices: Choices) -> Plan:
        """Train on until there is code for these choices, and then with it."""
        engine = self._engine
        engine.events.append({"event": "compiling"})
        with Compilation(engine, choices) as self._code:
            # The rest of a batch may have sizes that there is no code for.
            while not (self._code.done and self._is_between_steps):
                yield False
        code, self._code = self._code, None
        if code.failure is None:
            self._compile_s = code.elapsed_s
            engine.events.append({"event": "compiled", "seconds": round(code.elapsed_s, 1)})
            engine.choose(choices)
        else:
            engine.events.append({"event": "compile_failed", "reason": code.failure})
            engine.choose(replace(engine.choices, compile=False))

    def _best(self) -> Measuring:
        """Find the micro-batch to train with."""
        if self._goal.wished:
            return (yield from self._measured(self._goal.choices.micro_batch))
        if self._goal.grows:
            return (yield from self._fastest())
        return (yield from self._largest())

    def _fastest(self) -> Measuring:
        """Try larger and larger micro-batches."""
        goal, engine = self._goal, self._engine
        probes: list[Probe] = []
        while True:
            size = next_size(
                probes,
                start=engine.choices.micro_batch,
                most=goal.choices.micro_batch,
                room_bytes=goal.room_bytes,
            )
            if size is None:
                break
            probes.append((yield from self._measured(size)))
        best = fastest(probes, room_bytes=goal.room_bytes) or probes[-1]
        self._resize(best.size)
        return best

    def _best_compiled(self, eager: Probe) -> Measuring:
        """Compile for the micro-batch that follows from the best one without compiling."""
        engine, room = self._engine, self._goal.room_bytes
        fixed = min(self._fixed_bytes, eager.peak_bytes)
        size = size_of_compiled(eager, fixed=fixed, most=self._goal.choices.micro_batch, room=room)
        wanted = replace(engine.choices, compile=True, micro_batch=size)
        takes = fixed + (eager.scaled(size, fixed=fixed).peak_bytes - fixed) / EAGER
        engine.choose(meanwhile(wanted, takes, fixed=fixed, room=room))
        yield from self._compiled(wanted)
        if not engine.choices.compile:
            self._resize(eager.size)
            return eager
        return (yield from self._measured(size))

    def _largest(self) -> Measuring:
        """The largest micro-batch whose memory there is.

        Elsewhere than on a GPU one sequence keeps all cores busy: a larger micro-batch is no
        slower, and memory follows from one sequence.
        """
        engine, room = self._engine, self._goal.room_bytes
        one = yield from self._measured(1)
        if one.peak_bytes > room and not engine.choices.lean:
            engine.choose(replace(engine.choices, lean=True))
            one = yield from self._measured(1)
        fitting = one.fitting(room, fixed=self._fixed_bytes)
        size = min(self._goal.choices.micro_batch, fitting)
        return one if size <= 1 else (yield from self._measured(size))

    def _against_fp32(self, best: Probe) -> Measuring:
        """Train in fp32 if that is faster: casting the weights has its price, too."""
        half = self._engine.choices
        most = min(best.size, half.micro_batch)  # fewer than were measured if memory ran out
        # On a busy machine the time of a pass is that of other programs as well.
        sequence_s = min(best.seconds, best.work_s) / best.size
        size = max(1, min(most, int(COMPARED_S / max(1e-9, sequence_s))))
        probes = []
        for choices in (half, replace(half, precision="fp32")):
            self._engine.choose(replace(choices, micro_batch=size))
            probes.append((yield from self._measured(size)))
        in_half, plain = probes
        # What a sequence adds is at most twice as much in fp32.
        grown = max(0.0, best.peak_bytes - in_half.peak_bytes)
        takes = min(plain.scaled(most).peak_bytes, plain.peak_bytes + 2.0 * grown)
        if plain.work_s < in_half.work_s and takes <= self._goal.room_bytes:
            self._engine.choose(replace(half, precision="fp32", micro_batch=most))
            return replace(plain.scaled(most), peak_bytes=takes)
        self._engine.choose(replace(half, micro_batch=most))
        return replace(in_half.scaled(most), peak_bytes=best.peak_bytes)

    def _measured(self, size: int) -> Measuring:
        """Measure micro-batches of ``size`` sequences, or the equal parts that a batch allows."""
        engine = self._engine
        while engine.choices.compile and not self._is_between_steps:
            yield False
        self._resize(size)
        wanted = max(engine.sizes(engine.choices))
        probes: list[Probe] = []
        while len(probes) < PASSES:
            probe = yield True
            if engine.choices.micro_batch != size:
                return Probe(size, inf, inf, inf)  # memory ran out
            if probe is not None and probe.size == wanted:
                probes.append(probe)
        return Probe(
            size=wanted,
            seconds=min(probe.seconds for probe in probes),
            peak_bytes=max(probe.peak_bytes for probe in probes),
            work_s=min(probe.work_s for probe in probes),
        )

    def _resize(self, size: int) -> None:
        engine = self._engine
        engine.choices = replace(engine.choices, micro_batch=size)
        if engine.device.type == "cuda":
            torch.cuda.empty_cache()  # blocks of another size are of no use


class Compilation:
    """Code for one way to train, used as a context manager: leaving it waits for the thread.

    The code is made by passes of a twin of the model, whose gradients are its own. Other threads
    must not call compiled code meanwhile: torch refuses it. A compiler restores the random
    generators to where they were when it began, so a model with dropout may draw some masks twice.
    """

    def __init__(self, engine: Engine, choices: Choices) -> None:
        self._engine = engine
        self._choices = choices
        self._twin = twin(engine.model)
        if choices.lean != engine.choices.lean:
            recompute_activations(self._twin, choices.lean)
        self._error: Exception | None = None
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._work, name="compile")

    def __enter__(self) -> Compilation:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()

    def wait(self) -> bool:
        """Wait for the thread. Returns whether it was still at work."""
        was_alive = self._thread.is_alive()
        self._thread.join()
        return was_alive

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    @property
    def failure(self) -> str | None:
        """The reason why there is no code, in words."""
        error = self._error
        if error is None:
            return None
        return " ".join(f"{type(error).__name__}: {error}".split())[:200]

    def _work(self) -> None:
        device = self._engine.device
        try:
            # A new thread begins with the first device as its current one, and a compiler measures
            # its candidates on that.
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                for size in sorted(set(self._engine.sizes(self._choices)), reverse=True):
                    self._pass(size)
        except Exception as error:
            # A compiler raises errors of any type. One of the model itself reaches the loop, too.
            # If memory ran out, the code is there: it is what took the memory.
            self._error = None if is_out_of_memory(error) else error

    def _pass(self, size: int) -> None:
        engine, choices = self._engine, self._choices
        code = engine.code(choices)
        with autocast(engine.device, choices.precision):
            loss = code(self._twin, random_tokens(engine, size))
        torch.autograd.backward(loss)


def twin(model: nn.Module) -> nn.Module:
    """A module with gradients of its own, whose parameters and buffers have the same memory."""
    same: dict[int, object] = {id(buffer): buffer for buffer in model.buffers()}
    for parameter in model.parameters():
        same[id(parameter)] = nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
    return copy.deepcopy(model, same)
