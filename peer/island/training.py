"""The built-in loop in the ranks of an island: each trains on its part of the run's batch.

Every rank holds a whole copy of the model. The gradient of a step is the mean of the ranks'
gradients, each weighted by the tokens that it predicts, as if one device had computed all. It is
summed once per step, during the backward pass of the last micro-batch; a rank that runs out of
memory repeats its own part without the others. Models that need several devices for one copy are
for ``peer.island.join`` with FSDP2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from peer.island.ranks import RankPlace
from peer.run_file.sections import RunFile
from peer.trainer.computing.choices import Wish
from peer.trainer.computing.device_facts import choose_device
from peer.trainer.computing.engine import Engine
from peer.trainer.computing.fitting import Fit, Goal
from peer.trainer.computing.tuning import Tuner
from peer.trainer.loop import TrainerSettings, open_engine

BUCKET_VALUES = 1 << 23
"""Values that are summed by one collective operation: 32 MiB in fp32."""


def choose_devices(wish: Wish) -> tuple[str, ...]:
    """The devices of this machine to train on.

    If none is named, all accelerators that are like the first one: the slowest sets the pace of
    all. Raises ``ValueError`` if this machine lacks one.
    """
    named = _first(wish) if isinstance(wish, int) else wish
    chosen = named or _equal_accelerators() or ("auto",)
    for name in chosen:
        try:
            choose_device(name)
        except ValueError as error:
            raise ValueError(f"--device: {error}") from error
    return chosen


def _equal_accelerators() -> tuple[str, ...]:
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return tuple(f"cuda:{index}" for index, name in enumerate(names) if name == names[0])


def _first(count: int) -> tuple[str, ...]:
    """Names of the first accelerators; without any, of processes of the CPU, which is one."""
    if not torch.cuda.is_available():
        return tuple(f"cpu:{index}" for index in range(count))
    if count > torch.cuda.device_count():
        raise ValueError(f"--device is {count}; there are {torch.cuda.device_count()} here")
    return tuple(f"cuda:{index}" for index in range(count))


def batch_parts(batch_size: int, ranks: int) -> tuple[int, ...]:
    """Sequences of a batch for each rank, as equal as possible."""
    whole, rest = divmod(batch_size, ranks)
    return tuple(whole + (rank < rest) for rank in range(ranks))


class SummedGradients:
    """Sums the gradients of all ranks, each weighted by the values that it is the mean over.

    A bucket of gradients is sent as soon as the last backward pass of the step has completed it, so
    that the network works while the pass goes on. Buckets are in the order in which a backward pass
    completes them, and every rank sends them in that order, whatever it completes first. Compiled
    code hands over its gradients at its end: those of a block, or where the whole model is compiled
    all of them, so that nothing overlaps.

    ``DistributedDataParallel`` does the same for a step that succeeds at once. Here a pass that
    runs out of memory is repeated: buckets sent by then are of complete gradients, hence right, and
    are not sent again.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        *,
        bucket_values: int = BUCKET_VALUES,
    ) -> None:
        self._buckets = list(_buckets([*reversed(parameters)], bucket_values))
        self._bucket_of = {id(p): n for n, bucket in enumerate(self._buckets) for p in bucket}
        self._count = torch.ones(())
        self._whole: tuple[torch.Tensor, dist.Work] | None = None
        """The sum of the counts of all ranks, which may be under way."""
        self._missing: list[int] | None = None
        """Gradients that each bucket waits for, in the last pass of a step."""
        self._sent: list[tuple[torch.Tensor, dist.Work]] = []
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._completed)  # type: ignore[no-untyped-call]

    def begin_step(self, count: torch.Tensor) -> None:
        """A step begins, whose gradients here are of the mean over ``count`` values.

        Once per step, also where passes are repeated: all ranks take part in counting.
        """
        whole = count.float()
        self._count = whole.clone()
        self._whole = (whole, _summing(whole))

    def begin_pass(self, *, last: bool) -> None:
        """A backward pass begins. ``last``: its gradients complete those of the step."""
        self._missing = [len(bucket) for bucket in self._buckets] if last else None

    def _completed(self, parameter: torch.Tensor) -> None:
        if self._missing is None:
            return
        self._missing[self._bucket_of[id(parameter)]] -= 1
        while self.sent < len(self._buckets) and not self._missing[self.sent]:
            self._send()

    @property
    def sent(self) -> int:
        """Number of buckets of this step that were sent."""
        return len(self._sent)

    @torch.no_grad()
    def _send(self) -> None:
        # A parameter that this rank's part did not use has no gradient here.
        bucket = self._buckets[self.sent]
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        flat = torch.cat([part.reshape(-1) for part in parts]).mul_(self._count)
        self._sent.append((flat, _summing(flat)))

    def finish(self) -> None:
        """Send what is left, and set the gradients to those of the whole batch."""
        self._missing = None
        while self.sent < len(self._buckets):
            self._send()
        assert self._whole is not None, "a step was begun"
        count, counted = self._whole
        counted.wait()
        whole = count.clamp(min=1)  # where no rank predicts a token, all gradients are 0
        for bucket, (flat, work) in zip(self._buckets, self._sent, strict=True):
            work.wait()
            values = torch.split(flat.div_(whole), [p.numel() for p in bucket])
            for parameter, value in zip(bucket, values, strict=True):
                parameter.grad = value.view_as(parameter)
        self._sent.clear()


def _summing(values: torch.Tensor) -> dist.Work:
    """Begin to replace the values by their sums over all ranks."""
    work: dist.Work | None = dist.all_reduce(values, async_op=True)
    assert work is not None, "this process is a rank"
    return work


def _buckets(
    parameters: Sequence[torch.nn.Parameter], values_max: int
) -> Iterator[list[torch.nn.Parameter]]:
    bucket: list[torch.nn.Parameter] = []
    values = 0
    for parameter in parameters:
        if bucket and values + parameter.numel() > values_max:
            yield bucket
            bucket, values = [], 0
        bucket.append(parameter)
        values += parameter.numel()
    if bucket:
        yield bucket


def open_rank(
    run: RunFile,
    settings: TrainerSettings,
    goal: Goal,
    place: RankPlace,
    *,
    keep: Callable[[Fit], None] = lambda fit: None,
) -> Engine:
    """The engine of one rank, which trains on its part of the batch.

    Each rank finds out by itself what is the best way on its device; ``keep`` is told.
    """
    engine = open_engine(run, replace(settings, device=place.device))
    engine.batch_size = batch_parts(run.inner.batch_size, len(place.devices))[place.rank]
    goal = goal.for_batch(engine.batch_size)
    engine.choose(goal.first)
    engine.tuning = Tuner(engine, goal, keep=keep)
    if len(place.devices) > 1:
        engine.combine = SummedGradients([p for p in engine.model.parameters() if p.requires_grad])
    return engine
