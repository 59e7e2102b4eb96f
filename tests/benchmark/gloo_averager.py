"""torch.distributed's gloo all-reduce as a peer of ``tests.benchmark.averaging``.

It runs over plain TCP, without encryption, and tolerates no failure.
"""

from __future__ import annotations

import torch
import torch.distributed as distributed

from averaging.numbers.arrays import Float32s
from tests.benchmark.participant import Participant, Setup, contribution
from tests.processes import free_port


class GlooParticipant(Participant):
    """A rank of a gloo process group, which is formed in the first round."""

    def __init__(self, setup: Setup, meeting_point: str | None) -> None:
        super().__init__(setup)
        torch.set_num_threads(1)
        self._original = torch.from_numpy(contribution(setup))
        self._tensor = self._original.clone()
        self._point = meeting_point or f"127.0.0.1:{free_port()}"

    @property
    def meeting_point(self) -> str:
        return self._point

    def _join(self) -> None:
        distributed.init_process_group(
            "gloo",
            init_method=f"tcp://{self._point}",
            rank=self.setup.index,
            world_size=self.setup.peers,
        )

    def ready(self) -> None:
        if not distributed.is_initialized():
            self._join()  # returns when all peers have joined
        self._tensor.copy_(self._original)
        distributed.barrier()

    def exchange(self) -> None:
        distributed.all_reduce(self._tensor)
        self._tensor.div_(self.setup.peers)

    def result(self) -> Float32s:
        array: Float32s = self._tensor.numpy()
        return array

    def close(self) -> None:
        distributed.destroy_process_group()
