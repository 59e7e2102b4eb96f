"""One learner made of several processes: DDP or FSDP2 under torchrun, one peer in the run.

::

    with peer.island.join("my.run.toml", model=model, optimizer=optimizer) as run:   # in every rank
        ...the usual loop...

Rank 0 is the peer: it has the agent, and decides at each safe point what is offered and adopted
(``peer.trainer.lead``). The other ranks (``follower``) carry out its commands
(``peer.trainer.channel``), unit by unit (``peer.trainer.units``): of a unit that is offered each
rank sends the part that it holds, and of a unit that is adopted it receives that part. So all ranks
adopt a version at the same step, and nothing larger than a unit is ever whole anywhere but in the
slots of rank 0. ``ranks`` starts one process for each device of a machine, and ``training`` is the
loop in them. Nothing is sent between two safe points, and a safe point at which nothing is due
costs two small messages. While the machine's owner wants no steps (``shoal pause``, ``shoal
limits``), rank 0 stays at its safe point, and the other ranks with it.

Commands travel over a gloo group of their own, whatever the model's collectives use. The ranks must
make their optimizer steps together, as data parallel training does anyway. When a rank is lost,
torchrun ends the other ranks and starts all of them again; rank 0 has the same folder, hence the
same identity, and gets the parameters from the run.

A header and one part at a time: no more than a unit (4 MiB) is gathered anywhere but in the slots,
a large fragment is spread over safe points, and the ranks agree on nothing but the order of these
messages. News that reaches rank 0 asynchronously (the end, the learning rate, a turn to evaluate)
takes effect for all at a safe point; ranks that learned it at different steps would diverge or
hang.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from peer.bridge.messages import Fields
from peer.island.follower import Follower
from peer.run_file.sections import RunFile
from peer.storage.inner_state import Optimizers
from peer.trainer.channel import Channel, IslandBroken
from peer.trainer.lead import Lead
from peer.trainer.rank import plan_of
from peer.trainer.session import Run
from peer.trainer.session import join as join_alone
from peer.trainer.settings import JoinSettings, settings_from

__all__ = ["Follower", "IslandBroken", "join", "open"]


def join(
    run: str | Path | RunFile | None = None,
    *,
    model: torch.nn.Module,
    optimizer: Optimizers | None,
    auto: bool = True,
    settings: JoinSettings | None = None,
    **own: Any,
) -> Run | Follower:
    """``peer.join`` for every rank of ``torch.distributed``: together they are one peer.

    Rank 0 gets a ``Run``, the other ranks a ``Follower``, which has the part of it that a training
    loop needs. Without ``torch.distributed``, or with one process, it is ``peer.join``.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return join_alone(
            run, model=model, optimizer=optimizer, auto=auto, settings=settings, **own
        )
    plan = plan_of(run, model=model, optimizer=optimizer, auto=auto, settings=settings, own=own)
    if any("_flat_param" in name for name, _ in model.named_parameters()):
        raise IslandBroken(
            "FSDP1 keeps flattened parameters; use torch.distributed.fsdp.fully_shard"
        )
    timeout_s = plan.settings.start_timeout_s + 60.0
    if dist.get_rank() == 0:
        return Run(replace(plan, ranks=Lead(timeout_s)))
    return Follower(Channel(timeout_s), plan)


def open(run: str | Path | RunFile | None = None, **how: Any) -> Run | Follower:  # noqa: A001
    """``peer.open`` for every rank of ``torch.distributed``."""
    return join(run, **how).__enter__()


class Attendance:
    """The part of a Trainer's callback in a run, whatever the Trainer.

    ``own``: fields of ``peer.JoinSettings``. Wrong ones raise here, not when training begins.
    """

    def __init__(
        self,
        run: str | Path | RunFile | None,
        *,
        on_event: Callable[[Fields], None] | None,
        settings: JoinSettings | None,
        own: Mapping[str, Any],
    ) -> None:
        self.holds_final = settings_from(settings, own).final == "run"
        self._where = run
        self._on_event = on_event
        self._settings, self._own = settings, own
        self.joined: Run | Follower | None = None
        """The run of the present training, or of the last one; ``None`` before the first."""
        self.open = ExitStack()
        """Closed at the end of the training."""

    def __repr__(self) -> str:
        return repr(self._where if self.joined is None else self.joined)

    @property
    def run(self) -> Run | Follower:
        if self.joined is None:
            raise RuntimeError("the run is joined when training begins; there is none before")
        return self.joined

    def begin(self, model: torch.nn.Module, optimizer: Optimizers) -> Run | Follower:
        """Join the run. Raises what ``join`` raises."""
        self.open.close()  # an earlier training that ended in an error is still open
        run = join(
            self._where, model=model, optimizer=optimizer, settings=self._settings, **self._own
        )
        if self._on_event is not None:
            run.on("*", self._on_event)
        self.open.enter_context(run)
        self.joined = run
        return run
