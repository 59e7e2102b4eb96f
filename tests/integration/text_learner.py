"""A learner as a process (``tests.swarms.learner_process``) with the byte-level MLP.

The model is the one of ``peer.simulate``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from averaging.numbers.arrays import Float32s
from examples.paper.text_mlp import TextMlp
from peer.run_file.reading import parse
from tests.swarms.learner_process import Task, main


class TextModel(nn.Module):
    """The parameters of a ``TextMlp`` with the names of torch layers."""

    def __init__(self, problem: TextMlp, seed: int) -> None:
        super().__init__()
        shapes = {spec.name: spec.shape for spec in problem.specs}
        self.problem = problem
        (tokens, width), (first_out, first_in) = shapes["embedding"], shapes["first.weight"]
        (second_out, second_in), (head_out, head_in) = shapes["second.weight"], shapes["head"]
        self.embedding = nn.Embedding(tokens, width)
        self.first = nn.Linear(first_in, first_out)
        self.second = nn.Linear(second_in, second_out)
        self.head = nn.Linear(head_in, head_out, bias=False)
        self.set_values(problem.first_values(seed))

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def loss(self, sequences: torch.Tensor) -> torch.Tensor:
        return self.problem.loss(list(self.parameters()), sequences)

    @torch.no_grad()
    def set_values(self, values: Float32s) -> None:
        """Set the parameters from the problem's flat vector, which has the order of the layers."""
        at = 0
        for parameter in self.parameters():
            part = torch.from_numpy(values[at : at + parameter.numel()])
            parameter.copy_(part.view(parameter.shape))
            at += parameter.numel()


def values_of(tensors: dict[str, torch.Tensor]) -> Float32s:
    """The problem's flat vector from the named tensors of an exported run."""
    names = ("embedding.weight", "first.weight", "first.bias", "second.weight", "second.bias")
    parts = [tensors[name].flatten() for name in (*names, "head.weight")]
    values: Float32s = torch.cat(parts).numpy()
    return values


def task(settings: dict[str, Any]) -> Task:
    problem = TextMlp(cache=Path(settings["cache"]))
    run_file = parse(settings["run"])
    model = TextModel(problem, run_file.random_seed)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.ndim > 1]},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups,
        lr=run_file.inner.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=problem.weight_decay,
    )
    stream = problem.stream(settings["number"], run_file.random_seed)

    def loss() -> torch.Tensor:
        return model.loss(torch.from_numpy(stream.next(problem.batch)))

    return Task(model, optimizer, loss, problem.step_tokens)


if __name__ == "__main__":
    raise SystemExit(main(json.loads(sys.argv[1]), task))
