from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from peer.model.naming import named_parameters, unwrapped
from peer.model.recipes import embedding_names

# torch.compile imports parts of torch that warn of their own age.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


def bare() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3))


def names(model: nn.Module) -> list[str]:
    return [name for name, _ in named_parameters(model)]


def test_a_compiled_model_has_the_names_of_the_bare_one() -> None:
    model = bare()
    compiled = torch.compile(model)
    assert isinstance(compiled, nn.Module)
    assert names(compiled) == names(model) == ["0.weight", "1.weight", "1.bias"]
    assert unwrapped(compiled) is model
    assert embedding_names(compiled) == {"0.weight"}


def test_a_compiled_or_checkpointed_part_does_not_change_names() -> None:
    model = bare()
    expected = names(model)
    model[1] = cast(nn.Module, torch.compile(checkpoint_wrapper(model[1])))
    assert names(model) == expected


def test_a_data_parallel_model_has_the_names_of_the_bare_one() -> None:
    assert names(nn.DataParallel(bare())) == names(bare())


def test_a_part_that_its_author_named_module_keeps_its_name() -> None:
    model = nn.Module()
    model.module = nn.Linear(2, 2)
    assert names(model) == ["module.weight", "module.bias"]
