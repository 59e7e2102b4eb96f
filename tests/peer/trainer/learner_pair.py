"""A learner and an agent's port on the same memory, in one thread, for tests of both sides."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import torch

from averaging.history.merged_map import MergedMap
from averaging.history.state import FragmentState
from averaging.live.learner_port import Snapshot
from averaging.messages import Link
from averaging.numbers.layout import Layout
from dht.identity import PeerId
from peer.agent.slots import Adopted, SlotPort
from peer.bridge.shared_memory import SharedTensors, SlotState
from peer.trainer.learner import Learner
from peer.trainer.parameters import (
    Buffers,
    exchanged_tensors,
    is_coarse,
    specs_of,
    statistics_of,
)

ME = PeerId("12D3KooWMe")


INCARNATION = 7


class Pair:
    """A model, its learner, and the agent's port on the same memory."""

    def __init__(
        self,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        norm: torch.nn.Module | None = None,
        buffers: Buffers = "own",
        empties: bool = False,
    ) -> None:
        torch.manual_seed(3)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(6, 5), torch.nn.Linear(5, 4, bias=False), norm or torch.nn.LayerNorm(4)
        ).to(device=device, dtype=dtype)
        self.parameters = exchanged_tensors(self.model, buffers)
        self.statistics = statistics_of(self.model, buffers)
        self.layout = Layout.build(specs_of(self.parameters), 2, statistics=self.statistics.keys())
        self.memory = SharedTensors.create(
            [fragment.size for fragment in self.layout.fragments],
            layout=self.layout.hash,
            incarnation=INCARNATION,
            coarse=is_coarse(self.parameters),
        )
        self.rings = 0
        self.learner = Learner(
            self.memory, self.layout, self.parameters, ring=self._ring, budget_s=math.inf
        )
        self.adopted: list[Adopted] = []
        self.port = SlotPort(
            *(self.memory, ME, self.adopted.append),
            statistics=frozenset(f.index for f in self.layout.fragments if f.has_statistics),
            empties=empties,
        )

    def _ring(self) -> None:
        self.rings += 1

    def now(self, fragment: int) -> np.ndarray:
        out = np.empty(self.layout.fragments[fragment].size, np.float32)
        for unit in self.layout.fragments[fragment].units:
            flat = self.parameters[unit.tensor].detach().reshape(-1).float().cpu().numpy()
            out[unit.values] = flat[unit.start : unit.end]
        return out

    def train(self, amount: float, tokens: int = 10) -> None:
        """One 'optimizer step' that moves every parameter."""
        with torch.no_grad():
            for index, (name, parameter) in enumerate(self.parameters.items()):
                if name not in self.statistics:
                    parameter.add_(amount * (1 + index))
        self.learner.step(tokens)

    def idle(self, tokens: int = 10) -> None:
        self.learner.step(tokens)
        self.port.rang()

    async def offer(self, fragment: int, amount: float = 0.0) -> Snapshot:
        waiting = asyncio.ensure_future(self.port.snapshot(fragment, timeout_s=5))
        await self._wanted(fragment)
        self.train(amount)
        self.port.rang()
        snapshot = await waiting
        assert snapshot is not None
        return snapshot

    async def _wanted(self, fragment: int) -> None:
        await asyncio.sleep(0)
        for _ in range(5000):
            if not self.port.empties or self.memory.state(fragment) is not SlotState.FREE:
                return
            await asyncio.sleep(0.001)  # a thread fills the slot

    async def found(self) -> list[FragmentState]:
        """Make the own parameters version 0, as a founder does."""
        states = []
        for fragment in range(len(self.layout.fragments)):
            waiting = asyncio.ensure_future(self.port.values(fragment, timeout_s=5))
            await self._wanted(fragment)
            self.learner.exchange()
            self.port.rang()
            values = await waiting
            assert values is not None
            state = FragmentState.founded(self.layout.hash, fragment, values.copy(), 0)
            self.port.adopt(fragment, state, contained=self.memory.offered(fragment)[0])
            states.append(state)
        self.learner.exchange()
        self.port.rang()
        return states


def moved(state: FragmentState, by: float, merged: MergedMap | None = None) -> FragmentState:
    """The next version, ``by`` away."""
    version = state.version + 1
    lineage = bytes([version]) * 32
    return FragmentState(
        state.fragment,
        version,
        lineage,
        state.chain.extended(Link(version, lineage, 0)),
        (state.theta + np.float32(by)).astype(np.float32),
        state.momentum,
        state.merged if merged is None else merged,
    )


def successor(pair: Pair, states: list[FragmentState | None]) -> SlotPort:
    port = SlotPort(pair.memory, ME, pair.adopted.append)
    for fragment, state in enumerate(states):
        port.resume(fragment, None if state is None else state.theta)
    pair.port = port
    return port


def merged_to(step: int) -> MergedMap:
    return MergedMap().with_work(ME, INCARNATION, step, 10)


async def taken_beyond_the_checkpoint(pair: Pair) -> tuple[list[FragmentState], FragmentState]:
    """Give the trainer a version that the dead agent had not saved, and later work of its own."""
    states = await pair.found()
    snapshot = await pair.offer(0, amount=0.25)
    after = moved(states[0], 1.0, merged_to(snapshot.mark))
    pair.port.adopt(0, after, contained=snapshot.mark)
    pair.idle()
    pair.idle()
    pair.train(0.5)
    return states, after
