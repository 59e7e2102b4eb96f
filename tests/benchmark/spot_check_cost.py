"""Processor time of one spot check at the trainer, as a share of a training step.

``python -m tests.benchmark.spot_check_cost [RUN.toml] [TURNS]`` trains a run's model on random
tokens and, in turns with its steps, measures another peer's batch with two states of a fragment. A
check in a cycle of H steps takes the printed ratio divided by H of a trainer's time.
"""

from __future__ import annotations

import statistics
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch

from averaging.history.readings import SEQUENCES_MAX
from peer.bridge.shared_memory import SharedTensors
from peer.run_file.reading import parse
from peer.trainer.learner import Learner
from peer.trainer.loop import TrainerSettings, open_engine
from peer.trainer.parameters import exchanged_tensors, is_coarse, model_layout


def main(path: Path, turns: int) -> None:
    run = parse(path.read_text(encoding="utf-8"))
    engine = open_engine(run, TrainerSettings(device="cpu", threads=1))
    parameters = exchanged_tensors(engine.model, run.outer.buffers)
    layout = model_layout(engine.model, run.outer.fragments, buffers=run.outer.buffers)
    memory = SharedTensors.create(
        [fragment.size for fragment in layout.fragments],
        layout=layout.hash,
        incarnation=1,
        coarse=is_coarse(parameters),
    )
    learner = Learner(memory, layout, parameters, ring=lambda: None)
    rng = np.random.default_rng(0)
    states = torch.from_numpy(rng.normal(0, 0.02, 2 * layout.fragments[0].size)).float().chunk(2)
    ratios, steps = [], []
    with engine.tuning:
        for turn in range(turns + 2):
            batch = rng.integers(
                0, 255, (run.inner.batch_size, run.data.sequence_length + 1), dtype=np.int64
            )
            began = time.process_time()
            engine.gradients(torch.from_numpy(batch))
            engine.apply()
            step_s = time.process_time() - began
            began = time.process_time()
            measure = partial(engine.held_out_loss, batch[:SEQUENCES_MAX])
            assert learner.measured_with(0, states, measure) is not None
            if turn >= 2:  # the first ones allocate
                ratios.append((time.process_time() - began) / step_s)
                steps.append(step_s)
    ratio, cycle = statistics.median(ratios), run.outer.steps_per_cycle
    print(
        f"{layout.size} parameters, a step of {1e3 * statistics.median(steps):.0f} ms; a check "
        f"takes {ratio:.2f} of a step ({min(ratios):.2f} to {max(ratios):.2f}): "
        f"{100 * ratio / cycle:.1f}% of training with one in a cycle of {cycle}"
    )


if __name__ == "__main__":
    given = sys.argv[1:]
    main(
        Path(given[0] if given else "examples/tiny_gpt/run.toml"),
        int(given[1]) if len(given) > 1 else 20,
    )
