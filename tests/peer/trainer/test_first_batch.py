"""The digest of what a program trains on first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from peer.trainer.first_batch import FirstBatch

RUN = "ab" * 32


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.layer(inputs.float())


def digest_of(*batches: torch.Tensor, run: str = RUN, train: bool = True) -> str:
    model = Model().train(train)
    first = FirstBatch(model, run)
    for batch in batches:
        model(batch, mask=torch.ones(1))
    first.close()
    model(torch.zeros(3, 4))
    return first.digest


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        yield


def test_equal_batches_have_one_digest_whatever_the_seeds_are() -> None:
    batch = torch.arange(12).reshape(3, 4)
    found = digest_of(batch)
    assert found.startswith("batch ")
    torch.manual_seed(2)
    assert digest_of(batch, torch.zeros(3, 4)) == found
    others = (batch + 1, batch[:2], batch.float(), batch.t().reshape(3, 4))
    assert found not in {digest_of(other) for other in others}
    assert digest_of(batch, run="cd" * 32) != found


def test_what_is_evaluated_first_is_no_batch() -> None:
    batch = torch.arange(12).reshape(3, 4)
    model = Model()
    first = FirstBatch(model, RUN)
    model.eval()
    model(torch.zeros(3, 4))
    model.train()
    model(batch, mask=torch.ones(1))
    assert first.digest == digest_of(batch)


def test_without_a_forward_pass_of_the_model_it_is_of_the_seed() -> None:
    same = [digest_of(), digest_of(torch.ones(3, 4), train=False)]
    assert same[0] == same[1] and same[0].startswith("seed ")
    torch.manual_seed(2)
    assert digest_of() != same[0]


def test_a_compiled_model_keeps_one_graph_and_values_that_are_not_there_are_left() -> None:
    model = Model()
    first = FirstBatch(model, RUN)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    compiled(torch.ones(3, 4))
    assert first.digest.startswith("seed ")
    torch.vmap(model)(torch.ones(3, 4))
    assert first.digest.startswith("seed ")
    model(torch.ones(3, 4))
    assert first.digest.startswith("batch ")
