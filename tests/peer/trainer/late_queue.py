"""A queue on the CPU that makes a copy only when its mark was queried often enough.

Code that relies on a copy too early reads wrong values there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from peer.trainer.device_copies import CudaSideStream, SideStreamCopies, local_pieces
from tests.peer.trainer.learner_pair import Pair


class _Held(TorchDispatchMode):
    """Keeps copies for later instead of making them."""

    def __init__(self, queue: deque[Callable[[], Any]]) -> None:
        super().__init__()
        self._queue = queue

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        assert func is torch.ops.aten.copy_.default, func
        assert args[2] is True, "a copy that blocks"
        self._queue.append(lambda: func(*args))
        target: torch.Tensor = args[0]
        return target


class LateQueue(CudaSideStream):
    """A queue that makes its copies when a mark behind them was queried ``late`` times."""

    def __init__(self, late: int) -> None:
        self.late = late
        self.asked = 0
        self.pinned: list[int] = []
        self._queue: deque[Callable[[], Any]] = deque()
        self._done = 0

    def follow(self) -> None:
        return

    @contextmanager
    def queue(self) -> Iterator[None]:
        with _Held(self._queue):
            yield

    def mark(self) -> Any:
        this, place = self, self._done + len(self._queue)

        class At:
            def __init__(self) -> None:
                self.left = this.late

            def query(self) -> bool:
                this.asked += 1
                if self.left:
                    self.left -= 1
                    return False
                self.synchronize()
                return True

            def synchronize(self) -> None:
                self.left = 0
                while this._done < place:
                    this._queue.popleft()()
                    this._done += 1

        return At()

    def pin(self, slot: torch.Tensor) -> bool:
        self.pinned.append(slot.data_ptr())
        return True

    def unpin(self, slot: torch.Tensor) -> None:
        self.pinned.remove(slot.data_ptr())


def over(queue: Any, pair: Pair) -> Pair:
    """Let a pair's learner copy through ``queue``."""
    pieces = [local_pieces(fragment, pair.parameters) for fragment in pair.layout.fragments]
    device = next(iter(pair.parameters.values())).device
    pair.learner._copies = SideStreamCopies(pair.memory, pieces, device, queue)
    return pair
