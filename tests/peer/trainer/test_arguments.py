"""What a program gives to ``peer.join`` and ``run.log``: what is refused, and in which words."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

import peer
from peer.errors import LoopWarning
from peer.trainer.arguments import checked_loss, token_count

NET = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
SGD = torch.optim.SGD(NET.parameters(), lr=0.1)


def join(**given: Any) -> Any:
    arguments: dict[str, Any] = {"model": NET, "optimizer": SGD} | given
    return peer.join("no-such.run.toml", **arguments)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"model": [NET, NET]}, r"model is a list.*torch\.nn\.ModuleDict"),
        ({"model": torch.nn.ReLU}, r"model is the class ReLU.*pass an instance"),
        ({"model": None}, r"model is None.*torch\.nn\.Module"),
        ({"optimizer": None}, r"optimizer is None.*auto=False and calls run\.step"),
        ({"optimizer": torch.optim.SGD}, r"optimizer is the class SGD.*SGD\(model\.parameters"),
        ({"optimizer": [SGD, None]}, r"optimizer is None"),
        ({"optimizer": NET}, r"optimizer is a Sequential"),
        ({"optimizer": []}, r"optimizer is an empty list"),
        ({"dir": "here"}, r"'dir' is no setting of peer\.join; did you mean 'directory'"),
        ({"quite": True}, r"did you mean 'quiet'"),
        (
            {"optimizer": torch.optim.SGD(torch.nn.Linear(3, 2).parameters(), lr=0.1)},
            r"holds no trained parameter of the model",
        ),
    ],
)
def test_what_cannot_be_joined_with_is_refused_before_a_run_is_looked_for(
    given: dict[str, Any], told: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=told):
        join(**given)


def test_a_program_that_names_no_run_takes_that_of_its_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SHOAL_LINK", raising=False)
    with pytest.raises(TypeError, match=r"the run is missing: .* set SHOAL_LINK to one"):
        peer.join(model=NET, optimizer=SGD)
    monkeypatch.setenv("SHOAL_LINK", "shoal://abc?seed=x")
    assert repr(peer.join(model=NET, optimizer=SGD)) == "Run(shoal://abc?seed=x, not entered)"


def test_an_optimizer_that_lacks_trained_parameters_is_told_and_an_error_on_request() -> None:
    part = torch.optim.SGD(NET[0].parameters(), lr=0.1)
    with pytest.warns(LoopWarning, match=r"lacks 1\.weight and 1\.bias, which the run exchanges"):
        join(optimizer=part)
    with warnings.catch_warnings(), pytest.raises(LoopWarning, match=r"lacks 1\.weight"):
        warnings.simplefilter("error", LoopWarning)
        join(optimizer=part)
    rest = torch.optim.SGD(NET[1].parameters(), lr=0.1)
    for optimizer in (SGD, [part, rest], (part, rest)):
        join(optimizer=optimizer)
    join(optimizer=None, auto=False)


@pytest.mark.parametrize(
    "tokens", [8, 8.0, np.int64(8), np.float32(8), torch.tensor(8), torch.tensor([8.0])]
)
def test_tokens_of_any_numeric_type_are_counted(tokens: Any) -> None:
    count = token_count(tokens)
    assert count == 8 and type(count) is int


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        (-1, ValueError),
        (1.5, ValueError),
        (float("nan"), ValueError),
        (torch.zeros(2), ValueError),
        (torch.zeros((), device="meta"), TypeError),
        (True, TypeError),
        ("8", TypeError),
    ],
)
def test_odd_tokens_are_refused_on_the_spot(tokens: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"tokens (is|has)"):
        token_count(tokens)


def test_losses_of_any_numeric_type_are_accepted_and_others_refused_on_the_spot() -> None:
    for loss in (1, 1.5, np.float32(1.5), np.array(1.5), torch.tensor([[2]]), torch.ones(1)):
        float(checked_loss(loss))
    for odd in ("1.5", [1.0, 2.0], torch.zeros(2), torch.zeros((), dtype=torch.complex64)):
        with pytest.raises((TypeError, ValueError), match="loss"):
            checked_loss(odd)
