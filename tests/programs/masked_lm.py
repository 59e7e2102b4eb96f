"""An ALBERT, trained by transformers' Trainer with an optimizer of the program: Lamb."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers import AlbertConfig, AlbertForMaskedLM, Trainer, set_seed

import peer.hf
from tests.programs import here
from tests.programs.causal_lm import arguments

LENGTH, MASK = 32, 32


class Lamb(torch.optim.Optimizer):
    """Adam's update of each tensor, scaled to a share of the tensor's norm (You et al., 2019)."""

    def __init__(
        self, params: Iterable[torch.nn.Parameter], lr: float, decay: float = 0.01
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-6, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group, self.state[parameter])

    def _update(
        self, parameter: torch.Tensor, group: dict[str, Any], state: dict[str, Any]
    ) -> None:
        if not state:
            state["first"] = torch.zeros_like(parameter)
            state["second"] = torch.zeros_like(parameter)
        first, second = group["betas"]
        assert parameter.grad is not None
        state["first"].lerp_(parameter.grad, 1 - first)
        state["second"].lerp_(parameter.grad.square(), 1 - second)
        update = state["first"] / (state["second"].sqrt() + group["eps"])
        update.add_(parameter, alpha=group["decay"])
        norm, size = parameter.norm(), update.norm()
        trust = float(norm / size) if norm > 0 and size > 0 else 1.0
        parameter.add_(update, alpha=-group["lr"] * trust)


def masked(count: int, source: torch.Generator) -> list[dict[str, torch.Tensor]]:
    """Texts of one letter each, mostly: a few hundred steps teach to fill gaps in them."""
    letter = torch.randint(32, (count, 1), generator=source)
    noise = torch.rand(count, LENGTH, generator=source) < 0.1
    tokens = torch.where(noise, here.letters(count, LENGTH, source), letter)
    hidden = torch.rand(count, LENGTH, generator=source) < 0.15
    inputs = torch.where(hidden, MASK, tokens)
    labels = torch.where(hidden, tokens, -100)
    return [{"input_ids": i, "labels": t} for i, t in zip(inputs, labels, strict=True)]


def main() -> None:
    set_seed(42)
    config = AlbertConfig(
        vocab_size=33,
        embedding_size=16,
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=64,
        pad_token_id=None,
    )
    model = AlbertForMaskedLM(config)
    optimizer = Lamb(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
    with peer.hf.ShoalCallback(here.run(), settings=here.SETTINGS) as shoal:
        trainer = Trainer(
            model=model,
            args=arguments(),
            train_dataset=masked(4096, torch.Generator().manual_seed(1)),
            eval_dataset=masked(256, torch.Generator().manual_seed(7)),
            optimizers=(optimizer, schedule),
            callbacks=[shoal],
        )
        trainer.train()
    here.end(trainer.model, trainer.evaluate()["eval_loss"], shoal.run)


if __name__ == "__main__":
    main()
