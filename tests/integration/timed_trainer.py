"""A trainer on one core, with or without an agent, that measures its steps per second.

Settings come as one JSON object. The process prints ``ready`` when it is in the run (at once if it
joins none) and ``measured`` after the given seconds of steps.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import torch

import peer
from peer.model.recipes import build_model, build_optimizer, next_token_loss
from peer.run_file.reading import parse
from peer.trainer.session import Run
from tests.swarms.learner_process import say

WARM_STEPS = 15


def pin(process: psutil.Process, core: int) -> None:
    """Pin every thread: the affinity of a process applies to its first thread only."""
    for thread in process.threads():
        os.sched_setaffinity(thread.id, {core})


def main(settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    me = psutil.Process()
    run_file = parse(settings["run"])
    model = build_model(run_file)
    optimizer = build_optimizer(run_file, model)
    size = (run_file.inner.batch_size, run_file.data.sequence_length + 1)
    generator = torch.Generator().manual_seed(1)
    run: Run | None = None
    if settings["joins"]:
        directory = Path(settings["directory"])
        run = peer.join(
            run_file,
            model=model,
            optimizer=optimizer,
            directory=directory,
            name=directory.name,
            seeds=tuple(settings.get("seeds", ())),
            listen=("/ip4/127.0.0.1/tcp/0",),
            found_after_s=60.0 if settings.get("seeds") else 0.0,
            pace_s=settings.get("pace_s", 0.0),
        )
    with run if run is not None else nullcontext():
        while run is not None and (run.link is None or "seed=" not in run.link):
            time.sleep(0.02)
        # The agent, its daemon and their children go to the other core.
        for child in me.children(recursive=True):
            pin(child, settings["agent_core"])
        pin(me, settings["core"])
        say("ready", {"link": run.link if run is not None else None})
        steps, began, blocked_s, rounds = 0, 0.0, 0.0, 0
        while True:
            if steps == WARM_STEPS:
                began = time.perf_counter()
                if run is not None:
                    blocked_s, rounds = run.status.blocked_s, run.status.rounds
            elif steps > WARM_STEPS and time.perf_counter() - began >= settings["seconds"]:
                break
            batch = torch.randint(0, 256, size, generator=generator)
            loss = next_token_loss(model, batch)
            loss.backward()
            if run is not None:
                run.log(loss=loss, tokens=batch[:, 1:].numel())
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
        took_s = time.perf_counter() - began
        measured = {"steps_per_s": (steps - WARM_STEPS) / took_s, "steps": steps - WARM_STEPS}
        if run is not None:
            measured["blocked"] = (run.status.blocked_s - blocked_s) / took_s
            measured["rounds"] = run.status.rounds - rounds
        say("measured", measured)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
