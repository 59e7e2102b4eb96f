"""A tiny model that a Lightning Trainer trains in a run, beside an agent that has no network.

Lightning takes a second to import, which every worker would spend that collects tests: so tests
import this module for themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import lightning
import torch
from torch import nn

from peer.lightning import ShoalCallback
from peer.run_file.reading import parse
from tests.peer.agent.lone_agents import AGENT, QUICK

TOML = """
name = "lightning"
[model]
recipe = "custom"
[data]
recipe = "custom"
[inner]
optimizer = "custom"
learning_rate = 0.002
[schedule]
warmup_tokens = 200
[outer]
fragments = 2
steps_per_cycle = 5
overlap_steps = 1
"""


class Fit(lightning.LightningModule):  # type: ignore[misc]
    """Fits a plane. Its scheduler is one that must have no effect."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 1)
        self.seen: list[int] = []
        self.rates: list[float] = []

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        self.seen += [int(first) for first in batch[:, 0]]
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        return self.layer(batch / 64).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        halve = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        return [optimizer], [{"scheduler": halve, "interval": "step"}]


def train(
    directory: Path, module: Any, own: dict[str, Any] | None = None, **settings: Any
) -> tuple[ShoalCallback, list[Any], Any]:
    events: list[Any] = []
    shoal = ShoalCallback(
        parse(TOML),
        directory=directory / "peer",
        agent_command=AGENT,
        line=QUICK,
        **({"on_event": events.append} | (own or {})),
    )
    trainer = lightning.Trainer(
        default_root_dir=directory,
        callbacks=[shoal, *settings.pop("callbacks", [])],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=settings.pop("enable_checkpointing", False),
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    points = torch.arange(64).repeat(3, 1).T.float()
    loader: torch.utils.data.DataLoader[torch.Tensor] = torch.utils.data.DataLoader(
        cast(torch.utils.data.Dataset[torch.Tensor], list(points)), batch_size=4, shuffle=True
    )
    trainer.fit(module, loader)
    return shoal, events, trainer


class Until(lightning.Callback):  # type: ignore[misc]
    def __init__(self, happened: Callable[[], bool]) -> None:
        self.happened = happened

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        trainer.should_stop |= self.happened()
