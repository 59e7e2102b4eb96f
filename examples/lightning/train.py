"""A Lightning Trainer in a run: one callback makes it a peer.

python examples/lightning/train.py                                  # founds, prints its link
python examples/lightning/train.py 'shoal://...' --devices 2  # two processes, one peer
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import peer
import peer.lightning

RUN_FILE = Path(__file__).parent / "run.toml"


def say(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, **fields}, default=str), flush=True)


def spirals(count: int) -> TensorDataset:
    """Points on the three arms of a spiral, with the number of the arm."""
    arm = torch.randint(3, (count,))
    radius = torch.rand(count)
    angle = 5 * radius + arm * 2 * torch.pi / 3 + 0.1 * torch.randn(count)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), arm)


class Arms(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3)
        )
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        points, arms = batch
        loss = nn.functional.cross_entropy(self.net(points), arms)
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("run", nargs="?", default=str(RUN_FILE), help="a link or a run file")
    arguments.add_argument("--directory", type=Path, help="unset: a new temporary folder")
    arguments.add_argument("--devices", type=int, default=1, help="processes on this machine")
    arguments.add_argument(
        "--steps", type=int, default=1_000_000, help="maximum; the run may end earlier"
    )
    arguments.add_argument("--pace", type=float, default=0.01, help="minimum seconds per step")
    arguments.add_argument("--listen", default="/ip4/0.0.0.0/tcp/0")
    chosen = arguments.parse_args()

    directory = chosen.directory or Path(tempfile.mkdtemp(prefix="shoal-lightning-"))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = Arms()

    def on_event(fields: Mapping[str, Any]) -> None:
        if fields["event"] in ("link", "round", "peer_joined", "over"):
            say(**fields)

    shoal = peer.lightning.ShoalCallback(
        chosen.run,
        directory=directory / "peer",
        quiet=True,  # on_event prints the link
        on_event=on_event,
        pace_s=chosen.pace,
        listen=(chosen.listen,),
    )
    trainer = lightning.Trainer(
        callbacks=[shoal],
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=chosen.devices,
        strategy="ddp" if chosen.devices > 1 else "auto",
        max_steps=chosen.steps,
        default_root_dir=directory,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(spirals(4096), batch_size=64, shuffle=True)
    trainer.fit(module, loader)
    if isinstance(shoal.run, peer.Run):  # rank 0, or the only one
        stats = shoal.run.status
        first, last = module.losses[:20], module.losses[-20:]
        say(
            "done",
            steps=stats.steps,
            rounds=stats.rounds,
            loss_first=round(sum(first) / len(first), 3),
            loss_last=round(sum(last) / len(last), 3),
            blocked=f"{stats.blocked_fraction:.2%}",
            fates=dict(stats.fates),
        )


if __name__ == "__main__":
    main()
