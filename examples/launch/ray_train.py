"""Learners in Ray: workers of Ray Train without a process group, each a peer of its own.

Change: WORKERS, USE_GPU, FOLDER (a disk that outlives a worker), the model, the arguments.
SHOAL_LINK='shoal://...' python ray_train.py

Ray begins all workers again when one dies, and sends no SIGTERM: work since the last merge comes
back from FOLDER.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer  # starts no process group

WORKERS = 4
USE_GPU = True
FOLDER = Path("/mnt/shared/shoal")


def train(config: dict[str, Any]) -> None:
    from transformers import Trainer, TrainingArguments

    import peer
    import peer.hf

    rank = get_context().get_world_rank()
    model: Any = peer.build_model(peer.read_run(config["link"]))
    with peer.hf.ShoalCallback(config["link"], directory=FOLDER / str(rank)) as shoal:
        arguments = TrainingArguments(
            output_dir=str(FOLDER / f"trainer-{rank}"),
            max_steps=10**9,
            save_strategy="no",
            report_to=[],
        )
        Trainer(
            model=model, args=arguments, train_dataset=shoal.dataset(), callbacks=[shoal]
        ).train()


if __name__ == "__main__":
    DataParallelTrainer(
        train,
        train_loop_config={"link": os.environ["SHOAL_LINK"]},
        scaling_config=ScalingConfig(num_workers=WORKERS, use_gpu=USE_GPU),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=-1)),
    ).fit()
