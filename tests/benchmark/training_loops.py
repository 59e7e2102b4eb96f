"""The process of one turn of ``tests.benchmark.training``: one loop trains for some seconds.

Settings come as one JSON object, the result is one line of JSON.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor

from dht.identity import PeerId, RunId
from peer.data.feed import Feed
from peer.extras.bases.base_models import fetch_base
from peer.model.recipes import build_model, build_optimizer, clip_gradients, next_token_loss
from peer.processes import is_out_of_memory
from peer.run_file.reading import from_canonical
from peer.run_file.schedule import Rates
from peer.run_file.sections import GptModel, RunFile, vocabulary
from peer.trainer.computing.choices import Precision, flops_per_token, peak_flops
from peer.trainer.computing.device_facts import facts_of
from peer.trainer.computing.engine import Engine, autocast
from peer.trainer.computing.fitting import Remembered, key_of
from peer.trainer.loop import Stop, TrainerSettings, prepare_torch, train
from peer.trainer.preflight import examine
from peer.trainer.session import Run, join
from peer.trainer.settings import JoinSettings

WARM_UPS = 5
"""Unmeasured steps, after which everything is compiled and all memory has been touched."""

STEPS_MIN = 5

BEYOND_BUILT_IN = 2
"""Largest part of a batch that is tried by hand, over the one that the built-in loop has found:
each that does not fit takes a minute of compiling."""

ROUND_TIMEOUT_S = 300.0
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The task of one process."""

    run: str
    """The run file in canonical form."""
    device: str
    threads: int | None
    seconds: float
    folder: str
    """Folder of the whole benchmark."""
    own: str = ""
    """Folder of this process."""
    seeds: tuple[str, ...] = ()
    pace_s: float = 0.0

    @property
    def run_file(self) -> RunFile:
        data = self.run.encode()
        return from_canonical(data, RunId(blake3(data).hexdigest()))

    @property
    def trainer(self) -> TrainerSettings:
        return TrainerSettings(device=self.device, threads=self.threads)

    def joining(self) -> JoinSettings:
        return JoinSettings(
            directory=Path(self.own) / "peer",
            seeds=self.seeds,
            listen=LOOPBACK,
            found_after_s=ROUND_TIMEOUT_S if self.seeds else 0.0,
            pace_s=self.pace_s,
        )

    def engine(self) -> Engine:
        """Begin as ``shoal join`` does. Choices that the first turn finds while it trains are
        kept."""
        engine = examine(
            self.run_file,
            self.trainer,
            pace_s=0.0,
            directory=Path(self.own),
            remembered=self.remembered,
        ).engine
        assert engine is not None
        return engine

    @property
    def remembered(self) -> Remembered:
        """Measurements of the turns before."""
        return Remembered(Path(self.folder) / "measured.json")


class Stopwatch:
    """Times steps after the warm-up. The device is idle before and after them."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self._device = device
        self._seconds = seconds
        self._seen = 0
        self._began: float | None = None
        self.steps = 0
        """Measured steps."""
        self.elapsed_s = 0.0
        self.cpu_s = 0.0
        """Processor time of this process meanwhile."""

    def step(self, *, ready: Callable[[], bool] = lambda: True) -> bool:
        """Count a step. Returns whether enough is measured. ``ready``: whether to begin."""
        self._seen += 1
        if self._began is None:
            if self._seen >= WARM_UPS and ready():
                self._began = self._now()
                self.cpu_s = -time.process_time()
                if self._device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(self._device)
            return False
        self.steps += 1
        if self.steps < STEPS_MIN or time.perf_counter() - self._began < self._seconds:
            return False
        self.elapsed_s = self._now() - self._began
        self.cpu_s += time.process_time()
        return True

    @property
    def running(self) -> bool:
        return self._began is not None

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()


def alone(setup: Setup, result: dict[str, Any]) -> Stopwatch:
    """The built-in loop without a run."""
    run, engine = setup.run_file, setup.engine()
    watch = Stopwatch(engine.device, setup.seconds)
    rates = Rates(run)
    rates.follow(engine.optimizer)
    feed = Feed(run, PeerId("alone"), data_dir=Path(setup.own), over=lambda: False)
    tokens = 0
    with engine.tuning:
        for batch in feed.batches(None, None, engine.device):
            rates.set(tokens)
            engine.gradients(batch)
            engine.apply()
            tokens += batch[:, 1:].numel()
            if watch.step(ready=lambda: engine.tuning.text is None):
                break
    result["way"] = engine.choices.text
    return watch


def shoal(setup: Setup, result: dict[str, Any]) -> Stopwatch:
    """The built-in loop as ``shoal join`` runs it. It is measured after its first round."""
    engine = setup.engine()
    watch = Stopwatch(engine.device, setup.seconds)
    stop = Stop()
    before: dict[str, float] = {}
    deadline = time.monotonic() + ROUND_TIMEOUT_S

    def on_step(run: Run) -> None:
        if not watch.running and time.monotonic() > deadline:
            raise TimeoutError(f"no round within {ROUND_TIMEOUT_S:g} s")
        ended = watch.step(ready=lambda: run.status.rounds > 0 and engine.tuning.text is None)
        if watch.running and not before:
            status = run.status
            before.update(rounds=status.rounds, blocked_s=status.blocked_s)
        if ended:
            status = run.status
            result["rounds"] = status.rounds - before["rounds"]
            result["blocked_share"] = (status.blocked_s - before["blocked_s"]) / watch.elapsed_s
            stop.ask()

    train(
        setup.run_file,
        own=setup.joining(),
        settings=setup.trainer,
        stop=stop,
        on_step=on_step,
        engine=engine,
    )
    result["way"] = engine.choices.text
    return watch


def by_hand(setup: Setup, result: dict[str, Any]) -> Stopwatch:
    """A plain loop for this device: bf16 where it is in hardware, compiled, fused optimizer.

    The first turn finds the part of a batch that fits, for all turns.
    """
    run, device = setup.run_file, prepare_torch(setup.trainer)
    facts = facts_of(device)
    model = build_model(run, base=fetch_base(run)).to(device)
    optimizer = build_optimizer(run, model)
    torch.set_float32_matmul_precision("high")
    loss_of: Callable[[Tensor], Tensor] = partial(next_token_loss, model)
    if facts.compiles:
        loss_of = torch.compile(loss_of, dynamic=False)
    shape = (run.inner.batch_size, run.data.sequence_length + 1)
    batch = torch.randint(0, vocabulary(run.model) or 256, shape, device=device)

    def step(precision: Precision, parts: Sequence[Tensor]) -> None:
        for part in parts:
            with autocast(device, precision):
                loss = loss_of(part) * (len(part) / len(batch))
            torch.autograd.backward(loss)
        clip_gradients(run, model)
        optimizer.step()
        optimizer.zero_grad()

    known = Path(setup.folder) / "by_hand.json"
    if not known.exists():
        built_in = setup.remembered.get(key_of(run, facts, setup.trainer.wishes))
        most = len(batch) if built_in is None else BEYOND_BUILT_IN * built_in.choices.micro_batch
        found = _fitting(step, facts.fast, batch, most=most)
        known.write_text(json.dumps(found), encoding="utf-8")
    precision, size = json.loads(known.read_text(encoding="utf-8"))
    parts = torch.split(batch, size)
    watch = Stopwatch(device, setup.seconds)
    step(precision, parts)
    while not watch.step():
        step(precision, parts)
    compiled = ", compiled" if facts.compiles else ""
    result["way"] = f"{precision}{compiled}, {size} sequences at once"
    return watch


def _fitting(
    step: Callable[[Precision, Sequence[Tensor]], None],
    precisions: Sequence[Precision],
    batch: Tensor,
    *,
    most: int,
) -> tuple[Precision, int]:
    """The precision, and the largest part of a batch that fits. A CPU's precisions are timed."""
    size = min(most, len(batch))
    tried = precisions if batch.device.type == "cpu" else precisions[:1]
    while True:
        try:
            times = {
                precision: _seconds_of(step, precision, torch.split(batch, size))
                for precision in tried
            }
            return min(times, key=lambda precision: times[precision]), size
        except RuntimeError as error:
            if not is_out_of_memory(error) or size == 1:
                raise
        size = -(-size // 2)


def _seconds_of(
    step: Callable[[Precision, Sequence[Tensor]], None],
    precision: Precision,
    parts: Sequence[Tensor],
) -> float:
    times = []
    for _ in range(WARM_UPS):
        began = time.perf_counter()
        step(precision, parts)
        times.append(time.perf_counter() - began)
    return min(times)


def partner(setup: Setup) -> None:
    """A peer that founds the run and merges, but computes nothing, until it is killed.

    It also ends when the process that started it is gone.
    """
    parent = os.getppid()
    run_file = setup.run_file
    model = build_model(run_file, base=fetch_base(run_file))
    idle = torch.optim.SGD(model.parameters(), lr=1e-3)
    tokens = run_file.inner.batch_size * run_file.data.sequence_length
    joined = join(run_file, model=model, optimizer=idle, auto=False, settings=setup.joining())
    with joined as run:
        told = False
        while not run.over and os.getppid() == parent:
            if not told and run.link is not None and "seed=" in run.link:
                _say({"seed": run.link.partition("seed=")[2].partition("&")[0]})
                told = True
            run.step(tokens=tokens)


def _say(record: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


def _peak_bytes(device: torch.device) -> int:
    """Peak of the device while it was measured; on a CPU, of the process since its start."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def measure(loop: str, setup: Setup) -> dict[str, Any]:
    """Run one loop and return the fields of its result."""
    run = setup.run_file
    result: dict[str, Any] = {"loop": loop}
    watch = {"alone": alone, "shoal": shoal, "by_hand": by_hand}[loop](setup, result)
    device = prepare_torch(setup.trainer)
    facts = facts_of(device)
    parameters = sum(p.numel() for p in build_model(run, weights=False).parameters())
    step_s = watch.elapsed_s / watch.steps
    step_tokens = run.inner.batch_size * run.data.sequence_length
    tokens_per_s = step_tokens / step_s
    share = None
    if isinstance(run.model, GptModel):
        peak = peak_flops(facts.name, facts.fast[0])
        share = None if peak is None else tokens_per_s * flops_per_token(run, parameters) / peak
    return {
        **result,
        "device": facts.name,
        "parameters": parameters,
        "step_s": step_s,
        "tokens_per_s": tokens_per_s,
        "tokens_per_cpu_s": step_tokens * watch.steps / watch.cpu_s,
        "share_of_peak": share,
        "peak_memory_bytes": _peak_bytes(device),
    }


def main() -> None:
    settings = json.loads(sys.argv[1])
    loop = settings.pop("loop")
    settings["seeds"] = tuple(settings["seeds"])
    setup = Setup(**settings)
    if loop == "partner":
        partner(setup)
    else:
        _say(measure(loop, setup))


if __name__ == "__main__":
    main()
