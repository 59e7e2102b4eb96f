"""Commands and tensors between rank 0 of an island and its other ranks, over a gloo group."""

from __future__ import annotations

import enum
import math
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from peer.errors import PeerError

T = TypeVar("T")

HEADER = 8
"""Numbers of a command: its kind and its arguments."""


class Command(enum.IntEnum):
    """Kinds of commands from rank 0 to the other ranks."""

    BEGIN = 1
    """Read the run that follows."""
    OFFER = 2
    """Send your part of this unit of this fragment."""
    ADOPT = 3
    """Receive and adopt your part of this unit, in this way."""
    GO = 4
    """Leave the safe point."""
    END = 5
    """Close the channel: the run is over."""
    FAILED = 6
    """Fail with the reason that follows."""
    WAIT = 7
    """Stay: rank 0 rests, and is alive."""


class IslandBroken(PeerError):
    """The processes of an island do not fit together, or rank 0 could not get into the run."""

    exit_code = 3
    reason: str
    message = "the island cannot take part: {reason}"


class Agreed(NamedTuple):
    """Facts that all processes of one learner assume until their next safe point."""

    over: bool = False
    finished: bool = False
    global_tokens: int = 0
    rate: float = math.nan
    """The learning rate at so many tokens, which the run's owner may have changed."""
    peers: int = 1
    measure: bool = False
    """True if to measure the held-out loss now."""


class Channel:
    """CPU tensors between rank 0 and the other ranks."""

    is_open = True
    """False once the other ranks listen to rank 0 no more."""

    def __init__(self, timeout_s: float) -> None:
        try:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        except RuntimeError as error:
            # torchrun keeps its store over a restart, and with it the addresses of dead ranks.
            raise IslandBroken(
                f"its processes do not find each other: {error}; if torchrun has restarted them, "
                "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where it is started"
            ) from error
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def close(self) -> None:
        """Close the group, in every rank: its threads would keep the process from ending."""
        dist.destroy_process_group(self._group)

    def command(self, kind: Command, *arguments: float) -> None:
        header = torch.zeros(HEADER, dtype=torch.float64)
        header[: 1 + len(arguments)] = torch.tensor([kind, *arguments], dtype=torch.float64)
        dist.broadcast(header, 0, self._group)

    def receive_command(self) -> tuple[Command, list[float]]:
        header = torch.zeros(HEADER, dtype=torch.float64)
        dist.broadcast(header, 0, self._group)
        kind, *arguments = header.tolist()
        return Command(int(kind)), arguments

    def tell(self, kind: Command, what: Any) -> None:
        """A command, with a value that the other ranks ``hear`` next."""
        self.command(kind)
        dist.broadcast_object_list([what], 0, self._group)

    def hear(self) -> Any:
        told: list[Any] = [None]
        dist.broadcast_object_list(told, 0, self._group)
        return told[0]

    def broadcast(self, values: torch.Tensor) -> None:
        dist.broadcast(values, 0, self._group)

    def send(self, values: torch.Tensor, rank: int) -> None:
        dist.send(values, rank, self._group)

    def receive(self, size: int, rank: int) -> torch.Tensor:
        values = torch.empty(size, dtype=torch.float32)
        dist.recv(values, rank, self._group)
        return values

    def total(self, number: int) -> int:
        """The sum over all ranks, at rank 0. It begins a safe point."""
        numbers = torch.tensor([number], dtype=torch.int64)
        dist.reduce(numbers, 0, dist.ReduceOp.SUM, self._group)
        return int(numbers.item())

    def gathered(self, own: T) -> list[T]:
        """Exchange one thing between all ranks. Returns those of all, by rank, at each of them."""
        answers: list[Any] = [None] * self.size
        dist.all_gather_object(answers, own, self._group)
        return answers
