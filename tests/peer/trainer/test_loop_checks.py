"""Mistakes of training loops: what is told, when, and what it costs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from peer.errors import LoopMistake, LoopWarning
from peer.trainer.loop_checks import (
    LOGS_MAX,
    NO_EXCHANGE_S,
    OTHERS_STEPS_MAX,
    LoopChecks,
    checked_loss,
    restart_broken_moments,
    token_count,
    warn_unless_entered,
)

CYCLE = 5


class Loop:
    """A loop with its checks, and a clock that the test moves."""

    def __init__(self, *, auto: bool = True, strict: bool = False) -> None:
        self.now = 0.0
        self.told: list[tuple[str, str]] = []
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
        self.model[0].bias.requires_grad_(False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.checks = LoopChecks(
            self.model,
            (self.optimizer,),
            auto=auto,
            cycle=CYCLE,
            strict=strict,
            tell=lambda mistake, text: self.told.append((mistake, text)),
            clock=lambda: self.now,
        )

    def steps(self, count: int, **facts: Any) -> None:
        given = {"tokens": 8, "exchanged": True, "alone": False} | facts
        for _ in range(count):
            self.checks.stepped(**given)

    @contextmanager
    def watched(self) -> Iterator[None]:
        with ExitStack() as stack:
            self.checks.watch_optimizers(stack)
            yield


def test_a_loop_without_mistakes_hears_nothing() -> None:
    loop = Loop()
    with loop.watched():
        other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        for _ in range(40):
            other.step()  # of another model
            loop.optimizer.step()
            loop.steps(1)
            loop.checks.logged()
            loop.checks.check_loss(0.5)
    assert loop.told == []


def test_another_optimizer_that_trains_the_model_instead_is_told_at_once() -> None:
    loop = Loop()
    with loop.watched(), pytest.warns(LoopWarning, match="does not step any more: AdamW has made"):
        other = torch.optim.AdamW(loop.model.parameters())
        for _ in range(OTHERS_STEPS_MAX):
            other.step()
        assert loop.told == []
        for _ in range(3):
            other.step()
    assert [mistake for mistake, _ in loop.told] == ["optimizer"]
    other.step()  # no longer watched


def test_an_optimizer_around_another_one_is_none_too_many() -> None:
    loop = Loop()
    inner = torch.optim.SGD(loop.model.parameters(), lr=0.1)
    with loop.watched():
        for _ in range(3 * OTHERS_STEPS_MAX):
            inner.step()
            loop.steps(1)
    assert loop.told == []


def test_steps_without_run_step_are_told_where_the_loop_has_to_call_it() -> None:
    loop = Loop(auto=False)
    with loop.watched(), pytest.warns(LoopWarning, match=r"call run\.step\(tokens="):
        for _ in range(2 * CYCLE + 1):
            loop.optimizer.step()


def test_batches_without_a_step_are_told() -> None:
    loop = Loop()
    for _ in range(LOGS_MAX):
        loop.checks.logged()
    assert loop.told == []
    with pytest.warns(LoopWarning, match="no step was seen"):
        loop.checks.logged()


@pytest.mark.parametrize("change", ["replaced", "unfrozen", "added"])
def test_a_model_that_was_changed_after_joining_is_told_within_a_cycle(change: str) -> None:
    loop = Loop()
    loop.steps(CYCLE + 1)
    name = {"replaced": "1.weight", "unfrozen": "0.bias", "added": "2.weight, 2.bias"}[change]
    if change == "replaced":
        loop.model[1].weight = torch.nn.Parameter(torch.zeros(2, 2))
    elif change == "unfrozen":
        loop.model[0].bias.requires_grad_(True)
    else:
        loop.model.append(torch.nn.Linear(2, 1))
    with pytest.warns(LoopWarning, match=f"{name} {change}"):
        loop.steps(CYCLE)


def test_two_cycles_without_an_exchange_are_told_but_not_those_of_a_lone_or_quick_peer() -> None:
    loop = Loop()
    loop.steps(100, exchanged=False)
    loop.now = NO_EXCHANGE_S
    loop.steps(1, exchanged=True)
    loop.now += 2 * NO_EXCHANGE_S
    loop.steps(2 * CYCLE, exchanged=False)
    loop.steps(1, exchanged=False, alone=True)
    loop.now += NO_EXCHANGE_S
    loop.checks.rested()
    loop.steps(2 * CYCLE + 1, exchanged=False)
    assert loop.told == []
    loop.now += NO_EXCHANGE_S
    with pytest.warns(LoopWarning, match="no fragment was exchanged in the last 12 steps"):
        loop.steps(1, exchanged=False)


def test_each_mistake_is_told_once_and_the_first_three_are_errors_on_request() -> None:
    loop = Loop(strict=True)
    with pytest.warns(LoopWarning, match="no weight in the run") as told:
        loop.steps(5, tokens=0)
    assert len(told) == 1
    loop.model[1].weight = torch.nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(LoopMistake, match=r"1\.weight replaced") as caught:
        loop.steps(CYCLE)
    assert caught.value.kind == "parameters"
    assert [mistake for mistake, _ in loop.told] == ["no_tokens", "parameters"]
    with pytest.warns(LoopWarning, match="the loss is nan"):
        loop.checks.check_loss(float("nan"))


def test_a_joined_run_that_is_not_entered_is_told_at_its_first_step() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    warn_unless_entered(optimizer)
    with pytest.warns(LoopWarning, match=r"with peer\.join\(\.\.\.\) as run:"):
        optimizer.step()
    entered = warn_unless_entered(optimizer)
    entered()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


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


def test_broken_moments_and_statistics_begin_anew_and_others_stay() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    broken, sound = model.get_parameter("0.weight"), model.get_parameter("0.bias")
    variance = model.get_buffer("1.running_var")
    optimizer.state[broken]["momentum_buffer"].fill_(float("nan"))
    variance.fill_(float("inf"))
    restart_broken_moments(model, (optimizer,))
    assert broken not in optimizer.state and sound in optimizer.state
    assert torch.equal(variance, torch.ones(2))
