"""Measures the duration of safe points: ``python -m tests.benchmark.safe_points``.

One process acts as trainer and agent, with a model of 120 MB in four fragments. Every six steps one
fragment is offered and a new version of it adopted: once with the whole fragment copied at once,
once spread over several safe points, as trainers do. The pages of the slots are mapped beforehand.
"""

from __future__ import annotations

import math
import os

import numpy as np
import torch

from averaging.numbers.layout import Layout
from peer.bridge.shared_memory import Adoption, AdoptionOrder, SharedTensors, SlotState
from peer.status import Training
from peer.trainer.learner import BUDGET_S, Learner
from peer.trainer.parameters import specs_of, trained_parameters

FRAGMENTS = 4
CYCLE = 24
STEPS = 480


def measure(budget_s: float) -> Training:
    torch.set_num_threads(1)
    model = torch.nn.ModuleList(torch.nn.Linear(1024, 1024, bias=False) for _ in range(30))
    parameters = trained_parameters(model)
    layout = Layout.build(specs_of(parameters), FRAGMENTS)
    memory = SharedTensors.create(
        [fragment.size for fragment in layout.fragments],
        layout=layout.hash,
        incarnation=1,
        coarse=False,
    )
    learner = Learner(memory, layout, parameters, ring=lambda: None, budget_s=budget_s)
    for step in range(STEPS):
        turn, phase = divmod(step, CYCLE // FRAGMENTS)
        fragment = turn % FRAGMENTS
        if phase == 0:
            memory.pass_on(fragment, SlotState.WANTED)
        elif memory.state(fragment) is SlotState.OFFERED:
            np.multiply(memory.slot(fragment), np.float32(0.0), out=memory.slot(fragment))
            order = AdoptionOrder(Adoption.ADD, step, bytes(32), None, 0)
            memory.give(fragment, order)
        learner.step(1)
    training = learner.training
    learner.close()
    return training


if __name__ == "__main__":
    print(f"load {' '.join(f'{value:.1f}' for value in os.getloadavg())}")
    for name, budget_s in (("at once", math.inf), ("spread", BUDGET_S)):
        found = measure(budget_s)
        print(f"{name:8} p99 {found.blocked_p99_ms:6.2f} ms")
