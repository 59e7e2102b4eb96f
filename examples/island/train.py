"""One script for a single process and for an island of several, which is one peer in the run.

    python examples/island/train.py                                   # founds, prints its link
    torchrun --nproc-per-node 2 examples/island/train.py 'shoal://...' --spread fsdp2

Rank 0 is the peer; the other ranks follow it. The loop is the same in every rank.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import peer
import peer.island

RUN_FILE = Path(__file__).parent / "run.toml"


def say(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, **fields}, default=str), flush=True)


def spread(model: nn.Module, way: str) -> nn.Module:
    """Distribute the model over all processes: copies of it, or shards of every block."""
    if way == "ddp":
        return DistributedDataParallel(model)
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block)
    return fully_shard(model)


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("run", nargs="?", default=str(RUN_FILE), help="a link or a run file")
    arguments.add_argument("--spread", choices=["ddp", "fsdp2"], default="ddp")
    arguments.add_argument("--directory", type=Path, help="unset: a new temporary folder")
    arguments.add_argument(
        "--steps", type=int, default=1_000_000, help="maximum; the run may end earlier"
    )
    arguments.add_argument("--pace", type=float, default=0.0, help="minimum seconds per step")
    arguments.add_argument("--listen", default="/ip4/0.0.0.0/tcp/0")
    chosen = arguments.parse_args()

    torch.set_num_threads(1)
    run_file = peer.read_run(chosen.run)
    model = peer.build_model(run_file)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")  # "cpu:gloo,cuda:nccl" with GPUs
        model = spread(model, chosen.spread)
    optimizer = peer.build_optimizer(run_file, model)

    def on_event(fields: Mapping[str, Any]) -> None:
        if fields["event"] in ("round", "peer_joined", "over", "optimizer_restored"):
            say(**fields)

    with peer.island.join(
        chosen.run,
        model=model,
        optimizer=optimizer,
        directory=chosen.directory or Path(tempfile.mkdtemp(prefix="shoal-island-")),
        quiet=True,  # it is printed below
        pace_s=chosen.pace,
        listen=(chosen.listen,),
    ) as run:
        run.on("*", on_event)
        run.schedule(optimizer)
        if isinstance(run, peer.Run):  # rank 0, or the only one
            say("link", link=run.link, peer=run.peer_id, at=time.time())
        for step, tokens in zip(range(chosen.steps), run.data(), strict=False):
            loss = peer.next_token_loss(model, tokens)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            run.log(loss=loss, tokens=tokens[:, 1:].numel())
            optimizer.step()
            optimizer.zero_grad()
            if step % 50 == 0 and isinstance(run, peer.Run):
                say("progress", step=step, loss=float(loss.detach()), peers=run.peers)
    if isinstance(run, peer.Run):
        stats = run.status
        say(
            "done",
            finished=run.finished,
            steps=stats.steps,
            tokens=stats.tokens,
            rounds=stats.rounds,
            blocked=f"{stats.blocked_fraction:.2%}",
            blocked_p99_ms=round(stats.blocked_p99_ms, 2),
            fates=dict(stats.fates),
        )
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
