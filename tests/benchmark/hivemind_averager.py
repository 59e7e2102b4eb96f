"""hivemind's own averager as a peer of ``averaging``: the system to compare with."""

from __future__ import annotations

import time
from typing import Any

import torch
from hivemind import DHT
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.control import AveragingStage
from hivemind.compression import Float16Compression, NoCompression

from averaging.numbers.arrays import Float32s
from tests.benchmark.participant import Participant, Setup, contribution

_CODECS = {"f32": NoCompression, "f16": Float16Compression}


class HivemindParticipant(Participant):
    """``DecentralizedAverager`` with its defaults, and one group of all peers."""

    def __init__(self, setup: Setup, meeting_point: str | None) -> None:
        super().__init__(setup)
        torch.set_num_threads(1)
        self._original = torch.from_numpy(contribution(setup))
        self._dht = DHT(
            start=True,
            initial_peers=[meeting_point] if meeting_point else [],
            host_maddrs=["/ip4/127.0.0.1/tcp/0"],
        )
        self._averager = DecentralizedAverager(
            [self._original.clone()],
            self._dht,
            start=True,
            prefix="bench",
            target_group_size=setup.peers,
            min_group_size=setup.peers,
            compression=_CODECS[setup.codec](),
        )
        self._step: Any = None

    @property
    def meeting_point(self) -> str:
        return str(self._dht.get_visible_maddrs()[0])

    def ready(self) -> None:
        with self._averager.get_tensors() as tensors:
            tensors[0].copy_(self._original)

    def form(self) -> None:
        self._step = self._averager.step(wait=False, require_trigger=True, timeout=120)
        while self._step.stage != AveragingStage.AWAITING_TRIGGER:
            if self._step.done():
                raise RuntimeError(f"hivemind found no group: {self._step.exception()}")
            time.sleep(0.001)

    def exchange(self) -> None:
        self._step.allow_allreduce()
        self._step.result(timeout=120)

    def result(self) -> Float32s:
        with self._averager.get_tensors() as tensors:
            array: Float32s = tensors[0].numpy().copy()
        return array

    def close(self) -> None:
        self._averager.shutdown()
        self._dht.shutdown()
